"""Traces of kv-cache-tester: recorded Claude Code conversations, one a line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from saga_sim.traces.chains import (
    BlockIds,
    Chain,
    end_of_ids,
    head,
    moved,
    prefix_ids,
)
from saga_sim.traces.model import Call, runs_of
from saga_sim.traces.source import Part, Record, Source

EXPECTS = "id, block_size, tool_tokens, system_tokens, requests"

SUBAGENT = "subagent"


def matches(values: Mapping[str, Any]) -> bool:
    """Whether a record is of this format."""
    return "requests" in values and "block_size" in values


@dataclass(frozen=True, slots=True)
class _Opening:
    """What makes openings equal: tool and system tokens and the first request's model."""

    tool_tokens: int
    system_tokens: int
    model: str


@dataclass(frozen=True, slots=True)
class _Agent:
    """A conversation or one of its sub-agents; its requests are without the sub-agents' ones."""

    session_id: str
    parent_session_id: str | None
    start_s: float
    record: Record
    requests: list[Record]


class Reader:
    """Reads conversations.

    Hash ids are local to a conversation: they get a range of their own in the trace. The first
    ``(tool_tokens + system_tokens) // block_size`` blocks of a conversation's first request are
    its opening. Conversations with the same tool tokens, system tokens and first model share
    their openings; a request that does not begin like its conversation's first one (another
    system prompt) shares only what its own ids say.

    A sub-agent is a session of its own, ``<conversation>/<agent>``, with the opening of its own
    tool and system tokens. Its ``t`` is when it ended, and the times of its requests count from
    its start; here they stand on the clock of the conversation.
    """

    def __init__(self, ids: BlockIds, block_tokens: int | None) -> None:
        self._ids = ids
        self._block_tokens = block_tokens
        self._shared: dict[_Opening, int] = {}  # → first id of the opening's blocks

    def read(self, source: Source) -> Part:
        """Read a file; openings are shared with the files read before."""
        sessions: list[tuple[Call, ...]] = []
        block_tokens = 0
        names: set[str] = set()
        for record in source.records():
            recorded = record.integer("block_size", at_least=1)
            block_tokens = record.check_block(recorded, self._block_tokens)
            self._block_tokens = block_tokens
            name = record.name("id")
            if name in names:
                raise record.error(f"'id' is {name!r} again; expected one line a conversation")
            names.add(name)
            agents = [agent for agent in _agents(record, name, None, 0.0) if agent.requests]
            sessions += self._sessions(agents, block_tokens)
        return Part(sessions, block_tokens, clock="session")

    def _sessions(self, agents: list[_Agent], block_tokens: int) -> Iterator[tuple[Call, ...]]:
        chains = _local_chains(agents, block_tokens)
        base = self._ids.take(end_of_ids(chain for of in chains for chain in of))
        pieces: list[tuple[range, int]] = []
        seen: set[_Opening] = set()
        for agent, (first, *_) in zip(agents, chains, strict=True):
            opening = _opening(agent)
            num_blocks = (opening.tool_tokens + opening.system_tokens) // block_tokens
            blocks = head(first, num_blocks)
            if opening in seen or _overlaps(blocks, pieces):
                continue
            seen.add(opening)
            if opening not in self._shared:
                self._shared[opening] = self._ids.take(num_blocks)
            at = self._shared[opening]
            for run in blocks:
                pieces.append((run, at - run.start))
                at += len(run)
            pieces.sort(key=lambda piece: piece[0].start)
        for agent, of in zip(agents, chains, strict=True):
            calls = [
                _call(agent, request, moved(chain, base, pieces))
                for request, chain in zip(agent.requests, of, strict=True)
            ]
            yield tuple(sorted(calls, key=lambda call: call.arrival_s))


def _agents(
    record: Record, session_id: str, parent: str | None, start_s: float
) -> Iterator[_Agent]:
    """The agent of a record, then its sub-agents, then theirs."""
    items = record.records("requests")
    own = [item for item in items if item.values.get("type") != SUBAGENT]
    yield _Agent(session_id, parent, start_s, record, own)
    names: set[str] = set()
    for item in items:
        if item.values.get("type") != SUBAGENT:
            continue
        name = item.name("agent_id", str(len(names) + 1))
        if name in names:
            raise item.error(f"'agent_id' is {name!r} again; expected one entry a sub-agent")
        names.add(name)
        began_s = max(round(start_s + item.number("t") - _duration_s(item), 6), start_s)
        yield from _agents(item, f"{session_id}/{name}", session_id, began_s)


def _duration_s(subagent: Record) -> float:
    """How long a sub-agent ran; without a record of it, until its last answer."""
    if subagent.has("duration_ms"):
        return subagent.number("duration_ms") / 1e3
    requests = subagent.records("requests")
    return max((r.number("t") + r.number("api_time", 0.0) for r in requests), default=0.0)


def _local_chains(agents: list[_Agent], block_tokens: int) -> list[list[Chain]]:
    """Chains of the agents' requests with the conversation's own ids, one list an agent."""
    chains = [
        [
            head(runs_of(request.ids("hash_ids")), request.integer("in") // block_tokens)
            for request in agent.requests
        ]
        for agent in agents
    ]
    renamed = iter(prefix_ids([chain for of in chains for chain in of]))
    return [[next(renamed) for _ in of] for of in chains]


def _opening(agent: _Agent) -> _Opening:
    record = agent.record
    return _Opening(
        record.integer("tool_tokens", 0),
        record.integer("system_tokens", 0),
        agent.requests[0].text("model", ""),
    )


def _overlaps(blocks: Chain, pieces: list[tuple[range, int]]) -> bool:
    return any(
        run.start < piece.stop and piece.start < run.stop for run in blocks for piece, _ in pieces
    )


def _call(agent: _Agent, request: Record, chain: Chain) -> Call:
    return Call(
        session_id=agent.session_id,
        arrival_s=round(agent.start_s + request.number("t"), 6),
        input_tokens=request.integer("in"),
        output_tokens=request.integer("out"),
        chain=chain,
        duration_s=request.number("api_time", None),
        ending=request.text("stop", ""),
        parent_session_id=agent.parent_session_id,
    )
