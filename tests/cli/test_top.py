"""`saga top` against a gateway over stand-in workers, and against what is none."""

# ruff: noqa: F811 - a fixture is both imported and the name of an argument.

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from saga_cli.main import main
from saga_cli.top_frame import rows_for
from saga_gateway.identity import new_key
from tests.gateway.conftest import (  # noqa: F401 - fixtures, found by their names
    _eventually,
    gateway,
    start_gateway,
    worker,
    workers,
)


@pytest.fixture(autouse=True)
def _columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "220")
    monkeypatch.delenv("SAGA_API_KEY", raising=False)


@pytest.fixture
def top(capsys):
    """Runs `saga top`; returns its exit code, and what it printed and complained of."""

    async def run(*words):
        code = await asyncio.to_thread(main, ["top", *words])
        return code, *capsys.readouterr()

    return run


async def test_one_frame_shows_the_parts_of_the_dashboard(gateway, worker, top):
    worker.call_tools("run_tests")
    await gateway.chat("session-1", workflow_id="swe")
    gateway.clock.advance(3.0)
    code, printed, errors = await top(gateway.url, "--once")
    assert (code, errors) == (0, "")
    for shown in ("Workers", "Sessions", "Workflows", "Tenants", "Decisions"):
        assert shown in map(str.strip, printed.splitlines())
    for shown in (worker.worker_id, "session-1", "paused", "run_tests", "swe", "cold", "new"):
        assert shown in printed
    assert "1 paused" in printed


async def test_json_is_what_the_gateway_says(gateway, top):
    code, printed, _ = await top(gateway.url.removeprefix("http://"), "--once", "--json")
    assert code == 0
    assert json.loads(printed)["workers"][0]["status"] == "up"


async def test_what_steers_a_terminal_does_not_reach_it(gateway, worker, top, eventually):
    worker.steps = []
    worker.facts = {"queue": {"running": 0, "waiting": 0}, "policy": "\x1b]0;owned\x07[red]x"}
    await eventually(lambda: gateway.app._dispatcher.state(worker.worker_id))
    _, printed, _ = await top(gateway.url, "--once")
    assert "\x1b]" not in printed
    assert "[red]x" in printed


async def test_a_key_is_read_from_a_variable(start_gateway, worker, top, tmp_path, monkeypatch):
    (operator, one), (other, two) = new_key("ops"), new_key("team-a")
    path = tmp_path / "keys.toml"
    path.write_text(f"{one}admin = true\n{two}")
    gateway = await start_gateway(worker, keys_file=str(path))
    code, _, errors = await top(gateway.url, "--once")
    assert code == 1
    assert "asks for an operator's API key, and there is none" in errors
    assert "SAGA_API_KEY" in errors
    monkeypatch.setenv("SAGA_API_KEY", "wrong")
    assert "that in SAGA_API_KEY is not known" in (await top(gateway.url, "--once"))[2]
    for no_key in ("two\nlines", "clé…"):
        monkeypatch.setenv("SAGA_API_KEY", no_key)
        assert "what stands in SAGA_API_KEY is no API key" in (await top(gateway.url, "--once"))[2]
    monkeypatch.setenv("MINE", other)
    code, _, errors = await top(gateway.url, "--once", "--key-env", "MINE")
    assert code == 1
    assert "MINE is not an operator's" in errors
    assert other not in errors
    monkeypatch.setenv("MINE", operator)
    assert (await top(gateway.url, "--once", "--key-env", "MINE"))[0] == 0


async def test_nobody_there_is_said(top):
    code, printed, errors = await top("http://127.0.0.1:1", "--once")
    assert (code, printed) == (1, "")
    assert "no gateway answers at http://127.0.0.1:1" in errors


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://[::1"])
async def test_what_is_no_url_is_refused(top, url):
    code, _, errors = await top(url, "--once")
    assert code == 1
    assert "must be like http://127.0.0.1:8800" in errors


async def test_an_interval_has_bounds(top):
    assert (await top("--interval", "0"))[0] == 1


@pytest.fixture
def other_server():
    """A server that is no gateway: answers as it is told, and remembers what it was asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.asked.append((self.path, self.headers.get("Authorization")))
            status, headers, body = self.server.answer
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((200, {}, b"<html>"), "not as a SAGA gateway does"),
        ((200, {}, b"[]"), "not as a SAGA gateway does"),
        ((200, {}, b"{}"), "not as a SAGA gateway does"),
        ((404, {}, b""), "is it a SAGA gateway?"),
        ((503, {}, b""), "HTTP 503"),
    ],
)
async def test_what_is_no_gateway_is_told(top, other_server, answer, said):
    other_server.answer = answer
    code, _, errors = await top(f"http://127.0.0.1:{other_server.server_port}", "--once")
    assert code == 1
    assert said in errors


async def test_the_key_follows_no_redirect(top, other_server, monkeypatch):
    monkeypatch.setenv("SAGA_API_KEY", "secret")
    url = f"http://127.0.0.1:{other_server.server_port}"
    other_server.answer = (302, {"Location": f"{url}/elsewhere"}, b"")
    assert "HTTP 302" in (await top(url, "--once"))[2]
    assert [path.partition("?")[0] for path, _ in other_server.asked] == ["/saga/v1/overview"]


async def test_live_on_a_terminal_until_it_is_stopped(gateway, worker, eventually):
    """Frames follow one another on a real terminal, and Ctrl-C ends them."""
    master, slave = pty.openpty()
    words = [sys.executable, "-m", "saga_cli.main", "top", gateway.url, "--interval", "0.2"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200", "LINES": "60"}
    process = await asyncio.create_subprocess_exec(
        *words, stdin=slave, stdout=slave, stderr=slave, env=environment
    )
    os.close(slave)
    seen = bytearray()

    def read() -> None:
        try:
            while data := os.read(master, 65536):
                seen.extend(data)
        except OSError:
            pass  # Nobody writes there any more.

    reading = asyncio.create_task(asyncio.to_thread(read))
    try:
        await eventually(lambda: worker.worker_id.encode() in seen, 30)
        worker.call_tools("run_tests")
        await gateway.chat("session-1")
        await eventually(lambda: b"session-1" in seen and b"paused" in seen, 30)
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 20) == 130
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await reading
        os.close(master)


def test_what_fits_into_a_terminal_is_shown():
    shot = {"workers": [{}] * 3, "tenants": [{}], "workflows": [{}] * 5}
    assert rows_for(shot, 24) == 3
    assert rows_for(shot, 71) == 20
