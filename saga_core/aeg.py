"""An agent execution graph as a document: read from JSON, written as JSON, DOT and Mermaid."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from saga_core.fields import StateError, check_version, fields_of, items_of, label_of, number_of
from saga_core.transitions import START, Node

VERSION = 1
END_ID = "<end>"
START_ID = "<start>"
MAX_NODES = 256
MAX_EDGES = 4096
_MAX_S = 1e9
_MAX_TOKENS = 1e12
_SLACK = 1e-6


@dataclass(frozen=True, slots=True)
class AegNode:
    """A node of a graph.

    Attributes:
        node: the agent and the tool that its steps call.
        count: steps that were seen, older ones counting less.
        p_end: probability that a session ends there, 0 to 1.
        output_tokens, observation_tokens: mean length of the answers, and of what their tool
            returns; None: not known.
        pauses: how many pauses were measured.
        pause_p50_s, pause_p95_s: quantiles of the pause after it, seconds; None: not known.
    """

    node: Node
    count: float = 0.0
    p_end: float = 0.0
    output_tokens: float | None = None
    observation_tokens: float | None = None
    pauses: int = 0
    pause_p50_s: float | None = None
    pause_p95_s: float | None = None


@dataclass(frozen=True, slots=True)
class AegEdge:
    """An edge of a graph.

    Attributes:
        source, target: its nodes; the source may be the start.
        probability: share of the source's sessions that go on to the target, 0 to 1.
        count: how many were seen to, older ones counting less.
        overlap: share of the cached prefix that the next step begins with, 0 to 1; None: not known.
    """

    source: Node
    target: Node
    probability: float
    count: float = 0.0
    overlap: float | None = None


@dataclass(frozen=True, slots=True)
class Aeg:
    """A graph. Cycles are allowed.

    Attributes:
        workflow: its name.
        tasks: sessions that came to their end, older ones counting less.
        is_cold: too few to act on.
    """

    workflow: str
    nodes: tuple[AegNode, ...]
    edges: tuple[AegEdge, ...]
    tasks: float = 0.0
    is_cold: bool = False


def read_aeg(document: str | dict[str, Any]) -> Aeg:
    """Read a graph from JSON, of the form that ``to_dict`` gives.

    Of a node ``id`` is needed, and no more; without agent and tool the id is the agent. Of an edge
    ``from``, ``to`` and ``probability``; it may lead from ``<start>`` and to ``<end>``. What the
    edges of a node leave of 1 is its probability of an end, unless ``p_end`` says so. Without an
    edge from ``<start>`` sessions begin at the nodes to which no other leads, or at the first one.

    Raises:
        StateError: the document is not such a graph; the message names the field.
    """
    if isinstance(document, str):
        try:
            document = json.loads(document)
        except (ValueError, RecursionError) as error:
            raise StateError(f"aeg: is not valid JSON: {error}") from error
    fields = fields_of(document, "aeg")
    check_version(fields, VERSION, "aeg")
    workflow = label_of(fields, "workflow", "aeg")
    if workflow is None:
        raise StateError("workflow: is missing; expected a text")
    nodes = _read_nodes(fields)
    edges, ends = _read_edges(fields, {name: each.node for name, each in nodes.items()})
    left = {each.node: 1.0 for each in nodes.values()}
    for edge in edges:
        if edge.source != START:
            left[edge.source] -= edge.probability
    for name, each in nodes.items():
        rest = left[each.node]
        if rest < each.p_end + ends[each.node] - _SLACK or rest < -_SLACK:
            raise StateError(f"edges: the probabilities after {name!r} sum to more than 1")
    said = {of.get("id") for of in fields["nodes"] if of.get("p_end") is not None}
    known = tuple(
        each if name in said else replace(each, p_end=min(max(left[each.node], 0.0), 1.0))
        for name, each in nodes.items()
    )
    return Aeg(
        workflow,
        known,
        (*_start_edges(known, edges), *edges),
        tasks=number_of(fields, "tasks", "aeg", default=0.0),
    )


def _read_nodes(fields: Any) -> dict[str, AegNode]:
    nodes: dict[str, AegNode] = {}
    taken: set[Node] = {START}
    for item, where in items_of(fields, "nodes", ""):
        of = fields_of(item, where)
        name = label_of(of, "id", where)
        if name is None or name in nodes or name in (START_ID, END_ID):
            raise StateError(f"{where}.id: is {name!r}; expected a text of its own")
        node = Node(label_of(of, "agent", where), label_of(of, "tool", where))
        if node == Node(None, None):
            node = Node(name)
        if node in taken:
            raise StateError(f"{where}: agent and tool are those of another node")
        taken.add(node)
        if len(taken) > MAX_NODES + 1:
            raise StateError(f"nodes: are more than {MAX_NODES}")
        p50_s = _optional(of, "pause_p50_s", where, _MAX_S)
        p95_s = _optional(of, "pause_p95_s", where, _MAX_S)
        if p50_s is not None and p95_s is not None and p95_s < p50_s:
            raise StateError(f"{where}.pause_p95_s: is less than pause_p50_s")
        nodes[name] = AegNode(
            node,
            count=number_of(of, "count", where, default=0.0),
            p_end=number_of(of, "p_end", where, default=0.0, most=1.0),
            output_tokens=_optional(of, "output_tokens", where, _MAX_TOKENS),
            observation_tokens=_optional(of, "observation_tokens", where, _MAX_TOKENS),
            pauses=int(number_of(of, "pauses", where, default=0.0)),
            pause_p50_s=p50_s,
            pause_p95_s=p95_s,
        )
    if not nodes:
        raise StateError("nodes: expected at least one")
    return nodes


def _read_edges(fields: Any, nodes: dict[str, Node]) -> tuple[tuple[AegEdge, ...], Counter[Node]]:
    """The edges between nodes, and the probability that edges to the end say, by node."""
    edges: dict[tuple[str | None, str | None], AegEdge] = {}
    ends: Counter[Node] = Counter()
    for item, where in items_of(fields, "edges", ""):
        of = fields_of(item, where)
        source, target = label_of(of, "from", where), label_of(of, "to", where)
        if source != START_ID and source not in nodes:
            raise StateError(f"{where}.from: is {source!r}; expected the id of a node or <start>")
        if target not in nodes and (target != END_ID or source == START_ID):
            raise StateError(f"{where}.to: is {target!r}; expected the id of a node or <end>")
        if (source, target) in edges:
            raise StateError(f"{where}: leads from {source!r} to {target!r} as another one does")
        if len(edges) >= MAX_EDGES:
            raise StateError(f"edges: are more than {MAX_EDGES}")
        edge = AegEdge(
            START if source == START_ID else nodes[str(source)],
            nodes.get(str(target), Node()),
            number_of(of, "probability", where, most=1.0),
            number_of(of, "count", where, default=0.0),
            _optional(of, "overlap", where, 1.0),
        )
        edges[source, target] = edge
        if target == END_ID:
            ends[edge.source] += edge.probability  # type: ignore[assignment]
    return tuple(edge for (_, to), edge in edges.items() if to != END_ID), ends


def _start_edges(nodes: tuple[AegNode, ...], edges: tuple[AegEdge, ...]) -> Iterator[AegEdge]:
    if any(edge.source == START for edge in edges):
        return
    led_to = {edge.target for edge in edges if edge.source != edge.target}
    first = [each.node for each in nodes if each.node not in led_to] or [nodes[0].node]
    for node in first:
        yield AegEdge(START, node, 1.0 / len(first))


def _optional(of: Any, name: str, where: str, most: float) -> float | None:
    return None if of.get(name) is None else number_of(of, name, where, most=most)


def to_dict(aeg: Aeg, *, theta_conf: float = 0.7) -> dict[str, Any]:
    """The graph as values of JSON, for a dashboard and for ``read_aeg``.

    Args:
        theta_conf: an edge of at least this probability has ``is_used`` set.
    """
    ids = _ids(aeg)
    return {
        "version": VERSION,
        "workflow": aeg.workflow,
        "tasks": aeg.tasks,
        "is_cold": aeg.is_cold,
        "nodes": [
            {
                "id": ids[each.node],
                "agent": each.node.agent,
                "tool": each.node.tool,
                "count": each.count,
                "p_end": each.p_end,
                "output_tokens": each.output_tokens,
                "observation_tokens": each.observation_tokens,
                "pauses": each.pauses,
                "pause_p50_s": each.pause_p50_s,
                "pause_p95_s": each.pause_p95_s,
            }
            for each in aeg.nodes
        ],
        "edges": [
            {
                "from": ids[edge.source],
                "to": ids[edge.target],
                "probability": edge.probability,
                "count": edge.count,
                "overlap": edge.overlap,
                "is_used": edge.probability >= theta_conf,
            }
            for edge in aeg.edges
        ],
    }


def to_json(aeg: Aeg, *, theta_conf: float = 0.7) -> str:
    """The graph as a JSON document."""
    return json.dumps(to_dict(aeg, theta_conf=theta_conf), indent=1, ensure_ascii=False)


def to_dot(aeg: Aeg, *, theta_conf: float = 0.7) -> str:
    """The graph in Graphviz's language; edges that are not used are dashed."""

    def quoted(text: str) -> str:
        escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
        return f'"{escaped}"'

    names = _names(aeg)
    lines = [f"digraph {quoted(aeg.workflow)} {{", f"  {names[START]} [shape=point];"]
    lines.append("  end [shape=doublecircle, label=end];")
    lines += [f"  {names[each.node]} [label={quoted(_text(aeg, each))}];" for each in aeg.nodes]
    for source, target, p in _arrows(aeg, names):
        style = "" if p >= theta_conf else ", style=dashed"
        lines.append(f'  {source} -> {target} [label="{p:.2f}"{style}];')
    return "\n".join([*lines, "}", ""])


def to_mermaid(aeg: Aeg, *, theta_conf: float = 0.7) -> str:
    """The graph as a Mermaid flow chart; edges that are not used are dotted."""

    def quoted(text: str) -> str:
        escaped = re.sub(r"[^\w .,:/+~-]", lambda found: f"#{ord(found[0])};", text)
        return f'"{escaped}"'

    names = _names(aeg)
    lines = ["flowchart TD", f"  {names[START]}(( ))", "  finish(((end)))"]
    lines += [f"  {names[each.node]}[{quoted(_text(aeg, each))}]" for each in aeg.nodes]
    for source, target, p in _arrows(aeg, {**names, Node(END_ID): "finish"}):
        arrow = "-->" if p >= theta_conf else "-.->"
        lines.append(f"  {source} {arrow}|{p:.2f}| {target}")
    return "\n".join([*lines, ""])


RENDERERS: dict[str, Callable[..., str]] = {"json": to_json, "dot": to_dot, "mermaid": to_mermaid}
"""Name of a form → what writes a graph in it."""


def _arrows(aeg: Aeg, names: dict[Node, str]) -> Iterator[tuple[str, str, float]]:
    for edge in aeg.edges:
        yield names[edge.source], names[edge.target], edge.probability
    for each in aeg.nodes:
        if each.p_end > 0.0:
            yield names[each.node], names.get(Node(END_ID), "end"), each.p_end


def _names(aeg: Aeg) -> dict[Node, str]:
    names = {each.node: f"n{at}" for at, each in enumerate(aeg.nodes)}
    return {START: "begin", **names}


def _ids(aeg: Aeg) -> dict[Node, str]:
    ids: dict[Node, str] = {START: START_ID}
    taken = {START_ID, END_ID}
    for each in aeg.nodes:
        name = base = "/".join(part for part in each.node if part) or "step"
        number = 1
        while name in taken:
            number += 1
            name = f"{base}#{number}"
        taken.add(name)
        ids[each.node] = name
    return ids


def _text(aeg: Aeg, each: AegNode) -> str:
    agent, tool = each.node
    text = ": ".join(part for part in (agent, tool) if part) or "step"
    p50_s, p95_s = each.pause_p50_s, each.pause_p95_s
    if p50_s is None or p95_s is None or not math.isfinite(p50_s + p95_s):
        return text
    return f"{text}, pause {p50_s:.3g} to {p95_s:.3g} s"
