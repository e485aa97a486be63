"""What `saga aeg` reads: traces of any kind, as sequences, as exchanges, and as spans."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saga_core.graph import Graphs, Walk
from saga_core.transitions import Node
from saga_sim.aeg.conversations import generate
from saga_sim.aeg.exchanges import Exchange
from saga_sim.aeg.identification import (
    Identification,
    read_flat,
    replay,
    sessions,
    tasks,
)
from saga_sim.aeg.links import Edge, EdgeScore, infer_edges, read_spans, score_edges
from saga_sim.aeg.sequences import READERS, Run, Sequences, Step
from saga_sim.traces import Trace, read_trace
from saga_sim.traces.source import Source, TraceError

GENERATED = "generated"
"""Stands for a trace: conversations that are made up, with all that clients do to them."""

_CONVERSATIONS = 200
_WITHIN_S = 60.0
_LEAST_S = 1e-3


@dataclass(frozen=True, slots=True)
class Told:
    """How well sessions, or tasks, of a source were told apart.

    Attributes:
        us_per_request: CPU microseconds of it all, reading and hashing included.
    """

    name: str
    figures: Identification
    us_per_request: float


@dataclass(frozen=True, slots=True)
class Inferred:
    """Edges between the spans of a file; ``score`` where the true ones are known."""

    name: str
    edges: frozenset[Edge]
    score: EdgeScore | None

    def as_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        shown: dict[str, Any] = {"edges": sorted(self.edges)}
        if self.score is not None:
            shown |= {
                "true": self.score.true,
                "precision": self.score.precision,
                "recall": self.score.recall,
            }
        return shown


def without_generated(words: Iterable[str]) -> list[Path]:
    """The traces among the words."""
    return [Path(word) for word in words if word != GENERATED]


def read_sequences(paths: Sequence[Path]) -> Iterator[Sequences]:
    """The sessions of traces, as sequences of steps; one for each path.

    Raises:
        TraceError: a path is of no kind that is known.
    """
    for path in paths:
        kind = kind_of(path)
        if kind != "otel":
            yield READERS[kind](path)
            continue
        runs = [run for file in _files(path) for run in _runs_of_spans(file)]
        yield Sequences("spans", tuple(runs))


def _runs_of_spans(path: Path) -> Iterator[Run]:
    """The sessions of a file of spans; the workflow is the file's name.

    A step is the agent that made the call and the tool that it called. Calls that overlap, of
    agents that work side by side, follow each other in the order of their starts.
    """
    for calls in read_trace([path]).sessions:
        steps = []
        for call, after in zip(calls, [*calls[1:], None], strict=True):
            pause_s = call.tool_s
            if pause_s is None and after is not None and call.duration_s is not None:
                pause_s = max(0.0, after.arrival_s - call.arrival_s - call.duration_s)
            steps.append(Step(Node(call.agent, call.tool), pause_s))
        yield Run(calls[0].session_id, path.name.partition(".")[0], tuple(steps))


def learn_all(graphs: Graphs, sequences: Sequences, *, now_s: float) -> None:
    """Let graphs learn all sessions, one after the other, as if they ended now."""
    for run in sequences.runs:
        walk = Walk((None, run.workflow))
        for step in run.steps:
            graphs.stepped(walk, step.node, now_s=now_s)
            if step.pause_s is not None:
                graphs.returned(walk, step.pause_s)
        graphs.ended(walk, now_s=now_s)


def told_apart(words: Sequence[str], *, hide_ids: bool, seed: int) -> Iterator[Told]:
    """Sessions and tasks of sources, told by content with all ids hidden.

    ``generated`` is told apart always; traces where ``hide_ids`` says so.
    """
    for word in words:
        if word == GENERATED:
            yield _told("generated conversations", generate(seed, _CONVERSATIONS))
            continue
        path = Path(word)
        kind = kind_of(path) if hide_ids else ""
        if kind == "lmcache":
            by_source: dict[str, list[Path]] = {}
            for file in _files(path):
                by_source.setdefault(file.name.partition("_")[0], []).append(file)
            for name, files in sorted(by_source.items()):
                exchanges = read_flat(files, _WITHIN_S, seed)
                for with_links in (False, True):
                    shown = f"tasks of {name}, {'with' if with_links else 'without'} links"
                    yield _told(shown, exchanges, is_task=True, with_links=with_links)
        elif kind == "kv_cache_tester":
            yield _told("conversations, by blocks", by_blocks(read_trace([path]), seed))


def edges_of(words: Sequence[str], true: Mapping[str, Iterable[Edge]] | None) -> list[Inferred]:
    """Edges between the spans of recordings, ids and parents hidden, each file alone.

    Args:
        true: the true edges by the file's name without its ending.
    """
    found, pooled = [], EdgeScore()
    for path in without_generated(words):
        if kind_of(path) != "otel":
            continue
        for file in _files(path):
            edges = infer_edges(read_spans(file))
            score = None
            if true is not None:
                score = score_edges(edges, frozenset(true.get(file.stem, ())))
                pooled += score
            found.append(Inferred(file.stem, edges, score))
    if true is not None and len(found) > 1:
        found.append(Inferred("all", frozenset().union(*(each.edges for each in found)), pooled))
    return found


def by_blocks(trace: Trace, seed: int) -> list[Exchange]:
    """The calls of a trace that records blocks in the place of text, each block as one token.

    Its conversations, which were recorded alone, are begun within a minute of each other.
    """
    rng = random.Random(seed)
    exchanges = []
    for calls in trace.sessions:
        shift_s = rng.uniform(0.0, _WITHIN_S) - calls[0].arrival_s
        for at, call in enumerate(calls):
            blocks = [block for run in call.chain for block in run]
            start_s = call.arrival_s + shift_s
            name = f"{call.session_id}/{at:05}"
            end_s = start_s + max(_LEAST_S, call.duration_s or 0.0)
            body = {"prompt": blocks}
            exchanges.append(Exchange(name, call.session_id, start_s, end_s, "completions", body))
    return [each for each in exchanges if each.body["prompt"]]


def kind_of(path: Path) -> str:
    """Of which kind a trace is: a key of ``READERS``, or "otel".

    Raises:
        TraceError: of none of them.
    """
    files = _files(path)
    if not files:
        raise TraceError(f"{path} holds no trace")
    values = Source(files[0]).first().values
    if "spans" in values or "resourceSpans" in values:
        return "otel"
    if "transitions" in values:
        return "drawn"
    if {"timestamp", "input", "session_id"} <= values.keys():
        return "lmcache"
    if "requests" in values:
        return "kv_cache_tester"
    raise TraceError(
        f"{files[0]}: is no trace that steps can be read from: expected spans, LMCache's or "
        "kv-cache-tester's recordings, or tool statistics"
    )


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.iterdir() if ".json" in file.name)


def _told(
    name: str, exchanges: Sequence[Exchange], *, is_task: bool = False, with_links: bool = False
) -> Told:
    began_s = time.process_time()
    told = replay(exchanges)
    us = 1e6 * (time.process_time() - began_s) / max(1, len(exchanges))
    figures = tasks(told, with_links=with_links) if is_task else sessions(told)
    return Told(name, figures, us)
