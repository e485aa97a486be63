"""Which idle KV to give up first.

A *run* is the chain of blocks that the last request of a session, or one plain request, left
behind. A policy gives each idle run a key; the run with the least key loses its blocks first, from
the tail of the chain. Keys of two runs keep their order over time except at a stated moment, so a
heap holds the order and a decision costs O(log n).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from saga_core.errors import SettingsError
from saga_core.settings import RetentionSettings


class RunState(IntEnum):
    """What a run waits for; the greater, the stronger its claim to stay."""

    ENDED = 0
    IDLE = 1
    PAUSED = 2
    RESUMING = 3


@dataclass(frozen=True, slots=True)
class Run:
    """An idle run as a policy sees it.

    Attributes:
        run_id: unique, rising with the time of creation.
        state: ENDED: its session will not return. IDLE: a plain request's, or superseded.
            PAUSED: its session waits for a tool or a person. RESUMING: its session's next request
            is queued.
        last_used_s: end of the request that left it.
        size_share: its blocks ÷ the pool's blocks, 0 to 1.
        p_reuse: probability that it is read again, 0 to 1.
        protected_until_s: end of its TTL; -inf when it has none.
    """

    run_id: int
    state: RunState
    last_used_s: float
    size_share: float = 0.0
    p_reuse: float = 0.0
    protected_until_s: float = -math.inf


class EvictionKey(NamedTuple):
    """Place of a run in the eviction order: the least goes first; valid until ``review_s``."""

    rank: int
    loss: float
    last_used_s: float
    run_id: int
    review_s: float


class RetentionPolicy(Protocol):
    """Orders idle runs for eviction. Pure: the same run and time give the same key."""

    @property
    def name(self) -> str:
        """The name by which a setting chooses the policy."""

    def key(self, run: Run, *, now_s: float) -> EvictionKey:
        """Place of ``run`` at ``now_s``; until the key's ``review_s`` it holds unchanged."""


class PrefixLRU:
    """Least recently used first, tail of the chain first: what vLLM's own block pool does."""

    name = "prefix-lru"

    def __init__(self, settings: RetentionSettings) -> None:
        del settings  # It has no constants; every policy is built the same way.

    def key(self, run: Run, *, now_s: float) -> EvictionKey:
        return EvictionKey(0, 0.0, run.last_used_s, run.run_id, math.inf)


class WorkflowAwareLRU:
    """WA-LRU of the SAGA paper, with its TTL as a soft protection.

    P_evict = α·R + β·(1 - P_reuse) + γ·S, highest first, R = idle time ÷ τ_max, S = share of the
    pool. τ_max is a constant and R is not capped: the order of two runs then never changes with
    time. The key holds the part of -P_evict that does not depend on now.

    A paused run within its TTL that is likely to return goes only after every unprotected run; one
    whose session's next
    request is queued goes last; one whose session has ended goes first. Nothing is pinned: when
    only protected runs are left they go too, in the same order.
    """

    name = "wa-lru"

    def __init__(self, settings: RetentionSettings) -> None:
        self._settings = settings

    def key(self, run: Run, *, now_s: float) -> EvictionKey:
        s = self._settings
        loss = (
            s.alpha * run.last_used_s / s.tau_max_s
            - s.beta * (1.0 - run.p_reuse)
            - s.gamma * run.size_share
        )
        rank, review_s = int(run.state), math.inf
        if run.state is RunState.PAUSED:
            if now_s < run.protected_until_s and run.p_reuse >= s.protect_min_p_reuse:
                review_s = run.protected_until_s
            else:
                rank = int(RunState.IDLE)
        return EvictionKey(rank, loss, run.last_used_s, run.run_id, review_s)


POLICIES: dict[str, Callable[[RetentionSettings], RetentionPolicy]] = {
    policy.name: policy for policy in (PrefixLRU, WorkflowAwareLRU)
}
"""Every policy by its name."""


def make_policy(name: str, settings: RetentionSettings) -> RetentionPolicy:
    """Build a policy by name.

    Raises:
        SettingsError: there is no such policy; the message lists those that exist.
    """
    if name not in POLICIES:
        raise SettingsError(f"unknown policy {name!r}; choose one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name](settings)


class EvictionOrder:
    """Idle runs in the order of a policy. Put and discard cost O(log n), amortised."""

    def __init__(self, policy: RetentionPolicy) -> None:
        self._policy = policy
        self._runs: dict[int, tuple[Run, EvictionKey]] = {}
        # Both heaps hold stale entries; a live one equals the key in _runs.
        self._by_key: list[EvictionKey] = []
        self._by_review: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, run_id: int) -> bool:
        return run_id in self._runs

    def put(self, run: Run, *, now_s: float) -> None:
        """Add a run, or replace the run of that id."""
        key = self._policy.key(run, now_s=now_s)
        self._runs[run.run_id] = (run, key)
        heapq.heappush(self._by_key, key)
        if key.review_s < math.inf:
            heapq.heappush(self._by_review, (key.review_s, run.run_id))
        if max(len(self._by_key), len(self._by_review)) > 2 * len(self._runs) + 64:
            self._compact()

    def discard(self, run_id: int) -> None:
        """Remove a run; nothing happens when it is not there."""
        self._runs.pop(run_id, None)

    def first(self, *, now_s: float) -> int | None:
        """Id of the run that loses blocks first at ``now_s``; None when there is none."""
        self._review(now_s)
        while self._by_key:
            key = self._by_key[0]
            entry = self._runs.get(key.run_id)
            if entry is not None and entry[1] == key:
                return key.run_id
            heapq.heappop(self._by_key)
        return None

    def _review(self, now_s: float) -> None:
        while self._by_review and self._by_review[0][0] <= now_s:
            review_s, run_id = heapq.heappop(self._by_review)
            entry = self._runs.get(run_id)
            if entry is not None and entry[1].review_s == review_s:
                self.put(entry[0], now_s=now_s)

    def _compact(self) -> None:
        keys = [key for _, key in self._runs.values()]
        heapq.heapify(keys)
        self._by_key = keys
        reviews = [(key.review_s, key.run_id) for key in keys if key.review_s < math.inf]
        heapq.heapify(reviews)
        self._by_review = reviews
