"""Agent execution graphs, learned online: what each workflow's sessions do next, and when."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Generator, Hashable
from typing import Any

from saga_core.aeg import Aeg
from saga_core.aeg_view import declare, described
from saga_core.evidence import MAX_STEP, Evidence, stretch_of
from saga_core.fields import check_version, fields_of, items_of
from saga_core.outlook import Outlook, Walk, Workflow
from saga_core.standing import Standing
from saga_core.tool_durations import ToolDurations, key_of, key_state
from saga_core.transitions import START, Node

VERSION = 1
WEEK_S = 7 * 86_400.0
__all__ = ["VERSION", "WEEK_S", "Graphs", "Node", "Outlook", "Walk", "Workflow"]

_MUCH = 256
_STALE = 16
_MAX_WORKED_OUT = 1024
_KNOWN_ELSEWHERE = 30.0
_MAX_HEAD_START = 0.8


class Graphs:
    """The graphs of all workflows.

    A step is learned when it ends, once: by its number. What the sessions of all workflows do is
    learned beside, and stands in where a workflow has shown little. ``now_s`` is a time of one
    clock that all who merge their graphs share, and that goes on over restarts (Unix time);
    where it goes back it counts as the latest.

    Args:
        max_workflows: the least recently used one is forgotten beyond as many.
        half_life_s: age of evidence at which it counts half, seconds; infinite: it never ages.
        theta_conf: an edge that is less likely is not acted upon, 0 to 1 (the SAGA paper: 0.7).
        cold_tasks: a workflow is cold before it showed so many tasks to their end; as few as a
            fifth are enough where other workflows have shown the nodes that it goes through.
        max_edges: the least recently used workflow is forgotten beyond as many edges of all.
    """

    def __init__(
        self,
        *,
        max_workflows: int = 1000,
        half_life_s: float = WEEK_S,
        theta_conf: float = 0.7,
        cold_tasks: float = 30.0,
        max_edges: int = 1_000_000,
    ) -> None:
        self._max_workflows = max_workflows
        self._half_life_s = half_life_s
        self._theta_conf = theta_conf
        self._cold_tasks = cold_tasks
        self._max_edges = max_edges
        self._graphs: OrderedDict[Workflow, Evidence] = OrderedDict()
        self._root = Evidence(half_life_s)
        self._durations = ToolDurations()
        self._edges = 0

    def __len__(self) -> int:
        return len(self._graphs)

    # Learning

    def stepped(
        self,
        walk: Walk,
        node: Node,
        *,
        now_s: float,
        step: int | None = None,
        output_tokens: int | None = None,
        observation_tokens: int | None = None,
        overlap: float | None = None,
    ) -> bool:
        """A step of the session has ended; returns whether it was learned.

        A step that the walk has passed, or an ended walk, changes nothing. The same step again, a
        retry, stands in the place of the one before and is not counted. After steps that were not
        seen the walk goes on, and what led there is not learned.

        Args:
            step: its number in the session, from 0; None: the one after the last.
            output_tokens: length of its answer.
            observation_tokens: what its prompt holds beyond the step before it: the tool's result.
            overlap: share of the prefix cached by the step before that its prompt began with,
                0 to 1.
        """
        number = walk.step + 1 if step is None else min(step, MAX_STEP)
        if walk.has_ended or number < max(walk.step, 0):
            return False
        if number == walk.step:
            walk.last = (*walk.last[:-1], node)
            walk.has_returned = False
            return False
        graph = self._graph(walk.workflow)
        history, stretch = walk.last, stretch_of(max(walk.step, 0))
        observed = None
        if observation_tokens is not None and history[-1] != START:
            observed = (history[-1], observation_tokens)
        self._root.advance(now_s)
        graph.advance(now_s)
        edges = graph.transitions.num_nexts
        graph.size(node, output_tokens, observed)
        if number == walk.step + 1:
            if graph.tasks < self._cold_tasks * graph.weight:
                self._note_familiar(graph, history[-1])
            if overlap is not None:
                overlap = min(overlap, 1.0) if overlap > 0.0 else 0.0
            graph.step(history, stretch, node, overlap)
            self._root.step(history, None, node, overlap)
        walk.take(node, number)
        self._edges += graph.transitions.num_nexts - edges
        if self._edges > self._max_edges or len(self._graphs) > self._max_workflows:
            self._keep_bounds()
        return True

    def returned(self, walk: Walk, pause_s: float) -> bool:
        """The next request of the session came, so long after its last step; returns whether it
        was learned. A retry of the last step does not count: the caller does not tell of it."""
        if walk.has_ended or walk.has_returned or walk.step < 0 or not math.isfinite(pause_s):
            return False
        walk.has_returned = True
        self._durations.observe(walk.workflow, walk.last[-1].tool, max(0.0, pause_s))
        return True

    def ended(self, walk: Walk, *, now_s: float) -> bool:
        """The session takes no further step; returns whether it was learned."""
        if walk.has_ended or walk.step < 0:
            walk.has_ended = True
            return False
        walk.has_ended = True
        graph = self._graphs.get(walk.workflow)
        stretch = stretch_of(walk.step)
        for evidence in (self._root, graph):
            if evidence is None:
                continue
            evidence.advance(now_s)
            evidence.tasks += evidence.weight
            # A request came and failed: it did not end where it stands.
            if not walk.has_returned:
                edges = evidence.transitions.num_nexts
                evidence.end(walk.last, stretch if evidence is graph else None, walk.step)
                if evidence is graph:
                    self._edges += evidence.transitions.num_nexts - edges
        return True

    # What is expected

    def outlook(self, walk: Walk) -> Outlook:
        """What is expected of a session that stands there; see Outlook.

        Of a workflow that has shown much it is worked out anew when a sixteenth more has come.
        """
        graph = self._graphs.get(walk.workflow)
        stretch = stretch_of(max(walk.step, 0))
        if graph is None or graph.learned < _MUCH:
            return self._outlook(walk, graph, stretch)
        place = walk.last, stretch
        known = graph.worked_out.get(place)
        if known is not None and graph.learned - known[0] <= known[0] // _STALE:
            found: Outlook = known[1]
            return found
        found = self._outlook(walk, graph, stretch)
        if len(graph.worked_out) >= _MAX_WORKED_OUT:
            graph.worked_out.clear()
        graph.worked_out[place] = graph.learned, found
        return found

    def _outlook(self, walk: Walk, graph: Evidence | None, stretch: int) -> Outlook:
        standing = Standing(graph, self._root, walk.last, stretch)
        p_end = standing.p_end()
        node, p_node = standing.likeliest()
        p_node *= 1.0 - p_end
        tool = walk.last[-1].tool
        steps_left = standing.steps_left(p_end)
        p50_s, p95_s = self._durations.p50_p95_s(walk.workflow, tool)
        tokens = (self._root if graph is None else graph).mean_output_tokens()
        return Outlook(
            p_end=p_end,
            p_reuse=(1.0 - p_end) * standing.overlap(),
            next_node=node if p_node >= self._theta_conf else None,
            confidence=max(p_end, p_node),
            pause_p50_s=p50_s,
            pause_p95_s=p95_s,
            steps_left=steps_left,
            tokens_left=steps_left * tokens,
            is_cold=graph is None or self._is_cold(graph),
        )

    def next_nodes(self, walk: Walk) -> dict[Node | None, float]:
        """Probability of each next node, and as None that of one that never followed.

        They sum to 1 - ``outlook(walk).p_end``.
        """
        stretch = stretch_of(max(walk.step, 0))
        standing = Standing(self._graphs.get(walk.workflow), self._root, walk.last, stretch)
        goes_on = 1.0 - standing.p_end()
        found: dict[Node | None, float] = {
            node: goes_on * standing.p_next(node) for node in sorted(standing.nexts(), key=str)
        }
        found[None] = max(0.0, goes_on - sum(found.values()))
        return found

    def remaining_s(self, walk: Walk, age_s: float, q: float = 0.5) -> float:
        """Quantile ``q`` of the time left of the walk's pause that has lasted ``age_s`` seconds."""
        return self._durations.remaining_s(walk.workflow, walk.last[-1].tool, age_s, q)

    def pause_s(self, workflow: Workflow, tool: str | None, q: float) -> float:
        """Quantile ``q`` of the workflow's pauses for a tool, seconds; None: for no tool."""
        return self._durations.quantile_s(workflow, tool, q)

    # Graphs as a whole

    def workflows(self) -> tuple[Workflow, ...]:
        """The workflows that have a graph, least recently used first."""
        return tuple(self._graphs)

    def graph(self, workflow: Workflow, name: str = "") -> Aeg | None:
        """The workflow's graph as it is known now; None when it has none.

        Args:
            name: what the graph is called; by default the workflow as text.
        """
        evidence = self._graphs.get(workflow)
        if evidence is None:
            return None
        return described(
            evidence,
            self._durations,
            workflow,
            name=name or str(workflow),
            is_cold=self._is_cold(evidence),
        )

    def put(self, workflow: Workflow, aeg: Aeg, *, now_s: float) -> None:
        """Let the graph be the one that was declared, in the place of what was learned.

        It counts as ``cold_tasks`` passes through each node, so that what is seen goes on from it.
        """
        self.forget(workflow)
        graph = self._graph(workflow)
        graph.advance(now_s)
        declare(aeg, graph, self._durations, workflow, passes=max(self._cold_tasks, 1.0))
        self._edges += graph.transitions.num_nexts
        self._keep_bounds()

    def forget(self, workflow: Workflow) -> bool:
        """Drop the workflow's graph; returns whether it had one."""
        graph = self._graphs.pop(workflow, None)
        if graph is None:
            return False
        self._edges -= graph.transitions.num_nexts
        return True

    def size(self, workflow: Workflow) -> tuple[float, int, int, bool] | None:
        """Tasks, nodes and edges of the workflow's graph, and whether it is cold; cheap."""
        graph = self._graphs.get(workflow)
        if graph is None:
            return None
        tasks, nodes = graph.tasks / graph.weight, graph.nodes
        seen = (graph.transitions.get((node,)) for node in (START, *nodes))
        edges = sum(sum(to in nodes for to in each.nexts) for each in seen if each is not None)
        return tasks, len(nodes), edges, self._is_cold(graph)

    # State

    def merge(self, other: Graphs) -> None:
        """Add what others have learned, such as another replica; ``other`` stays as it is.

        Evidence of both must be apart: a state that has been merged counts twice when it is merged
        again.
        """
        for workflow, theirs in other._graphs.items():
            graph = self._graph(workflow)
            before = graph.transitions.num_nexts
            graph.merge(theirs)
            self._edges += graph.transitions.num_nexts - before
        self._root.merge(other._root)
        self._durations.merge(other._durations)
        self._keep_bounds()

    def state(self) -> dict[str, Any]:
        """All that was learned, as values of JSON.

        Raises:
            StateError: a workflow is not a text or a tuple of texts.
        """
        saving = self.saving()
        while True:
            try:
                next(saving)
            except StopIteration as done:
                state: dict[str, Any] = done.value
                return state

    def saving(self) -> Generator[None, None, dict[str, Any]]:
        """Make the state a little at a time, some milliseconds, for those who cannot wait longer.

        Its value when it is done is the state. What is learned in between may be in it or not.

        Raises:
            StateError: a workflow is not a text or a tuple of texts.
        """
        graphs = []
        for workflow, graph in list(self._graphs.items()):
            graphs.append({"workflow": key_state(workflow), "graph": graph.state()})
            yield
        root = self._root.state()
        yield
        durations = yield from self._durations.state()
        return {"version": VERSION, "root": root, "graphs": graphs, "durations": durations}

    @classmethod
    def from_state(cls, state: Any, **options: Any) -> Graphs:
        """What ``state`` gave.

        Args:
            options: those of the class.

        Raises:
            StateError: it is of another version, or not such a state.
        """
        fields = fields_of(state, "state")
        check_version(fields, VERSION, "state")
        graphs = cls(**options)
        half_life_s = graphs._half_life_s
        graphs._root = Evidence.from_state(fields.get("root"), half_life_s, "root")
        for item, where in items_of(fields, "graphs", ""):
            of = fields_of(item, where)
            workflow = key_of(of.get("workflow"), f"{where}.workflow")
            graphs.forget(workflow)
            graph = Evidence.from_state(of.get("graph"), half_life_s, f"{where}.graph")
            graphs._graphs[workflow] = graph
            graphs._edges += graph.transitions.num_nexts
            graphs._keep_bounds()
        graphs._durations = ToolDurations.from_state(fields.get("durations"))
        return graphs

    def check_integrity(self) -> None:
        """Raise AssertionError when what is counted contradicts itself."""
        if len(self._graphs) > self._max_workflows:
            raise AssertionError("more workflows than are allowed")
        for evidence in (self._root, *self._graphs.values()):
            evidence.check_integrity()
        edges = sum(graph.transitions.num_nexts for graph in self._graphs.values())
        if edges != self._edges:
            raise AssertionError(f"{edges} edges, counted as {self._edges}")

    def _graph(self, workflow: Workflow) -> Evidence:
        graph = self._graphs.get(workflow)
        if graph is None:
            graph = self._graphs[workflow] = Evidence(self._half_life_s)
        else:
            self._graphs.move_to_end(workflow)
        return graph

    def _keep_bounds(self) -> None:
        while len(self._graphs) > self._max_workflows or (
            self._edges > self._max_edges and len(self._graphs) > 1
        ):
            self.forget(self._next_to_go())

    def _next_to_go(self) -> Workflow:
        """The least recently used workflow of the owner that has most: no other pays for it."""
        owners = Counter(map(_owner, self._graphs))
        (greatest, most), *others = owners.most_common(2)
        if others and others[0][1] == most:
            return next(iter(self._graphs))
        return next(workflow for workflow in self._graphs if _owner(workflow) == greatest)

    def _note_familiar(self, graph: Evidence, node: Node) -> None:
        everywhere = self._root.transitions.get((node,))
        here = graph.transitions.get((node,))
        others = 0.0 if everywhere is None else everywhere.went / self._root.weight
        others -= 0.0 if here is None else here.went / graph.weight
        graph.steps += graph.weight
        if others >= _KNOWN_ELSEWHERE:
            graph.familiar += graph.weight

    def _is_cold(self, graph: Evidence) -> bool:
        familiar = graph.familiar / graph.steps if graph.steps else 0.0
        needed = self._cold_tasks * (1.0 - _MAX_HEAD_START * familiar)
        return graph.tasks / graph.weight < needed * (1.0 - 1e-9)


def _owner(workflow: Workflow) -> Hashable:
    """Whose workflow it is: the first part of a key that has parts."""
    return workflow[0] if isinstance(workflow, tuple) and workflow else None
