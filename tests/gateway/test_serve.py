"""The gateway as a process, and its settings."""

import re
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from saga_core.errors import SagaError, SettingsError
from saga_gateway.app import GatewaySettings, ListenError, serve
from saga_gateway.settings import worker_address

PROGRAM = """
from saga_gateway.app import GatewaySettings, serve
serve(GatewaySettings(workers=("127.0.0.1:9",), port=0))
print("ended")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serves_until_a_signal(number):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline()
        ready = re.fullmatch(
            r"SAGA gateway on (http://127\.0\.0\.1:\d+), workers: 127\.0\.0\.1:9\n", line
        )
        assert ready, line
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{ready[1]}/health") as response:
            assert response.status == 200
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out, err) == (0, "ended\n", "")


def test_port_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=rf"127\.0\.0\.1:{port}.*Choose another port"):
            serve(GatewaySettings(workers=("http://127.0.0.1:9",), port=port))
    assert issubclass(ListenError, SagaError)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workers": ()}, "at least one worker"),
        ({"workers": ("http://a:1", "a:1")}, "a:1 more than once"),
        ({"workers": ("http://a:1/v1",)}, "without a path"),
        ({"workers": ("ftp://a",)}, "must be http"),
        ({"workers": ("http://a:x",)}, "is not a URL"),
        ({"host": ""}, "host must not be empty"),
        ({"port": 70000}, "port=70000 must be from 0 to 65535"),
        ({"pool_idle_s": 5.0}, "pool_idle_s"),
        ({"idle_timeout_s": float("nan")}, "idle_timeout_s"),
    ],
)
def test_settings_are_checked(changes, words):
    with pytest.raises(SettingsError, match=words):
        GatewaySettings(**({"workers": ("http://a:1",)} | changes))


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://10.0.0.1:8000/", ("10.0.0.1:8000", "http://10.0.0.1:8000")),
        ("host:8000", ("host:8000", "http://host:8000")),
        ("https://Host", ("host:443", "https://host:443")),
        ("http://[::1]:8000", ("[::1]:8000", "http://[::1]:8000")),
    ],
)
def test_worker_addresses(url, address):
    assert worker_address(url) == address
