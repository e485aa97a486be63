"""What every trace is read into: LLM calls with the identity of their prompt's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Call:
    """One LLM call of a session.

    Attributes:
        session_id: its session; unique in the trace.
        arrival_s: when it arrived, seconds on the trace's clock.
        input_tokens, output_tokens: length of the prompt and of the answer.
        chain: identity of the prompt's full blocks in order, as runs of consecutive ids. Equal ids
            mean equal prefixes up to and including that block, so an id has one predecessor only.
        duration_s: how long the call ran; None when the trace does not say.
        ending: how the answer ended ("tool_use", "end_turn"); "" when the trace does not say.
        tool: name of the tool that the answer called; None when none, or not said.
        tool_s: how long that tool ran, seconds; None when not said.
        parent_session_id: the session that spawned this one.
        agent: the agent that made the call; None when not said.
    """

    session_id: str
    arrival_s: float
    input_tokens: int
    output_tokens: int
    chain: tuple[range, ...]
    duration_s: float | None = None
    ending: str = ""
    tool: str | None = None
    tool_s: float | None = None
    parent_session_id: str | None = None
    agent: str | None = None

    @property
    def num_blocks(self) -> int:
        """Full blocks of the prompt."""
        return sum(map(len, self.chain))


@dataclass(frozen=True, slots=True)
class Trace:
    """Calls of one source.

    Attributes:
        name: where it came from, for reports.
        block_tokens: tokens in a block.
        sessions: the calls by session, each in the order of arrival.
        clock: "shared" when arrivals of different sessions are on one clock; "session" when the
            source recorded each session alone, so that only gaps within a session mean something.
    """

    name: str
    block_tokens: int
    sessions: tuple[tuple[Call, ...], ...]
    clock: str = "session"
    notes: tuple[str, ...] = field(default=())


def runs_of(ids: Sequence[int]) -> tuple[range, ...]:
    """Group block ids into runs of consecutive ids."""
    runs: list[range] = []
    start = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or ids[i] != ids[i - 1] + 1:
            runs.append(range(ids[start], ids[i - 1] + 1))
            start = i
    return tuple(runs)
