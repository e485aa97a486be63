"""Traces of hashed prompts from serving clusters: Mooncake and Bailian."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from saga_sim.traces.chains import BlockIds, Chain, end_of_ids, head, moved, prefix_ids
from saga_sim.traces.model import Call, runs_of
from saga_sim.traces.source import Part, Record, Source, TraceError

MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16

MOONCAKE_EXPECTS = "timestamp, input_length, output_length, hash_ids"
BAILIAN_EXPECTS = f"chat_id, parent_chat_id, {MOONCAKE_EXPECTS}"

COMMON_FAN_OUT = 8
"""A block that so many different blocks follow is the end of a common prefix."""

MOONCAKE_NOTE = "Sessions are inferred from shared prefixes"


def matches_mooncake(values: Mapping[str, Any]) -> bool:
    """Whether a record is of Mooncake's format."""
    return {"timestamp", "hash_ids"} <= values.keys() and "chat_id" not in values


def matches_bailian(values: Mapping[str, Any]) -> bool:
    """Whether a record is of Bailian's format."""
    return {"timestamp", "hash_ids", "chat_id"} <= values.keys()


class MooncakeReader:
    """Reads Mooncake's calls: 512-token blocks, times in milliseconds, no sessions.

    A call goes on in the session whose last prompt is the longest prefix of its own, at full
    blocks, give or take that prompt's last block; the prefix must reach beyond the part that is
    common to many. Otherwise it opens a session. The last, partly filled block of a prompt, which
    the trace counts, is left out.
    """

    def __init__(self, ids: BlockIds, block_tokens: int | None) -> None:
        self._ids = ids
        self._wanted = block_tokens

    def read(self, source: Source) -> Part:
        """Read a file; its ids are its own."""
        calls: list[Call] = []
        for record in source.records():
            record.check_block(MOONCAKE_BLOCK_TOKENS, self._wanted)
            time_s = record.number("timestamp") / 1e3
            calls.append(_call(record, "", time_s, MOONCAKE_BLOCK_TOKENS))
        calls = _with_prefix_ids(calls, self._ids)
        calls.sort(key=lambda call: call.arrival_s)
        sessions = [
            tuple(replace(call, session_id=str(i)) for call in of)
            for i, of in enumerate(_sessions_by_prefix(calls), 1)
        ]
        return Part(sessions, MOONCAKE_BLOCK_TOKENS, clock="shared", notes=(MOONCAKE_NOTE,))


class BailianReader:
    """Reads Bailian's calls: 16-token blocks, times in seconds, parents of calls.

    A session is what goes back to one call without a parent, by whose id it is named, or to one
    parent that the file does not hold.
    """

    def __init__(self, ids: BlockIds, block_tokens: int | None) -> None:
        self._ids = ids
        self._wanted = block_tokens

    def read(self, source: Source) -> Part:
        """Read a file; its ids are its own."""
        calls: list[Call] = []
        parents: dict[str, str] = {}
        for record in source.records():
            record.check_block(BAILIAN_BLOCK_TOKENS, self._wanted)
            chat_id = record.name("chat_id")
            if chat_id in parents:
                raise record.error(f"'chat_id' is {chat_id!r} again; expected a call an id")
            parents[chat_id] = record.name("parent_chat_id", "-1")
            calls.append(_call(record, chat_id, record.number("timestamp"), BAILIAN_BLOCK_TOKENS))
        calls = _with_prefix_ids(calls, self._ids)
        calls.sort(key=lambda call: call.arrival_s)
        roots = _roots(parents, source)
        sessions: dict[str, list[Call]] = {}
        for call in calls:
            root = roots[call.session_id]
            sessions.setdefault(root, []).append(replace(call, session_id=root))
        return Part([tuple(of) for of in sessions.values()], BAILIAN_BLOCK_TOKENS, clock="shared")


def _call(record: Record, session_id: str, arrival_s: float, block_tokens: int) -> Call:
    input_tokens = record.integer("input_length")
    return Call(
        session_id=session_id,
        arrival_s=arrival_s,
        input_tokens=input_tokens,
        output_tokens=record.integer("output_length"),
        chain=head(runs_of(record.ids("hash_ids")), input_tokens // block_tokens),
    )


def _with_prefix_ids(calls: Sequence[Call], ids: BlockIds) -> list[Call]:
    """The calls with block ids of the trace, each with one predecessor."""
    chains = prefix_ids([call.chain for call in calls])
    base = ids.take(end_of_ids(chains))
    return [
        replace(call, chain=moved(chain, base)) for call, chain in zip(calls, chains, strict=True)
    ]


def _roots(parents: Mapping[str, str], source: Source) -> dict[str, str]:
    """Call → the first call of its session, or the parent of that which is not in the file."""
    roots: dict[str, str] = {}
    for chat_id in parents:
        path: list[str] = []
        at = chat_id
        while at not in roots and parents.get(at, "-1") != "-1":
            path.append(at)
            at = parents[at]
            if len(path) > len(parents):
                raise TraceError(
                    f"{source.path}: chat_id {chat_id!r} is its own ancestor; "
                    "expected parents that lead to -1"
                )
        root = roots.get(at, at)
        roots.update(dict.fromkeys([*path, at], root))
    return roots


@dataclass(slots=True)
class _Open:
    """Sessions by what a next call's prompt has to hold: id of a block → the session.

    Attributes:
        whole: by the last block of the session's last prompt.
        but_last: by the block before that; of several sessions the one that was last.
    """

    whole: dict[int, int] = field(default_factory=dict)
    but_last: dict[int, int] = field(default_factory=dict)

    def find(self, chain: Chain, common: set[int]) -> int | None:
        """The session in which a call with this chain goes on."""
        for block_id in reversed([block_id for run in chain for block_id in run]):
            if block_id in common:
                return None
            for index in (self.whole, self.but_last):
                if block_id in index:
                    return index[block_id]
        return None

    def move(self, session: int, old: Chain, new: Chain) -> None:
        """The session's last prompt was ``old`` and is ``new``."""
        for index, depth in ((self.whole, 1), (self.but_last, 2)):
            old_id, new_id = _from_end(old, depth), _from_end(new, depth)
            if old_id is not None and index.get(old_id) == session:
                del index[old_id]
            if new_id is not None:
                index[new_id] = session


def _sessions_by_prefix(calls: Sequence[Call]) -> list[list[Call]]:
    """The calls, in the order of arrival, by session."""
    common = _common_ends(call.chain for call in calls)
    sessions: list[list[Call]] = []
    open_sessions = _Open()
    for call in calls:
        number = open_sessions.find(call.chain, common)
        old: Chain = ()
        if number is None:
            number = len(sessions)
            sessions.append([])
        else:
            old = sessions[number][-1].chain
        sessions[number].append(call)
        open_sessions.move(number, old, call.chain)
    return sessions


def _common_ends(chains: Iterable[Chain]) -> set[int]:
    """The blocks that end a prefix common to many."""
    before: dict[int, int] = {}
    for chain in chains:
        last = -1
        for run in chain:
            for block_id in run:
                before[block_id] = last
                last = block_id
    fan_out = Counter(before.values())
    return {block_id for block_id, followers in fan_out.items() if followers >= COMMON_FAN_OUT}


def _from_end(chain: Chain, depth: int) -> int | None:
    """The ``depth``-th block from the end, 1 the last."""
    for run in reversed(chain):
        if depth <= len(run):
            return run[-depth]
        depth -= len(run)
    return None
