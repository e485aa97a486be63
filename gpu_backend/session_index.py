"""Which session's request left which KV blocks behind, and which idle block to give up next.

Blocks are known by id. A block belongs to every paused session whose last request contained it,
and to at most one run of plain requests, the latest. It becomes a victim when its last holder has
given it up, so a shared prefix outlives all that stands on it.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from saga_core.pauses import PauseModel, Step, Wait
from saga_core.policies import make_policy
from saga_core.retention import EvictionOrder, Run, RunState
from saga_core.settings import RetentionSettings
from saga_core.types import Pause

_SLACK = 16
# Sessions that share a prefix hold its blocks each: their entries, 8 bytes each, are bounded.
_MAX_ENTRIES_PER_BLOCK = 64


@dataclass(slots=True)
class _Held:
    """The blocks of one run, in chain order, each with the generation it had when recorded.

    Attributes:
        wait: what has been learned of such waits; it goes on when the blocks are gone.
        kind: of a plain run: "plain", "superseded" or "shared".
        left_by: of a superseded run, the session that left it.
        idle_since_s: when it came to wait for what it waits for now.
        size: blocks when it was recorded.
        uses: requests of its session so far.
        pause: what somebody said of its session's pause.
        resumed_s: arrival of its session's next request.
        live: of a plain run, the blocks that it still owns.
        is_branch: another request of the session was under way when this was recorded.
    """

    run_id: int
    session_id: str | None
    blocks: array[int]
    generations: array[int]
    last_used_s: float
    wait: Wait
    kind: str
    left_by: str | None = None
    idle_since_s: float = 0.0
    size: int = 0
    uses: int = 1
    state: RunState = RunState.IDLE
    pause: Pause | None = None
    resumed_s: float | None = None
    live: int = 0
    is_branch: bool = False

    def entries(self) -> Iterator[tuple[int, int]]:
        """Blocks with their generations, in chain order."""
        return zip(self.blocks, self.generations, strict=True)


@dataclass(slots=True)
class IndexCounts:
    """What the index holds now."""

    sessions: int = 0
    runs: int = 0
    session_blocks: int = 0


@dataclass(slots=True)
class SessionIndex:
    """Sessions and their idle blocks on one worker, in the order of a retention policy.

    Not thread-safe: vLLM's engine loop is its only caller. Every method takes ``now_s`` on one
    monotonic clock.

    Args:
        num_blocks: size of the KV pool; block ids are below it.
        policy_name: the policy that orders idle runs.
        settings: bounds and constants.

    Raises:
        SettingsError: there is no such policy.
    """

    num_blocks: int
    policy_name: str
    settings: RetentionSettings
    _order: EvictionOrder = field(init=False)
    _held: dict[int, _Held] = field(init=False, default_factory=dict)
    _sessions: OrderedDict[str, _Held] = field(init=False, default_factory=OrderedDict)
    _claims: list[int] = field(init=False)
    _generation: list[int] = field(init=False)
    _plain_owner: dict[int, _Held] = field(init=False, default_factory=dict)
    _session_blocks: int = field(init=False, default=0)
    _session_entries: int = field(init=False, default=0)
    # Requests of a session that have arrived and not ended; only sessions that have some.
    _outstanding: dict[str, int] = field(init=False, default_factory=dict)
    _next_run_id: int = field(init=False, default=0)
    _model: PauseModel = field(init=False)

    def __post_init__(self) -> None:
        s = self.settings
        self._model = PauseModel(max_sessions=s.max_sessions, half_life_s=s.hazard_half_life_s)
        self._order = EvictionOrder(make_policy(self.policy_name, s, self._model))
        self._claims = [0] * self.num_blocks
        self._generation = [0] * self.num_blocks

    # Events

    def record(
        self,
        session_id: str | None,
        blocks: Sequence[int],
        *,
        now_s: float,
        resuming: bool = False,
        step: Step = Step(),  # noqa: B008 - frozen
    ) -> None:
        """A request gave up its blocks (cached ones, in chain order).

        They replace those of the session's request before: blocks that the new chain no longer
        contains are superseded and rank as a plain request's, unless other requests of the session
        are still under way. With no blocks the session keeps what it had. ``resuming`` says that
        the request was preempted and comes back by itself; ``step`` is how it went.
        """
        if session_id is None:
            if blocks:
                self._read_plain(blocks, None, now_s=now_s)
                self._add_plain(blocks, "plain", last_used_s=now_s, now_s=now_s)
            return
        others = self._outstanding.get(session_id, 0) - 1
        if not resuming:
            self._set_outstanding(session_id, others)
        before = self._sessions.get(session_id)
        if before is not None and (not blocks or others > 0 or before.is_branch):
            blocks = [*blocks, *self._still_there(before, set(blocks))]
        self._read_plain(blocks, session_id, now_s=now_s)
        if before is None:
            self._share([block for block in blocks if self._claims[block]], now_s=now_s)
        if resuming or others > 0:
            wait = self._model.left("plain", now_s=now_s)
        else:
            wait = self._model.paused(session_id, step, now_s=now_s)
        held = self._new_held(session_id, blocks, now_s, wait, "paused")
        held.uses = 1 if before is None else before.uses + 1
        self._session_entries += len(held.blocks)
        for block in held.blocks:
            self._claim(block)
        if before is not None:
            self._release(before, now_s=now_s, kept=set(held.blocks))
        self._sessions[session_id] = held
        self._sessions.move_to_end(session_id)
        held.is_branch = others > 0
        held.state = RunState.RESUMING if resuming or others > 0 else RunState.PAUSED
        self._rank(held, now_s=now_s)
        self._keep_bounds(now_s)

    def resume(self, session_id: str, *, now_s: float) -> None:
        """The session's next request has arrived and waits; its KV is about to be read."""
        others = self._outstanding.get(session_id, 0)
        self._set_outstanding(session_id, others + 1)
        held = self._sessions.get(session_id)
        if held is None:
            return
        if not others:
            held.resumed_s = now_s
        self._set(held, RunState.RESUMING, held.pause, now_s)

    def started(self, session_id: str, *, now_s: float, known_blocks: int | None = None) -> None:
        """The waiting request has taken what it could use of its session's KV.

        What it left is superseded; what it took is in use, and recorded again at its end.
        ``known_blocks`` are those of its prompt that had been computed before, evicted or not;
        None when that is not known.
        """
        held = self._sessions.get(session_id)
        if held is None:
            return
        if held.resumed_s is not None:
            share = 1.0 if known_blocks is None else min(1.0, known_blocks / max(1, held.size))
            self._model.read(held.wait, now_s=held.resumed_s, share=share, session_id=session_id)
            held.resumed_s = None
        if self._outstanding.get(session_id, 0) <= 1:
            held.wait = self._model.left("superseded", now_s=now_s)
            self._set(held, RunState.IDLE, None, now_s)

    def pause(self, session_id: str, pause: Pause, *, now_s: float) -> bool:
        """Somebody who knows more says what the session waits for. False: no such session here."""
        held = self._sessions.get(session_id)
        if held is None:
            return False
        if session_id in self._outstanding or held.state is RunState.ENDED:
            return True  # The notice was overtaken, by the next request or by the end.
        self._model.told(session_id, held.wait, pause, now_s=now_s)
        self._set(held, RunState.PAUSED, pause, now_s)
        return True

    def expect(self, session_id: str, *, now_s: float) -> bool:
        """The session's next request is announced; its TTL starts anew. False: not here."""
        held = self._sessions.get(session_id)
        if held is None:
            return False
        if held.state is RunState.PAUSED:
            self._model.announced(held.wait, now_s=now_s)
            held.idle_since_s = now_s
            self._set(held, RunState.PAUSED, held.pause, now_s)
        return True

    def end(self, session_id: str, *, now_s: float) -> bool:
        """The session will not return: its private blocks are the next victims. False: not here."""
        held = self._sessions.get(session_id)
        if held is None:
            return False
        if held.state is RunState.PAUSED:
            self._model.ended(held.wait, now_s=now_s)
        self._set(held, RunState.ENDED, None, now_s)
        return True

    def evicted(self, block: int) -> None:
        """The block lost its content; whoever held it holds it no more."""
        self._generation[block] += 1
        if self._claims[block]:
            self._claims[block] = 0
            self._session_blocks -= 1
        self._disown(block)

    def clear(self) -> None:
        """Every block lost its content."""
        for block in range(self.num_blocks):
            self._generation[block] += 1
            self._claims[block] = 0
        self._session_blocks = self._session_entries = 0
        self._plain_owner.clear()
        self._sessions.clear()
        self._held.clear()
        self._order = EvictionOrder(make_policy(self.policy_name, self.settings, self._model))

    # Decisions

    def is_held(self, block: int) -> bool:
        """Whether a run holds the block, so that giving it up is the policy's decision."""
        return self._claims[block] > 0 or block in self._plain_owner

    def victims(self, count: int, *, now_s: float, is_idle: Callable[[int], bool]) -> list[int]:
        """Choose up to ``count`` blocks to give up, the first to go first.

        Blocks that running requests use are passed over; the request's own end records them
        again. Fewer are returned only when no run has an idle block left.
        """
        chosen: list[int] = []
        while len(chosen) < count:
            run_id = self._order.first(now_s=now_s, pressure=self._pressure())
            if run_id is None:
                break
            held = self._held[run_id]
            while held.blocks and len(chosen) < count:
                block, generation = held.blocks.pop(), held.generations.pop()
                self._session_entries -= held.session_id is not None
                if self._give_up(held, block, generation) and is_idle(block):
                    chosen.append(block)
            if not held.blocks or (held.session_id is None and held.live == 0):
                self._drop(held)
        return chosen

    def counts(self) -> IndexCounts:
        """Sizes, for statistics."""
        return IndexCounts(len(self._sessions), len(self._held), self._session_blocks)

    def check_integrity(self) -> None:
        """Recompute every count from the runs; raises AssertionError on the first difference."""
        claims = [0] * self.num_blocks
        for session_id, held in self._sessions.items():
            assert held.session_id == session_id
            for block, generation in held.entries():
                claims[block] += self._is(block, generation)
        assert claims == self._claims
        entries = sum(len(held.blocks) for held in self._sessions.values())
        assert entries == self._session_entries
        assert entries <= _MAX_ENTRIES_PER_BLOCK * self.num_blocks
        assert all(count > 0 for count in self._outstanding.values())
        assert self._session_blocks == sum(count > 0 for count in claims)
        live: dict[int, int] = {}
        for block, held in self._plain_owner.items():
            assert self._held[held.run_id] is held
            assert (block, self._generation[block]) in set(held.entries())
            live[held.run_id] = live.get(held.run_id, 0) + 1
        for run_id, held in self._held.items():
            assert run_id == held.run_id
            assert run_id in self._order
            assert held.session_id is not None or held.live == live[run_id] > 0
            assert held.session_id is not None or len(held.blocks) <= 2 * held.live + _SLACK
        assert len(self._order) == len(self._held)

    # Internals

    def _is(self, block: int, generation: int) -> bool:
        return self._generation[block] == generation

    def _new_held(
        self,
        session_id: str | None,
        blocks: Sequence[int],
        last_used_s: float,
        wait: Wait,
        kind: str,
    ) -> _Held:
        self._next_run_id += 1
        return _Held(
            self._next_run_id,
            session_id,
            array("I", blocks),
            array("I", (self._generation[block] for block in blocks)),
            last_used_s,
            wait,
            kind,
            idle_since_s=last_used_s,
            size=len(blocks),
        )

    def _still_there(self, held: _Held, without: set[int]) -> list[int]:
        return [
            block
            for block, generation in held.entries()
            if block not in without and self._is(block, generation)
        ]

    def _set_outstanding(self, session_id: str, count: int) -> None:
        if count > 0:
            self._outstanding[session_id] = count
        else:
            self._outstanding.pop(session_id, None)

    def _keep_bounds(self, now_s: float) -> None:
        """Let the least recently used sessions go when there are too many, or too many entries."""
        max_entries = _MAX_ENTRIES_PER_BLOCK * self.num_blocks
        while len(self._sessions) > self.settings.max_sessions or (
            self._session_entries > max_entries
        ):
            _, oldest = self._sessions.popitem(last=False)
            self._release(oldest, now_s=now_s, kept=set())

    def _set(self, held: _Held, state: RunState, pause: Pause | None, now_s: float) -> None:
        held.state, held.pause = state, pause
        self._rank(held, now_s=now_s)

    def _pressure(self) -> float:
        return self._session_blocks / self.num_blocks

    def _rank(self, held: _Held, *, now_s: float) -> None:
        p_reuse = pause_p95_s = 0.0
        if held.pause is not None:
            p_reuse, pause_p95_s = held.pause.p_reuse, held.pause.pause_p95_s
        elif held.state is RunState.PAUSED:
            p_reuse, pause_p95_s = self._model.p_reuse(held.wait), self._model.p95_s(held.wait)
        run = Run(
            run_id=held.run_id,
            state=held.state,
            last_used_s=held.last_used_s,
            idle_since_s=held.idle_since_s,
            size_share=len(held.blocks) / self.num_blocks,
            uses=held.uses,
            p_reuse=p_reuse,
            pause_p95_s=pause_p95_s,
            wait=held.wait,
        )
        self._held[held.run_id] = held
        self._order.put(run, now_s=now_s, pressure=self._pressure())

    def _add_plain(
        self,
        blocks: Sequence[int],
        kind: str,
        *,
        last_used_s: float,
        now_s: float,
        left_by: str | None = None,
    ) -> None:
        held = self._new_held(None, blocks, last_used_s, self._model.left(kind, now_s=now_s), kind)
        held.left_by = left_by
        for block in held.blocks:
            self._disown(block)
            self._plain_owner[block] = held
            held.live += 1
        self._rank(held, now_s=now_s)

    def _read_plain(self, blocks: Sequence[int], session_id: str | None, *, now_s: float) -> None:
        """Learn that a request contained blocks of plain runs.

        A session reads those of others with its first request only: later ones contain them as a
        matter of course. What it takes up of its own past is no longer superseded.
        """
        is_first = session_id not in self._sessions
        taken: dict[int, list[_Held]] = {}
        shared: dict[int, _Held] = {}
        for block in blocks:
            owner = self._plain_owner.get(block)
            if owner is None:
                continue
            is_own = session_id is not None and owner.left_by == session_id
            if owner.kind == "shared":
                shared[owner.run_id] = owner
            if is_own or is_first:
                taken.setdefault(owner.run_id, []).append(owner)
            if is_own:
                self._disown(block)
        for owner in shared.values():
            # Used with all that stands on it, and given up after it.
            owner.last_used_s = math.nextafter(now_s, math.inf)
            self._rank(owner, now_s=now_s)
        for run_id, owners in taken.items():
            owner = owners[0]
            self._model.read(owner.wait, now_s=now_s, share=min(1.0, len(owners) / owner.size))
            if run_id in self._held:
                owner.wait = self._model.left(owner.kind, now_s=now_s)
                owner.uses += 1
                self._rank(owner, now_s=now_s)

    def _share(self, blocks: Sequence[int], *, now_s: float) -> None:
        """A new session begins with blocks of others: these are a run of their own from now on."""
        if any(self._plain_owner.get(block) is None for block in blocks):
            last_used_s = math.nextafter(now_s, math.inf)
            self._add_plain(blocks, "shared", last_used_s=last_used_s, now_s=now_s)

    def _claim(self, block: int) -> None:
        self._claims[block] += 1
        if self._claims[block] == 1:
            self._session_blocks += 1

    def _unclaim(self, block: int) -> None:
        self._claims[block] -= 1
        if self._claims[block] == 0:
            self._session_blocks -= 1

    def _disown(self, block: int) -> None:
        owner = self._plain_owner.pop(block, None)
        if owner is not None:
            owner.live -= 1
            if owner.live == 0:
                self._drop(owner)
            elif len(owner.blocks) > 2 * owner.live + _SLACK:
                self._shrink(owner)

    def _shrink(self, held: _Held) -> None:
        """Forget the entries of a plain run that others have taken over."""
        rest = [
            (block, generation)
            for block, generation in held.entries()
            if self._plain_owner.get(block) is held and self._is(block, generation)
        ]
        held.blocks = array("I", (block for block, _ in rest))
        held.generations = array("I", (generation for _, generation in rest))

    def _give_up(self, held: _Held, block: int, generation: int) -> bool:
        """Take the block from the run; True when nobody holds it any more."""
        if not self._is(block, generation):
            return False
        if held.session_id is None:
            if self._plain_owner.get(block) is not held:
                return False
            del self._plain_owner[block]
            held.live -= 1
        else:
            self._unclaim(block)
        return not self.is_held(block)

    def _release(self, held: _Held, *, now_s: float, kept: set[int]) -> None:
        """Drop a session's run; blocks that its successor does not keep go on as a plain run.

        So do those that others hold, where this use was the latest: else they would fall back to
        an older use, and be victims before the blocks that stand on them.
        """
        rest: list[int] = []
        under_shared: list[int] = []
        shared_used_s = 0.0
        for block, generation in held.entries():
            if not self._is(block, generation):
                continue
            self._unclaim(block)
            owner = self._plain_owner.get(block)
            if owner is not None and owner.kind == "shared":
                # What it stands on is as much shared as the block itself.
                under_shared += rest
                rest, shared_used_s = [], owner.last_used_s
            elif block not in kept and (owner is None or owner.last_used_s <= held.last_used_s):
                rest.append(block)
        self._session_entries -= len(held.blocks)
        held.blocks, held.generations = array("I"), array("I")
        self._drop(held)
        if under_shared:
            self._add_plain(under_shared, "shared", last_used_s=shared_used_s, now_s=now_s)
        if rest:
            self._add_plain(
                rest,
                "superseded",
                last_used_s=held.last_used_s,
                now_s=now_s,
                left_by=held.session_id,
            )

    def _drop(self, held: _Held) -> None:
        """Forget a run that holds no blocks. A session stays known, so that its facts survive."""
        self._order.discard(held.run_id)
        self._held.pop(held.run_id, None)
