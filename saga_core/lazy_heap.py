"""What comes first, of many whose ranks keep changing."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

K = TypeVar("K", bound=str)

_SPARE = 64


class LazyHeap(Generic[K]):
    """Keys in the order of their ranks, then of ``tie``, then of the keys; operations are O(log n).

    A rank that is replaced or dropped stays in the heap until it comes up, or until the heap is
    twice as long as it need be.
    """

    __slots__ = ("_heap", "_ranks")

    def __init__(self) -> None:
        self._ranks: dict[K, tuple[float, float]] = {}
        self._heap: list[tuple[tuple[float, float], K]] = []

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, key: K) -> bool:
        return key in self._ranks

    def rank(self, key: K) -> float:
        """The rank of a key that is in it."""
        return self._ranks[key][0]

    def set(self, key: K, rank: float, tie: float = 0.0) -> None:
        """Let the key have that rank, from now on."""
        entry = rank, tie
        if self._ranks.get(key) == entry:
            return
        self._ranks[key] = entry
        heappush(self._heap, (entry, key))
        if len(self._heap) > 2 * len(self._ranks) + _SPARE:
            self._heap = [(rank, key) for key, rank in self._ranks.items()]
            heapify(self._heap)

    def drop(self, key: K) -> None:
        """The key has no rank any more, if it had one."""
        self._ranks.pop(key, None)

    def first(self) -> K | None:
        """The key of the least rank; None when there is none."""
        heap, ranks = self._heap, self._ranks
        while heap:
            rank, key = heap[0]
            if ranks.get(key) == rank:
                return key
            heappop(heap)
        return None

    def firsts(self, limit: int) -> list[K]:
        """Up to ``limit`` keys, the least rank first."""
        if limit == 1:
            key = self.first()
            return [] if key is None else [key]
        taken: list[tuple[tuple[float, float], K]] = []
        while self._heap and len(taken) < limit:
            entry = heappop(self._heap)
            # The same rank may have been set twice, with another one in between.
            if self._ranks.get(entry[1]) == entry[0] and (not taken or taken[-1] != entry):
                taken.append(entry)
        for entry in taken:
            heappush(self._heap, entry)
        return [key for _, key in taken]

    def due(self, now: float, limit: int) -> list[K]:
        """Take out up to ``limit`` keys whose rank is not above ``now``, the least first."""
        found: list[K] = []
        while len(found) < limit:
            key = self.first()
            if key is None or self._ranks[key][0] > now:
                break
            self.drop(key)
            found.append(key)
        return found
