"""Responses that live in the worker that made them."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import orjson

from saga_gateway.routes import RESPONSE_PREFIX


class Made(NamedTuple):
    """Where a response comes from: the worker that made it, and the session that it is of."""

    worker_id: str
    session_id: str | None


class Responses:
    """Who has made a tenant's responses: that worker alone can go on from them.

    The oldest makes room.
    """

    def __init__(self, max_responses: int) -> None:
        self._max_responses = max_responses
        self._made: OrderedDict[str, Made] = OrderedDict()

    def get(self, tenant: str | None, response_id: str | None) -> Made | None:
        """Where it comes from; None when the tenant has no such response here."""
        return None if response_id is None else self._made.get(_key(tenant, response_id))

    def put(self, tenant: str | None, response_id: str, made: Made) -> None:
        """Remember a response."""
        self._made[_key(tenant, response_id)] = made
        if len(self._made) > self._max_responses:
            self._made.popitem(last=False)


def _key(tenant: str | None, response_id: str) -> str:
    # One text takes half the room of a pair. No tenant's name has a line end in it.
    return f"{tenant or ''}\n{response_id}"


class UnreadableError(Exception):
    """A body is no JSON that the gateway reads: what it goes on from cannot be told."""


def named_response(path: str, body: bytes) -> str | None:
    """Id of the response that a request of the responses API goes on from, or is about.

    Raises:
        UnreadableError: the body is not JSON.
    """
    if path.startswith(RESPONSE_PREFIX):
        return path.removeprefix(RESPONSE_PREFIX).partition("/")[0]
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise UnreadableError(str(error)) from None
    named = content.get("previous_response_id") if isinstance(content, dict) else None
    return named if isinstance(named, str) else None
