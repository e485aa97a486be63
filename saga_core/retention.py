"""Which idle KV to give up first.

A *run* is the chain of blocks that the last request of a session, or one plain request, left
behind. A policy gives each idle run a key; the run with the least key loses its blocks first, from
the tail of the chain. A key holds until its stated moment; the run is ranked anew after that, at
the latest when it comes first, so a heap holds the order and a decision costs O(log n). The
policies are in ``saga_core.policies``.
"""

from __future__ import annotations

import heapq
import math
from enum import IntEnum
from typing import NamedTuple, Protocol

from saga_core.pauses import Wait

REVIEWS_PER_CALL = 2
"""Overdue runs that one call ranks anew, beside those that come first."""

# Entries of a heap for each run, stale ones included, before it is made anew.
_MAX_ENTRIES_PER_RUN = 4


class RunState(IntEnum):
    """What a run waits for; the greater, the stronger its claim to stay."""

    ENDED = 0
    IDLE = 1
    PAUSED = 2
    RESUMING = 3


class Run(NamedTuple):
    """An idle run as a policy sees it.

    Attributes:
        run_id: unique, rising with the time of creation.
        state: ENDED: its session will not return. IDLE: a plain request's, or superseded.
            PAUSED: its session waits for a tool or a person. RESUMING: its session's next request
            is queued.
        last_used_s: end of the request that left it.
        idle_since_s: when it came to wait for what it waits for now; not before ``last_used_s``.
        size_share: its blocks ÷ the pool's blocks, 0 to 1.
        uses: requests of its session so far, at least 1.
        p_reuse: probability that it is read again, 0 to 1.
        pause_p95_s: 95th percentile of the pause that it waits for, seconds; 0 when it waits for
            none.
        wait: what has been learned of such waits; None when nobody learns.
        reload_share: cost of getting a block back ÷ cost of prefilling it, 0 to 1; below 1 when a
            slower tier holds a copy.
    """

    run_id: int
    state: RunState
    last_used_s: float
    idle_since_s: float = -math.inf
    size_share: float = 0.0
    uses: int = 1
    p_reuse: float = 0.0
    pause_p95_s: float = 0.0
    wait: Wait | None = None
    reload_share: float = 1.0


class EvictionKey(NamedTuple):
    """Place of a run in the eviction order: the least goes first; valid until ``review_s``."""

    rank: int
    loss: float
    last_used_s: float
    run_id: int
    review_s: float = math.inf


class RetentionPolicy(Protocol):
    """Orders idle runs for eviction: the same run, time, pressure and history, the same key."""

    @property
    def name(self) -> str:
        """The name by which a setting chooses the policy."""

    def key(self, run: Run, *, now_s: float, pressure: float) -> EvictionKey:
        """Place of ``run`` at ``now_s``; until the key's ``review_s`` it holds unchanged.

        Args:
            pressure: share of the KV pool that sessions hold, paused or running, 0 to 1.
        """

    def gave_up(self, key: EvictionKey) -> None:
        """The run with this key is the first to lose blocks."""


class EvictionOrder:
    """Idle runs in the order of a policy. Put and discard cost O(log n), amortised; defer O(1).

    Keys past their review are ranked anew a few at each call of ``first``, the longest overdue
    first, and whenever they come first: no run is given up by an overdue key. One that is worth
    less by now may stay in its old place until its turn comes, and so be kept longer than the
    policy would.
    """

    def __init__(self, policy: RetentionPolicy) -> None:
        self._policy = policy
        self._runs: dict[int, tuple[Run, EvictionKey]] = {}
        # Both heaps hold stale entries; a live one equals the key in _runs.
        self._by_key: list[EvictionKey] = []
        self._by_review: list[tuple[float, int]] = []
        # Runs that have risen since they got their key: ranked anew when they come first.
        self._deferred: set[int] = set()

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, run_id: int) -> bool:
        return run_id in self._runs

    def put(self, run: Run, *, now_s: float, pressure: float) -> None:
        """Add a run, or replace the run of that id."""
        key = self._policy.key(run, now_s=now_s, pressure=pressure)
        self._runs[run.run_id] = (run, key)
        self._deferred.discard(run.run_id)
        heapq.heappush(self._by_key, key)
        if key.review_s < math.inf:
            heapq.heappush(self._by_review, (key.review_s, run.run_id))
        max_entries = _MAX_ENTRIES_PER_RUN * len(self._runs) + 64
        if len(self._by_key) > max_entries or len(self._by_review) > max_entries:
            self._compact()

    def defer(self, run: Run, *, now_s: float, pressure: float) -> None:
        """Put a run that goes no sooner than it did when it was put last."""
        before = self._runs.get(run.run_id)
        if before is None:
            self.put(run, now_s=now_s, pressure=pressure)
        else:
            self._runs[run.run_id] = (run, before[1])
            self._deferred.add(run.run_id)

    def discard(self, run_id: int) -> None:
        """Remove a run; nothing happens when it is not there."""
        self._runs.pop(run_id, None)
        self._deferred.discard(run_id)

    def first(self, *, now_s: float, pressure: float) -> int | None:
        """Id of the run that loses blocks first at ``now_s``; None when there is none."""
        self._review(now_s, pressure)
        key = self.peek(now_s=now_s, pressure=pressure)
        if key is None:
            return None
        self._policy.gave_up(key)
        return key.run_id

    def peek(self, *, now_s: float, pressure: float) -> EvictionKey | None:
        """Key of the run that would lose blocks first; nothing is given up by asking."""
        while self._by_key:
            key = self._by_key[0]
            entry = self._runs.get(key.run_id)
            if entry is None or entry[1] is not key:
                heapq.heappop(self._by_key)
            elif key.review_s <= now_s or key.run_id in self._deferred:
                self.put(entry[0], now_s=now_s, pressure=pressure)
            else:
                return key
        return None

    def run(self, run_id: int) -> Run:
        """The run of that id, as it was ranked last."""
        return self._runs[run_id][0]

    def _review(self, now_s: float, pressure: float) -> None:
        reviews = 0
        while self._by_review and self._by_review[0][0] <= now_s and reviews < REVIEWS_PER_CALL:
            review_s, run_id = heapq.heappop(self._by_review)
            entry = self._runs.get(run_id)
            if entry is not None and entry[1].review_s == review_s:
                self.put(entry[0], now_s=now_s, pressure=pressure)
                reviews += 1

    def _compact(self) -> None:
        keys = [key for _, key in self._runs.values()]
        heapq.heapify(keys)
        self._by_key = keys
        reviews = [(key.review_s, key.run_id) for key in keys if key.review_s < math.inf]
        heapq.heapify(reviews)
        self._by_review = reviews
