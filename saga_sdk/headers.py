"""The headers of one outgoing request: hints, baggage and trace context."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from opentelemetry import trace

from saga_core.errors import SettingsError
from saga_core.hints import Hints, clean, encode

Headers = MutableMapping[str, str]

MAX_BAGGAGE_BYTES = 8192
_BAGGAGE_FIELDS = ("workflow_id", "task_id", "session_id")
_LLM_PATHS = ("/completions", "/responses")
_DEFAULT_PORTS = {"http": 80, "https": 443}


class Request(Protocol):
    """What is used of a request of httpx or httpx2."""

    method: str
    url: Any
    headers: Any


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


def is_llm_call(request: Request) -> bool:
    """Whether a request generates text: chat, completion or response."""
    return request.method == "POST" and str(request.url.path).endswith(_LLM_PATHS)


def is_retry(request: Request) -> bool:
    """Whether the OpenAI client sends this request again after a failed attempt."""
    return str(request.headers.get("x-stainless-retry-count", "0")) != "0"


def add_hints(headers: Headers, hints: Hints) -> None:
    """Set the hint headers that are absent, and add the ids to the ``baggage`` header."""
    for name, value in encode(hints).items():
        if name not in headers:
            headers[name] = value
    baggage = merge_baggage(headers.get("baggage", ""), hints)
    if baggage:
        headers["baggage"] = baggage


def merge_baggage(existing: str, hints: Hints) -> str:
    """Append the ids to a ``baggage`` header's value.

    Members that are there stay, also one with the same key. A member that would make the value
    longer than W3C allows is left out.
    """
    keys = {member.partition("=")[0].strip() for member in existing.split(",")}
    merged = existing.strip()
    for field in _BAGGAGE_FIELDS:
        value = clean(getattr(hints, field) or "")
        key = f"saga.{field}"
        if value is None or key in keys:
            continue
        longer = f"{merged},{key}={value}" if merged else f"{key}={value}"
        if len(longer.encode()) <= MAX_BAGGAGE_BYTES:
            merged = longer
    return merged


def add_trace_context(headers: Headers) -> None:
    """Set ``traceparent`` and its kin, when there is a current span and no ``traceparent``.

    The baggage of OpenTelemetry's context is not sent: it was not meant for this host alone.
    """
    if "traceparent" in headers or not trace.get_current_span().get_span_context().is_valid:
        return
    # Lazy: importing it loads the propagators that the environment names, and may fail.
    from opentelemetry import propagate

    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    for name, value in carrier.items():
        if name.lower() != "baggage" and name not in headers:
            headers[name] = value
