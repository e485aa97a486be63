"""Keeps a gateway and its workers running, and ends them together."""

from __future__ import annotations

import asyncio
import math
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from saga_cli import up_guard
from saga_cli.processes import Service, how_ended
from saga_cli.up_log import LogView
from saga_cli.up_restarts import Restarts
from saga_core.errors import SagaError

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_S = 0.1
_UNREADY_GRACE_S = 2.0
_REST_GRACE_S = 2.0


class Guard:
    """The process that kills the groups told to it should this one be killed."""

    def __init__(self) -> None:
        # Isolated: it needs nothing but the standard library, and starts in no time.
        command = [sys.executable, "-I", "-S", str(Path(up_guard.__file__))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, text=True, bufsize=1, start_new_session=True
        )

    def add(self, group: int) -> None:
        """Guard a process group."""
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """The group is gone: its number may come to mean another."""
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # Somebody has killed it; the kernel still ends the leaders.
            self._process.stdin.write(line)

    def dismiss(self) -> None:
        """End it: nothing is left to guard."""
        assert self._process.stdin is not None
        self._process.kill()
        self._process.wait()
        with suppress(OSError):
            self._process.stdin.close()


@dataclass(slots=True, eq=False)
class Kept:
    """A service that is kept running.

    Args:
        service: not started.
        grace_s: how long it may take to end when it is told to, seconds.
        restarts: when it is started again.
        ready: set while it serves.
    """

    service: Service
    grace_s: float
    restarts: Restarts
    ready: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """Runs a gateway and the workers behind it until a signal comes.

    SIGINT, SIGTERM or SIGHUP: the gateway ends first and finishes what is open, then the workers;
    a second one kills all. Made and run on one event loop of the main thread.
    """

    def __init__(
        self, gateway: Kept, workers: Sequence[Kept], log: LogView, ready_line: str
    ) -> None:
        self._gateway = gateway
        self._workers = workers
        self._all = (gateway, *workers)
        self._log = log
        self._ready_line = ready_line
        self._signals = 0
        self._stop = asyncio.Event()

    async def run(self) -> bool:
        """Keep all running; returns whether all could end in peace.

        Raises:
            SagaError: a process that has never been ready was given up.
            BrokenPipeError: nobody reads the log any more.
        """
        loop = asyncio.get_running_loop()
        outlives_terminal = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # As under nohup.
        for number in _STOP_SIGNALS:
            if number is not signal.SIGHUP or not outlives_terminal:
                loop.add_signal_handler(number, self._on_signal)
        guard = Guard()
        tasks = [asyncio.create_task(self._keep(kept, guard)) for kept in self._all]
        tasks.append(asyncio.create_task(self._announce()))
        ends = [asyncio.create_task(event.wait()) for event in (self._stop, self._log.broken)]
        try:
            pending = {*tasks, *ends}
            while not any(end.done() for end in ends):
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            if self._log.broken.is_set():
                raise BrokenPipeError
        finally:
            for task in (*tasks, *ends):
                task.cancel()
            await asyncio.gather(*tasks, *ends, return_exceptions=True)
            await self._end()
            guard.dismiss()
        return self._signals < 2

    def _on_signal(self) -> None:
        self._signals += 1
        self._stop.set()
        if self._signals == 1:
            self._log.say("stopping; a second signal kills at once")
        else:
            for kept in self._all:
                kept.service.kill()

    async def _keep(self, kept: Kept, guard: Guard) -> None:
        """Start the service, and again whenever it ends."""
        service = kept.service
        while True:
            service.start()
            pid = service.pid
            guard.add(pid)
            code, ready_s = await self._until_end(kept)
            # Its own children may live on, and hold its port and its GPU.
            await service.end_rest(_REST_GRACE_S)
            guard.remove(pid)
            await asyncio.sleep(_POLL_S)  # The log has yet to read its last lines.
            pause_s = kept.restarts.after(code, ready_s)
            if pause_s is None:
                raise SagaError(self._given_up(kept, code))
            self._log.say(f"{service.name} {how_ended(code)}; started again in {pause_s:g} s")
            await asyncio.sleep(pause_s)

    async def _until_end(self, kept: Kept) -> tuple[int, float | None]:
        """Wait for the end of a process; its exit code, and for how long it was ready, seconds."""
        loop = asyncio.get_running_loop()
        service = kept.service
        since_s = None
        try:
            await service.wait_ready(math.inf)
            since_s = loop.time()
            kept.ready.set()
            self._log.say(f"{service.name} is ready{self._count(kept)}")
            await service.watch()
        except SagaError:
            code = service.exit_code()
            if code is None:
                raise
            kept.ready.clear()
            return code, None if since_s is None else loop.time() - since_s

    def _count(self, kept: Kept) -> str:
        if kept is self._gateway:
            return ""
        ready = sum(worker.ready.is_set() for worker in self._workers)
        return f" ({ready} of {len(self._workers)} workers)"

    def _given_up(self, kept: Kept, code: int) -> str:
        times = kept.restarts.in_row
        often = "" if times == 1 else f", {times} times in a row,"
        lines = self._log.last_lines(kept.service.name)
        said = f"; its last lines are:\n{lines}" if lines else " and has said nothing"
        return f"{kept.service.name} {how_ended(code)}{often} before it was ready{said}"

    async def _announce(self) -> None:
        """Say where the gateway is, once it has a worker."""
        await self._gateway.ready.wait()
        first = [asyncio.create_task(worker.ready.wait()) for worker in self._workers]
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in first:
                task.cancel()
        url = f"{self._gateway.service.url}/ready"
        while not await _answers(url):  # noqa: ASYNC110 - another process is asked
            await asyncio.sleep(_POLL_S)
        print(self._ready_line, flush=True)

    async def _end(self) -> None:
        """End the gateway, then the workers, which serve what it still has open."""
        await self._end_one(self._gateway)
        await asyncio.gather(*map(self._end_one, self._workers))

    async def _end_one(self, kept: Kept) -> None:
        # An engine that is being loaded hears no signal, and has nothing to finish.
        grace_s = kept.grace_s if kept.ready.is_set() else _UNREADY_GRACE_S
        if self._signals >= 2:  # It may have come before this one was told to end.
            grace_s = 0.0
        await asyncio.to_thread(kept.service.stop, grace_s)


async def _answers(url: str) -> bool:
    timeout = aiohttp.ClientTimeout(total=5)
    with suppress(aiohttp.ClientError, asyncio.TimeoutError):
        async with aiohttp.ClientSession(timeout=timeout) as client, client.get(url) as response:
            return response.status == 200
    return False
