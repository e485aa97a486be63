"""Which session's request left which KV blocks behind, and which idle block to give up next.

Blocks are known by id. A block becomes a victim when the last run that holds it has given it up,
so a shared prefix outlives all that stands on it. Of every run it is learned when it is read
again; the gap ends with the arrival of the request that reads it.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpu_backend.held_blocks import BlockHolders, Held
from gpu_backend.requests_under_way import RequestsUnderWay
from saga_core.notices import EndNotice, Notice, PauseNotice
from saga_core.pauses import Outlook, PauseModel, Step, View, Wait
from saga_core.policies import make_policy
from saga_core.retention import EvictionOrder, RetentionPolicy, Run, RunState
from saga_core.settings import RetentionSettings
from saga_core.types import Pause

# Sessions that share a prefix hold its blocks each: their entries, 4 bytes each, are bounded.
_MAX_ENTRIES_PER_BLOCK = 64
_UNHELD = len(RunState)
# Of a session whose requests overlap, so many blocks of earlier ones are kept as its own.
_MAX_BRANCH_BLOCKS = 4096


@dataclass(slots=True)
class IndexCounts:
    """What the index holds now."""

    sessions: int = 0
    runs: int = 0
    session_blocks: int = 0


@dataclass(slots=True)
class SessionIndex:
    """Sessions and their idle blocks on one worker, in the order of a retention policy.

    Not thread-safe: vLLM's engine loop is its only caller. Every method that needs the time takes
    ``now_s`` on one monotonic clock.

    Args:
        num_blocks: size of the KV pool; block ids are below it.
        policy_name: the policy that orders idle runs.
        settings: bounds and constants.

    Attributes:
        on_loss: told of a session some of whose blocks have been chosen to be given up.
        on_victim: told of each block chosen to be given up, with who held it (session id, or the
            run's number where no session waits for it) and its run.
        on_ranked: told of each session whose run is ranked anew, with that run.
        is_held: whether a run holds a block, so that giving it up is the policy's decision.

    Raises:
        SettingsError: there is no such policy.
    """

    num_blocks: int
    policy_name: str
    settings: RetentionSettings
    on_victim: Callable[[int, str | int, Run], None] | None = None
    on_loss: Callable[[str], None] | None = None
    on_ranked: Callable[[str, Run], None] | None = None
    is_held: Callable[[int], bool] = field(init=False)
    _model: PauseModel = field(init=False)
    _order: EvictionOrder = field(init=False)
    _holders: BlockHolders = field(init=False)
    # Runs that may have idle blocks, and the latest run of each session, also when it has none.
    _held: dict[int, Held] = field(init=False, default_factory=dict)
    _sessions: OrderedDict[str, Held] = field(init=False, default_factory=OrderedDict)
    _requests: RequestsUnderWay = field(init=False, default_factory=RequestsUnderWay)
    # Evicted blocks by the state of the run that held them; the last is of those that none held.
    evictions: list[int] = field(init=False, default_factory=lambda: [0] * (_UNHELD + 1))
    _victim_states: bytearray = field(init=False)
    _next_run_id: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        s = self.settings
        self._model = PauseModel(max_sessions=s.max_sessions, half_life_s=s.hazard_half_life_s)
        self._order = EvictionOrder(make_policy(self.policy_name, s, self._model))
        self._holders = BlockHolders(self.num_blocks)
        self.is_held = self._holders.is_held  # Asked for every block that is taken.
        self._victim_states = bytearray([_UNHELD]) * self.num_blocks

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
                self._read_owners(blocks, None, now_s=now_s, arrival_s=now_s - step.run_s)
                self._leave(blocks, "plain", last_used_s=now_s, now_s=now_s)
            return
        others = self._requests.count(session_id) - 1
        if resuming:
            self._requests.queued(session_id)
        else:
            self._requests.ended(session_id)
        before = self._sessions.get(session_id)
        if before is not None:
            if not blocks and before.resumed_s is not None:
                self._sessions.move_to_end(session_id)
                self._gave_up_waiting(before, others, now_s)
                return
            self._read_unnoticed(before, blocks, now_s)
            if not blocks or others > 0 or before.is_branch:
                here = set(blocks)
                kept = [block for block in self._holders.live(before) if block not in here]
                blocks = [*blocks, *kept[:_MAX_BRANCH_BLOCKS]]
        self._read_owners(blocks, session_id, now_s=now_s, arrival_s=now_s - step.run_s)
        if before is None:
            self._share(blocks, now_s)
        is_queued = resuming or self._requests.is_queued(session_id)
        state = RunState.RESUMING if is_queued else RunState.PAUSED
        if resuming or others > 0:
            wait = _unwatched("paused", now_s)
        else:
            wait = self._model.paused(session_id, step, now_s=now_s)
        held = self._new_held(session_id, "paused", blocks, now_s, wait)
        held.state, held.is_branch = state, others > 0
        held.uses = 1 if before is None else before.uses + 1
        self._holders.claim(held, after=before)
        if before is not None:
            self._release(before, "superseded", kept=held.blocks, now_s=now_s)
        self._sessions[session_id] = held
        self._sessions.move_to_end(session_id)
        self._rank(held, now_s)
        self._end_if_over(session_id, now_s)
        self._keep_bounds(now_s)

    def resume(self, session_id: str, *, now_s: float) -> None:
        """The session's next request has arrived and waits; its KV is about to be read."""
        is_only = session_id not in self._requests
        self._requests.arrived(session_id)
        held = self._sessions.get(session_id)
        if held is None:
            return
        if is_only:
            held.resumed_s = now_s
        held.state = RunState.RESUMING
        self._rank(held, now_s, rises=True)

    def started(
        self,
        session_id: str,
        *,
        now_s: float,
        known_blocks: int | None = None,
        blocks: Sequence[int] = (),
    ) -> None:
        """The waiting request has taken what it could use of its session's KV.

        What it left is superseded; what it took is in use, and recorded again at its end.

        Args:
            known_blocks: those of its prompt that had been computed before, evicted or not; None
                when that is not known.
            blocks: those that it holds now, in chain order, as far as they are known.
        """
        self._requests.started(session_id)
        held = self._sessions.get(session_id)
        if held is None:
            return
        if held.resumed_s is not None:
            self._read_session(held, known_blocks, held.resumed_s)
        if self._requests.count(session_id) <= 1:
            # How much is left is known only when the request ends: until then nothing is learned.
            held.wait, held.idle_since_s = _unwatched("superseded", now_s), now_s
            held.state, held.pause = RunState.IDLE, None
            if held.blocks == array("I", blocks[: len(held.blocks)]) and self.on_ranked is None:
                self._unrank(held)  # All of it is in use.
            else:
                self._rank(held, now_s)
        elif not self._requests.is_queued(session_id) and held.state is RunState.RESUMING:
            held.wait, held.idle_since_s = _unwatched("paused", now_s), now_s
            self._set(held, RunState.PAUSED, None, now_s)

    def take(self, notice: Notice, *, now_s: float) -> bool:
        """Somebody says something of a session. False: no such session here."""
        if isinstance(notice, PauseNotice):
            return self.pause(notice.session_id, notice.pause, now_s=now_s)
        if isinstance(notice, EndNotice):
            return self.end(notice.session_id, now_s=now_s)
        return self.expect(notice.session_id, now_s=now_s)

    def pause(self, session_id: str, pause: Pause, *, now_s: float) -> bool:
        """Somebody who knows more says what the session waits for. False: no such session here."""
        held = self._sessions.get(session_id)
        if held is None:
            return False
        if session_id in self._requests or held.state is RunState.ENDED:
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
        """The session will not return: its private blocks are the next victims. False: not here.

        While a request of it is under way, that is so from the request's end on.
        """
        held = self._sessions.get(session_id)
        if session_id in self._requests:
            self._requests.end_later(session_id)
            return held is not None
        if held is None:
            return False
        if held.state is RunState.PAUSED:
            self._model.ended(held.wait, now_s=now_s)
        self._set(held, RunState.ENDED, None, now_s)
        return True

    def restore(self, session_id: str, blocks: Sequence[int], *, now_s: float) -> bool:
        """Blocks of the session's last request are on the GPU again, in chain order.

        The session goes on waiting for what it waited for. False: it does not wait; nothing is
        changed.
        """
        held = self._sessions.get(session_id)
        if held is None or held.state not in (RunState.PAUSED, RunState.RESUMING):
            return False
        here = set(blocks)
        rest = [block for block in self._holders.unclaim(held) if block not in here]
        held.blocks, held.recorded_at = self._holders.entries([*blocks, *rest])
        self._holders.claim(held)
        self._rank(held, now_s)
        self._keep_bounds(now_s)
        return True

    def evicted(self, *blocks: int, now_s: float) -> None:
        """The blocks lost their content; whoever held them holds them no more."""
        states, evictions = self._victim_states, self.evictions
        for block in blocks:
            evictions[states[block]] += 1
            states[block] = _UNHELD
        for bereft in self._holders.lose(blocks):
            self._drop(bereft, now_s)

    def clear(self) -> None:
        """Every block lost its content; sessions are forgotten, what was learned is not."""
        for held in (*self._held.values(), *self._sessions.values()):
            held.wait.is_over = True
        self._holders.clear()
        self._sessions.clear()
        self._held.clear()
        self._order = EvictionOrder(self.make_policy())

    # Decisions

    def victims(self, count: int, *, now_s: float, is_idle: Callable[[int], bool]) -> list[int]:
        """Choose up to ``count`` blocks to give up, the first to go first.

        Blocks that running requests use are passed over; the request's own end records them
        again. Fewer are returned only when no run has an idle block left.
        """
        chosen: list[int] = []
        while len(chosen) < count:
            run_id = self._order.first(now_s=now_s, pressure=self.pressure())
            if run_id is None:
                break
            held, first = self._held[run_id], len(chosen)
            while held.blocks and len(chosen) < count:
                chosen += filter(is_idle, self._holders.take(held, count - len(chosen)))
            for block in chosen[first:]:
                self._victim_states[block] = held.state
            if self.on_loss is not None and held.session_id is not None:
                self.on_loss(held.session_id)
            if self.on_victim is not None:
                holder = run_id if held.session_id is None else held.session_id
                run = self._order.run(run_id)
                for block in chosen[first:]:
                    self.on_victim(block, holder, run)
            if not held.blocks or (held.session_id is None and held.live == 0):
                self._drop(held, now_s)
        return chosen

    def largest(self, count: int) -> list[tuple[str, int]]:
        """Sessions that hold most, with their blocks in the pool; linear in what they hold."""
        largest = heapq.nlargest(
            count, self._sessions.items(), key=lambda item: (len(item[1].blocks), item[0])
        )
        return [(session_id, len(self._holders.live(held))) for session_id, held in largest]

    def outlook(self, session_id: str, *, now_s: float) -> Outlook | None:
        """Whether and when the session is expected to go on; None when it is not paused."""
        held = self._sessions.get(session_id)
        if held is None or held.state is not RunState.PAUSED:
            return None
        return self._model.outlook(held.wait, now_s=now_s)

    def least_worth(self, *, now_s: float) -> float:
        """Expected reads per second of the block that would be given up first; 0 without one."""
        key = self._order.peek(now_s=now_s, pressure=self.pressure())
        wait = None if key is None else self._order.run(key.run_id).wait
        return 0.0 if wait is None else self._model.worth(wait, now_s=now_s)

    def pressure(self) -> float:
        """Share of the pool that sessions hold, 0 to 1."""
        return self._holders.session_blocks / self.num_blocks

    def make_policy(self) -> RetentionPolicy:
        """The policy of this index once more, with the same evidence, for another tier."""
        return make_policy(self.policy_name, self.settings, self._model)

    def counts(self) -> IndexCounts:
        """Sizes, for statistics."""
        return IndexCounts(len(self._sessions), len(self._held), self._holders.session_blocks)

    def check_integrity(self) -> None:
        """Compare the parts with each other; raises AssertionError on the first difference."""
        owners = [held for held in self._held.values() if held.session_id is None]
        self._holders.check_integrity(self._sessions.values(), owners)
        assert self._holders.session_entries <= _MAX_ENTRIES_PER_BLOCK * self.num_blocks
        self._requests.check_integrity()
        for session_id, held in self._sessions.items():
            assert (held.session_id, held.kind) == (session_id, "paused")
            assert held.resumed_s is None or session_id in self._requests
            assert held.state is not RunState.IDLE or held.wait.is_over
            assert self._held.get(held.run_id, held) is held
        assert len(self._order) == len(self._held)
        for run_id, held in self._held.items():
            assert run_id == held.run_id
            assert run_id in self._order
            assert held.idle_since_s >= held.last_used_s
            if held.session_id is not None:
                assert self._sessions[held.session_id] is held
            else:
                assert held.wait.plain.cls == (held.kind,)
                assert (held.left_by is not None) == (held.kind == "superseded")

    # Sessions

    def _read_session(self, held: Held, known_blocks: int | None, arrival_s: float) -> None:
        """A request of the session contains ``known_blocks`` of what the one before left."""
        share = 1.0
        if known_blocks is not None and held.size:
            share = min(1.0, known_blocks / held.size)
        held.resumed_s = None
        self._model.read(held.wait, now_s=arrival_s, share=share, session_id=held.session_id)

    def _read_unnoticed(self, before: Held, blocks: Sequence[int], now_s: float) -> None:
        """The request that now ends is the first sign of the session's return."""
        if not before.wait.is_over:
            known_blocks = len(set(blocks).intersection(self._holders.live(before)))
            arrival_s = now_s if before.resumed_s is None else before.resumed_s
            self._read_session(before, known_blocks if blocks else None, arrival_s)

    def _gave_up_waiting(self, held: Held, others: int, now_s: float) -> None:
        """The session's request ended before it started: its pause goes on."""
        if others <= 0:
            held.resumed_s = None
            self._set(held, RunState.PAUSED, held.pause, now_s)
            assert held.session_id is not None
            self._end_if_over(held.session_id, now_s)

    def _end_if_over(self, session_id: str, now_s: float) -> None:
        if self._requests.take_end(session_id):
            self.end(session_id, now_s=now_s)

    def _keep_bounds(self, now_s: float) -> None:
        """Let the least recently used sessions go when there are too many, or too many entries."""
        max_entries = _MAX_ENTRIES_PER_BLOCK * self.num_blocks
        while len(self._sessions) > self.settings.max_sessions or (
            self._holders.session_entries > max_entries
        ):
            _, oldest = self._sessions.popitem(last=False)
            oldest.wait.is_over = True  # Its return would not be known as one.
            self._release(oldest, "plain", kept=(), now_s=now_s)

    def _release(self, held: Held, kind: str, *, kept: Sequence[int], now_s: float) -> None:
        """Drop a session's run; blocks that its successor does not keep go on as a plain run.

        So do those that others hold, where this use was the latest: else they would fall back to
        an older use, and be victims before the blocks that stand on them.
        """
        rest: list[int] = []
        under_shared: list[int] = []
        shared_used_s = 0.0
        given_up = self._holders.unclaim(held)
        successors = set(kept) if given_up else set()
        for block in given_up:
            owner = self._holders.owner(block)
            if owner is not None and owner.kind == "shared":
                # What it stands on is as much shared as the block itself.
                under_shared += rest
                rest, shared_used_s = [], owner.last_used_s
            elif block not in successors and (
                owner is None or owner.last_used_s <= held.last_used_s
            ):
                rest.append(block)
        self._drop(held, now_s)
        if under_shared:
            self._leave(under_shared, "shared", last_used_s=shared_used_s, now_s=now_s)
        if rest:
            left_by = held.session_id if kind == "superseded" else None
            self._leave(rest, kind, last_used_s=held.last_used_s, now_s=now_s, left_by=left_by)

    # Runs that no session waits for

    def _leave(
        self,
        blocks: Sequence[int],
        kind: str,
        *,
        last_used_s: float,
        now_s: float,
        left_by: str | None = None,
    ) -> None:
        wait = self._model.left(kind, now_s=now_s)
        held = self._new_held(None, kind, blocks, last_used_s, wait)
        held.left_by = left_by
        if kind == "superseded":
            held.idle_since_s = max(last_used_s, now_s)
        for bereft in self._holders.own(held):
            self._drop(bereft, now_s)
        self._rank(held, now_s)

    def _read_owners(
        self, blocks: Sequence[int], session_id: str | None, *, now_s: float, arrival_s: float
    ) -> None:
        """Learn that a request contained blocks of runs that no session waits for.

        A session reads those of others with its first request only: later ones contain them as a
        matter of course. What it takes up of its own past is no longer superseded.
        """
        is_first = session_id not in self._sessions
        read: dict[int, int] = {}
        owners: dict[int, Held] = {}
        for block, owner in self._holders.owned(blocks):
            owners[owner.run_id] = owner
            is_own = session_id is not None and owner.left_by == session_id
            if is_own or is_first:
                read[owner.run_id] = read.get(owner.run_id, 0) + 1
            if is_own:
                self._holders.disown(block)
        for run_id, owner in owners.items():
            if run_id in read:
                share = min(1.0, read[run_id] / owner.size)
                self._model.read(owner.wait, now_s=arrival_s, share=share)
                owner.uses += 1
            if owner.live == 0:
                self._drop(owner, now_s)
                continue
            if run_id in read:
                owner.wait = self._model.left(owner.kind, now_s=now_s)
            if owner.kind == "shared":
                # Used with all that stands on it, and given up after it.
                owner.last_used_s = owner.idle_since_s = math.nextafter(now_s, math.inf)
            if run_id in read:
                self._rank(owner, now_s)
            elif owner.kind == "shared":
                self._rank(owner, now_s, rises=True)

    def _share(self, blocks: Sequence[int], now_s: float) -> None:
        """A new session begins with blocks of others: these are a run of their own from now on."""
        claimed = [block for block in blocks if self._holders.is_claimed(block)]
        if any(self._holders.owner(block) is None for block in claimed):
            last_used_s = math.nextafter(now_s, math.inf)
            self._leave(claimed, "shared", last_used_s=last_used_s, now_s=now_s)

    # All runs

    def _new_held(
        self,
        session_id: str | None,
        kind: str,
        blocks: Sequence[int],
        last_used_s: float,
        wait: Wait,
    ) -> Held:
        self._next_run_id += 1
        run_id, entries = self._next_run_id, self._holders.entries(blocks)
        return Held(run_id, session_id, kind, *entries, last_used_s, wait, last_used_s, len(blocks))

    def _set(self, held: Held, state: RunState, pause: Pause | None, now_s: float) -> None:
        held.state, held.pause = state, pause
        self._rank(held, now_s)

    def _rank(self, held: Held, now_s: float, *, rises: bool = False) -> None:
        """Put the run in its place; one that ``rises`` goes no sooner than before."""
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
        put = self._order.defer if rises else self._order.put
        put(run, now_s=now_s, pressure=self.pressure())
        if self.on_ranked is not None and held.session_id is not None:
            self.on_ranked(held.session_id, run)

    def _drop(self, held: Held, now_s: float) -> None:
        """Forget a run that holds no blocks. A session stays known, so that its facts survive."""
        self._unrank(held)
        if held.session_id is None:
            # A later read would go unnoticed: what is known is that there was none until now.
            self._model.read(held.wait, now_s=now_s, share=0.0)

    def _unrank(self, held: Held) -> None:
        """Nothing that the run holds is to be given up."""
        self._order.discard(held.run_id)
        self._held.pop(held.run_id, None)


def _unwatched(kind: str, now_s: float) -> Wait:
    """A wait of this kind from which nothing is learned."""
    return Wait(View((kind,), now_s), is_over=True)
