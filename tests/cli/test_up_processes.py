"""`saga up` as a process: a real gateway before stand-ins for workers."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from saga_cli.processes import Service, free_port

NOTHING: Mapping[str, str] = {}

STAND_IN = textwrap.dedent(
    """
    import http.server, json, os, pathlib, subprocess, sys, time
    words = sys.argv[1:]
    if words[0] == "gateway":
        from saga_cli.main import main
        sys.exit(main(words))
    if "--ends" in words:
        print("no room for the model", flush=True)
        sys.exit(3)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        def answer(self, content):
            body = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        def do_GET(self):
            self.answer({"pid": os.getpid()})
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if "until" in asked:
                pathlib.Path(asked["began"]).touch()
                while not pathlib.Path(asked["until"]).exists():
                    time.sleep(0.01)
            self.answer({"pid": os.getpid()})
        def log_message(self, *arguments):
            pass
    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True
    port = int(words[words.index("--port") + 1])
    print("serving", words[1], "child", child.pid, flush=True)
    Server(("127.0.0.1", port), Handler).serve_forever()
    """
)
PROGRAM = textwrap.dedent(
    """
    import sys
    from saga_cli import up
    from saga_cli.main import main
    up.SAGA = (sys.executable, sys.argv[1])
    up._WORKER_STARTS = 2
    sys.exit(main(["up", *sys.argv[2:]]))
    """
)


def _eventually(predicate: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
    deadline_s = time.monotonic() + timeout_s
    while not (value := predicate()):
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)
    return value


def _exists(pid: int) -> bool:
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _children(pid: int) -> dict[int, str]:
    """Processes right below one, and their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid and fields[0] != "Z":
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
    return found


class Up:
    """`saga up` as a process, with stand-ins for workers."""

    def __init__(self, folder: Path, *words: str) -> None:
        stand_in = folder / "stand_in.py"
        stand_in.write_text(STAND_IN)
        self.port = free_port()
        self.out, self.err = folder / "out", folder / "err"
        command = [sys.executable, "-c", PROGRAM, str(stand_in), "some/model"]
        command += ["--port", str(self.port), *words]
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        self.pids: set[int] = set()

    def __enter__(self) -> Up:
        return self

    def __exit__(self, *_: object) -> None:
        self.tree()
        self.process.kill()
        self.process.wait()
        self.all_gone()

    @property
    def log(self) -> str:
        return self.err.read_text()

    def tree(self) -> set[int]:
        """All processes that were ever seen below the command."""
        todo = [self.process.pid]
        while todo:
            below = _children(todo.pop())
            self.pids |= set(below)
            todo += below
        return self.pids

    def one(self, word: str) -> int:
        """The only child with the word in its command line."""
        (pid,) = (p for p, line in _children(self.process.pid).items() if word in line)
        return pid

    def logs(self, pattern: str, count: int = 1) -> None:
        """Wait until lines of the log fit the pattern."""

        def is_there() -> bool:
            return len(re.findall(pattern, self.log, re.MULTILINE)) >= count

        _eventually(is_there, f"{pattern} is not in the log:\n{self.err.read_text()}")

    def ready(self, workers: int) -> None:
        """Wait until all serve."""
        self.logs(r"^saga +\| worker-\d is ready", workers)
        _eventually(self.out.read_text, "no line with the base URL")
        self.tree()

    def post(self, content: Mapping[str, str] = NOTHING, session: str = "s") -> httpx.Response:
        url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
        headers = {"X-SAGA-Session-ID": session}
        with httpx.Client(trust_env=False, timeout=30) as client:
            return client.post(url, json=dict(content), headers=headers)

    def ends(self) -> int:
        """The exit code."""
        return self.process.wait(30)

    def all_gone(self) -> None:
        _eventually(
            lambda: not any(map(_exists, self.pids)),
            f"still there: {[pid for pid in self.pids if _exists(pid)]}",
        )


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    """Starts the command; what it has left is ended after the test."""
    started: list[Up] = []

    def run(*words: str) -> Up:
        started.append(Up(tmp_path, *words))
        return started[-1]

    yield run
    for one in started:
        one.__exit__()


FAST = (
    *("--set", "health_interval_s=0.1"),
    *("--set", "worker_backoff_s=0.1"),
    *("--set", "slow_start_s=0.1"),
)


def test_workers_and_gateway_serve_behind_one_url(start: Callable[..., Up]) -> None:
    running = start("--workers", "2", *FAST)
    running.ready(2)
    base_url = f"http://127.0.0.1:{running.port}/v1"
    assert running.out.read_text() == f"SAGA serves some/model at base_url {base_url}\n"
    answers = [running.post(session=f"s{n}") for n in range(16)]
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["pid"] for answer in answers}) == 2
    assert re.search(r"^worker-1 \| serving some/model", running.log, re.MULTILINE)
    assert re.search(r"^gateway  \| SAGA gateway on ", running.log, re.MULTILINE)
    assert "\x1b" not in running.log
    running.process.terminate()
    assert running.ends() == 0
    assert len(running.pids) == 2 * 2 + 2  # Workers with a child each, the gateway, the guard.
    running.all_gone()


def test_a_killed_worker_comes_back_under_its_id_and_nothing_of_it_is_left(
    start: Callable[..., Up],
) -> None:
    running = start("--workers", "2", *FAST)
    running.ready(2)
    before = running.post()
    victim = before.json()["pid"]
    below = _children(victim)
    os.kill(victim, signal.SIGKILL)
    assert running.post().status_code == 200  # By the other.
    running.logs(r"^saga +\| worker-\d was ended by signal 9 \(Killed\); started again in 1 s")
    running.logs(r"is ready \(2 of 2 workers\)", 2)
    assert not any(map(_exists, below))
    back = before.headers["X-SAGA-Worker"]

    def serves_again() -> bool:
        answer = running.post(session=f"s{time.monotonic()}")
        assert answer.status_code == 200
        return answer.headers["X-SAGA-Worker"] == back

    _eventually(serves_again, "it is given no session")


def test_a_killed_gateway_comes_back_at_its_port(start: Callable[..., Up]) -> None:
    running = start(*FAST)
    running.ready(1)
    os.kill(running.one(" gateway "), signal.SIGKILL)
    running.logs(r"^saga +\| gateway was ended by signal 9")
    running.logs(r"^saga +\| gateway is ready", 2)
    assert running.post().status_code == 200
    assert len(running.out.read_text().splitlines()) == 1


def _open_request(running: Up, folder: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """A client that waits for an answer, and the file at which the worker gives it."""
    began, until = folder / "began", folder / "until"
    asked = json.dumps({"began": str(began), "until": str(until)})
    program = (
        "import sys, httpx\n"
        "answer = httpx.post(sys.argv[1], content=sys.argv[2], timeout=60, trust_env=False)\n"
        "print(answer.status_code)\n"
    )
    url = f"http://127.0.0.1:{running.port}/v1/chat/completions"
    client = subprocess.Popen([sys.executable, "-c", program, url, asked], stdout=subprocess.PIPE)
    _eventually(began.exists, "the worker has no request")
    return client, until


def test_a_signal_lets_open_requests_finish_before_workers_end(
    start: Callable[..., Up], tmp_path: Path
) -> None:
    running = start(*FAST)
    running.ready(1)
    client, until = _open_request(running, tmp_path)
    with client:
        running.process.send_signal(signal.SIGINT)
        running.logs(r"^saga +\| stopping")
        _eventually(lambda: not _listens(running.port), "the gateway takes new connections")
        assert client.poll() is None
        until.touch()
        assert client.stdout is not None
        assert client.stdout.read() == b"200\n"
    assert running.ends() == 0
    running.all_gone()


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


def test_a_second_signal_kills(start: Callable[..., Up], tmp_path: Path) -> None:
    running = start(*FAST)
    running.ready(1)
    client, _ = _open_request(running, tmp_path)
    with client:
        running.process.terminate()
        running.logs(r"^saga +\| stopping")
        running.process.terminate()
        assert running.ends() == 130
        running.all_gone()
        client.kill()


def test_nothing_is_left_when_the_command_itself_is_killed(start: Callable[..., Up]) -> None:
    running = start("--workers", "2")
    running.ready(2)
    assert len(running.pids) == 6
    running.process.kill()
    running.ends()
    running.all_gone()


def test_a_worker_that_never_serves_ends_the_command(start: Callable[..., Up]) -> None:
    running = start("--", "--ends")
    running.tree()
    assert running.ends() == 1
    running.all_gone()
    said = running.log.rpartition("saga up: ")[2]
    assert said == (
        "worker-0 ended with exit code 3, 2 times in a row, before it was ready; its last lines "
        "are:\n  | no room for the model\n  | no room for the model\n"
    )
    assert running.out.read_text() == ""


def test_a_gateway_that_refuses_its_settings_ends_the_command_at_once(
    start: Callable[..., Up],
) -> None:
    running = start("--host", "0.0.0.0")
    assert running.ends() == 1
    said = running.log.rpartition("saga up: ")[2]
    assert "gateway ended with exit code 1 before it was ready" in said
    assert "without API keys the gateway listens to its own host alone" in said
    running.all_gone()


def test_when_nobody_reads_the_log_any_more_all_ends(tmp_path: Path) -> None:
    stand_in = tmp_path / "stand_in.py"
    stand_in.write_text(STAND_IN)
    command = [sys.executable, "-c", PROGRAM, str(stand_in), "m", "--port", str(free_port())]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith(b"saga ")
        pids = set(_children(process.pid))
        process.stderr.close()
        assert process.wait(30) == 141
    _eventually(lambda: not any(map(_exists, pids)), "something is left")


def test_a_service_keeps_to_its_cpus_and_writes_where_it_is_told(tmp_path: Path) -> None:
    cpu = max(os.sched_getaffinity(0))
    program = "import os; print(os.sched_getaffinity(0)); raise SystemExit(3)"
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-c", program]
        service = Service("server", command, 1, log.fileno(), cpus={cpu}, host="[::1]")
        service.start()
        _eventually(lambda: service.exit_code() is not None, "it goes on")
    assert service.exit_code() == 3
    assert service.url == "http://[::1]:1"
    service.stop()
    service.kill()  # Nothing is left to kill.
    assert (tmp_path / "log").read_text() == f"{{{cpu}}}\n"
