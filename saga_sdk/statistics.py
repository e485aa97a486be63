"""What the SDK holds and has lost."""

from __future__ import annotations

from dataclasses import dataclass

from saga_sdk.context import calls
from saga_sdk.events import sender
from saga_sdk.runs import tracker
from saga_sdk.sessions import named_sessions


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts of this process.

    Attributes:
        open_runs: runs of frameworks that have not ended.
        open_calls: LLM calls of frameworks that have not ended.
        named_sessions: sessions whose steps are remembered between runs.
        events_queued: events that wait to be sent.
        events_sent: events that gateways took.
        events_dropped: events that were lost: the queue was full, or nobody took them.
    """

    open_runs: int
    open_calls: int
    named_sessions: int
    events_queued: int
    events_sent: int
    events_dropped: int


def stats() -> Stats:
    """What the SDK holds now, and what became of its events since the process began."""
    return Stats(
        open_runs=len(tracker),
        open_calls=len(calls),
        named_sessions=len(named_sessions),
        events_queued=len(sender),
        events_sent=sender.sent,
        events_dropped=sender.dropped,
    )
