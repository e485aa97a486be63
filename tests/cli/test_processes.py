"""Child processes of the command: they are watched, and none is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from saga_cli.processes import Service, free_port, tree_cpu_s
from saga_core.errors import SagaError

SERVER = textwrap.dedent(
    """
    import http.server, subprocess, sys
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(str(child.pid).encode())
    print("serving", flush=True)
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
    """
)


def _exists(pid: int) -> bool:
    """Whether the process runs; one that has ended and only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_gone(*pids: int) -> None:
    deadline = time.monotonic() + 20
    while any(_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still there: {pids}"
        time.sleep(0.02)


def _child_pid(service: Service) -> int:
    import urllib.request

    with urllib.request.urlopen(f"{service.url}/health", timeout=10) as answer:
        return int(answer.read())


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    port = free_port()
    service = Service("server", [sys.executable, "-c", SERVER, str(port)], port, tmp_path / "log")
    yield service
    service.stop()


def test_stop_ends_the_service_and_its_children(service: Service) -> None:
    service.start()
    asyncio.run(service.wait_ready(30))
    pids = (service.pid, _child_pid(service))
    assert all(_exists(pid) for pid in pids)
    service.stop()
    _wait_gone(*pids)


def test_a_service_that_is_killed_is_reported_with_its_last_words(service: Service) -> None:
    async def scenario() -> None:
        service.start()
        await service.wait_ready(30)
        watch = asyncio.create_task(service.watch())
        os.kill(service.pid, signal.SIGKILL)
        await watch

    with pytest.raises(SagaError, match=r"(?s)server was ended by signal 9.*serving"):
        asyncio.run(scenario())
    pid = service.pid
    service.stop()
    _wait_gone(pid)


def test_a_service_that_cannot_start_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('the disk is full')"]
    service = Service("worker", command, free_port(), tmp_path / "log")
    service.start()
    with pytest.raises(SagaError, match=r"(?s)worker ended with exit code 1.*the disk is full"):
        asyncio.run(service.wait_ready(30))
    service.stop()


def test_a_service_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    service = Service("worker", command, free_port(), tmp_path / "log")
    service.start()
    with pytest.raises(SagaError, match="not ready after 0 s"):
        asyncio.run(service.wait_ready(0.0))
    pid = service.pid
    service.stop()
    _wait_gone(pid)


def test_a_service_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from saga_cli.processes import Service
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        service = Service("worker", command, 1, Path(sys.argv[1]))
        service.start()
        print(service.pid, flush=True)
        time.sleep(600)
        """
    )
    command = [sys.executable, "-c", program, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert _exists(pid)
        parent.kill()
    _wait_gone(pid)


def test_cpu_seconds_are_those_of_the_whole_tree() -> None:
    busy = """
        import sys, time
        while time.process_time() < 0.4:
            pass
        print("done", flush=True)
        sys.stdin.read()
        """
    # The shell waits for the program: what follows keeps it from becoming the program.
    command = ["sh", "-c", '"$0" -c "$1"; exit', sys.executable, textwrap.dedent(busy)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        used_s = tree_cpu_s(process.pid)
        assert process.stdin is not None
        process.stdin.close()
    assert 0.38 < used_s < 10.0
    assert tree_cpu_s(process.pid) == 0.0
