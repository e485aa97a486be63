"""Traces in SAGA's own format: JSON lines, one call a line, with the identity of its blocks.

An optional first line says what the blocks are::

    {"saga_trace": 1, "block_tokens": 64, "clock": "shared", "notes": ["made by hand"]}

``clock`` is "session" (the default) or "shared"; without the line a block is 64 tokens. Each
other line is a call::

    {"session_id": "a", "arrival_s": 2.5, "input_tokens": 200, "output_tokens": 20,
     "hash_ids": [0, 1, 7], "duration_s": 1.25, "ending": "tool_use", "tool": "search",
     "tool_s": 0.5, "parent_session_id": "main"}

The fields after ``hash_ids`` are optional. ``hash_ids`` name the prompt's full blocks in order;
``"runs": [[0, 2], [7, 8]]`` says the same as ranges, each with its start and the id after its
last. An id stands for the whole prefix up to its block, so it follows one other id only. Lines
may come in any order; calls of a session are sorted by arrival.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from saga_sim.traces.chains import (
    DEFAULT_BLOCK_TOKENS,
    BlockIds,
    Chain,
    ambiguous_id,
    end_of_ids,
    joined,
    moved,
    predecessors,
)
from saga_sim.traces.model import Call, Trace, runs_of
from saga_sim.traces.source import Part, Record, Source, TraceError

EXPECTS = "session_id, arrival_s, input_tokens, output_tokens, hash_ids or runs"

VERSION = 1
CLOCKS = ("session", "shared")


def matches(values: Mapping[str, Any]) -> bool:
    """Whether a record is of this format."""
    return "saga_trace" in values or {"session_id", "arrival_s"} <= values.keys()


def write_trace(trace: Trace, path: Path) -> None:
    """Write a trace, packed by gzip if the name ends in ``.gz``; equal traces give equal files.

    Reading it gives the same sessions, block size, clock and notes; the name becomes the file's.
    """
    header = {
        "saga_trace": VERSION,
        "block_tokens": trace.block_tokens,
        "clock": trace.clock,
        "notes": list(trace.notes),
    }
    with path.open("wb") as raw:
        binary = gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if path.suffix == ".gz" else raw
        with io.TextIOWrapper(binary, encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(header) + "\n")
            for calls in trace.sessions:
                for call in calls:
                    file.write(json.dumps(_values(call)) + "\n")


class Reader:
    """Reads the format that the module describes."""

    def __init__(self, ids: BlockIds, block_tokens: int | None) -> None:
        self._ids = ids
        self._wanted = block_tokens

    def read(self, source: Source) -> Part:
        """Read a file; its ids are its own."""
        block_tokens = self._wanted or DEFAULT_BLOCK_TOKENS
        clock = CLOCKS[0]
        notes: tuple[str, ...] = ()
        calls: list[tuple[str, Call]] = []
        for i, record in enumerate(source.records()):
            if "saga_trace" not in record.values:
                calls.append((record.where, _call(record, block_tokens)))
                continue
            if i > 0:
                raise record.error("'saga_trace' is not on the first line; expected a call")
            block_tokens, clock, notes = _header(record, self._wanted)
        _check_predecessors(calls)
        base = self._ids.take(end_of_ids(call.chain for _, call in calls))
        return Part(list(_sessions(calls, base)), block_tokens, clock, notes)


def _values(call: Call) -> dict[str, Any]:
    """The fields of a call's line; those that say nothing are left out."""
    optional = {
        "duration_s": call.duration_s,
        "ending": call.ending or None,
        "tool": call.tool,
        "tool_s": call.tool_s,
        "parent_session_id": call.parent_session_id,
    }
    return {
        "session_id": call.session_id,
        "arrival_s": call.arrival_s,
        "input_tokens": call.input_tokens,
        "output_tokens": call.output_tokens,
        "runs": [[run.start, run.stop] for run in call.chain],
        **{name: value for name, value in optional.items() if value is not None},
    }


def _header(record: Record, wanted: int | None) -> tuple[int, str, tuple[str, ...]]:
    """Block size, clock and notes that the first line says."""
    version = record.integer("saga_trace")
    if version != VERSION:
        raise record.error(f"'saga_trace' is {version}; expected {VERSION}, the known version")
    recorded = record.integer("block_tokens", DEFAULT_BLOCK_TOKENS, at_least=1)
    clock = record.text("clock", CLOCKS[0])
    if clock not in CLOCKS:
        raise record.error(f"'clock' is {clock!r}; expected {' or '.join(CLOCKS)}")
    notes = record.values.get("notes", [])
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        raise record.error("'notes' is not a list of strings")
    return record.check_block(recorded, wanted), clock, tuple(notes)


def _call(record: Record, block_tokens: int) -> Call:
    input_tokens = record.integer("input_tokens")
    chain = _runs(record) if record.has("runs") else runs_of(record.ids("hash_ids"))
    num_blocks = sum(map(len, chain))
    if num_blocks > input_tokens // block_tokens:
        raise record.error(
            f"has {num_blocks} blocks, but 'input_tokens' fill {input_tokens // block_tokens} of "
            f"{block_tokens} tokens; expected full blocks only"
        )
    return Call(
        session_id=record.name("session_id"),
        arrival_s=record.number("arrival_s"),
        input_tokens=input_tokens,
        output_tokens=record.integer("output_tokens"),
        chain=chain,
        duration_s=record.number("duration_s", None),
        ending=record.text("ending", ""),
        tool=record.text("tool", None),
        tool_s=record.number("tool_s", None),
        parent_session_id=record.name("parent_session_id", None),
    )


def _runs(record: Record) -> Chain:
    runs = []
    for pair in record.values["runs"] if isinstance(record.values["runs"], list) else [None]:
        if not isinstance(pair, list) or [type(x) for x in pair] != [int, int]:
            raise record.error("'runs' is not a list of [start, stop]; expected pairs of integers")
        start, stop = pair
        if not 0 <= start < stop:
            raise record.error(f"'runs' has {pair}; expected 0 <= start < stop")
        runs.append(range(start, stop))
    return joined(runs)


def _check_predecessors(calls: list[tuple[str, Call]]) -> None:
    """Raise if a block id follows two different ones."""
    block_id = ambiguous_id(call.chain for _, call in calls)
    if block_id is None:
        return
    seen: dict[int, str] = {}
    for where, call in calls:
        for before in predecessors(call.chain, block_id):
            for other, there in seen.items():
                if other != before:
                    raise TraceError(
                        f"{where}: block {block_id} follows {_block(before)}, but "
                        f"{_block(other)} at {there}; expected ids that stand for the whole "
                        "prefix, one predecessor each"
                    )
            seen.setdefault(before, where)


def _block(block_id: int) -> str:
    return "nothing" if block_id < 0 else f"block {block_id}"


def _sessions(calls: list[tuple[str, Call]], base: int) -> Iterator[tuple[Call, ...]]:
    sessions: dict[str, list[Call]] = {}
    for _, call in calls:
        own = replace(call, chain=moved(call.chain, base)) if base else call
        sessions.setdefault(call.session_id, []).append(own)
    for of in sessions.values():
        yield tuple(sorted(of, key=lambda call: call.arrival_s))
