"""Shadow cache: what another eviction order would have hit on the traffic of the live engine.

Only metadata: block hashes in virtual blocks, in the order in which vLLM's block pool would give
them up or in that of a retention policy. One request at a time, its hits are those of an engine
that runs this order. With requests side by side it is an estimate, since it follows the live
engine's timing: a prompt's blocks are taken and cached when the request is admitted, not chunk by
chunk, and those of its output when it ends. The live engine may run more at once than this cache
can hold; a request then keeps the beginning of its chain, as far as there are free blocks, and the
rest is not cached (``overflow_blocks``).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Concatenate, ParamSpec, TypeVar

from gpu_backend.regret import GhostBlocks
from gpu_backend.session_index import SessionIndex
from gpu_backend.virtual_blocks import VirtualBlocks, victims_ahead
from saga_core.notices import Notice
from saga_core.pauses import Step
from saga_core.settings import RetentionSettings

STOCK_ORDER = "vllm"
"""The name of vLLM's own eviction order."""

logger = logging.getLogger("vllm.saga")
_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(slots=True)
class ShadowCounters:
    """Totals since the start; the names mean what they mean in the live engine's counters.

    Attributes:
        requests, prompt_tokens: admitted for the first time.
        cached_tokens: of the prompts, what this cache would have hit.
        regret_tokens: of the rest, what had been cached here before and was evicted.
        evicted_blocks: cached blocks that lost their content for want of room.
        overflow_blocks: blocks of running requests for which there was no room.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    regret_tokens: int = 0
    evicted_blocks: int = 0
    overflow_blocks: int = 0


def _contained(
    otherwise: _T,
) -> Callable[
    [Callable[Concatenate[ShadowCache, _P], _T]], Callable[Concatenate[ShadowCache, _P], _T]
]:
    """A failure of the method switches the shadow off and no more; off, it does nothing."""

    def wrap(
        method: Callable[Concatenate[ShadowCache, _P], _T],
    ) -> Callable[Concatenate[ShadowCache, _P], _T]:
        @functools.wraps(method)
        def call(shadow: ShadowCache, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
            if shadow.off_reason is not None:
                return otherwise
            try:
                return method(shadow, *args, **kwargs)
            except Exception:  # The live engine and its retention go on.
                shadow.off_reason = f"{method.__name__} failed"
                logger.exception("SAGA's shadow cache is off: %s", shadow.off_reason)
                return otherwise

        return call

    return wrap


@dataclass(slots=True)
class _Chain:
    """The blocks of a running request, of which the first ``hit`` were found cached."""

    blocks: list[int]
    hit: int


@dataclass(slots=True)
class ShadowCache:
    """A prefix cache beside the live one, fed with the live engine's events.

    For models with one kind of KV blocks. No event raises: after a failure ``off_reason`` says
    what happened, and every event does nothing. An event costs O(blocks of its request), and
    O(log runs) for each block evicted. Memory is bounded by the pool, the running requests and
    the bounds of the settings.

    Args:
        policy_name: a policy of ``saga_core.policies``, or ``STOCK_ORDER``.
        num_blocks: size of the live KV pool, vLLM's null block included.
        block_tokens: tokens per block.
        settings: bounds and constants.

    Raises:
        SettingsError: there is no such policy.
    """

    policy_name: str
    num_blocks: int
    block_tokens: int
    settings: RetentionSettings
    off_reason: str | None = field(init=False, default=None)
    counters: ShadowCounters = field(init=False, default_factory=ShadowCounters)
    _index: SessionIndex | None = field(init=False, default=None)
    _blocks: VirtualBlocks = field(init=False)
    _ghosts: GhostBlocks = field(init=False)
    _running: dict[str, _Chain] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.policy_name != STOCK_ORDER:
            self._index = SessionIndex(self.num_blocks, self.policy_name, self.settings)
        self._blocks = VirtualBlocks(self.num_blocks)
        self._ghosts = GhostBlocks(self.settings.max_ghost_blocks)

    # Events of the scheduler

    @_contained(None)
    def arrived(self, session_id: str | None, now_s: float) -> None:
        """A request has been queued."""
        if self._index is not None and session_id is not None:
            self._index.resume(session_id, now_s=now_s)

    @_contained(0)
    def admitted(
        self,
        request_id: str,
        session_id: str | None,
        block_hashes: Sequence[Hashable],
        num_tokens: int,
        now_s: float,
        *,
        preempted: bool = False,
        reads_cache: bool = True,
    ) -> int:
        """The live engine has begun to run a request; returns the tokens it would have hit here.

        Args:
            block_hashes: of the full blocks of its ``num_tokens`` tokens, output included when it
                was ``preempted`` before. The last token is computed in any case.
            reads_cache: False for a request that must not use cached blocks.
        """
        self._blocks.release(self._pop(request_id).blocks)  # As a rule there is nothing.
        usable = block_hashes[: (num_tokens - 1) // self.block_tokens] if reads_cache else ()
        found = self._blocks.find(usable)
        chain, lost_blocks = _Chain(found, len(found)), 0
        if not preempted:
            rest = islice(usable, chain.hit, None)
            lost_blocks = self._ghosts.count_lost(rest, self._blocks.__contains__)
        self._blocks.use(found)
        self._running[request_id] = chain
        self._take(chain, -(-num_tokens // self.block_tokens) - chain.hit, now_s)
        self._cache(chain, block_hashes)
        if self._index is not None and session_id is not None:
            known_blocks = chain.hit + lost_blocks if self.settings.max_ghost_blocks else None
            self._index.started(
                session_id, now_s=now_s, known_blocks=known_blocks, blocks=chain.blocks
            )
        cached_tokens = chain.hit * self.block_tokens
        if not preempted:
            self.counters.requests += 1
            self.counters.prompt_tokens += num_tokens
            self.counters.cached_tokens += cached_tokens
            self.counters.regret_tokens += lost_blocks * self.block_tokens
        return cached_tokens

    @_contained(None)
    def released(
        self,
        request_id: str,
        block_hashes: Sequence[Hashable],
        session_id: str | None,
        *,
        num_blocks: int,
        preempted: bool,
        step: Step,
        now_s: float,
    ) -> None:
        """A request has given up its blocks, or has ended before it had any.

        Args:
            block_hashes: of the full blocks that the live engine had computed, output included.
            num_blocks: all blocks that the request had in the live engine, the last of which may
                not be full.
        """
        chain = self._pop(request_id)
        self._forget_uncomputed(chain, len(block_hashes), now_s)
        while len(chain.blocks) < num_blocks and self._blocks.num_free:
            self._take(chain, 1, now_s)  # Decoding takes one block at a time.
        self.counters.overflow_blocks += max(0, num_blocks - len(chain.blocks))
        self._cache(chain, block_hashes)
        if self._index is not None:
            cached = [block for block in chain.blocks if self._blocks.hashes[block] is not None]
            self._index.record(session_id, cached, now_s=now_s, resuming=preempted, step=step)
        self._blocks.release(chain.blocks)

    # Control

    @_contained(None)
    def take(self, notice: Notice, now_s: float) -> None:
        """Somebody says something of a session."""
        if self._index is not None:
            self._index.take(notice, now_s=now_s)

    @_contained(None)
    def clear(self) -> None:
        """The prefix cache was reset; what running requests have is not cached any more."""
        self._blocks.clear()
        self._ghosts.clear()
        if self._index is not None:
            self._index.clear()

    def state(self) -> dict[str, object]:
        """A snapshot for ``GET /saga/v1/state``."""
        return {
            "policy": self.policy_name,
            "off_reason": self.off_reason,
            "counters": asdict(self.counters),
        }

    def cached_hashes(self) -> set[Hashable]:
        """Hashes of all cached blocks, those in use included."""
        return self._blocks.cached_hashes()

    def check_integrity(self) -> None:
        """Compare the parts with each other; raises AssertionError on the first difference."""
        self._blocks.check_integrity([chain.blocks for chain in self._running.values()])
        assert all(chain.hit <= len(chain.blocks) for chain in self._running.values())
        if self._index is not None:
            self._index.check_integrity()

    # Internals

    def _pop(self, request_id: str) -> _Chain:
        return self._running.pop(request_id, None) or _Chain([], 0)

    def _take(self, chain: _Chain, count: int, now_s: float) -> None:
        """Give the request up to ``count`` blocks more, the policy's victims first."""
        count = min(count, self._blocks.num_free)
        index = self._index
        if index is not None:
            wanted = count - self._blocks.count_unheld_at_front(count, index.is_held)
            if wanted > 0:
                wanted += victims_ahead(self.num_blocks)
                is_idle = self._blocks.is_evictable
                self._blocks.move_to_front(index.victims(wanted, now_s=now_s, is_idle=is_idle))
        taken = self._blocks.take(count)
        for block in taken:
            if self._blocks.hashes[block] is not None:
                self.counters.evicted_blocks += 1
                lost_hash = self._empty(block, now_s)
                if lost_hash is not None:
                    self._ghosts.evicted(lost_hash)
        chain.blocks += taken

    def _cache(self, chain: _Chain, block_hashes: Sequence[Hashable]) -> None:
        """The blocks behind the hit are full, as far as there are hashes."""
        for i in range(chain.hit, min(len(chain.blocks), len(block_hashes))):
            if self._blocks.hashes[chain.blocks[i]] is None:
                self._blocks.cache(chain.blocks[i], block_hashes[i])

    def _forget_uncomputed(self, chain: _Chain, num_computed: int, now_s: float) -> None:
        """A prompt is cached as a whole at admission; the request may have ended before that."""
        for block in chain.blocks[max(num_computed, chain.hit) :]:
            if self._blocks.hashes[block] is not None and not self._blocks.is_shared(block):
                self._empty(block, now_s)

    def _empty(self, block: int, now_s: float) -> Hashable | None:
        if self._index is not None:
            self._index.evicted(block, now_s=now_s)
        return self._blocks.empty(block)
