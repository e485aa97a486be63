"""One worker's prefix cache under a retention policy, driven by a workload.

Calls run as long as the trace says. While a call runs its blocks are held, also when all running
calls need more than the capacity; what is left is for idle runs, which the policy orders. The
policy, its order and what it learns from are the objects that the worker runs.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field

from saga_core.pauses import PauseModel, Step, Wait
from saga_core.policies import make_policy
from saga_core.retention import EvictionOrder, Run, RunState
from saga_core.settings import RetentionSettings
from saga_sim.belady import Schedule
from saga_sim.host import HostTier
from saga_sim.resident import ResidentTree
from saga_sim.signals import Signals, Teller
from saga_sim.workload import ROOT, SimCall, Workload

_MAX_BRANCHES = 4


@dataclass(slots=True)
class _Idle:
    """An idle run: what the policy is told of it, besides its blocks.

    Attributes:
        kind: why it is there: "paused", "ended", "superseded" or "shared".
        node: end of its chain when it was left.
        base: depth in blocks above which others held it then.
    """

    run_id: int
    node: int
    kind: str
    state: RunState
    wait: Wait
    last_used_s: float
    idle_since_s: float
    uses: int
    base: int = 0


@dataclass(slots=True)
class _Session:
    """A session's latest run and the branches that it has left; evicted ones are remembered."""

    run: _Idle | None = None
    uses: int = 0
    branches: list[_Idle] = field(default_factory=list)


@dataclass(slots=True)
class CacheRun:
    """What one run of the simulator measured.

    Attributes:
        hits: resident blocks that each call found, per call of the workload.
        host_hits: blocks that it found in the host tier.
        victims: blocks evicted in the measured span, by the kind of their run.
        idle_block_s: blocks that idle runs held, integrated over the seconds of the measured span.
        overcommitted: calls at whose arrival running calls alone exceeded the capacity.
    """

    hits: list[int]
    host_hits: list[int]
    victims: Counter[str] = field(default_factory=Counter)
    idle_block_s: float = 0.0
    overcommitted: int = 0


class CacheSimulator:
    """Replays a workload through a policy; see the module.

    Args:
        capacity_blocks: KV blocks of the worker.
        policy: name of the policy.
        host: a slower tier that takes what is evicted; None when there is none.
    """

    def __init__(
        self,
        workload: Workload,
        schedule: Schedule,
        capacity_blocks: int,
        policy: str,
        signals: Signals,
        *,
        seed: int = 0,
        settings: RetentionSettings | None = None,
        host: HostTier | None = None,
    ) -> None:
        settings = settings or RetentionSettings()
        self._workload = workload
        self._schedule = schedule
        self._capacity = capacity_blocks
        self._model = PauseModel(
            max_sessions=settings.max_sessions, half_life_s=settings.hazard_half_life_s
        )
        self._order = EvictionOrder(make_policy(policy, settings, self._model))
        self._teller = Teller(signals, workload, seed)
        self._tree = ResidentTree(workload.nodes)
        self._host = host
        self._idle: dict[int, _Idle] = {}
        self._sessions: dict[str, _Session] = {}
        self._running: dict[int, int] = {}
        self._extra = 0
        self._num_runs = 0
        self._tool_ends: list[tuple[float, int]] = []
        self.result = CacheRun([0] * len(workload.calls), [0] * len(workload.calls))

    def run(self) -> CacheRun:
        """Replay every event; returns what was measured."""
        needed, before_s = 0, 0.0
        for now_s, is_arrival, i in self._schedule.events:
            from_s = max(before_s, self._workload.measure_from_s)
            to_s = min(now_s, self._workload.measure_to_s)
            if to_s > from_s:
                self.result.idle_block_s += (to_s - from_s) * (self._tree.used - needed)
            before_s = now_s
            needed += self._schedule.needs(i) if is_arrival else -self._schedule.sets_free(i)
            while self._tool_ends and self._tool_ends[0][0] <= now_s:
                at_s, run_id = heapq.heappop(self._tool_ends)
                self._tool_ended(run_id, at_s)
            if is_arrival:
                self._arrive(i, self._workload.calls[i], now_s)
            else:
                self._end(i, self._workload.calls[i], now_s)
        return self.result

    def check_integrity(self) -> None:
        """Compare the parts with each other; raises AssertionError on the first difference."""
        self._tree.check_integrity()
        assert len(self._order) == len(self._idle)
        for run_id in self._idle:
            assert run_id in self._order
            assert self._tree.is_held(run_id)

    # Events

    def _arrive(self, i: int, call: SimCall, now_s: float) -> None:
        session = self._sessions.setdefault(call.session_id, _Session())
        hit, hit_node = self._tree.hit(call.node)
        self.result.hits[i] = hit
        if self._host is not None and call.node != ROOT and hit < self._depth(call.node):
            self.result.host_hits[i] = self._host.take(hit, call.node, now_s=now_s)
        if call.node != ROOT:
            if session.uses == 0:
                self._read_shared(hit_node, now_s)
            self._read_branches(session, call.node, now_s)
            if session.run is not None:
                share = self._common_depth(session.run.node, call.node) / self._depth(
                    session.run.node
                )
                self._model.read(
                    session.run.wait, now_s=now_s, share=share, session_id=call.session_id
                )
                self._supersede(session, call.node, now_s)
            session.uses += 1
            self._num_runs += 1
            self._running[i] = self._num_runs
            self._tree.hold(self._num_runs, call.node)
        self._extra += call.extra_blocks
        self._make_room(now_s)
        self.result.overcommitted += self._tree.used + self._extra > self._capacity

    def _end(self, i: int, call: SimCall, now_s: float) -> None:
        self._extra -= call.extra_blocks
        if call.node == ROOT:
            return
        session = self._sessions[call.session_id]
        # Another call of the session may have ended while this one ran: that is a branch now.
        self._supersede(session, call.node, now_s)
        step = Step(call.input_tokens, now_s - call.arrival_s, call.ending)
        wait = self._model.paused(
            call.session_id, step, now_s=now_s, pause=self._teller.pause(call)
        )
        run = _Idle(
            self._running.pop(i),
            call.node,
            "paused",
            RunState.PAUSED,
            wait,
            last_used_s=now_s,
            idle_since_s=now_s,
            uses=session.uses,
        )
        session.run = run
        if self._teller.is_end(call):
            run.kind, run.state = "ended", RunState.ENDED
            self._model.ended(wait, now_s=now_s)
        tool_end_s = self._teller.tool_end_s(call)
        if tool_end_s is not None:
            heapq.heappush(self._tool_ends, (tool_end_s, run.run_id))
        self._rank(run, now_s)

    def _tool_ended(self, run_id: int, now_s: float) -> None:
        run = self._idle.get(run_id)
        if run is not None and run.state is RunState.PAUSED:
            self._model.announced(run.wait, now_s=now_s)
            run.idle_since_s = now_s
            self._rank(run, now_s)

    # Runs

    def _rank(self, run: _Idle, now_s: float) -> None:
        self._idle[run.run_id] = run
        capacity = self._capacity
        self._order.put(
            Run(
                run.run_id,
                run.state,
                run.last_used_s,
                idle_since_s=run.idle_since_s,
                size_share=min(1.0, (self._depth(run.node) - run.base) / capacity),
                uses=run.uses,
                p_reuse=self._model.p_reuse(run.wait) if run.state is RunState.PAUSED else 0.0,
                pause_p95_s=self._model.p95_s(run.wait),
                wait=run.wait,
            ),
            now_s=now_s,
            pressure=min(1.0, self._tree.used / capacity),
        )

    def _drop(self, run: _Idle) -> None:
        del self._idle[run.run_id]
        self._order.discard(run.run_id)

    def _supersede(self, session: _Session, node: int, now_s: float) -> None:
        """The session goes on with the path to ``node``; what of its run is not on it is left."""
        run = session.run
        if run is None:
            return
        session.run = None
        base = self._common_depth(run.node, node)
        if base == self._depth(run.node):
            if run.run_id in self._idle:
                self._tree.let_go(run.run_id)
                self._drop(run)
            return
        run.base = base
        self._leave(run, "superseded", now_s)
        session.branches = [*session.branches[1 - _MAX_BRANCHES :], run]

    def _leave(self, run: _Idle, kind: str, now_s: float) -> None:
        run.kind, run.state, run.idle_since_s = kind, RunState.IDLE, now_s
        run.wait = self._model.left(kind, now_s=now_s)
        if run.run_id in self._idle:
            self._rank(run, now_s)

    def _read_branches(self, session: _Session, node: int, now_s: float) -> None:
        """The session takes up branches that it had left, in whole or in part."""
        kept = []
        for run in session.branches:
            common = self._common_depth(run.node, node)
            own = self._depth(run.node) - run.base
            if common <= run.base:
                kept.append(run)
                continue
            self._model.read(run.wait, now_s=now_s, share=(common - run.base) / own)
            if common - run.base < own:
                run.base = common
                self._leave(run, "superseded", now_s)
                kept.append(run)
            elif run.run_id in self._idle:
                self._tree.let_go(run.run_id)
                self._drop(run)
        session.branches = kept

    def _read_shared(self, node: int, now_s: float) -> None:
        """A new session begins with blocks of others: these are a run of their own from now on."""
        first = node
        is_known = node == ROOT
        while node != ROOT:
            for run_id in self._tree.tips_at(node):
                run = self._idle.get(run_id)
                if run is not None and run.kind == "shared":
                    is_known = is_known or node == first
                    self._model.read(run.wait, now_s=now_s)
                    run.last_used_s = now_s
                    run.uses += 1
                    self._leave(run, "shared", now_s)
            node = self._workload.nodes.parent[node]
        if not is_known:
            self._num_runs += 1
            wait = self._model.left("shared", now_s=now_s)
            shared = _Idle(
                self._num_runs, first, "shared", RunState.IDLE, wait, now_s, now_s, uses=2
            )
            self._tree.hold(shared.run_id, first)
            self._rank(shared, now_s)

    def _make_room(self, now_s: float) -> None:
        over = self._tree.used + self._extra - self._capacity
        while over > 0:
            pressure = min(1.0, self._tree.used / self._capacity)
            run_id = self._order.first(now_s=now_s, pressure=pressure)
            if run_id is None:
                break
            run = self._idle[run_id]
            for node, start, blocks in self._tree.give_up(run_id, over):
                over -= blocks
                if self._workload.is_measured(now_s):
                    self.result.victims[run.kind] += blocks
                if self._host is not None:
                    self._host.put(node, start, blocks, now_s=now_s)
            if not self._tree.is_held(run_id):
                self._drop(run)

    def _depth(self, node: int) -> int:
        return self._workload.nodes.depth[node]

    def _common_depth(self, a: int, b: int) -> int:
        """Blocks that the paths to two nodes have in common."""
        nodes = self._workload.nodes
        while a != b:
            if ROOT in (a, b):
                return 0
            if nodes.depth[a] >= nodes.depth[b]:
                a = nodes.parent[a]
            else:
                b = nodes.parent[b]
        return nodes.depth[a] if a != ROOT else 0
