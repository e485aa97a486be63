"""Events: what an agent's process says between two of its requests.

The body of ``POST /saga/v1/events`` is a JSON array of objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import orjson

from saga_core.errors import SagaError
from saga_core.hints import clean

MAX_EVENTS = 1024
_LEGAL = "must be a text of 1 to 256 characters of A-Z a-z 0-9 . _ ~ : -"


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
    """One event; those of tasks may name no session, and those of sessions no task."""

    kind: EventKind
    session_id: str | None
    task_id: str | None = None


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
    session_id = _id(item, "session_id", where)
    if session_id is None and kind in _OF_A_SESSION:
        raise EventError(f"{where}.session_id {_LEGAL}")
    task_id = _id(item, "task_id", where) if item.get("task_id") else None
    return Event(kind, session_id, task_id)


def _id(item: dict[str, object], name: str, where: str) -> str | None:
    """The id of that name, which could have come as a header; None: it is not there."""
    value = item.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or clean(value) != value:
        raise EventError(f"{where}.{name} {_LEGAL}")
    return value
