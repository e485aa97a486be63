"""How well graphs learned online foretell: the next step, the end of a session, its pauses."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from saga_core.durations import PauseDurations
from saga_core.graph import Graphs, Walk
from saga_core.transitions import Node
from saga_core.types import ToolType, tool_type_of
from saga_sim.aeg.measures import Coverage, Ends, auc_of, coverage, ends_of, share_of
from saga_sim.aeg.sequences import Run, Sequences

MAX_ORDER = 3
END = Node("<end>")


@dataclass(frozen=True, slots=True)
class Prediction:
    """What graphs foretold of sessions that were held out.

    Accuracies are shares of outcomes, each a next step or an end, the first step included.

    Attributes:
        folds: into how many the sessions were parted; all but one were learned from.
        sessions, outcomes: that were foretold.
        frozen, prequential: accuracy of the graphs as learned; and of such as go on learning.
        orders: accuracy of tables of order 0 to 3 from the same training sessions; an unseen
            context falls back on the next shorter one.
        in_sample: the same of tables that have seen the evaluated sessions too.
        ceiling: the best possible; None: not known.
        ends, ends_order1: how ends were foretold; AUC of the share of ends by node.
        pauses: coverage of P95 by who foretold it.
    """

    source: str
    folds: int
    sessions: int
    outcomes: int
    frozen: float
    prequential: float
    orders: tuple[float, ...]
    in_sample: tuple[float, ...]
    ceiling: float | None
    ends: Ends
    ends_order1_auc: float
    pauses: dict[str, Coverage] = field(default_factory=dict)

    @property
    def best_order(self) -> int:
        """The order whose table does best on the evaluated sessions: an oracle's choice."""
        return max(range(len(self.orders)), key=lambda order: self.orders[order])


def split(runs: Sequence[Run], folds: int, seed: int = 0) -> list[tuple[list[Run], list[Run]]]:
    """Part sessions at random into folds: each time those to learn from, and those held out.

    Every session is held out once.
    """
    shuffled = sorted(runs, key=lambda run: run.session_id)
    random.Random(seed).shuffle(shuffled)
    return [
        ([run for at, run in enumerate(shuffled) if at % folds != fold], shuffled[fold::folds])
        for fold in range(folds)
    ]


def evaluate(
    sequences: Sequences, *, folds: int = 5, seed: int = 0, half_life_s: float = math.inf
) -> Prediction:
    """Learn from all folds of the sessions but one, measure on that one; pooled over the folds.

    Nothing of a session is known to what foretells it. See Prediction.
    """
    held_out = [_Fold(learned, evaluated, half_life_s) for learned, evaluated in split(
        sequences.runs, folds, seed
    )]  # fmt: skip
    fixed = [seen for fold in held_out for seen in fold.fixed]
    moving = [seen for fold in held_out for seen in fold.moving]
    flat = [seen for of in fixed for seen in of]
    orders = range(MAX_ORDER + 1)
    own = [_Table(order, sequences.runs) for order in orders]
    return Prediction(
        source=sequences.name,
        folds=folds,
        sessions=len(fixed),
        outcomes=len(flat),
        frozen=share_of(seen.is_right for seen in flat),
        prequential=share_of(seen.is_right for of in moving for seen in of),
        orders=tuple(share_of(hit for f in held_out for hit in f.hits[order]) for order in orders),
        in_sample=tuple(share_of(table.hits(sequences.runs)) for table in own),
        ceiling=sequences.ceiling,
        ends=ends_of([(s.p_end, s.did_end) for s in flat if s.p_end is not None], own[0].p_end()),
        ends_order1_auc=auc_of([pair for fold in held_out for pair in fold.end_scores]),
        pauses={
            name: coverage([pairs for fold in held_out for pairs in fold.pauses[name]], seed=seed)
            for name in held_out[0].pauses
            if any(pairs for fold in held_out for pairs in fold.pauses[name])
        },
    )


class _Fold:
    """What was foretold of the sessions of one fold, by what was learned from the others."""

    def __init__(self, learned: list[Run], evaluated: list[Run], half_life_s: float) -> None:
        graphs = _Watched(half_life_s)
        for run in learned:
            graphs.foretell(run, learn=True)
        frozen = graphs.copy()
        self.fixed = [frozen.foretell(run, learn=False) for run in evaluated]
        self.moving = [graphs.foretell(run, learn=True) for run in evaluated]
        tables = [_Table(order, learned) for order in range(MAX_ORDER + 1)]
        self.hits = [list(table.hits(evaluated)) for table in tables]
        self.end_scores = list(tables[1].end_scores(evaluated))
        self.pauses = {
            "graph, frozen": _by_graph(self.fixed),
            "graph, goes on learning": _by_graph(self.moving),
            **_by_baselines(learned, evaluated),
        }


@dataclass(frozen=True, slots=True)
class _Seen:
    """One outcome beside what was foretold; no end can come before the first step."""

    is_right: bool
    p_end: float | None
    did_end: bool
    pause_s: float | None
    p95_s: float


class _Watched:
    """Graphs with sessions led through them, one after the other."""

    def __init__(self, half_life_s: float) -> None:
        self._options = {"half_life_s": half_life_s, "theta_conf": 0.0}
        self._graphs = Graphs(**self._options)  # type: ignore[arg-type]
        self._now_s = 0.0

    def copy(self) -> _Watched:
        """The same, to go another way."""
        copied = _Watched(self._options["half_life_s"])
        copied._graphs = Graphs.from_state(self._graphs.state(), **self._options)
        copied._now_s = self._now_s
        return copied

    def foretell(self, run: Run, *, learn: bool) -> list[_Seen]:
        """What is foretold at each place of a session, beside what came."""
        walk, found = Walk(run.workflow), []
        pause_s = None
        for at in range(len(run.steps) + 1):
            node = run.steps[at].node if at < len(run.steps) else END
            outlook = self._graphs.outlook(walk)
            expects_end = outlook.p_end >= outlook.confidence
            expected = END if expects_end else outlook.next_node
            found.append(
                _Seen(
                    is_right=expected == node,
                    p_end=outlook.p_end if at else None,
                    did_end=node is END,
                    pause_s=pause_s if node is not END else None,
                    p95_s=outlook.pause_p95_s,
                )
            )
            self._now_s += pause_s or 1.0
            if node is not END:
                self._move(walk, node, pause_s, learn=learn)
                pause_s = run.steps[at].pause_s
            elif learn:
                self._graphs.ended(walk, now_s=self._now_s)
        return found

    def _move(self, walk: Walk, node: Node, pause_s: float | None, *, learn: bool) -> None:
        if not learn:
            walk.take(node)
            return
        if pause_s is not None:
            self._graphs.returned(walk, pause_s)
        self._graphs.stepped(walk, node, now_s=self._now_s)


class _Table:
    """Counts of outcomes by the last nodes, from training sessions; shorter ones for a fallback."""

    def __init__(self, order: int, runs: Iterable[Run]) -> None:
        self._order = order
        self._counts: dict[Hashable, Counter[Node]] = {}
        for run in runs:
            for past, node in _outcomes(run):
                for length in range(order + 1):
                    self._counts.setdefault(_context(past, length), Counter())[node] += 1

    def hits(self, runs: Iterable[Run]) -> Iterator[bool]:
        """Whether each outcome is the one counted most after the longest known context."""
        for run in runs:
            for past, node in _outcomes(run):
                yield self._after(past).most_common(1)[0][0] == node

    def p_end(self) -> float:
        """Share of steps that were the last."""
        counts = self._counts[_context([], 0)]
        starts = counts[END]
        return starts / max(1, sum(counts.values()) - starts)

    def end_scores(self, runs: Iterable[Run]) -> Iterable[tuple[float, bool]]:
        """Share of ends after each step's context, and whether it was the last."""
        for run in runs:
            for past, node in _outcomes(run):
                if past:
                    counts = self._after(past)
                    yield counts[END] / counts.total(), node is END

    def _after(self, past: list[Node]) -> Counter[Node]:
        for length in range(self._order, -1, -1):
            found = self._counts.get(_context(past, length))
            if found is not None:
                return found
        return Counter({END: 1})


def _context(past: list[Node], length: int) -> Hashable:
    # A session's first steps have less behind them: they are contexts of their own.
    return (length, tuple(past[-length:]) if length else ())


def _outcomes(run: Run) -> Iterable[tuple[list[Node], Node]]:
    past: list[Node] = []
    for step in run.steps:
        yield past, step.node
        past.append(step.node)
    yield past, END


_Pairs = list[tuple[float, float]]


def _by_graph(found: Sequence[Sequence[_Seen]]) -> list[_Pairs]:
    """Each session's pauses, with the P95 that was foretold before them."""
    return [[(s.pause_s, s.p95_s) for s in of if s.pause_s is not None] for of in found]


def _by_baselines(learned: Sequence[Run], evaluated: Sequence[Run]) -> dict[str, list[_Pairs]]:
    """The same by simpler means: what they are called → what they say."""

    def by_tool(run: Run, node: Node) -> Hashable:
        return run.workflow, node.tool

    def by_nothing(run: Run, node: Node) -> Hashable:
        return "all"

    rows = {}
    for name, key in (("last 512-1024 by tool", by_tool), ("last 512-1024 of all", by_nothing)):
        durations = PauseDurations()
        for run, node, pause_s in _measured(learned):
            durations.observe(key(run, node), pause_s)
        rows[name] = _told(evaluated, durations, key)
    rows["prior"] = _told(evaluated, PauseDurations(), by_tool)
    return rows


def _told(
    runs: Iterable[Run], durations: PauseDurations, key: Callable[[Run, Node], Hashable]
) -> list[_Pairs]:
    return [
        [
            (pause_s, durations.p95_s(key(run, node), _type_of(node)))
            for _, node, pause_s in _measured([run])
        ]
        for run in runs
    ]


def _measured(runs: Iterable[Run]) -> Iterator[tuple[Run, Node, float]]:
    for run in runs:
        for step in run.steps:
            if step.pause_s is not None:
                yield run, step.node, step.pause_s


def _type_of(node: Node) -> ToolType:
    return ToolType.HUMAN if node.tool is None else tool_type_of(node.tool)


def describe(result: Prediction) -> str:
    """The figures as lines of text."""
    best = result.best_order
    ceiling = "" if result.ceiling is None else f", ceiling {result.ceiling:.3f}"
    lines = [
        f"{result.source}: {result.outcomes} outcomes of {result.sessions} sessions, each held "
        f"out once in {result.folds} folds",
        f"  next step or end: frozen {result.frozen:.3f}, goes on learning "
        f"{result.prequential:.3f}{ceiling}",
        f"  tables of order 0-3: {_row(result.orders)} (best: order {best}, the graph "
        f"{result.frozen - result.orders[best]:+.3f} to it, "
        f"{result.frozen - result.orders[0]:+.3f} to order 0)",
        f"  the same, fitted to the sessions themselves: {_row(result.in_sample)}",
        f"  end: AUC {result.ends.auc:.3f} (order 1: {result.ends_order1_auc:.3f}), Brier "
        f"{result.ends.brier:.4f} (the share of ends: {result.ends.brier_of_share:.4f}), ECE "
        f"{result.ends.ece:.4f}",
    ]
    lines += [
        f"    {count:6d} steps foretold to end {p:.3f}, ended {came:.3f}"
        for count, p, came in result.ends.bins
    ]
    for name, seen in result.pauses.items():
        lines.append(
            f"  P95 of pauses, {name}: covers {seen.share:.3f} [{seen.low:.3f}, {seen.high:.3f}] "
            f"of {seen.pauses} in {seen.sessions} sessions, median {seen.median_ratio:.2f} x actual"
        )
    return "\n".join(lines)


def _row(values: Iterable[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)
