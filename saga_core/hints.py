"""The hint headers: what an agent's process says about a request.

Hints are advice. A bad value is dropped and named to the caller, never an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import lru_cache
from urllib.parse import unquote

from saga_core.types import ToolType, parse_tool_type

MAX_VALUE_CHARS = 256

_TOKEN = re.compile(r"[A-Za-z0-9._~:-]{1,256}")
_NOT_TOKEN = re.compile(r"[^A-Za-z0-9._~:-]+")
_MAX_INT_DIGITS = 15
_MAX_INT = 10**_MAX_INT_DIGITS - 1


@dataclass(frozen=True, slots=True)
class Hints:
    """What a request says about its place in an agent's run; None means "not said".

    Attributes:
        step: 0-based number of the LLM call in its session; a retry repeats it.
        node: agent, role or graph node that makes the call.
        tool: type of the tool whose result this request carries.
        tool_name: that tool's name.
        deadline_ms: milliseconds until the task should be done.
        final: this is the last step of its session.
    """

    workflow_id: str | None = None
    task_id: str | None = None
    session_id: str | None = None
    parent_session_id: str | None = None
    step: int | None = None
    node: str | None = None
    tool: ToolType | None = None
    tool_name: str | None = None
    deadline_ms: int | None = None
    final: bool = False


HEADERS: dict[str, str] = {
    "workflow_id": "X-SAGA-Workflow-ID",
    "task_id": "X-SAGA-Task-ID",
    "session_id": "X-SAGA-Session-ID",
    "parent_session_id": "X-SAGA-Parent-Session-ID",
    "step": "X-SAGA-Step",
    "node": "X-SAGA-Node",
    "tool": "X-SAGA-Tool",
    "tool_name": "X-SAGA-Tool-Name",
    "deadline_ms": "X-SAGA-Deadline-Ms",
    "final": "X-SAGA-Final",
}
"""Field of :class:`Hints` → name of its header."""

_INT_FIELDS = frozenset({"step", "deadline_ms"})
_PARSED_FIELDS = _INT_FIELDS | {"tool", "final"}
_FIELD_OF = {header.lower(): field for field, header in HEADERS.items()}
_BAGGAGE = {
    "saga.workflow_id": "workflow_id",
    "saga.task_id": "task_id",
    "saga.session_id": "session_id",
}
assert {f.name for f in fields(Hints)} == set(HEADERS)


@dataclass(frozen=True, slots=True)
class Decoded:
    """Hints read from a request, and the names of the headers whose value was dropped."""

    hints: Hints
    dropped: tuple[str, ...] = ()


def clean(value: str) -> str | None:
    """Make any text a legal hint value: foreign characters become ``-``, the length is capped.

    A legal value stays as it is. Returns None when nothing legal is left.
    """
    # The ids of a session come again with each of its calls. A long text is not worth keeping.
    return _clean_short(value) if len(value) <= MAX_VALUE_CHARS else _clean(value)


def _clean(value: str) -> str | None:
    if _TOKEN.fullmatch(value):
        return value
    cleaned = _NOT_TOKEN.sub("-", value).strip("-")[:MAX_VALUE_CHARS]
    return cleaned or None


_clean_short = lru_cache(maxsize=4096)(_clean)


def encode(hints: Hints, of: Iterable[str] = tuple(HEADERS)) -> dict[str, str]:
    """Write hints as headers. Fields that are not said, numbers out of range, and text that cannot
    be made legal are left out; the result is always safe to send.

    Args:
        of: the fields that are written; by default all.
    """
    headers: dict[str, str] = {}
    for field in of:
        value = getattr(hints, field)
        if value is None or value is False:
            continue
        text = _written(field, value)
        if text is not None:
            headers[HEADERS[field]] = text
    return headers


def decode(headers: Iterable[tuple[str, str]]) -> Decoded:
    """Read hints from a request's headers, names in any case.

    ``X-SAGA-*`` wins over the ``baggage`` header. The first legal value of a repeated header
    counts. Values that are not legal are dropped and their header is named in ``dropped``.
    """
    found: dict[str, str | int | bool | ToolType] = {}
    dropped: list[str] = []
    baggage: list[str] = []
    for name, value in headers:
        lowered = name.lower()
        if lowered == "baggage":
            baggage.append(value)
            continue
        field = _FIELD_OF.get(lowered)
        if field is None or field in found:
            continue
        parsed = _parse(field, value.strip())
        if parsed is None:
            dropped.append(HEADERS[field])
        else:
            found[field] = parsed
    for header in baggage:
        for field, text in _baggage_items(header):
            if field not in found and _TOKEN.fullmatch(text):
                found[field] = text
    return Decoded(Hints(**found), tuple(dropped))  # type: ignore[arg-type]


def _written(field: str, value: object) -> str | None:
    if type(value) is ToolType:
        return value.value
    if type(value) is int and field in _INT_FIELDS:
        return str(value) if 0 <= value <= _MAX_INT else None
    text = "1" if value is True else clean(str(value))
    if text is None or field not in _PARSED_FIELDS:
        return text
    return text if _parse(field, text) is not None else None


def _parse(field: str, value: str) -> str | int | bool | ToolType | None:
    if field in _INT_FIELDS:
        legal = value.isascii() and value.isdigit() and len(value) <= _MAX_INT_DIGITS
        return int(value) if legal else None
    if field == "final":
        return {"1": True, "true": True, "0": False, "false": False}.get(value.lower())
    if field == "tool":
        return parse_tool_type(value)
    return value if _TOKEN.fullmatch(value) else None


def _baggage_items(header: str) -> Iterable[tuple[str, str]]:
    for member in header.split(","):
        key, _, rest = member.partition("=")
        field = _BAGGAGE.get(key.strip())
        if field is not None:
            yield field, unquote(rest.partition(";")[0].strip())
