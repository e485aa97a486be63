"""The headers of one outgoing request: hints, baggage and trace context."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from saga_core.errors import SettingsError
from saga_core.hints import HEADERS, Hints, clean, encode
from saga_sdk.dialects import DEFAULT, Dialect, foreign_headers
from saga_sdk.semconv import BAGGAGE_KEYS

Headers = MutableMapping[str, str]
# Names in lower case.
Sent = Mapping[bytes, bytes]

MAX_BAGGAGE_BYTES = 8192
_LLM_PATHS = ("/completions", "/responses", "/v1/messages")
_LOWERED = {name: name.lower().encode() for name in HEADERS.values()}
_FIELDS_OF_A_CALL = ("step", "node", "tool", "tool_name", "deadline_ms", "final")
_DEFAULT_PORTS = {"http": 80, "https": 443}


class Request(Protocol):
    """What is used of a request of httpx or httpx2."""

    method: str
    url: Any
    headers: Any
    extensions: Any


def origin_of(url: str) -> tuple[str, str, int]:
    """Scheme, host and port of a URL, in lower case, with the scheme's default port.

    Raises:
        SettingsError: the URL is not an absolute http or https one.
    """
    try:
        parts = urlsplit(url.strip())
        scheme, host = parts.scheme.lower(), parts.hostname
        port = parts.port or _DEFAULT_PORTS.get(scheme)
    except ValueError:
        host = port = None
    if port is None or not host or scheme not in _DEFAULT_PORTS:
        raise SettingsError(f"base URL {url!r} must be like http://host:port/v1")
    return scheme, host, port


def events_url(url: str) -> str:
    """Where the server behind an LLM call's URL takes events, if it is a SAGA gateway.

    A path before ``/v1`` is kept, user and password are not.

    Raises:
        SettingsError: the URL is not an absolute http or https one.
    """
    scheme, host, port = origin_of(url)
    prefix = urlsplit(url).path.rpartition("/v1/")[0]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{prefix}/saga/v1/events"


def is_llm_path(url: str) -> bool:
    """Whether what is posted to a URL generates text: chat, completion, response or message."""
    return url.partition("?")[0].endswith(_LLM_PATHS)


def read(request: Request) -> Sent:
    """What a request says already. One look at everything costs as much as one look-up."""
    return {name.lower(): value for name, value in request.headers.raw}


def is_retry(sent: Sent) -> bool:
    """Whether the OpenAI client sends this request again after a failed attempt."""
    return sent.get(b"x-stainless-retry-count", b"0") != b"0"


def add_hints(
    headers: Headers,
    sent: Sent,
    hints: Hints,
    *,
    deadline_ms: int | None = None,
    dialects: Iterable[Dialect] = DEFAULT,
) -> tuple[str, ...]:
    """Set the headers of the dialects that are absent; in SAGA's, add the ids to ``baggage``.

    Returns the names of the headers of the other dialects that were set.

    Args:
        sent: what the headers say before.
    """
    if Dialect.SAGA in dialects:
        ids, baggage = _ids(
            hints.workflow_id, hints.task_id, hints.session_id, hints.parent_session_id
        )
        for name, lowered, value in ids:
            if lowered not in sent:
                headers[name] = value
        of_call = encode(hints, _FIELDS_OF_A_CALL)
        if deadline_ms is not None:
            of_call[HEADERS["deadline_ms"]] = str(deadline_ms)
        for name, value in of_call.items():
            if _LOWERED[name] not in sent:
                headers[name] = value
        if b"baggage" in sent:
            baggage = merge_baggage(headers["baggage"], hints)
        if baggage:
            headers["baggage"] = baggage
    foreign = foreign_headers(dialects, hints)
    added = tuple(name for name in foreign if name.lower().encode() not in sent)
    for name in added:
        headers[name] = foreign[name]
    return added


@functools.lru_cache(maxsize=2048)
def _ids(
    workflow_id: str | None,
    task_id: str | None,
    session_id: str | None,
    parent_session_id: str | None,
) -> tuple[tuple[tuple[str, bytes, str], ...], str]:
    """The headers that all calls of a session have in common, and a baggage of the ids."""
    hints = Hints(workflow_id, task_id, session_id, parent_session_id)
    headers = tuple((name, _LOWERED[name], value) for name, value in encode(hints).items())
    return headers, merge_baggage("", hints)


def remove_hints(headers: Headers, foreign: Iterable[str]) -> None:
    """Take all hints out of a request's headers: SAGA's, and the named ones of other dialects."""
    ours = {name.lower() for name in (*HEADERS.values(), *foreign)}
    for name in [name for name in headers if name.lower() in ours]:
        del headers[name]
    baggage = headers.get("baggage")
    if baggage is not None:
        kept = [m.strip() for m in baggage.split(",") if _key_of(m) not in BAGGAGE_KEYS.values()]
        if kept:
            headers["baggage"] = ",".join(kept)
        else:
            del headers["baggage"]


def merge_baggage(existing: str, hints: Hints) -> str:
    """Append the ids to a ``baggage`` header's value.

    Members that are there stay, also one with the same key. A member that would make the value
    longer than W3C allows is left out.
    """
    keys = {_key_of(member) for member in existing.split(",")} if existing else ()
    merged = existing.strip()
    for field, key in BAGGAGE_KEYS.items():
        value = getattr(hints, field)
        value = None if value is None else clean(value)
        if value is None or key in keys:
            continue
        longer = f"{merged},{key}={value}" if merged else f"{key}={value}"
        # What is added is ASCII; only what was there may be more bytes than characters.
        size = len(longer) if longer.isascii() else len(longer.encode())
        if size <= MAX_BAGGAGE_BYTES:
            merged = longer
    return merged


def _key_of(member: str) -> str:
    return member.partition("=")[0].strip()


def add_trace_context(headers: Headers) -> None:
    """Set ``traceparent`` and its kin of the current span, unless there is a ``traceparent``.

    The baggage of OpenTelemetry's context is not sent: it was not meant for this host alone.
    """
    if "traceparent" in headers:
        return
    # Lazy: importing it loads the propagators that the environment names, and may fail.
    from opentelemetry import propagate

    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    for name, value in carrier.items():
        if name.lower() != "baggage" and name not in headers:
            headers[name] = value
