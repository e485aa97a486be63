"""What each worker is, and whether one that gets no requests could serve some."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from saga_gateway.engines import detect
from saga_gateway.workers import Worker, Workers, WorkerTasks

logger = logging.getLogger(__name__)

_FAILURES_TO_BE_DOWN = 2
_DETECT_AGAIN_S = 2.0

Get = Callable[[Worker, str], Awaitable[tuple[int, bytes]]]
"""Asks a worker for a path; returns the status and the body of the answer."""


class HealthChecks:
    """One task a worker, so that a worker that hangs holds up nobody else.

    It first finds out what the worker is. Two failed checks in a row take a worker out, one success
    brings it back. It comes back slowly, see :class:`~saga_gateway.workers.Worker`, and is asked
    anew what it is.

    Args:
        interval_s: seconds between two checks of a worker; 0: it is only asked what it is.
        changed: is called whenever a worker is down, or up again.
    """

    def __init__(
        self,
        workers: Workers,
        get: Get,
        interval_s: float,
        clock: Callable[[], float],
        changed: Callable[[], None],
    ) -> None:
        self._get = get
        self._changed = changed
        self._interval_s = interval_s
        self._clock = clock
        self._tasks = WorkerTasks(workers, self._watch)

    async def follow(self) -> None:
        """Check the workers that there are now, and no others."""
        await self._tasks.follow()

    async def stop(self) -> None:
        """Stop checking."""
        await self._tasks.stop()

    async def _watch(self, worker: Worker) -> None:
        failures = 0
        while True:
            if worker.healthy and worker.engine is None:
                await self._detect(worker)
            if self._interval_s == 0.0:
                if worker.engine is not None:
                    return
                await asyncio.sleep(_DETECT_AGAIN_S)
                continue
            await asyncio.sleep(self._interval_s)
            failures = await self._check(worker, failures)

    async def _detect(self, worker: Worker) -> None:
        try:
            worker.engine = await detect(partial(self._get, worker))
        except Exception as error:  # noqa: BLE001 - nothing that it says may end its checks
            logger.info("worker %s does not say what it is: %s", worker.worker_id, _reason(error))
        else:
            logger.info("worker %s is %s", worker.worker_id, worker.engine)

    async def _check(self, worker: Worker, failures: int) -> int:
        """Check once; returns how many checks in a row have failed."""
        try:
            status, _ = await self._get(worker, "/health")
            is_well, reason = 200 <= status < 300, f"HTTP {status}"
        except Exception as error:  # noqa: BLE001 - nothing that it says may end its checks
            is_well, reason = False, _reason(error)
        failures = 0 if is_well else failures + 1
        if is_well:
            if not worker.healthy:
                logger.warning("worker %s is up again", worker.worker_id)
            is_back = not worker.healthy or worker.unreachable
            worker.is_well(self._clock())
            if is_back:
                self._changed()
        elif failures >= _FAILURES_TO_BE_DOWN and worker.healthy:
            logger.warning("worker %s is down: %s", worker.worker_id, reason)
            worker.healthy = False
            self._changed()
        return failures


def _reason(error: BaseException) -> str:
    return type(error).__name__
