"""Delivery of notices to workers, off the path of requests."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import islice

import orjson

from saga_core.notices import Notice, encode_notices
from saga_gateway.stats import Stats
from saga_gateway.workers import Worker, Workers, WorkerTasks

logger = logging.getLogger(__name__)

_BATCH = 128

Post = Callable[[Worker, bytes], Awaitable[int]]
"""Sends a body to a worker's notice endpoint and returns the status of the answer."""


@dataclass(slots=True)
class _Outbox:
    worker: Worker
    waiting: deque[Notice] = field(default_factory=deque)
    filled: asyncio.Event = field(default_factory=asyncio.Event)


class Notifier:
    """A bounded queue and a task per worker.

    Notices of a worker arrive in the order in which they were put; those that gather while a
    batch is under way form the next. A full queue drops its oldest notice, a failed batch is not
    sent again: losing a notice does no harm. A worker that answers 404 does not speak the
    protocol and gets no more of them, until it has been down.
    """

    def __init__(self, workers: Workers, post: Post, *, max_queued: int, stats: Stats) -> None:
        self._outboxes: dict[str, _Outbox] = {}
        self._tasks = WorkerTasks(workers, self._deliver)
        self._post = post
        self._max_queued = max_queued
        self._stats = stats

    def put(self, worker_id: str, notice: Notice) -> None:
        """Queue a notice; never waits."""
        outbox = self._outboxes.get(worker_id)
        if outbox is None or not outbox.worker.takes_notices:
            self._stats.notices_dropped += 1
            return
        if len(outbox.waiting) >= self._max_queued:
            outbox.waiting.popleft()
            self._stats.notices_dropped += 1
        outbox.waiting.append(notice)
        outbox.filled.set()

    async def follow(self) -> None:
        """Deliver to the workers that there are now, and to no others."""
        await self._tasks.follow()

    async def stop(self) -> None:
        """Stop delivering; what is queued is lost."""
        await self._tasks.stop()

    async def _deliver(self, worker: Worker) -> None:
        outbox = self._outboxes[worker.worker_id] = _Outbox(worker)
        try:
            while True:
                await outbox.filled.wait()
                batch = list(islice(outbox.waiting, _BATCH))
                for _ in batch:
                    outbox.waiting.popleft()
                if not outbox.waiting:
                    outbox.filled.clear()
                await self._send(worker, batch)
        finally:
            self._stats.notices_dropped += len(outbox.waiting)
            outbox.waiting.clear()
            if self._outboxes.get(worker.worker_id) is outbox:
                del self._outboxes[worker.worker_id]

    async def _send(self, worker: Worker, batch: list[Notice]) -> None:
        try:
            status = await self._post(worker, orjson.dumps(encode_notices(batch)))
        except Exception as error:  # noqa: BLE001 - no failure may end the delivery of later notices
            self._failed(worker, type(error).__name__, len(batch))
            return
        if status == 404:
            worker.refuses_notices = True
            logger.info("worker %s has no SAGA control API: it gets no notices", worker.worker_id)
            self._stats.notices_dropped += len(batch)
        elif status >= 300:
            self._failed(worker, f"HTTP {status}", len(batch))
        else:
            self._stats.notices_sent += len(batch)

    def _failed(self, worker: Worker, kind: str, lost: int) -> None:
        self._stats.notices_dropped += lost
        if kind not in self._stats.notice_failures:
            logger.warning("notices to worker %s failed: %s", worker.worker_id, kind)
        self._stats.notice_failures[kind] += 1
