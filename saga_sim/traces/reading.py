"""Traces read from files: the format is told from the first record, files become one trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from saga_sim.traces import hash_ids, kv_cache_tester, lmcache, otel_spans, saga_jsonl
from saga_sim.traces.chains import BlockIds
from saga_sim.traces.model import Call, Trace
from saga_sim.traces.source import Part, Source, TraceError

__all__ = ["FORMATS", "Format", "Reader", "TraceError", "read_trace"]

_SUFFIXES = (".json", ".jsonl", ".gz")


class Reader(Protocol):
    """Reads the files of one format, one after the other."""

    def read(self, source: Source) -> Part:
        """Read a file.

        Raises:
            TraceError: the file does not hold what its format says.
        """
        ...


@dataclass(frozen=True, slots=True)
class Format:
    """A format of traces.

    Attributes:
        expects: fields of its records, for messages.
        matches: whether a file whose first record this is has the format.
        reader: makes a reader, from the trace's block ids and the block size that is asked for.
    """

    expects: str
    matches: Callable[[Mapping[str, Any]], bool]
    reader: Callable[[BlockIds, int | None], Reader]


FORMATS: dict[str, Format] = {
    "saga": Format(saga_jsonl.EXPECTS, saga_jsonl.matches, saga_jsonl.Reader),
    "kv-cache-tester": Format(
        kv_cache_tester.EXPECTS, kv_cache_tester.matches, kv_cache_tester.Reader
    ),
    "lmcache": Format(lmcache.EXPECTS, lmcache.matches, lmcache.Reader),
    "mooncake": Format(
        hash_ids.MOONCAKE_EXPECTS, hash_ids.matches_mooncake, hash_ids.MooncakeReader
    ),
    "bailian": Format(hash_ids.BAILIAN_EXPECTS, hash_ids.matches_bailian, hash_ids.BailianReader),
    "otel": Format(otel_spans.EXPECTS, otel_spans.matches, otel_spans.Reader),
}
"""The formats by name, in the order in which they are tried."""


def read_trace(
    paths: Sequence[Path], *, block_tokens: int | None = None, format: str = "auto"
) -> Trace:
    """Read files into one trace.

    The files' sessions follow in the order of the files. A session id that was used before gets
    "@2", "@3" and so on. Recorded block ids count per file; blocks of text are the same in all
    files. Arrivals of different files compare only where the format gives world time; the
    earliest is 0 then. The clock is "shared" for such files and for a single one that says so.

    Args:
        paths: files, plain or gzip, and folders; a folder stands for its ``*.json``, ``*.jsonl``
            and ``*.gz`` by name, without those of its folders.
        block_tokens: size of a block where text is recorded; None: 64. Recorded blocks keep
            their size.
        format: name of the format; "auto": told from the first record of each file.

    Raises:
        TraceError: a file is missing or malformed, or the files do not fit together.
    """
    if format != "auto" and format not in FORMATS:
        raise TraceError(f"format is {format!r}; expected auto, {', '.join(FORMATS)}")
    if block_tokens is not None and block_tokens < 1:
        raise TraceError(f"block_tokens is {block_tokens}; expected 1 or more")
    sources = list(_sources(paths))
    ids = BlockIds()
    readers: dict[str, Reader] = {}
    parts: list[Part] = []
    for source in sources:
        name = format if format != "auto" else _format_of(source)
        if name not in readers:
            readers[name] = FORMATS[name].reader(ids, block_tokens)
        parts.append(readers[name].read(source))
        if parts[-1].block_tokens != parts[0].block_tokens:
            raise TraceError(
                f"{source.path}: has blocks of {parts[-1].block_tokens} tokens, but "
                f"{sources[0].path} of {parts[0].block_tokens}; expected one size in a trace"
            )
    return _merged(_name_of(paths), parts)


def _sources(paths: Sequence[Path]) -> Iterator[Source]:
    """The files to read, in order."""
    if not paths:
        raise TraceError("no files are named; expected one at least")
    for path in paths:
        if not path.is_dir():
            yield Source(path)
            continue
        files = sorted(file for file in path.iterdir() if file.name.endswith(_SUFFIXES))
        files = [file for file in files if file.is_file()]
        if not files:
            raise TraceError(f"{path}: holds no traces; expected {_one_of('*', _SUFFIXES)} files")
        yield from map(Source, files)


def _format_of(source: Source) -> str:
    first = source.first()
    for name, known in FORMATS.items():
        if known.matches(first.values):
            return name
    formats = "; ".join(f"{name} ({known.expects})" for name, known in FORMATS.items())
    fields = ", ".join(sorted(first.values)[:10]) or "none"
    raise first.error(f"is of no known format: its fields are {fields}; expected {formats}")


def _merged(name: str, parts: Sequence[Part]) -> Trace:
    origin_s = min(
        (call.arrival_s for part in parts if part.clock == "world" for call in _calls(part)),
        default=0.0,
    )
    sessions: list[tuple[Call, ...]] = []
    used: set[str] = set()
    for part in parts:
        new_ids = _unused_ids(part, used)
        used.update(new_ids.values())
        start_s = origin_s if part.clock == "world" else 0.0
        for calls in part.sessions:
            sessions.append(tuple(_moved(call, new_ids, start_s) for call in calls))
    if not sessions:
        raise TraceError(f"{name}: holds no calls")
    clocks = {part.clock for part in parts}
    is_shared = clocks == {"world"} or (clocks == {"shared"} and len(parts) == 1)
    return Trace(
        name=name,
        block_tokens=parts[0].block_tokens,
        sessions=tuple(sessions),
        clock="shared" if is_shared else "session",
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    )


def _calls(part: Part) -> Iterator[Call]:
    return (call for calls in part.sessions for call in calls)


def _unused_ids(part: Part, used: set[str]) -> dict[str, str]:
    """Session id → the id that it gets in the trace, for the sessions of a file."""
    own = [calls[0].session_id for calls in part.sessions]
    taken = used.union(own)
    new_ids: dict[str, str] = {}
    for session_id in own:
        new_id, number = session_id, 1
        while new_id in (used if number == 1 else taken):
            number += 1
            new_id = f"{session_id}@{number}"
        new_ids[session_id] = new_id
        taken.add(new_id)
    return new_ids


def _moved(call: Call, new_ids: Mapping[str, str], start_s: float) -> Call:
    """The call with the session ids and the start of the trace; the same object if it fits."""
    parent = call.parent_session_id
    session_id = new_ids[call.session_id]
    new_parent = None if parent is None else new_ids.get(parent, parent)
    if (session_id, new_parent, start_s) == (call.session_id, parent, 0.0):
        return call
    return replace(
        call,
        session_id=session_id,
        parent_session_id=new_parent,
        arrival_s=round(call.arrival_s - start_s, 6) if start_s else call.arrival_s,
    )


def _name_of(paths: Sequence[Path]) -> str:
    first = paths[0].resolve().name
    return first if len(paths) == 1 else f"{first} and {len(paths) - 1} more"


def _one_of(prefix: str, names: Iterable[str]) -> str:
    *most, last = (prefix + name for name in names)
    return f"{', '.join(most)} or {last}"
