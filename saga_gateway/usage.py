"""Answers that did not say how many tokens they took, until their worker does."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

from saga_gateway.answers import Usage

PATIENCE_S = 3.0
_EARLY_S = 1.0
_MAX_WAITING = 10_000

Told = Callable[[Usage | None], None]
"""Is given the counts, or None: nobody knows them."""


class UsageDesk:
    """Answers by worker and session, first in first out: a worker tells of them in that order.

    Each is settled once: by what the worker says, after ``PATIENCE_S`` without a word, or when too
    many wait. A word may come shortly before the answer's last byte.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: OrderedDict[int, tuple[float, tuple[str, str], Told]] = OrderedDict()
        self._by_session: dict[tuple[str, str], deque[int]] = {}
        self._early: OrderedDict[tuple[str, str], tuple[float, Usage]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def wait_for(self, worker_id: str, session_id: str, told: Told) -> None:
        """Call ``told`` when it is known what the session's last answer took."""
        key = (worker_id, session_id)
        early_s, usage = self._early.pop(key, (0.0, None))
        if usage is not None and early_s > self._clock() - _EARLY_S:
            told(usage)
            return
        self._count += 1
        self._waiting[self._count] = (self._clock(), key, told)
        self._by_session.setdefault(key, deque()).append(self._count)
        if len(self._waiting) > _MAX_WAITING:
            self._settle(next(iter(self._waiting)), None)

    def tell(self, worker_id: str, session_id: str, usage: Usage) -> None:
        """The worker says what an answer of the session took."""
        key = (worker_id, session_id)
        numbers = self._by_session.get(key)
        if numbers:
            self._settle(numbers[0], usage)
            return
        self._early[key] = (self._clock(), usage)
        self._early.move_to_end(key)
        if len(self._early) > _MAX_WAITING:
            self._early.popitem(last=False)

    def give_up(self) -> None:
        """Settle those for whom no word has come in time."""
        while self._early:
            key, (early_s, _) = next(iter(self._early.items()))
            if early_s > self._clock() - _EARLY_S:
                break
            del self._early[key]
        oldest_s = self._clock() - PATIENCE_S
        while self._waiting:
            number, (since_s, _, _) = next(iter(self._waiting.items()))
            if since_s > oldest_s:
                return
            self._settle(number, None)

    def close(self) -> None:
        """Settle all."""
        while self._waiting:
            self._settle(next(iter(self._waiting)), None)

    def _settle(self, number: int, usage: Usage | None) -> None:
        _, key, told = self._waiting.pop(number)
        numbers = self._by_session[key]
        numbers.remove(number)
        if not numbers:
            del self._by_session[key]
        told(usage)
