"""Which worker of the simulated cluster gets a request."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker as a router sees it.

    Attributes:
        worker: its number.
        running, waiting: requests that its engine runs, and that wait in it.
        used_share: share of its KV pool that running requests hold, 0 to 1.
    """

    worker: int
    running: int
    waiting: int
    used_share: float

    @property
    def in_flight(self) -> int:
        """Requests that it has not answered."""
        return self.running + self.waiting


class Router(Protocol):
    """Chooses a worker for each request at once."""

    def place(
        self, session: str, prompt: Sequence[bytes], loads: Sequence[WorkerLoad], now_s: float
    ) -> int:
        """The worker that is to serve the session's next request.

        Args:
            prompt: hashes of the prompt's full blocks, each standing for its whole prefix.
            loads: of all workers that are up, by number.
        """

    def ended(self, session: str) -> None:
        """The session will not come back."""


class RoundRobin:
    """One worker after the other, whoever asks."""

    def __init__(self) -> None:
        self._next = 0

    def place(
        self, session: str, prompt: Sequence[bytes], loads: Sequence[WorkerLoad], now_s: float
    ) -> int:
        chosen = self._next % len(loads)
        self._next += 1
        return loads[chosen].worker

    def ended(self, session: str) -> None:
        pass


class LeastLoaded:
    """The fewest requests in flight; ties: the worker that was chosen longest ago."""

    def __init__(self) -> None:
        self._chosen: dict[int, int] = {}
        self._count = 0

    def place(
        self, session: str, prompt: Sequence[bytes], loads: Sequence[WorkerLoad], now_s: float
    ) -> int:
        best = min(loads, key=lambda load: (load.in_flight, self._chosen.get(load.worker, -1)))
        self._count += 1
        self._chosen[best.worker] = self._count
        return best.worker

    def ended(self, session: str) -> None:
        pass


class Affinity:
    """A session goes to the worker that served it last, a new one to the least loaded.

    It leaves a worker where requests wait and that has more than ``max_ratio`` times as many in
    flight as the least loaded one, which counts as having at least one; inf: never.
    """

    def __init__(self, max_ratio: float = math.inf) -> None:
        self._max_ratio = max_ratio
        self._home: dict[str, int] = {}
        self._others = LeastLoaded()

    def place(
        self, session: str, prompt: Sequence[bytes], loads: Sequence[WorkerLoad], now_s: float
    ) -> int:
        home = next((load for load in loads if load.worker == self._home.get(session)), None)
        if home is not None:
            least = max(1, min(load.in_flight for load in loads))
            is_long = home.in_flight > self._max_ratio * least
            if not (is_long and home.waiting):
                return home.worker
        chosen = self._others.place(session, prompt, loads, now_s)
        self._home[session] = chosen
        return chosen

    def ended(self, session: str) -> None:
        self._home.pop(session, None)


class PrefixAware:
    """The worker that was sent the longest prefix of the prompt, if that is half of it or more.

    Else, or where loads differ by more than ``_MAX_DIFFERENCE`` requests and ``_MAX_RATIO`` times,
    the least loaded. Of each worker the blocks sent to it are remembered, as many as its pool has,
    the least recently sent forgotten first.
    """

    _MIN_SHARE = 0.5
    _MAX_DIFFERENCE = 32
    _MAX_RATIO = 1.5

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._sent: dict[int, OrderedDict[bytes, None]] = {}
        self._others = LeastLoaded()

    def place(
        self, session: str, prompt: Sequence[bytes], loads: Sequence[WorkerLoad], now_s: float
    ) -> int:
        self._sent = {load.worker: self._sent.get(load.worker, OrderedDict()) for load in loads}
        chosen = self._longest(prompt, loads)
        if chosen is None:
            chosen = self._others.place(session, prompt, loads, now_s)
        sent = self._sent[chosen]
        for block in reversed(prompt):  # So that a prefix's end is forgotten before its beginning.
            sent[block] = None
            sent.move_to_end(block)
        while len(sent) > self._blocks:
            sent.popitem(last=False)
        return chosen

    def ended(self, session: str) -> None:
        pass

    def _longest(self, prompt: Sequence[bytes], loads: Sequence[WorkerLoad]) -> int | None:
        counts = [load.in_flight for load in loads]
        most, least = max(counts), min(counts)
        if most - least > self._MAX_DIFFERENCE and most > self._MAX_RATIO * least:
            return None
        found = {load.worker: _match(prompt, self._sent[load.worker]) for load in loads}
        best = max(loads, key=lambda load: (found[load.worker], -load.in_flight, -load.worker))
        if found[best.worker] < max(1.0, self._MIN_SHARE * len(prompt)):
            return None
        return best.worker


def _match(prompt: Sequence[bytes], sent: OrderedDict[bytes, None]) -> int:
    """Blocks with which the prompt begins that were sent."""
    return next((n for n, block in enumerate(prompt) if block not in sent), len(prompt))
