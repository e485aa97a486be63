"""The workers: which there are, how busy they are, and which can be reached."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from math import inf
from typing import Any

from saga_core.breaker import Breaker
from saga_gateway.discovery import Discovery, Found, sources_of
from saga_gateway.engines import Engine
from saga_gateway.settings import GatewaySettings, worker_address

logger = logging.getLogger(__name__)

_LEAST_WEIGHT = 0.1
_LONGEST_REST_S = 60.0


class Outcome(Enum):
    """What a request showed of the worker that it was sent to."""

    SERVED = "served"
    FAILED = "failed"
    UNREACHABLE = "unreachable"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """How busy a worker is.

    Attributes:
        in_flight: requests that it serves now.
        available: whether it can take one more.
        weight: share of what an equal worker would be given, above 0, at most 1.
    """

    worker_id: str
    in_flight: int
    available: bool = True
    weight: float = 1.0


@dataclass(slots=True)
class Worker:
    """One engine replica.

    A worker that comes back, by a health check or through its breaker, is given more and more new
    sessions over ``slow_start_s``: its caches are empty.

    Attributes:
        worker_id: ``host:port``.
        base_url: ``scheme://host:port``.
        breaker: keeps requests from it after failures.
        slow_start_s: see above, seconds.
        in_flight: requests that are being served.
        healthy: False once its health checks fail.
        unreachable: it took no connection the last time.
        back_since_s: when it came back.
        rests_until_s: it has asked not to be sent anything before then; others are preferred.
        draining: it is to go: what it serves it may finish, anything else goes elsewhere.
        engine: what it is; None until it has said so.
        refuses_notices: it has said that it does not know the control API.
    """

    worker_id: str
    base_url: str
    breaker: Breaker
    slow_start_s: float
    in_flight: int = 0
    healthy: bool = True
    unreachable: bool = False
    back_since_s: float = -inf
    rests_until_s: float = -inf
    draining: bool = False
    engine: Engine | None = None
    refuses_notices: bool = False

    @property
    def takes_notices(self) -> bool:
        """Whether it takes notices, as far as is known."""
        known = self.engine is None or self.engine.takes_notices
        return known and not self.refuses_notices

    def begin(self) -> None:
        """One more request is in flight."""
        self.in_flight += 1
        self.breaker.began()

    def end(self, outcome: Outcome, now_s: float) -> None:
        """One request less is in flight; what it has shown is learned from."""
        self.in_flight -= 1
        if outcome is Outcome.NOTHING:
            self.breaker.gave_up()
        elif outcome is Outcome.SERVED:
            self.unreachable = False
            if self.breaker.succeeded():
                self.back_since_s = now_s
        else:
            self.breaker.failed(now_s)
            if outcome is Outcome.UNREACHABLE:
                self.unreachable = True
                self.breaker.open(now_s)

    def asked_for_rest(self, retry_after: str, now_s: float) -> None:
        """It is full, and says after how many seconds to come again."""
        if retry_after.isascii() and retry_after.isdigit():
            self.rests_until_s = now_s + min(float(retry_after), _LONGEST_REST_S)

    def load(self, now_s: float) -> WorkerLoad:
        """How busy it is, and whether it can be given more."""
        weight = 1.0
        if now_s < self.back_since_s + self.slow_start_s:
            weight = max(_LEAST_WEIGHT, (now_s - self.back_since_s) / self.slow_start_s)
        available = self.healthy and not self.draining and self.breaker.allows(now_s)
        return WorkerLoad(self.worker_id, self.in_flight, available, weight)

    def describe(self, now_s: float) -> dict[str, object]:
        """The worker as operators see it."""
        return {
            **asdict(self.load(now_s)),
            "healthy": self.healthy,
            "draining": self.draining,
            "engine": None if self.engine is None else asdict(self.engine),
            "takes_notices": self.takes_notices,
        }

    def is_well(self, now_s: float) -> None:
        """A health check has succeeded."""
        if not self.healthy or self.unreachable:
            # Failures of requests are another matter: those the breaker counts by itself.
            self.back_since_s = now_s
            self.breaker.reset()
            self.engine, self.refuses_notices = None, False  # It may be another one.
        self.healthy, self.unreachable = True, False


class Workers:
    """The workers of this gateway: those of the settings, and those that sources find.

    Attributes:
        sources: where others are found.

    Raises:
        SettingsError: a source cannot find its workers.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._by_id: dict[str, Worker] = {}
        self.sources = sources_of(settings)
        self._found = {source: source.now() for source in self.sources}
        self._update()

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._by_id.values()))

    def __getitem__(self, worker_id: str) -> Worker:
        return self._by_id[worker_id]

    def get(self, worker_id: str) -> Worker | None:
        """The worker of that id, while there is one."""
        return self._by_id.get(worker_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def loads(self, now_s: float) -> list[WorkerLoad]:
        """How busy the workers are."""
        return [worker.load(now_s) for worker in self._by_id.values()]

    def found(self, source: Discovery, found: Found) -> None:
        """A source has found these, and no others.

        Who is still there keeps its state, who is gone may finish what it serves.
        """
        self._found[source] = found
        self._update()
        logger.warning("workers: %s", ", ".join(self._by_id) or "none")

    def _update(self) -> None:
        wanted = dict(map(worker_address, self._settings.workers))
        for found in self._found.values():
            wanted |= found
        breaker, slow_start_s = self._settings.breaker(), self._settings.slow_start_s
        before, self._by_id = self._by_id, {}
        for worker_id, base_url in wanted.items():
            known = before.get(worker_id)
            if known is None or known.base_url != base_url:
                known = Worker(worker_id, base_url, Breaker(breaker), slow_start_s)
            self._by_id[worker_id] = known


class WorkerTasks:
    """A task for every worker, while there is that worker."""

    def __init__(
        self, workers: Workers, run: Callable[[Worker], Coroutine[Any, Any, None]]
    ) -> None:
        self._workers = workers
        self._run = run
        self._tasks: dict[str, tuple[Worker, asyncio.Task[None]]] = {}

    async def follow(self) -> None:
        """Begin the tasks that are missing, and end those of workers that are gone."""
        for worker in self._workers:
            if worker.worker_id not in self._tasks:
                task = asyncio.create_task(self._run(worker))
                self._tasks[worker.worker_id] = worker, task
        gone = [
            worker_id
            for worker_id, (worker, _) in self._tasks.items()
            if self._workers.get(worker_id) is not worker
        ]
        await self._end(gone)
        if any(worker.worker_id not in self._tasks for worker in self._workers):
            await self.follow()  # A worker came back under the id of one that went.

    async def stop(self) -> None:
        """End all tasks."""
        await self._end(list(self._tasks))

    async def _end(self, worker_ids: list[str]) -> None:
        ended = [self._tasks.pop(worker_id)[1] for worker_id in worker_ids]
        for task in ended:
            task.cancel()
        await asyncio.gather(*ended, return_exceptions=True)
