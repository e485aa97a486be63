"""Which paused sessions' KV to bring back before they ask for it, and what came of it.

The engine's side, :mod:`gpu_backend.replay`, says what is resident and does the work: it asks for
the session's last prompt once more, which loads what the host tier holds and computes the rest.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from saga_core.pauses import Outlook
from saga_core.prefetch import PrefetchCandidate, PrefetchVerdict, TierSpeed, plan_prefetch

_FIRST_LOOK_S = 0.05
_LOOK_AGAIN = 1.25
"""A session that misses something is looked at again when its pause is so many times as old."""
_RESIDENT_S, _RESIDENT_AGAIN = 2.0, 2.0
"""One that misses nothing is looked at when it loses blocks. It may lose others' that it shares,
of which nobody tells: so, rarely, in between."""
_MAX_LOOKS_PER_STEP = 4
_REMEMBERED_POOLS = 4
"""Prompts of so many pools of tokens are remembered, four bytes a token."""


@dataclass(frozen=True, slots=True)
class Chain:
    """What a session's last request left: enough to ask for it again.

    Attributes:
        tokens: ids of all its tokens.
        hashes: of its full blocks, in chain order.
        lora_request, cache_salt: what else the engine's side needs.
    """

    tokens: Sequence[int]
    hashes: Sequence[Any]
    lora_request: Any = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class Residence:
    """Where a chain's blocks are: the first ``gpu_blocks`` on the GPU, the next ``host_blocks`` in
    the host tier."""

    gpu_blocks: int
    host_blocks: int


class EngineView(Protocol):
    """What the engine tells about itself when a decision is due."""

    def residence(self, chain: Chain) -> Residence:
        """Where the chain's blocks are."""

    def outlook(self, session_id: str, now_s: float) -> Outlook | None:
        """What is expected of the session's pause; None when it is not in one."""

    def displaced(self, blocks: int, now_s: float) -> tuple[int, float]:
        """Of so many blocks taken from the pool, those that a run holds, and their worth."""

    def speed(self) -> TierSpeed | None:
        """Measured rates; None before there are any."""

    def is_idle(self) -> bool:
        """Whether no request of a client waits or runs."""

    def usage(self) -> float:
        """Share of the pool that running requests use, 0 to 1."""


@dataclass(slots=True)
class PrefetchCounts:
    """Totals since the engine started; of what was started, each is one of the four others.

    Attributes:
        started: prefetches begun.
        useful: read by the session's next request.
        late: the request came first; what had been done until then is used.
        wasted: evicted before the request came, or the request was another one, or never came.
        cancelled: given up before all was done, because requests needed the room; what had been
            done by then stays, and the rest may be tried again.
        loaded_tokens, computed_tokens: brought back from the host tier, and by prefill.
    """

    started: int = 0
    useful: int = 0
    late: int = 0
    wasted: int = 0
    cancelled: int = 0
    loaded_tokens: int = 0
    computed_tokens: int = 0


@dataclass(slots=True)
class Prefetch:
    """One prefetch, from its start until its session's next request has been admitted.

    Attributes:
        blocks: leading blocks of the chain that it brings to the GPU, those there included.
        gpu_blocks: of these, there when it started.
        is_computed: by prefill, not from the host tier.
        is_done: all of them are there.
    """

    session_id: str
    chain: Chain
    blocks: int
    gpu_blocks: int
    is_computed: bool
    is_done: bool = False


@dataclass(slots=True)
class _Watched:
    chain: Chain
    since_s: float
    version: int
    # When the pause may have ended, as it looked at first: seen from a later moment at which it
    # has not, it is always a little ahead.
    early_s: float | None = None
    resume_s: float | None = None
    # Blocks of it have been chosen to go; they go one by one, as others need them.
    is_losing: bool = False


@dataclass(slots=True)
class Prefetcher:
    """Paused sessions, each looked at when a prefetch may be due.

    Args:
        num_blocks, block_tokens: size of the KV pool.
        pressure_high: share of the pool in use by requests above which nothing is prefetched.
        budget_share: share of the pool that prefetches under way may take, 0 to 1; a single one
            may take more.
    """

    num_blocks: int
    block_tokens: int
    pressure_high: float
    budget_share: float = 0.1
    counts: PrefetchCounts = field(default_factory=PrefetchCounts)
    _watched: OrderedDict[str, _Watched] = field(init=False, default_factory=OrderedDict)
    _tokens: int = field(init=False, default=0)
    _looks: list[tuple[float, int, str]] = field(init=False, default_factory=list)
    _under_way: dict[str, Prefetch] = field(init=False, default_factory=dict)
    _versions: Iterator[int] = field(init=False, default_factory=itertools.count)

    # Events

    def paused(self, session_id: str, chain: Chain, *, now_s: float) -> None:
        """A request of the session has ended."""
        self._unwatch(session_id)
        self._settle(session_id, 0)
        watched = self._watched[session_id] = _Watched(chain, now_s, next(self._versions))
        self._tokens += len(chain.tokens)
        while self._tokens > _REMEMBERED_POOLS * self.num_blocks * self.block_tokens:
            self._forget(next(iter(self._watched)))
        self._look(session_id, watched, now_s + _RESIDENT_S)

    def lost(self, session_id: str, *, now_s: float) -> None:
        """Blocks of the session are being given up."""
        watched = self._watched.get(session_id)
        if watched is not None and session_id not in self._under_way:
            watched.is_losing = True
            self._look(session_id, watched, max(now_s, watched.since_s + _FIRST_LOOK_S))

    def expected(self, session_id: str, resume_s: float | None, *, now_s: float) -> None:
        """Something has been said of the session's pause; ``resume_s``: it ends about then."""
        watched = self._watched.get(session_id)
        if watched is not None:
            watched.resume_s, watched.early_s = resume_s, None
            self._look(session_id, watched, now_s)

    def resumed(self, session_id: str) -> Prefetch | None:
        """The session's next request has arrived; returns a prefetch that has come too late."""
        self._unwatch(session_id)
        prefetch = self._under_way.get(session_id)
        if prefetch is None or prefetch.is_done:
            return None
        del self._under_way[session_id]
        self.counts.late += 1
        return prefetch

    def admitted(self, session_id: str, cached_blocks: int) -> None:
        """The session's request found so many blocks on the GPU."""
        self._settle(session_id, cached_blocks)

    def ended(self, session_id: str) -> None:
        """The session will not come back."""
        self._forget(session_id)

    def clear(self) -> None:
        """The KV cache has been reset: there is nothing that could be brought back."""
        for session_id in list(self._watched):
            self._forget(session_id)

    # Decisions

    def due(self, engine: EngineView, *, now_s: float) -> Iterator[Prefetch]:
        """Prefetches to start now; they are under way as soon as they are yielded."""
        speed = engine.speed()
        if speed is None:
            return
        looks = 0
        while self._looks and self._looks[0][0] <= now_s and looks < _MAX_LOOKS_PER_STEP:
            look = heapq.heappop(self._looks)
            session_id = look[2]
            if not self._is_current(look) or session_id in self._under_way:
                continue
            looks += 1
            watched = self._watched[session_id]
            prefetch = self._decide(session_id, watched, engine, speed, now_s)
            if prefetch is not None:
                self._under_way[session_id] = prefetch
                self.counts.started += 1
                yield prefetch

    def wake_in_s(self, now_s: float) -> float | None:
        """Seconds until a session is to be looked at; None when none is."""
        while self._looks and not self._is_current(self._looks[0]):
            heapq.heappop(self._looks)
        return max(0.0, self._looks[0][0] - now_s) if self._looks else None

    def finished(
        self,
        prefetch: Prefetch,
        *,
        loaded_blocks: int,
        computed_blocks: int,
        is_cancelled: bool,
        now_s: float,
    ) -> None:
        """The prefetch has come to its end, having brought so many blocks to the GPU."""
        self.counts.loaded_tokens += loaded_blocks * self.block_tokens
        self.counts.computed_tokens += computed_blocks * self.block_tokens
        prefetch.is_done = True
        if not is_cancelled or self._under_way.get(prefetch.session_id) is not prefetch:
            return
        del self._under_way[prefetch.session_id]
        self.counts.cancelled += 1
        watched = self._watched.get(prefetch.session_id)
        if watched is not None:
            self._look_later(prefetch.session_id, watched, now_s)

    # Internals

    def _decide(
        self,
        session_id: str,
        watched: _Watched,
        engine: EngineView,
        speed: TierSpeed,
        now_s: float,
    ) -> Prefetch | None:
        outlook = engine.outlook(session_id, now_s)
        if outlook is None:
            return None
        where = engine.residence(watched.chain)
        is_computed = where.host_blocks == 0
        blocks = len(watched.chain.hashes) if is_computed else where.gpu_blocks + where.host_blocks
        if blocks <= where.gpu_blocks and not watched.is_losing:
            age_s = now_s - watched.since_s
            again_s = watched.since_s + max(_RESIDENT_S, _RESIDENT_AGAIN * age_s)
            self._look(session_id, watched, again_s)
            return None
        missing = min(blocks - where.gpu_blocks, self._budget_blocks(is_computed))
        if missing <= 0 or (is_computed and not engine.is_idle()):
            self._look_later(session_id, watched, now_s)
            return None
        displaced_blocks, displaced_worth = engine.displaced(missing, now_s)
        if watched.early_s is None:
            watched.early_s = outlook.early_s
        early_s, expected_s, p_soon = watched.early_s, outlook.expected_s, outlook.p_soon
        if watched.resume_s is not None:
            p_soon = outlook.p_next
            early_s = max(now_s, watched.resume_s)
            expected_s = early_s if watched.resume_s > now_s else max(now_s, expected_s)
        candidate = PrefetchCandidate(
            p_next=outlook.p_next,
            p_soon=p_soon,
            tokens=missing * self.block_tokens,
            early_end_s=early_s,
            expected_end_s=expected_s,
            displaced_tokens=displaced_blocks * self.block_tokens,
            displaced_worth=displaced_worth,
            is_computed=is_computed,
        )
        action = plan_prefetch(
            candidate,
            speed,
            now_s=now_s,
            pressure=engine.usage(),
            pressure_high=self.pressure_high,
        )
        if action.verdict is PrefetchVerdict.START:
            reached = where.gpu_blocks + missing
            return Prefetch(session_id, watched.chain, reached, where.gpu_blocks, is_computed)
        if action.verdict is PrefetchVerdict.WAIT:
            self._look(session_id, watched, action.at_s)
        else:
            self._look_later(session_id, watched, now_s)
        return None

    def _budget_blocks(self, is_computed: bool) -> int:
        """Blocks that one more prefetch may bring: the first all that it needs, others what is left
        of the budget; one that computes comes alone."""
        under_way = [prefetch for prefetch in self._under_way.values() if not prefetch.is_done]
        if is_computed or not under_way:
            return 0 if under_way else self.num_blocks
        taken = sum(prefetch.blocks - prefetch.gpu_blocks for prefetch in under_way)
        return int(self.budget_share * self.num_blocks) - taken

    def _settle(self, session_id: str, cached_blocks: int) -> None:
        prefetch = self._under_way.pop(session_id, None)
        if prefetch is None:
            return
        if cached_blocks > prefetch.gpu_blocks:
            self.counts.useful += 1
        else:
            self.counts.wasted += 1

    def _forget(self, session_id: str) -> None:
        self._unwatch(session_id)
        self._settle(session_id, 0)

    def _unwatch(self, session_id: str) -> None:
        watched = self._watched.pop(session_id, None)
        if watched is not None:
            self._tokens -= len(watched.chain.tokens)

    def _look_later(self, session_id: str, watched: _Watched, now_s: float) -> None:
        age_s = max(_FIRST_LOOK_S, now_s - watched.since_s)
        self._look(session_id, watched, watched.since_s + _LOOK_AGAIN * age_s)

    def _look(self, session_id: str, watched: _Watched, at_s: float) -> None:
        watched.version = next(self._versions)
        heapq.heappush(self._looks, (at_s, watched.version, session_id))
        if len(self._looks) > 2 * len(self._watched) + 64:
            self._looks = [look for look in self._looks if self._is_current(look)]
            heapq.heapify(self._looks)

    def _is_current(self, look: tuple[float, int, str]) -> bool:
        watched = self._watched.get(look[2])
        return watched is not None and watched.version == look[1]
