"""Traces of LMCache's agent recordings: flat text of prompts and answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from saga_sim.traces.chains import (
    DEFAULT_BLOCK_TOKENS,
    BlockIds,
    Chain,
    common_blocks,
    tokens_of,
)
from saga_sim.traces.model import Call
from saga_sim.traces.source import Part, Record, Source

EXPECTS = "timestamp, input, output, session_id"

NOTE = "Tokens are estimated as characters / 4; conversations are told apart by their prompts"


def matches(values: Mapping[str, Any]) -> bool:
    """Whether a record is of this format."""
    return {"timestamp", "input", "session_id"} <= values.keys()


@dataclass(slots=True)
class _Conversation:
    """A conversation as it stands after its last call."""

    session_id: str
    text: str
    chain: Chain
    calls: list[Call] = field(default_factory=list)

    def shared_tokens(self, text: str, chain: Chain, block_tokens: int) -> int:
        """Length of the prefix that makes a call go on here; -1 when it does not.

        It goes on when its prompt begins with the whole last prompt, or with at least half of the
        last prompt's blocks.
        """
        if text == self.text or (self.text and text.startswith(self.text)):
            return tokens_of(self.text)
        shared = common_blocks(self.chain, chain)
        if shared and 2 * shared >= sum(map(len, self.chain)):
            return shared * block_tokens
        return -1


class Reader:
    """Reads flat prompts.

    ``session_id`` names a task, in which several agents may talk in turns. A call goes on in that
    conversation of its task with whose last prompt it shares the longest prefix, if that is long
    enough; of equal ones in the one that was last. Otherwise it opens ``<task>/<n>``, n from 1.
    Who spawned whom is not known. Arrivals count from the file's first call.
    """

    def __init__(self, ids: BlockIds, block_tokens: int | None) -> None:
        self._ids = ids
        self._block_tokens = block_tokens or DEFAULT_BLOCK_TOKENS

    def read(self, source: Source) -> Part:
        """Read a file; equal text gets the ids that it has in the files read before."""
        records = [(record.integer("timestamp"), record) for record in source.records()]
        records.sort(key=lambda item: item[0])
        start_us = records[0][0] if records else 0
        tasks: dict[str, list[_Conversation]] = {}
        for time_us, record in records:
            name = record.name("session_id")
            self._add(record, name, tasks.setdefault(name, []), (time_us - start_us) / 1e6)
        sessions = [tuple(of.calls) for task in tasks.values() for of in task]
        return Part(sessions, self._block_tokens, clock="shared", notes=(NOTE,))

    def _add(
        self, record: Record, task: str, conversations: list[_Conversation], arrival_s: float
    ) -> None:
        """Add a call to its conversation; a new one joins ``conversations``.

        These are in the order in which they opened.
        """
        text, answer = record.text("input"), record.text("output", "")
        chain = self._ids.of_text(text, self._block_tokens)
        best, best_key = None, (-1, 0.0)
        for known in conversations:
            shared = known.shared_tokens(text, chain, self._block_tokens)
            key = (shared, known.calls[-1].arrival_s)
            if shared >= 0 and key >= best_key:
                best, best_key = known, key
        if best is None:
            best = _Conversation(f"{task}/{len(conversations) + 1}", text, chain)
            conversations.append(best)
        best.text, best.chain = text, chain
        best.calls.append(
            Call(
                session_id=best.session_id,
                arrival_s=arrival_s,
                input_tokens=tokens_of(text),
                output_tokens=tokens_of(answer),
                chain=chain,
            )
        )
