"""A learned graph as a document, and a declared one as evidence."""

from __future__ import annotations

from collections.abc import Hashable

from saga_core.aeg import Aeg, AegEdge, AegNode
from saga_core.evidence import Evidence
from saga_core.tool_durations import ToolDurations
from saga_core.transitions import START


def described(
    evidence: Evidence, durations: ToolDurations, workflow: Hashable, *, name: str, is_cold: bool
) -> Aeg:
    """The graph that the evidence of a workflow shows; order 1, and nothing of other workflows."""
    weight, get = evidence.weight, evidence.transitions.get
    nodes, edges = [], []
    for node in (START, *evidence.nodes):
        seen = get((node,))
        sums = evidence.nodes.get(node)
        outcomes = 0.0 if seen is None else seen.went + seen.ended
        if sums is not None:
            steps = max(sums.steps, 1e-300)
            nodes.append(
                AegNode(
                    node,
                    count=sums.steps / weight,
                    p_end=seen.ended / outcomes if seen is not None and outcomes else 0.0,
                    output_tokens=sums.output_tokens / steps,
                    observation_tokens=sums.observation_tokens / max(sums.observed, 1e-300),
                    pauses=durations.pauses(workflow, node.tool),
                    pause_p50_s=durations.own_s(workflow, node.tool, 0.5),
                    pause_p95_s=durations.own_s(workflow, node.tool, 0.95),
                )
            )
        if seen is None or not outcomes:
            continue
        overlap = seen.reused / seen.known if seen.known else None
        edges += [
            AegEdge(node, to, probability=count / outcomes, count=count / weight, overlap=overlap)
            for to, count in seen.nexts.items()
            if to in evidence.nodes and count > 0.0
        ]
    return Aeg(
        name,
        tuple(nodes),
        tuple(edges),
        tasks=evidence.tasks / weight,
        is_cold=is_cold,
    )


def declare(
    aeg: Aeg, evidence: Evidence, durations: ToolDurations, workflow: Hashable, *, passes: float
) -> None:
    """Let the evidence be as if ``passes`` sessions had gone through each node of a graph."""
    weighed = passes * evidence.weight
    transitions = evidence.transitions
    evidence.tasks = weighed
    for each in aeg.nodes:
        output_tokens, observed = each.output_tokens or 0.0, 0.0
        if each.observation_tokens is not None:
            observed = passes
        observation_tokens = observed * (each.observation_tokens or 0.0)
        evidence.declare(each.node, [passes, passes * output_tokens, observed, observation_tokens])
        for context in ((), (each.node,)):
            transitions.touch(context).ended += weighed * each.p_end
        if each.pause_p50_s is not None and each.pause_p95_s is not None:
            durations.declare(workflow, each.node.tool, each.pause_p50_s, each.pause_p95_s)
    for edge in aeg.edges:
        count = weighed * edge.probability
        for context in ((), (edge.source,)):
            seen = transitions.touch(context)
            transitions.num_nexts += seen.add(edge.target, count)
            if edge.overlap is not None:
                seen.known += count
                seen.reused += count * edge.overlap
