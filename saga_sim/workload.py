"""Turns a trace into a workload: sessions drawn at random, arriving at one worker.

The blocks of all calls form a forest, since a block's id has one predecessor. It is cut wherever
a chain of the trace begins, ends or branches; the pieces are the *nodes* on which the simulators
work, so that a call's whole prompt is named by the last node of its path.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from saga_sim.traces import TraceError
from saga_sim.traces.model import Call, Trace

SPLIT_GAP_S = 3600.0
"""A session that pauses longer counts as two: no cache is meant to wait that long."""

ROOT = -1


@dataclass(frozen=True, slots=True)
class SimCall:
    """A call of the workload; times on the workload's clock, from 0.

    Attributes:
        node: last node of its prompt's path; ``ROOT`` when the prompt fills no block.
        input_tokens: length of its prompt.
        extra_blocks: blocks held while it runs beyond those of its path: the last, partly filled
            one and the answer's.
        tool_end_s: when the tool that its answer called ends; None when not known.
        next_s: arrival of the session's next call; None after the last.
    """

    arrival_s: float
    end_s: float
    session_id: str
    node: int
    input_tokens: int
    output_tokens: int
    extra_blocks: int
    ending: str
    tool: str | None
    tool_end_s: float | None
    next_s: float | None


@dataclass(slots=True)
class Nodes:
    """The forest of block runs: per node its parent, its length and its depth, in blocks."""

    parent: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    """Blocks of the path down to and including the node."""

    def add(self, parent: int, length: int) -> int:
        """Append a node; returns its number."""
        above = self.depth[parent] if parent != ROOT else 0
        self.parent.append(parent)
        self.length.append(length)
        self.depth.append(above + length)
        return len(self.parent) - 1


@dataclass(slots=True)
class Workload:
    """Calls in the order of arrival over a forest of nodes.

    Attributes:
        footprint_blocks: mean blocks of live sessions' prompts over the measured span; what several
            share counts for each.
        measure_from_s, measure_to_s: the measured span; before it the caches warm up, after it
            the last sessions end.
    """

    name: str
    block_tokens: int
    nodes: Nodes
    calls: list[SimCall]
    measure_from_s: float
    measure_to_s: float
    footprint_blocks: float = 0.0

    def is_measured(self, at_s: float) -> bool:
        """Whether a moment lies in the measured span."""
        return self.measure_from_s <= at_s < self.measure_to_s

    def capacity_at(self, pressure: float) -> int:
        """KV capacity in blocks at which the live footprint ÷ capacity is ``pressure``."""
        return max(1, round(self.footprint_blocks / pressure))


@dataclass(frozen=True, slots=True)
class Draw:
    """How sessions are drawn.

    Attributes:
        live_sessions: mean number of sessions alive at a time.
        measured_calls: about how many calls the measured span holds.
        seed: of the draw.
    """

    live_sessions: float = 40.0
    measured_calls: int = 12_000
    seed: int = 0


DECODE_S_PER_TOKEN = 0.02
MIN_DURATION_S = 1e-3


def build_workload(trace: Trace, draw: Draw) -> Workload:
    """Draw families of sessions from ``trace`` and let them arrive by a Poisson process.

    A *family* is a session with all that it spawned; it is cut where all of it pauses for longer
    than ``SPLIT_GAP_S``. Families are dealt from a shuffled deck, which is shuffled anew when it
    is empty; each deal has fresh session and block ids, save for blocks that several families of
    the trace share. A trace on a shared clock keeps its own arrivals.
    """
    whole = families_of(trace)
    forest = _Forest(whole)
    families = [part for family in whole for part in split(family)]
    rng = random.Random(draw.seed)
    if trace.clock == "shared":
        origin_s = min(family[0].arrival_s for family in families)
        starts = [(family[0].arrival_s, i) for i, family in enumerate(families)]
        span_s = max(end_s_of(call) for family in families for call in family) - origin_s
        measure_from_s, measure_to_s = origin_s + 0.2 * span_s, origin_s + span_s
    else:
        starts, measure_from_s, measure_to_s = _arrivals(families, draw, rng)
    builder = _Builder(trace, forest)
    for copy, (start_s, index) in enumerate(sorted(starts)):
        builder.deal(families[index], start_s, copy)
    calls = sorted(builder.calls, key=lambda call: (call.arrival_s, call.session_id))
    workload = Workload(
        trace.name, trace.block_tokens, builder.nodes, calls, measure_from_s, measure_to_s
    )
    workload.footprint_blocks = _mean_footprint(workload)
    return workload


def families_of(trace: Trace) -> list[list[Call]]:
    """Calls of each family, a session with all that it spawned, in the order of arrival.

    Each has a duration, a guess where the trace does not say.
    """
    parent = {s[0].session_id: s[0].parent_session_id for s in trace.sessions}

    def root(session_id: str) -> str:
        seen = {session_id}
        above = parent.get(session_id)
        while above in parent and above not in seen:
            seen.add(above)
            session_id, above = above, parent[above]
        return session_id

    families: dict[str, list[Call]] = {}
    for session in trace.sessions:
        calls = _with_durations(session)
        families.setdefault(root(session[0].session_id), []).extend(calls)
    for family in families.values():
        family.sort(key=lambda call: (call.arrival_s, call.session_id))
    return list(families.values())


def split(family: list[Call]) -> list[list[Call]]:
    """Cut a family where all of it pauses for longer than ``SPLIT_GAP_S``."""
    parts: list[list[Call]] = [[]]
    busy_until_s = family[0].arrival_s
    for call in family:
        if call.arrival_s - busy_until_s > SPLIT_GAP_S:
            parts.append([])
        parts[-1].append(call)
        busy_until_s = max(busy_until_s, end_s_of(call))
    return parts


def end_s_of(call: Call) -> float:
    """When the call ended, on the trace's clock."""
    return call.arrival_s + max(call.duration_s or 0.0, MIN_DURATION_S)


def _with_durations(session: Sequence[Call]) -> list[Call]:
    """Fill in how long a call ran where the trace does not say, ending before the next one."""
    filled = []
    for i, call in enumerate(session):
        if call.duration_s is None:
            guess_s = 1.0 + DECODE_S_PER_TOKEN * call.output_tokens
            if i + 1 < len(session):
                guess_s = min(guess_s, 0.8 * max(0.0, session[i + 1].arrival_s - call.arrival_s))
            call = replace(call, duration_s=guess_s)
        filled.append(call)
    return filled


def _arrivals(
    families: list[list[Call]], draw: Draw, rng: random.Random
) -> tuple[list[tuple[float, int]], float, float]:
    """Start times with the family that starts, and the measured span."""
    lives_s = [max(map(end_s_of, family)) - family[0].arrival_s for family in families]
    rate = draw.live_sessions / (sum(lives_s) / len(lives_s))
    calls_per_s = rate * sum(map(len, families)) / len(families)
    # Warm until nine tenths of the sessions that live at a time in the long run are there.
    warm_s = max(lives_s)
    for life_s in sorted(lives_s):
        if rate * sum(min(x, life_s) for x in lives_s) / len(lives_s) >= 0.9 * draw.live_sessions:
            warm_s = life_s
            break
    until_s = warm_s + draw.measured_calls / calls_per_s
    starts: list[tuple[float, int]] = []
    deck: list[int] = []
    at_s = rng.expovariate(rate)
    while at_s < until_s:
        if not deck:
            deck = list(range(len(families)))
            rng.shuffle(deck)
        starts.append((at_s, deck.pop()))
        at_s += rng.expovariate(rate)
    return starts, warm_s, until_s


class _Forest:
    """The trace's blocks cut into pieces; a piece is known by its first block id."""

    def __init__(self, families: list[list[Call]]) -> None:
        cuts = {edge for f in families for c in f for r in c.chain for edge in (r.start, r.stop)}
        self._cuts = sorted(cuts)
        self.parent: dict[int, int] = {}
        self.length: dict[int, int] = {}
        self._tips: dict[tuple[int, int, int], int] = {}
        self.common: set[int] = set()
        first_user: dict[int, int] = {}
        for i, family in enumerate(families):
            seen: set[int] = set()
            for call in family:
                tip = self.tip(call.chain)
                while tip != ROOT and tip not in seen:
                    seen.add(tip)
                    if first_user.setdefault(tip, i) != i:
                        self.common.add(tip)
                    tip = self.parent[tip]

    def tip(self, chain: Sequence[range]) -> int:
        """The last piece of a chain; ROOT when it is empty."""
        above = ROOT
        for run in chain:
            key = (above, run.start, run.stop)
            if key not in self._tips:
                self._tips[key] = self._pieces(above, run)
            above = self._tips[key]
        return above

    def _pieces(self, above: int, run: range) -> int:
        at = bisect_left(self._cuts, run.start)
        while self._cuts[at] < run.stop:
            start, stop = self._cuts[at], self._cuts[at + 1]
            if self.parent.setdefault(start, above) != above:
                raise TraceError(
                    f"block {start} follows two different blocks; ids must be prefixes"
                )
            self.length[start] = stop - start
            above = start
            at += 1
        return above


class _Builder:
    """Deals families into one workload."""

    def __init__(self, trace: Trace, forest: _Forest) -> None:
        self._block_tokens = trace.block_tokens
        self._forest = forest
        self._common: dict[int, int] = {}
        self.nodes = Nodes()
        self.calls: list[SimCall] = []

    def deal(self, family: list[Call], start_s: float, copy: int) -> None:
        """Add one copy of a family under fresh ids."""
        shift_s = start_s - family[0].arrival_s
        own: dict[int, int] = {}
        next_s: dict[str, float] = {}
        dealt: list[SimCall] = []
        for call in reversed(family):
            session_id = f"{call.session_id}#{copy}"
            end_s = end_s_of(call) + shift_s
            held = -(-(call.input_tokens + call.output_tokens) // self._block_tokens)
            dealt.append(
                SimCall(
                    arrival_s=call.arrival_s + shift_s,
                    end_s=end_s,
                    session_id=session_id,
                    node=self._node(self._forest.tip(call.chain), own),
                    input_tokens=call.input_tokens,
                    output_tokens=call.output_tokens,
                    extra_blocks=max(0, held - call.num_blocks),
                    ending=call.ending,
                    tool=call.tool,
                    tool_end_s=None if call.tool_s is None else end_s + call.tool_s,
                    next_s=next_s.get(call.session_id),
                )
            )
            next_s[call.session_id] = call.arrival_s + shift_s
        self.calls += reversed(dealt)

    def _node(self, piece: int, own: dict[int, int]) -> int:
        """This copy's node for a piece of the forest."""
        missing = []
        while piece != ROOT:
            known = self._common if piece in self._forest.common else own
            if piece in known:
                break
            missing.append(piece)
            piece = self._forest.parent[piece]
        node = ROOT if piece == ROOT else known[piece]
        for piece in reversed(missing):
            node = self.nodes.add(node, self._forest.length[piece])
            known = self._common if piece in self._forest.common else own
            known[piece] = node
        return node


def _mean_footprint(workload: Workload) -> float:
    """Mean blocks of live sessions over the measured span.

    A session's part is the path of its latest call, from that call's arrival until the next one's,
    or until its end.
    """
    total = 0.0
    for call in workload.calls:
        from_s = max(call.arrival_s, workload.measure_from_s)
        to_s = min(call.end_s if call.next_s is None else call.next_s, workload.measure_to_s)
        if to_s > from_s and call.node != ROOT:
            total += (to_s - from_s) * (workload.nodes.depth[call.node] + call.extra_blocks)
    return total / (workload.measure_to_s - workload.measure_from_s)
