"""Events: what an agent's process says between two of its requests.

The body of ``POST /saga/v1/events`` is a JSON array of objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import orjson

from saga_core.errors import SagaError
from saga_core.hints import HEADERS, decode

MAX_EVENTS = 1024


class EventError(SagaError, ValueError):
    """A body of events is malformed; the message names the field and what it takes."""


class EventKind(StrEnum):
    """What has happened."""

    TASK_START = "task_start"
    TASK_END = "task_end"
    TOOL_START = "tool_start"
    TOOL_END = "tool_end"
    SESSION_END = "session_end"


_OF_A_SESSION = frozenset({EventKind.TOOL_START, EventKind.TOOL_END, EventKind.SESSION_END})


@dataclass(frozen=True, slots=True)
class Event:
    """One event; those of tasks may name no session."""

    kind: EventKind
    session_id: str | None


def parse_events(body: bytes) -> list[Event]:
    """Read a body; fields that are not known are passed over.

    Raises:
        EventError: anything in the body is not as documented; nothing of it is to be applied.
    """
    try:
        items = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise EventError(f"the body is not JSON: {error}") from None
    if not isinstance(items, list) or len(items) > MAX_EVENTS:
        raise EventError(f"the body must be an array of at most {MAX_EVENTS} objects")
    return [_event(item, f"[{i}]") for i, item in enumerate(items)]


def _event(item: object, where: str) -> Event:
    if not isinstance(item, dict):
        raise EventError(f"{where} must be an object")
    try:
        kind = EventKind(str(item.get("event")))
    except ValueError:
        kinds = ", ".join(EventKind)
        raise EventError(f"{where}.event must be one of {kinds}") from None
    session_id = item.get("session_id")
    if session_id is None and kind not in _OF_A_SESSION:
        return Event(kind, None)
    if not isinstance(session_id, str) or not _legal(session_id):
        raise EventError(
            f"{where}.session_id must be a text of 1 to 256 characters of A-Z a-z 0-9 . _ ~ : -"
        )
    return Event(kind, session_id)


def _legal(session_id: str) -> bool:
    """Whether the id could have come as a header."""
    return decode([(HEADERS["session_id"], session_id)]).hints.session_id == session_id
