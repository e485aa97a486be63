"""The paths that are relayed to workers, and the shape that errors have on them."""

from __future__ import annotations

import re
from enum import StrEnum


class Dialect(StrEnum):
    """Whose protocol a path speaks."""

    OPENAI = "openai"
    RESPONSES = "responses"
    ANTHROPIC = "anthropic"


STEPS: dict[str, Dialect] = {
    "/v1/chat/completions": Dialect.OPENAI,
    "/v1/completions": Dialect.OPENAI,
    "/v1/responses": Dialect.RESPONSES,
    "/v1/messages": Dialect.ANTHROPIC,
}
"""Paths whose POST is a step of a session."""

APIS: dict[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}
"""The same paths, and how the prompt stands in their bodies."""

SINGLE: dict[str, Dialect] = {
    **dict.fromkeys(
        (
            "/v1/embeddings",
            "/v2/embed",
            "/pooling",
            "/classify",
            "/v1/rerank",
            "/v2/rerank",
            "/rerank",
            "/v1/score",
            "/score",
            "/tokenize",
            "/detokenize",
            "/v1/audio/transcriptions",
            "/v1/audio/translations",
        ),
        Dialect.OPENAI,
    ),
    "/v1/messages/count_tokens": Dialect.ANTHROPIC,
}
"""Paths whose POST any worker can answer, and that no session goes on with."""

RESPONSE_PREFIX = "/v1/responses/"
_RESPONSE = re.compile(RESPONSE_PREFIX + r"[A-Za-z0-9_-]{1,256}(?P<cancel>/cancel)?")


def response_method(path: str) -> str | None:
    """What a path of a response takes, GET or POST to cancel; None: it is no such path."""
    match = _RESPONSE.fullmatch(path)
    return None if match is None else "POST" if match["cancel"] else "GET"


def dialect_of(path: str) -> Dialect:
    """The dialect of a path that is relayed."""
    if path.startswith(RESPONSE_PREFIX):
        return Dialect.RESPONSES
    return STEPS.get(path) or SINGLE.get(path, Dialect.OPENAI)


def error_body(
    message: str, *, kind: str, code: str, dialect: Dialect = Dialect.OPENAI
) -> dict[str, object]:
    """An error as the dialect's clients read it; ``kind`` is its ``type``."""
    if dialect is Dialect.ANTHROPIC:
        kind = "api_error" if kind == "server_error" else kind
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {"error": {"message": message, "type": kind, "code": code}}


def error_event(message: str, *, code: str, dialect: Dialect) -> tuple[bytes, dict[str, object]]:
    """Head and data of the event with which a stream of the dialect ends in an error."""
    if dialect is Dialect.RESPONSES:
        return b"event: error\n", {"type": "error", "code": code, "message": message, "param": None}
    head = b"event: error\n" if dialect is Dialect.ANTHROPIC else b""
    return head, error_body(message, kind="server_error", code=code, dialect=dialect)
