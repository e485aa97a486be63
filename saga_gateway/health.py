"""Active health checks: whether a worker that gets no requests could serve some."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import aiohttp

from saga_gateway.workers import Worker, Workers, WorkerTasks

logger = logging.getLogger(__name__)

_FAILURES_TO_BE_DOWN = 2

Probe = Callable[[Worker], Awaitable[int]]
"""Asks a worker how it is, and returns the status of the answer."""


class HealthChecks:
    """One task a worker, so that a worker that hangs holds up nobody else.

    Two failures in a row take a worker out, one success brings it back. It comes back slowly, see
    :class:`~saga_gateway.workers.Worker`.

    Args:
        interval_s: seconds between two checks of a worker; 0: no checks.
    """

    def __init__(
        self, workers: Workers, probe: Probe, interval_s: float, clock: Callable[[], float]
    ) -> None:
        self._workers = workers
        self._probe = probe
        self._interval_s = interval_s
        self._clock = clock
        self._tasks = WorkerTasks(workers, self._check)

    async def follow(self) -> None:
        """Check the workers that there are now, and no others."""
        if self._interval_s > 0.0:
            await self._tasks.follow()

    async def stop(self) -> None:
        """Stop checking."""
        await self._tasks.stop()

    async def _check(self, worker: Worker) -> None:
        failures = 0
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                status = await self._probe(worker)
                is_well, reason = 200 <= status < 300, f"HTTP {status}"
            except (aiohttp.ClientError, OSError) as error:
                is_well, reason = False, type(error).__name__
            failures = 0 if is_well else failures + 1
            was_well = worker.healthy
            if is_well:
                worker.is_well(self._clock())
            elif failures >= _FAILURES_TO_BE_DOWN:
                worker.healthy = False
            if was_well and not worker.healthy:
                logger.warning("worker %s is down: %s", worker.worker_id, reason)
            elif worker.healthy and not was_well:
                logger.warning("worker %s is up again", worker.worker_id)
