"""The workers: which there are, how busy they are, and which can be reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from math import inf

from saga_core.breaker import Breaker
from saga_core.placement import WorkerLoad
from saga_gateway.settings import GatewaySettings, worker_address

_LEAST_WEIGHT = 0.1


class Outcome(Enum):
    """What a request showed of the worker that it was sent to."""

    SERVED = "served"
    FAILED = "failed"
    UNREACHABLE = "unreachable"
    NOTHING = "nothing"


@dataclass(slots=True)
class Attempt:
    """One request at a worker; ``outcome`` is what it has shown so far."""

    outcome: Outcome = Outcome.NOTHING


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
        takes_notices: False once it has said that it does not know the control API.
    """

    worker_id: str
    base_url: str
    breaker: Breaker
    slow_start_s: float
    in_flight: int = 0
    healthy: bool = True
    unreachable: bool = False
    back_since_s: float = -inf
    takes_notices: bool = True

    @contextmanager
    def serving(self, clock: Callable[[], float]) -> Iterator[Attempt]:
        """Count one request in flight while the block runs, and learn from its outcome."""
        attempt = Attempt()
        self.in_flight += 1
        self.breaker.began()
        try:
            yield attempt
        finally:
            self.in_flight -= 1
            self._learn(attempt.outcome, clock())

    def load(self, now_s: float) -> WorkerLoad:
        """The worker as placement sees it."""
        weight = 1.0
        if now_s < self.back_since_s + self.slow_start_s:
            weight = max(_LEAST_WEIGHT, (now_s - self.back_since_s) / self.slow_start_s)
        available = self.healthy and self.breaker.allows(now_s)
        return WorkerLoad(self.worker_id, self.in_flight, available, weight)

    def is_well(self, now_s: float) -> None:
        """A health check has succeeded."""
        if not self.healthy or self.unreachable:
            # Failures of requests are another matter: those the breaker counts by itself.
            self.back_since_s = now_s
            self.breaker.reset()
        self.healthy, self.unreachable = True, False

    def _learn(self, outcome: Outcome, now_s: float) -> None:
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


class Workers:
    """The workers of this gateway, in the order of the settings."""

    def __init__(self, settings: GatewaySettings) -> None:
        breaker = settings.breaker()
        self._by_id = {
            worker_id: Worker(worker_id, base_url, Breaker(breaker), settings.slow_start_s)
            for worker_id, base_url in map(worker_address, settings.workers)
        }

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._by_id.values())

    def __getitem__(self, worker_id: str) -> Worker:
        return self._by_id[worker_id]

    def loads(self, now_s: float, *, without: str | None = None) -> list[WorkerLoad]:
        """The workers as placement sees them; ``without`` is shown as not available."""
        return [
            replace(load, available=False) if load.worker_id == without else load
            for load in (worker.load(now_s) for worker in self._by_id.values())
        ]
