"""Sessions as sequences of steps, to learn graphs from: read from traces, or drawn."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from saga_core.transitions import Node
from saga_sim.traces import Trace, read_trace
from saga_sim.traces.kv_cache_tester import SUBAGENT
from saga_sim.traces.source import Record, Source


@dataclass(frozen=True, slots=True)
class Step:
    """One step: what it was, and the pause after it, seconds; None where none is recorded."""

    node: Node
    pause_s: float | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """One session of a workflow, from its first step to its end."""

    session_id: str
    workflow: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sessions of one source.

    Attributes:
        ceiling: share of next steps and ends that the best predictor gets right; None: not known.
    """

    name: str
    runs: tuple[Run, ...]
    ceiling: float | None = None


def from_trace(trace: Trace) -> Sequences:
    """The sessions of a trace; a step is its tool, else how its answer ended.

    The pause after a step is the time from its end to the next call; where calls have no length
    there is none. Where the trace says how long the tool ran, the pause is that.
    """
    runs = []
    for calls in trace.sessions:
        steps = []
        for at, call in enumerate(calls):
            pause_s = None
            if at + 1 < len(calls) and call.duration_s is not None:
                pause_s = max(0.0, calls[at + 1].arrival_s - call.arrival_s - call.duration_s)
            is_tool = call.tool is not None or call.ending == "tool_use"
            kind = call.tool or call.ending or "unknown"
            node = Node(tool=kind) if is_tool else Node(agent=kind)
            steps.append(Step(node, pause_s if call.tool_s is None else call.tool_s))
        runs.append(Run(calls[0].session_id, trace.name, tuple(steps)))
    return Sequences(trace.name, tuple(runs))


def from_kv_cache_tester(path: Path) -> Sequences:
    """The conversations of a kv-cache-tester trace and their sub-agents.

    A step is how its answer ended and the types of the answer's parts: the trace names no tools.
    """
    runs = [run for record in Source(path).records() for run in _conversations(record)]
    return Sequences("kv_cache_tester", tuple(runs))


def _conversations(record: Record) -> Iterator[Run]:
    agents = [(record.name("id"), "main", record)]
    while agents:
        session_id, workflow, agent = agents.pop()
        requests = []
        for at, item in enumerate(agent.records("requests")):
            if item.values.get("type") == SUBAGENT:
                agents.append((f"{session_id}/{at}", "subagent", item))
            else:
                requests.append(item)
        requests.sort(key=lambda item: item.number("t"))
        if requests:
            yield Run(session_id, workflow, tuple(_answers(requests)))


def _answers(requests: Sequence[Record]) -> Iterator[Step]:
    for at, request in enumerate(requests):
        parts = request.values.get("output_types") or []
        ending = request.text("stop", "")
        kind = f"{ending or 'unknown'}:{'+'.join(sorted(set(map(str, parts))))}"
        node = Node(tool=kind) if ending == "tool_use" else Node(agent=kind)
        pause_s = None
        if at + 1 < len(requests):
            ended_s = request.number("t") + request.number("api_time", 0.0)
            pause_s = max(0.0, requests[at + 1].number("t") - ended_s)
        yield Step(node, pause_s)


def from_lmcache(paths: Sequence[Path]) -> Sequences:
    """The conversations of LMCache's agent recordings.

    A step is the kind of its answer's text; the workflow is the file's name up to ``_``. Calls have
    no length: the pause after one is the time until the next begins.
    """
    runs = []
    for path in paths:
        trace = read_trace([path])
        texts: dict[tuple[str, float], str] = {}
        records = list(Source(path).records())
        start_us = min((record.integer("timestamp") for record in records), default=0)
        for record in records:
            arrival_s = (record.integer("timestamp") - start_us) / 1e6
            texts[record.name("session_id"), arrival_s] = record.text("output", "")
        workflow = path.name.partition("_")[0]
        for calls in trace.sessions:
            task = calls[0].session_id.rpartition("/")[0]
            steps = []
            for at, call in enumerate(calls):
                is_last = at + 1 == len(calls)
                pause_s = None if is_last else calls[at + 1].arrival_s - call.arrival_s
                steps.append(Step(kind_of_text(texts[task, call.arrival_s]), pause_s))
            runs.append(Run(calls[0].session_id, workflow, tuple(steps)))
    return Sequences("lmcache", tuple(runs))


_FENCE = re.compile(r"```(?:bash|sh)\s*\n\s*(?:cd\s+\S+\s*&&\s*)?([\w.-]+)")
_CALL = re.compile(r'"name"\s*:\s*"([\w.-]+)"')
_NEXT_SPEAKER = re.compile(r'"next_speaker"\s*:\s*\{[^}]*"answer"\s*:\s*"([\w-]+)"')
# Checked in order; the first whose expression is found decides, and what it caught is the tool.
_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("bash", _FENCE),
    ("call", _CALL),
    ("speaker", _NEXT_SPEAKER),
)


def kind_of_text(text: str) -> Node:
    """What a flat answer did: the verb of its shell command, the tool or the speaker that it
    names, code, or text alone. An empty answer is a call whose text was not recorded."""
    if not text:
        return Node(tool="unrecorded")
    for kind, pattern in _KINDS:
        found = pattern.search(text)
        if found is not None:
            return Node(tool=f"{kind}:{found[1][:40]}")
    if "```" in text:
        return Node(tool="code")
    return Node(agent="json" if text.lstrip().startswith("{") else "text")


def draw_from_statistics(path: Path, *, sessions: int, seed: int = 0) -> Sequences:
    """Sessions drawn from measured counts of which tool followed which, and tool times.

    A Markov chain of order 1, so that the best share of right answers is known: the steps' shares
    times the largest probability after each. Pauses are drawn between the measured quantiles.

    Raises:
        TraceError: the file lacks ``transitions`` or ``tool_seconds``.
    """
    record = Source(path).first()
    nexts: dict[str, dict[str, float]] = {}
    for row in record.values.get("transitions") or ():
        if not isinstance(row, list) or len(row) != 3:
            raise record.error("'transitions' expected rows of two tools and a count")
        nexts.setdefault(str(row[0]), {})[str(row[1])] = float(row[2])
    times = record.values.get("tool_seconds")
    if _FIRST not in nexts or not isinstance(times, dict):
        raise record.error("expected 'transitions' from <start>, and 'tool_seconds'")
    rng = random.Random(seed)
    runs = tuple(_draw(f"s{at}", nexts, times, rng) for at in range(sessions))
    return Sequences("drawn", runs, _ceiling(nexts))


_FIRST, _LAST = "<start>", "<end>"


def _draw(
    name: str, nexts: Mapping[str, Mapping[str, float]], times: Mapping[str, object],
    rng: random.Random,
) -> Run:  # fmt: skip
    steps: list[Step] = []
    at = _FIRST
    while True:
        after = nexts.get(at, {_LAST: 1.0})
        at = rng.choices(list(after), list(after.values()))[0]
        if at == _LAST:
            break
        steps.append(Step(Node(tool=at), _draw_s(times.get(at), rng)))
    last = steps[-1]
    return Run(name, "drawn", (*steps[:-1], Step(last.node)))


_LEVELS = (("p10", 0.1), ("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99), ("max", 1.0))


def _draw_s(quantiles: object, rng: random.Random) -> float | None:
    if not isinstance(quantiles, dict):
        return None
    level, low, low_s = rng.random(), 0.0, 0.5 * float(quantiles["p10"])
    for name, high in _LEVELS:
        high_s = float(quantiles[name])
        if level <= high:
            share = (level - low) / (high - low)
            return float(low_s * (high_s / low_s) ** share)
        low, low_s = high, high_s
    return low_s


def _ceiling(nexts: Mapping[str, Mapping[str, float]]) -> float:
    """Bayes accuracy Σ π(v) max_u P(v → u), π the share of visits of a session to v, the start
    included."""
    shares = {v: {u: n / sum(to.values()) for u, n in to.items()} for v, to in nexts.items()}
    visits, flow = dict.fromkeys(shares, 0.0), {_FIRST: 1.0}
    while sum(flow.values()) > 1e-9:
        after: dict[str, float] = {}
        for v, mass in flow.items():
            visits[v] = visits.get(v, 0.0) + mass
            for u, p in shares.get(v, {_LAST: 1.0}).items():
                if u != _LAST:
                    after[u] = after.get(u, 0.0) + mass * p
        flow = after
    best = sum(mass * max(shares.get(v, {_LAST: 1.0}).values()) for v, mass in visits.items())
    return best / sum(visits.values())


READERS: Mapping[str, Callable[[Path], Sequences]] = {
    "kv_cache_tester": from_kv_cache_tester,
    "lmcache": lambda path: from_lmcache(
        sorted(path.glob("*.jsonl*")) if path.is_dir() else [path]
    ),
    "drawn": lambda path: draw_from_statistics(path, sessions=400),
}
"""Name of a source → what reads it from a file, or a folder of them."""
