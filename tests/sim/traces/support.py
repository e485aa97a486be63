"""What the tests of trace loaders share."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from saga_sim.traces import Call, Trace, TraceError, read_trace
from saga_sim.traces.chains import joined

SAMPLES = Path(__file__).parent / "samples"


def write_lines(path: Path, items: Iterable[Any]) -> Path:
    """Write objects, one a line, and text as it is; packed if the name ends in .gz."""
    lines = [item if isinstance(item, str) else json.dumps(item) for item in items]
    data = "".join(line + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def read_lines(path: Path, items: Iterable[Any], **settings: Any) -> Trace:
    """Write objects, read them as a trace and check it."""
    trace = read_trace([write_lines(path, items)], **settings)
    check_trace(trace)
    return trace


def error_of(path: Path, items: Iterable[Any], **settings: Any) -> str:
    """Message of the error that reading the objects gives, without the folder."""
    write_lines(path, items)
    with pytest.raises(TraceError) as caught:
        read_trace([path], **settings)
    return str(caught.value).replace(f"{path.parent}/", "")


def ids_of(call: Call) -> list[int]:
    return [block_id for run in call.chain for block_id in run]


def check_trace(trace: Trace) -> None:
    """What holds for every trace: its order, its names, and one predecessor for each id."""
    names = [calls[0].session_id for calls in trace.sessions]
    assert len(set(names)) == len(names)
    before: dict[int, int] = {}
    for calls in trace.sessions:
        assert {call.session_id for call in calls} == {calls[0].session_id}
        arrivals = [call.arrival_s for call in calls]
        assert arrivals == sorted(arrivals)
        for call in calls:
            assert min(call.arrival_s, call.input_tokens, call.output_tokens) >= 0
            assert call.num_blocks <= call.input_tokens // trace.block_tokens
            assert call.chain == joined(call.chain)
            assert all(run.start >= 0 and len(run) > 0 for run in call.chain)
            last = -1
            for run in call.chain:
                assert before.setdefault(run.start, last) == last
                last = run.stop - 1
    check_inner_ids(trace, before)


def check_inner_ids(trace: Trace, before: dict[int, int]) -> None:
    """Ids inside a run follow the next lower one; none of them may open a run elsewhere."""
    starts = sorted(first for first, last in before.items() if last != first - 1)
    runs = {run for calls in trace.sessions for call in calls for run in call.chain}
    events = sorted([(run.start + 1, 0) for run in runs] + [(run.stop, -1) for run in runs])
    depth, at = 0, 0
    for first in starts:
        while at < len(events) and events[at][0] <= first:
            depth += 1 if events[at][1] == 0 else -1
            at += 1
        assert depth == 0, f"block {first} follows two ids"
