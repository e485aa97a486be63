"""The retention of one engine: session index, regret and counters behind the engine's events."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field

from gpu_backend.host_tier import Holder, HostTier, Key
from gpu_backend.prefetch import Prefetcher
from gpu_backend.regret import GhostBlocks
from gpu_backend.session_index import SessionIndex
from gpu_backend.shadow import STOCK_ORDER, ShadowCache
from saga_core.notices import EndNotice, Notice, PauseNotice
from saga_core.pauses import Step
from saga_core.retention import Run, RunState
from saga_core.settings import RetentionSettings

_MIN_PREFILL_TOKENS = 64
_PREFILL_DECAY = 0.99
_STEPS_KEPT = 256


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


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A request of a session that has been answered.

    Attributes:
        engine: tells the engines of a worker apart; another one after each start.
        number: of the engine's such requests, from 0.
        cached_tokens: of the prompt, found in any tier.
    """

    engine: str
    number: int
    session_id: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(slots=True)
class FinishedSteps:
    """The latest of them, for who did not see the answers' token counts."""

    _engine: str = field(default_factory=lambda: secrets.token_hex(4))
    _count: int = 0
    _latest: deque[FinishedStep] = field(default_factory=lambda: deque(maxlen=_STEPS_KEPT))
    # Of the requests under way: what each found cached when it was first admitted.
    _cached_tokens: dict[str, int] = field(default_factory=dict)

    def admitted(self, request_id: str, cached_tokens: int) -> None:
        """A session's request runs; when it was preempted before, the first time counts."""
        self._cached_tokens.setdefault(request_id, cached_tokens)

    def ended(
        self,
        request_id: str,
        session_id: str,
        *,
        prompt_tokens: int,
        output_tokens: int,
        is_answered: bool,
    ) -> None:
        """A session's request is over; one that was given up is not told of."""
        cached_tokens = self._cached_tokens.pop(request_id, 0)
        if is_answered:
            number, self._count = self._count, self._count + 1
            self._latest.append(
                FinishedStep(
                    self._engine, number, session_id, prompt_tokens, cached_tokens, output_tokens
                )
            )

    def state(self) -> list[dict[str, object]]:
        """The latest as JSON can hold them."""
        return [asdict(step) for step in self._latest]


@dataclass(slots=True)
class PrefillRate:
    """Prompt tokens that the engine computes per second, over about the last 100 steps that had
    a good number of them."""

    _tokens: float = 0.0
    _seconds: float = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """One step computed so many prompt tokens in so many seconds."""
        if tokens >= _MIN_PREFILL_TOKENS and seconds > 0.0:
            self._tokens = _PREFILL_DECAY * self._tokens + tokens
            self._seconds = _PREFILL_DECAY * self._seconds + seconds

    @property
    def tokens_per_s(self) -> float | None:
        """The rate; None before there is one."""
        return self._tokens / self._seconds if self._seconds else None


@dataclass(slots=True)
class KVRetention:
    """What one engine retains, and what that cost and saved.

    Args:
        policy_name: a policy of ``saga_core.policies``, or ``STOCK_ORDER``.
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
    prefetcher: Prefetcher | None = field(init=False, default=None)
    shadow: ShadowCache | None = field(init=False, default=None)
    prefill_rate: PrefillRate = field(init=False, default_factory=PrefillRate)
    finished_steps: FinishedSteps = field(init=False, default_factory=FinishedSteps)
    _copy: Callable[[Key, int], None] = field(init=False)
    _loaded: Callable[[], tuple[int, float]] = field(init=False)
    # Blocks that the policy has just chosen, with who held them, until they are evicted.
    leaving: dict[int, tuple[Holder, Run]] = field(init=False, default_factory=dict)
    _pinned_blocks: int = field(init=False, default=0)
    _pins_counted_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.ghosts = GhostBlocks(self.settings.max_ghost_blocks)
        self.index = None
        if self.policy_name != STOCK_ORDER:
            self.index = SessionIndex(self.num_blocks, self.policy_name, self.settings)

    # Events of the scheduler

    def arrived(self, session_id: str | None) -> None:
        """A request has been queued."""
        if self.shadow is not None:
            self.shadow.arrived(session_id, self.clock())
        if self.index is not None and session_id is not None:
            self.index.resume(session_id, now_s=self.clock())
            if self.prefetcher is not None:
                self.prefetcher.resumed(session_id)

    def admitted(
        self,
        *,
        session_id: str | None,
        prompt_tokens: int,
        cached_tokens: int,
        host_tokens: int = 0,
        lost_blocks: int | None,
        preempted: bool,
        blocks: Sequence[int] = (),
    ) -> None:
        """A waiting request has got its blocks and runs; ``lost_blocks`` None: not known.

        Of the ``cached_tokens``, ``host_tokens`` are to be loaded from the host tier. ``blocks``
        are those that it holds, in chain order, as far as they are known.
        """
        if self.index is not None:
            now_s = self.clock()
            self._count_pins(self.index, now_s)
            if session_id is not None:
                known_blocks = None
                if lost_blocks is not None:
                    known_blocks = cached_tokens // self.block_tokens + lost_blocks
                self.index.started(
                    session_id, now_s=now_s, known_blocks=known_blocks, blocks=blocks
                )
                if self.prefetcher is not None:
                    local_blocks = (cached_tokens - host_tokens) // self.block_tokens
                    self.prefetcher.admitted(session_id, local_blocks)
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

    def evicted(self, blocks: Sequence[int], lost: Sequence[tuple[int, Key]]) -> None:
        """Cached blocks lost their content; the hashes of those ``lost`` are resident nowhere."""
        self.counters.evicted_blocks += len(blocks)
        for _, key in lost:
            self.ghosts.evicted(key)
        if self.host is not None:
            for block, key in lost:
                self._demote(block, key)
        if self.index is not None:
            self.index.evicted(*blocks, now_s=self.clock())

    def reset(self) -> None:
        """The prefix cache was reset."""
        self.ghosts.clear()
        if self.prefetcher is not None:
            self.prefetcher.clear()
        if self.shadow is not None:
            self.shadow.clear()
        if self.index is not None:
            self.index.clear()
            self._count_pins(self.index, self.clock())

    def attach_prefetcher(self, prefetcher: Prefetcher) -> None:
        """Tell it of pauses, and of sessions that lose blocks."""
        self.prefetcher = prefetcher
        if self.index is not None:
            self.index.on_loss = lambda session_id: prefetcher.lost(session_id, now_s=self.clock())

    # Host tier

    def attach_host(
        self,
        host: HostTier,
        *,
        copy: Callable[[Key, int], None],
        loaded: Callable[[], tuple[int, float]],
    ) -> None:
        """Keep in ``host`` what is evicted.

        ``copy`` saves a block's content before it goes; ``loaded`` tells how many blocks have been
        loaded back and the seconds that took.
        """
        assert self.index is not None
        self.host, self._copy, self._loaded = host, copy, loaded
        self.index.on_victim = self._chosen
        self.index.on_ranked = self._ranked

    def load_tokens_per_s(self) -> float | None:
        """Measured rate of loads from the host tier; None before the first."""
        blocks, seconds = (0, 0.0) if self.host is None else self._loaded()
        return blocks * self.block_tokens / seconds if seconds else None

    def choose_host_victims(
        self, count: int, is_evictable: Callable[[Key], bool]
    ) -> list[Key] | None:
        """Blocks that the host tier gives up; None when there are not so many."""
        assert self.index is not None
        assert self.host is not None
        pressure = self.index.pressure()
        return self.host.evict(count, is_evictable, now_s=self.clock(), pressure=pressure)

    def _chosen(self, block: int, holder: Holder, run: Run) -> None:
        self.leaving[block] = (holder, run)

    def _ranked(self, session_id: str, run: Run) -> None:
        assert self.index is not None
        assert self.host is not None
        self.host.ranked(session_id, run, now_s=self.clock(), pressure=self.index.pressure())

    def _demote(self, block: int, key: Key) -> None:
        victim = self.leaving.pop(block, None)
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
            if self.index is not None and not self.index.take(notice, now_s=now_s):
                self.counters.unknown_sessions += 1
            if self.prefetcher is not None:
                _tell(self.prefetcher, notice, now_s)
            if self.shadow is not None:
                self.shadow.take(notice, now_s)

    def state(self, *, num_sessions: int = 0) -> dict[str, object]:
        """A snapshot for ``GET /saga/v1/state``, with the ``num_sessions`` largest sessions."""
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
            "prefill_tokens_per_s": self.prefill_rate.tokens_per_s,
            **self._optional_state(num_sessions),
        }

    def _optional_state(self, num_sessions: int) -> dict[str, object]:
        state: dict[str, object] = {}
        if self.host is not None:
            state["host"] = {
                "num_blocks": self.host.num_blocks,
                "held_blocks": len(self.host),
                "refused_blocks": self.host.refused_blocks,
                "load_tokens_per_s": self.load_tokens_per_s(),
            }
        if self.prefetcher is not None:
            state["prefetch"] = asdict(self.prefetcher.counts)
        if self.shadow is not None:
            state["shadow"] = self.shadow.state()
        if self.index is not None:
            reasons = (*(state.name.lower() for state in RunState), "unheld")
            state["evictions"] = dict(zip(reasons, self.index.evictions, strict=True))
        if self.index is not None and num_sessions:
            state["sessions"] = [
                {
                    "session_id": session_id,
                    "gpu_tokens": blocks * self.block_tokens,
                    "host_tokens": self.host.held_by(session_id) * self.block_tokens
                    if self.host is not None
                    else 0,
                }
                for session_id, blocks in self.index.largest(num_sessions)
            ]
        return state

    def _count_pins(self, index: SessionIndex, now_s: float) -> None:
        """Add what sessions have held since the last call, and see what they hold now."""
        self.counters.pinned_block_s += self._pinned_blocks * (now_s - self._pins_counted_s)
        self._pinned_blocks, self._pins_counted_s = index.counts().session_blocks, now_s


def _tell(prefetcher: Prefetcher, notice: Notice, now_s: float) -> None:
    if isinstance(notice, EndNotice):
        prefetcher.ended(notice.session_id)
    else:
        resume_s = None if isinstance(notice, PauseNotice) else now_s + notice.in_s
        prefetcher.expected(notice.session_id, resume_s, now_s=now_s)
