"""Responses that live in the worker that made them."""

from __future__ import annotations

from collections import OrderedDict

import orjson

from saga_gateway.routes import RESPONSE_PREFIX


class ResponseHomes:
    """Which worker has made a tenant's response: it alone can go on from it.

    The oldest makes room.
    """

    def __init__(self, max_responses: int) -> None:
        self._max_responses = max_responses
        self._homes: OrderedDict[tuple[str | None, str], str] = OrderedDict()

    def get(self, tenant: str | None, response_id: str | None) -> str | None:
        """The worker's id; None when the tenant has no such response here."""
        return None if response_id is None else self._homes.get((tenant, response_id))

    def put(self, tenant: str | None, response_id: str, worker_id: str) -> None:
        """Remember a response."""
        self._homes[tenant, response_id] = worker_id
        if len(self._homes) > self._max_responses:
            self._homes.popitem(last=False)


def named_response(path: str, body: bytes) -> str | None:
    """Id of the response that a request of the responses API goes on from, or is about."""
    if path.startswith(RESPONSE_PREFIX):
        return path.removeprefix(RESPONSE_PREFIX).partition("/")[0]
    if b"previous_response_id" not in body:
        return None
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None  # The worker says what is wrong with it.
    named = content.get("previous_response_id") if isinstance(content, dict) else None
    return named if isinstance(named, str) else None
