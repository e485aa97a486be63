"""The retention of one engine: session index, regret and counters behind the engine's events."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, field

from gpu_backend.regret import GhostBlocks
from gpu_backend.session_index import SessionIndex
from saga_core.notices import EndNotice, Notice, PauseNotice
from saga_core.pauses import Step
from saga_core.settings import RetentionSettings

OBSERVE = "vllm"
"""The policy name that leaves vLLM's own eviction order and only counts."""


@dataclass(slots=True)
class Counters:
    """Totals since the engine started.

    Attributes:
        requests: requests admitted for the first time.
        prompt_tokens: their prompt tokens; cached + computed.
        cached_tokens: of these, found in the prefix cache.
        computed_tokens: of these, prefilled.
        regret_tokens: of the computed, those that had been cached before and were evicted.
        preempted_tokens: tokens computed again after a preemption; in none of the above.
        evicted_blocks: cached blocks that lost their content.
        chosen_blocks: of these, chosen by the policy out of vLLM's order.
        notices, unknown_sessions: notices taken; of these, about sessions not held here.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    regret_tokens: int = 0
    preempted_tokens: int = 0
    evicted_blocks: int = 0
    chosen_blocks: int = 0
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
    """

    policy_name: str
    num_blocks: int
    block_tokens: int
    settings: RetentionSettings
    clock: Callable[[], float]
    index: SessionIndex | None = field(init=False)
    ghosts: GhostBlocks = field(init=False)
    counters: Counters = field(init=False, default_factory=Counters)
    off_reason: str | None = field(init=False, default=None)

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
        lost_blocks: int | None,
        preempted: bool,
    ) -> None:
        """A waiting request has got its blocks and runs; ``lost_blocks`` None: not known."""
        if self.index is not None and session_id is not None:
            known_blocks = None
            if lost_blocks is not None:
                known_blocks = cached_tokens // self.block_tokens + lost_blocks
            self.index.started(session_id, now_s=self.clock(), known_blocks=known_blocks)
        c = self.counters
        computed = prompt_tokens - cached_tokens
        if preempted:
            c.preempted_tokens += computed
            return
        c.requests += 1
        c.prompt_tokens += prompt_tokens
        c.cached_tokens += cached_tokens
        c.computed_tokens += computed
        c.regret_tokens += (lost_blocks or 0) * self.block_tokens

    def released(
        self,
        session_id: str | None,
        blocks: Sequence[int],
        *,
        preempted: bool,
        step: Step = Step(),  # noqa: B008 - frozen
    ) -> None:
        """A request gives up its cached blocks, in chain order."""
        if self.index is not None:
            self.index.record(session_id, blocks, now_s=self.clock(), resuming=preempted, step=step)

    # Events of the block pool

    def evicted(self, block: int, lost_hash: Hashable | None) -> None:
        """A cached block lost its content; ``lost_hash`` is now resident nowhere."""
        self.counters.evicted_blocks += 1
        if lost_hash is not None:
            self.ghosts.evicted(lost_hash)
        if self.index is not None:
            self.index.evicted(block, now_s=self.clock())

    def reset(self) -> None:
        """The prefix cache was reset."""
        self.ghosts.clear()
        if self.index is not None:
            self.index.clear()

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
        held = asdict(self.index.counts()) if self.index is not None else {}
        return {
            "policy": self.policy_name,
            "off_reason": self.off_reason,
            "num_blocks": self.num_blocks,
            "block_tokens": self.block_tokens,
            "ghost_blocks": len(self.ghosts),
            "held": held,
            "counters": asdict(self.counters),
        }

    @staticmethod
    def _take(index: SessionIndex, notice: Notice, now_s: float) -> bool:
        if isinstance(notice, PauseNotice):
            return index.pause(notice.session_id, notice.pause, now_s=now_s)
        if isinstance(notice, EndNotice):
            return index.end(notice.session_id, now_s=now_s)
        return index.expect(notice.session_id, now_s=now_s)
