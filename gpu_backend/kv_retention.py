"""The retention of one engine: session index, regret and counters behind the engine's events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field

from gpu_backend.host_tier import Holder, HostTier, Key
from gpu_backend.regret import GhostBlocks
from gpu_backend.session_index import SessionIndex
from saga_core.notices import EndNotice, Notice, PauseNotice
from saga_core.pauses import Step
from saga_core.retention import Run
from saga_core.settings import RetentionSettings

OBSERVE = "vllm"
"""The policy name that leaves vLLM's own eviction order and only counts."""


@dataclass(slots=True)
class Counters:
    """Totals since the engine started.

    Attributes:
        requests: requests admitted for the first time.
        prompt_tokens: their prompt tokens; cached + computed.
        cached_tokens: of these, found in the prefix cache, on the GPU or in the host tier.
        host_cached_tokens: of the cached, loaded from the host tier.
        computed_tokens: of these, prefilled.
        regret_tokens: of the computed, those that had been cached before and were evicted.
        preempted_tokens: tokens computed again after a preemption; in none of the above.
        evicted_blocks: cached blocks that lost their content.
        chosen_blocks: of these, chosen by the policy out of vLLM's order.
        pinned_block_s: blocks that sessions hold × seconds, each block once; from the end of a
            step until they are evicted or given up, as seen at the next admission or end of a
            request, so a step that reads them counts too.
        notices, unknown_sessions: notices taken; of these, about sessions not held here.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    host_cached_tokens: int = 0
    computed_tokens: int = 0
    regret_tokens: int = 0
    preempted_tokens: int = 0
    evicted_blocks: int = 0
    chosen_blocks: int = 0
    pinned_block_s: float = 0.0
    notices: int = 0
    unknown_sessions: int = 0


@dataclass(slots=True)
class KVRetention:
    """What one engine retains, and what that cost and saved.

    Args:
        policy_name: a policy of ``saga_core.policies``, or ``OBSERVE``.
        num_blocks: size of the KV pool.
        block_tokens: tokens per block.
        settings: bounds and constants.
        clock: monotonic seconds, read once per event.
        block_bytes: KV bytes of a block on this engine's GPUs; 0 when not known.
    """

    policy_name: str
    num_blocks: int
    block_tokens: int
    settings: RetentionSettings
    clock: Callable[[], float]
    block_bytes: int = 0
    index: SessionIndex | None = field(init=False)
    ghosts: GhostBlocks = field(init=False)
    counters: Counters = field(init=False, default_factory=Counters)
    off_reason: str | None = field(init=False, default=None)
    host: HostTier | None = field(init=False, default=None)
    _copy: Callable[[Key, int], None] = field(init=False)
    # Blocks that the policy has just chosen, with who held them, until they are evicted.
    _victims: dict[int, tuple[Holder, Run]] = field(init=False, default_factory=dict)
    _pinned_blocks: int = field(init=False, default=0)
    _pins_counted_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.ghosts = GhostBlocks(self.settings.max_ghost_blocks)
        self.index = None
        if self.policy_name != OBSERVE:
            self.index = SessionIndex(self.num_blocks, self.policy_name, self.settings)

    # Events of the scheduler

    def arrived(self, session_id: str | None) -> None:
        """A request has been queued."""
        if self.index is not None and session_id is not None:
            self.index.resume(session_id, now_s=self.clock())

    def admitted(
        self,
        *,
        session_id: str | None,
        prompt_tokens: int,
        cached_tokens: int,
        host_tokens: int = 0,
        lost_blocks: int | None,
        preempted: bool,
    ) -> None:
        """A waiting request has got its blocks and runs; ``lost_blocks`` None: not known.

        Of the ``cached_tokens``, ``host_tokens`` are to be loaded from the host tier.
        """
        if self.index is not None:
            now_s = self.clock()
            self._count_pins(self.index, now_s)
            if session_id is not None:
                known_blocks = None
                if lost_blocks is not None:
                    known_blocks = cached_tokens // self.block_tokens + lost_blocks
                self.index.started(session_id, now_s=now_s, known_blocks=known_blocks)
        c = self.counters
        computed = prompt_tokens - cached_tokens
        if preempted:
            c.preempted_tokens += computed
            return
        c.requests += 1
        c.prompt_tokens += prompt_tokens
        c.cached_tokens += cached_tokens
        c.host_cached_tokens += host_tokens
        c.computed_tokens += computed
        c.regret_tokens += (lost_blocks or 0) * self.block_tokens

    def released(
        self,
        session_id: str | None,
        blocks: Sequence[int],
        *,
        preempted: bool,
        step: Step = Step(),  # noqa: B008 - frozen
        keys: Iterable[Key] = (),
    ) -> None:
        """A request gives up its cached blocks, in chain order; ``keys`` are all their keys."""
        if self.host is not None:
            self.host.used(session_id, keys)
        if self.index is not None:
            now_s = self.clock()
            self.index.record(session_id, blocks, now_s=now_s, resuming=preempted, step=step)
            self._count_pins(self.index, now_s)

    # Events of the block pool

    def evicted(self, block: int, lost_hash: Key | None) -> None:
        """A cached block lost its content; ``lost_hash`` is now resident nowhere."""
        self.counters.evicted_blocks += 1
        if lost_hash is not None:
            self.ghosts.evicted(lost_hash)
            self._demote(block, lost_hash)
        if self.index is not None:
            self.index.evicted(block, now_s=self.clock())

    def reset(self) -> None:
        """The prefix cache was reset."""
        self.ghosts.clear()
        if self.index is not None:
            self.index.clear()
            self._count_pins(self.index, self.clock())

    # Host tier

    def attach_host(self, host: HostTier, copy: Callable[[Key, int], None]) -> None:
        """Keep in ``host`` what is evicted; ``copy`` saves a block's content before it goes."""
        assert self.index is not None
        self.host, self._copy = host, copy
        self.index.on_victim = self._leaving
        self.index.on_ranked = self._ranked

    def choose_host_victims(
        self, count: int, is_evictable: Callable[[Key], bool]
    ) -> list[Key] | None:
        """Blocks that the host tier gives up; None when there are not so many."""
        assert self.index is not None
        assert self.host is not None
        pressure = self.index.pressure()
        return self.host.evict(count, is_evictable, now_s=self.clock(), pressure=pressure)

    def _leaving(self, block: int, holder: Holder, run: Run) -> None:
        self._victims[block] = (holder, run)

    def _ranked(self, session_id: str, run: Run) -> None:
        assert self.index is not None
        assert self.host is not None
        self.host.ranked(session_id, run, now_s=self.clock(), pressure=self.index.pressure())

    def _demote(self, block: int, key: Key) -> None:
        victim = self._victims.pop(block, None)
        if self.host is None or self.index is None or victim is None:
            return
        holder, run = victim
        now_s, pressure = self.clock(), self.index.pressure()
        if self.host.admits(run, now_s=now_s, pressure=pressure):
            if key not in self.host:
                self._copy(key, block)
            self.host.insert(key, holder, run, now_s=now_s, pressure=pressure)

    # Control

    def notify(self, notices: Sequence[Notice]) -> None:
        """Take what the gateway knows of sessions; about unknown sessions it is only counted."""
        now_s = self.clock()
        for notice in notices:
            self.counters.notices += 1
            if self.index is not None and not self._take(self.index, notice, now_s):
                self.counters.unknown_sessions += 1

    def state(self) -> dict[str, object]:
        """A snapshot for ``GET /saga/v1/state``."""
        held: dict[str, int] = {}
        if self.index is not None:
            self._count_pins(self.index, self.clock())
            held = asdict(self.index.counts())
        return {
            "policy": self.policy_name,
            "off_reason": self.off_reason,
            "num_blocks": self.num_blocks,
            "block_tokens": self.block_tokens,
            "block_bytes": self.block_bytes,
            "pressure": held.get("session_blocks", 0) / self.num_blocks,
            "ghost_blocks": len(self.ghosts),
            "held": held,
            "counters": asdict(self.counters),
        }

    def _count_pins(self, index: SessionIndex, now_s: float) -> None:
        """Add what sessions have held since the last call, and see what they hold now."""
        self.counters.pinned_block_s += self._pinned_blocks * (now_s - self._pins_counted_s)
        self._pinned_blocks, self._pins_counted_s = index.counts().session_blocks, now_s

    @staticmethod
    def _take(index: SessionIndex, notice: Notice, now_s: float) -> bool:
        if isinstance(notice, PauseNotice):
            return index.pause(notice.session_id, notice.pause, now_s=now_s)
        if isinstance(notice, EndNotice):
            return index.end(notice.session_id, now_s=now_s)
        return index.expect(notice.session_id, now_s=now_s)
