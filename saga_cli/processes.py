"""Child processes that end with their parent: start, wait until ready, watch, stop."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import aiohttp

from saga_core.errors import SagaError

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.2


def free_port() -> int:
    """A loopback TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(slots=True)
class Service:
    """An HTTP server in a process group of its own; its output goes to ``log``.

    Args:
        name: how messages call it.
        command: program and arguments.
        port: the port that the command listens on.
        log: file for its output, or a descriptor that takes it.
        environment: added to this process's variables.
        ready_path: answers 200 as soon as it serves.
        host: the address, as it stands in a URL, at which the port is reached.
        cpus: logical CPUs that it may run on; none named: all that this process may.
    """

    name: str
    command: Sequence[str]
    port: int
    log: Path | int
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_path: str = "/health"
    host: str = "127.0.0.1"
    cpus: Collection[int] = ()
    _process: subprocess.Popen[bytes] | None = field(init=False, default=None)

    @property
    def url(self) -> str:
        """Base URL, without a path."""
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the group's leader; the service has been started."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the process; it is told to end should this process die."""
        libc = ctypes.CDLL(None) if sys.platform == "linux" else None

        def prepare() -> None:
            if libc is not None:
                libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if self.cpus:
                os.sched_setaffinity(0, self.cpus)

        log = self.log
        with nullcontext(log) if isinstance(log, int) else log.open("wb") as output:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                start_new_session=True,
                preexec_fn=prepare,
            )

    async def wait_ready(self, timeout_s: float) -> None:
        """Return when ``ready_path`` answers 200.

        Raises:
            SagaError: the process ended, or the time is over; the message has its last words.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as client:
            while True:
                self.check_alive()
                with suppress(aiohttp.ClientError, asyncio.TimeoutError):
                    async with client.get(self.url + self.ready_path) as response:
                        if response.status == 200:
                            return
                if asyncio.get_running_loop().time() > deadline:
                    late = f"the {self.name} was not ready after {timeout_s:.0f} s."
                    raise SagaError(late + self._last_words())
                await asyncio.sleep(_POLL_S)

    def check_alive(self) -> None:
        """Raises SagaError with the process's last words when it has ended."""
        code = self.exit_code()
        if code is not None:
            raise SagaError(f"the {self.name} {how_ended(code)}.{self._last_words()}")

    def exit_code(self) -> int | None:
        """Exit code of a process that has ended by itself, -N after signal N; None: it lives."""
        return self._process.poll() if self._process is not None else None

    async def watch(self) -> NoReturn:
        """Never return while the process lives; raise SagaError when it ends."""
        while True:
            self.check_alive()
            await asyncio.sleep(_POLL_S)

    def cpu_s(self) -> float:
        """CPU seconds, user and system, that its processes have used, those that ended included.

        0 where the system has no ``/proc``.
        """
        return tree_cpu_s(self._process.pid) if self._process is not None else 0.0

    def stop(self, grace_s: float = 10.0) -> None:
        """End the whole process group: politely, after ``grace_s`` seconds for certain."""
        if self._process is None:
            return
        self._signal_group(signal.SIGTERM)
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        finally:  # Also when a second Ctrl-C interrupts the wait.
            self._signal_group(signal.SIGKILL)
            self._process.wait()
            self._process = None

    async def end_rest(self, grace_s: float) -> None:
        """End what is left of the group of a process that has ended, politely at first.

        Killed at once, its children could not give back what they share, such as shared memory.
        """
        self._signal_group(signal.SIGTERM)
        with suppress(asyncio.TimeoutError):
            async with asyncio.timeout(grace_s):
                while _is_group_alive(self.pid):  # noqa: ASYNC110 - no child of ours, so no event
                    await asyncio.sleep(_POLL_S)
        self.stop(0.0)

    def kill(self) -> None:
        """End what is left of the process group at once; also while another thread stops it."""
        self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        process = self._process
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def _last_words(self, lines: int = 15) -> str:
        if isinstance(self.log, int):
            return ""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        shown = "\n".join(f"  | {line}" for line in text.splitlines()[-lines:])
        return f" Its log is {self.log}, the last lines are:\n{shown}" if shown else ""


def how_ended(exit_code: int) -> str:
    """What became of a process, as the end of a sentence."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    return f"was ended by signal {-exit_code} ({signal.strsignal(-exit_code)})"


@asynccontextmanager
async def running(service: Service) -> AsyncIterator[None]:
    """Start the service, and stop it whatever happens."""
    service.start()
    try:
        yield
    finally:
        service.stop()


async def run_beside(work: Awaitable[object], services: Sequence[Service], who: str) -> None:
    """Wait for the work; the death of a service ends it and is the error to report.

    Raises:
        SagaError: a service died, or ``who`` works failed.
    """
    task = asyncio.ensure_future(work)
    watches = [asyncio.create_task(service.watch()) for service in services]
    try:
        await asyncio.wait({task, *watches}, return_when=asyncio.FIRST_COMPLETED)
        if task.done() and task.exception() is not None:
            # A dying worker breaks the requests first; give the watch time to see the cause.
            await asyncio.wait(watches, timeout=3.0, return_when=asyncio.FIRST_COMPLETED)
        for watch in watches:
            if watch.done():
                watch.result()
        try:
            await task
        except SagaError:
            raise
        except Exception as error:
            raise SagaError(f"{who} failed: {type(error).__name__}: {error}") from error
    finally:
        for one in (task, *watches):
            one.cancel()
        await asyncio.gather(task, *watches, return_exceptions=True)


def tree_cpu_s(pid: int) -> float:
    """CPU seconds of a process and all below it; children that ended and were awaited count."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for number, fields in _stats():
        children.setdefault(int(fields[1]), []).append(number)
        ticks[number] = sum(map(int, fields[11:15]))
    total, pending = 0, [pid]
    while pending:
        number = pending.pop()
        total += ticks.get(number, 0)
        pending += children.get(number, ())
    return total / os.sysconf("SC_CLK_TCK")


def _is_group_alive(group: int) -> bool:
    """Whether a process of the group runs; those that only wait to be reaped do not."""
    return any(int(fields[2]) == group and fields[0] != "Z" for _, fields in _stats())


def _stats() -> Iterator[tuple[int, list[str]]]:
    """Of each process its id, and state, parent, group and so on as ``/proc`` tells them."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # It has just ended.
            # The name, in parentheses, may hold anything.
            yield int(stat.parent.name), stat.read_text().rpartition(")")[2].split()
