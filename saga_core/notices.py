"""Notices: what the gateway tells a worker about a session between two of its requests.

The body of ``POST /saga/v1/sessions:notify`` is ``{"version": 1, "notices": [...]}``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from saga_core.errors import NoticeError
from saga_core.hints import MAX_VALUE_CHARS
from saga_core.types import Pause

VERSION = 1
MAX_NOTICES = 1024
_MAX_S = 86_400.0


@dataclass(frozen=True, slots=True)
class PauseNotice:
    """A step of the session has ended and it waits, for a tool or a person."""

    session_id: str
    pause: Pause


@dataclass(frozen=True, slots=True)
class ResumeNotice:
    """The session's next request is on its way or expected within ``in_s`` seconds."""

    session_id: str
    in_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EndNotice:
    """The session will not come back; its private KV may go."""

    session_id: str


Notice = PauseNotice | ResumeNotice | EndNotice


def encode_notices(notices: Sequence[Notice]) -> dict[str, object]:
    """Write notices as the JSON object that a worker reads."""
    return {"version": VERSION, "notices": [_encode(notice) for notice in notices]}


def decode_notices(body: object) -> list[Notice]:
    """Read a JSON body.

    Raises:
        NoticeError: anything in the body is not as documented; nothing of it is to be applied.
    """
    version = body.get("version") if isinstance(body, Mapping) else None
    if not isinstance(body, Mapping) or isinstance(version, bool) or version != VERSION:
        raise NoticeError(f'the body must be an object with "version": {VERSION}')
    items = body.get("notices")
    if not isinstance(items, list) or len(items) > MAX_NOTICES:
        raise NoticeError(f'"notices" must be a list of at most {MAX_NOTICES} objects')
    return [_decode(item, f"notices[{i}]") for i, item in enumerate(items)]


def _encode(notice: Notice) -> dict[str, object]:
    if isinstance(notice, PauseNotice):
        pause = asdict(notice.pause)
        if notice.pause.pause_p50_s is None:
            del pause["pause_p50_s"]
        return {"kind": "pause", "session_id": notice.session_id, **pause}
    if isinstance(notice, ResumeNotice):
        return {"kind": "resume_soon", "session_id": notice.session_id, "in_s": notice.in_s}
    return {"kind": "end", "session_id": notice.session_id}


def _decode(item: object, where: str) -> Notice:
    if not isinstance(item, Mapping):
        raise NoticeError(f"{where} must be an object")
    session_id = item.get("session_id")
    if not isinstance(session_id, str) or not _is_short_text(session_id):
        raise NoticeError(f"{where}.session_id must be a text of 1 to {MAX_VALUE_CHARS} characters")
    kind = item.get("kind")
    if kind == "end":
        return EndNotice(session_id)
    if kind == "resume_soon":
        return ResumeNotice(session_id, _number(item, "in_s", where, _MAX_S, default=0.0))
    if kind == "pause":
        tool_name = item.get("tool_name")
        if tool_name is not None and not _is_short_text(tool_name):
            raise NoticeError(
                f"{where}.tool_name must be null or a text of 1 to {MAX_VALUE_CHARS} characters"
            )
        pause = Pause(
            p_reuse=_number(item, "p_reuse", where, 1.0),
            pause_p95_s=_number(item, "pause_p95_s", where, _MAX_S),
            tool_name=tool_name,
            pause_p50_s=None
            if item.get("pause_p50_s") is None
            else _number(item, "pause_p50_s", where, _MAX_S),
        )
        return PauseNotice(session_id, pause)
    raise NoticeError(f'{where}.kind must be "pause", "resume_soon" or "end"')


def _is_short_text(value: object) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= MAX_VALUE_CHARS


def _number(
    item: Mapping[str, object], field: str, where: str, high: float, default: float | None = None
) -> float:
    value = item.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= high:
        raise NoticeError(f"{where}.{field} must be a number from 0 to {high:g}")
    return float(value)
