"""Which headers a proxy passes on, in either direction."""

from __future__ import annotations

from collections.abc import Iterable

from saga_gateway.asgi import RawHeaders

Headers = list[tuple[str, str]]

_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_SET_BY_CLIENT_LIBRARY = frozenset({"host", "content-length", "expect"})
OWN_RESPONSE_HEADERS = (
    "X-SAGA-Worker",
    "X-SAGA-Route",
    "X-SAGA-Session-ID",
    "X-SAGA-Cached-Tokens",
)
_OWN_LOWER = frozenset(name.lower().encode() for name in OWN_RESPONSE_HEADERS)
PRIORITY_HEADER = "x-vllm-priority"
"""vLLM's: a whole number, lower first. It refuses any but 0 where it serves in another order."""
_SESSION_HEADERS = frozenset({"x-session-id", "x-smg-routing-key"})
_LEFT_OUT = _HOP_BY_HOP | _SET_BY_CLIENT_LIBRARY | {PRIORITY_HEADER}
_LEFT_OUT_OF_STEP = _LEFT_OUT | _SESSION_HEADERS
_HOP_BY_HOP_BYTES = frozenset(name.encode() for name in _HOP_BY_HOP)
_NOT_DOWNSTREAM = _HOP_BY_HOP_BYTES | _OWN_LOWER


def decode_headers(raw: RawHeaders) -> Headers:
    """Headers as text: UTF-8 where they are that, else Latin-1; names in lower case."""
    return [(name.decode("latin-1").lower(), _text(value)) for name, value in raw]


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def upstream_headers(headers: Headers, *, is_step_of_session: bool) -> Headers:
    """What any worker gets: the end-to-end headers.

    What each engine is told in its own words is left out (:func:`engines.engine_headers`): the
    priority, and the session where there is one. Without one, the client's own words for it pass.
    """
    left_out = _LEFT_OUT_OF_STEP if is_step_of_session else _LEFT_OUT
    left_out |= _named_by_connection(headers)
    return [(name, value) for name, value in headers if name not in left_out]


def downstream_headers(raw: RawHeaders) -> list[tuple[bytes, bytes]]:
    """What the client gets of a worker's headers: end-to-end ones, never both lengths."""
    lowered = [(name.lower(), value) for name, value in raw]
    left_out = _NOT_DOWNSTREAM
    for name, value in lowered:
        if name == b"connection":
            left_out |= {token.strip().lower() for token in value.split(b",")}
        elif name == b"transfer-encoding":
            left_out |= {b"content-length"}
    return [(name, value) for name, value in lowered if name not in left_out]


def _named_by_connection(headers: Iterable[tuple[str, str]]) -> frozenset[str]:
    return frozenset(
        token.strip().lower()
        for name, value in headers
        if name == "connection"
        for token in value.split(",")
    )
