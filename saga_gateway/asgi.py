"""The few pieces of ASGI that the routes share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

import orjson

from saga_gateway.routes import Dialect, error_body

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
RawHeaders = Sequence[tuple[bytes, bytes]]


class ClientGoneError(Exception):
    """The client left before its request was read."""


class BodyTooLargeError(Exception):
    """The request body is larger than the settings allow."""


async def read_body(receive: Receive, max_bytes: int) -> bytes:
    """Read a request's body.

    Raises:
        ClientGoneError: the client left first.
        BodyTooLargeError: more than ``max_bytes`` came; the rest is not read.
    """
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        piece = message.get("body", b"")
        size += len(piece)
        if size > max_bytes:
            raise BodyTooLargeError
        pieces.append(piece)
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def run_until_gone(receive: Receive, work: Awaitable[None]) -> bool:
    """Await ``work``, and cancel it as soon as the client leaves.

    To be called when the body has been read. Returns whether ``work`` ran to its end.
    """
    task = asyncio.current_task()
    assert task is not None
    left = False

    async def watch() -> None:
        nonlocal left
        await _gone(receive)
        left = True
        task.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        await work
    except asyncio.CancelledError:
        if not left or task.uncancel():
            raise  # Somebody else wants it to end.
        return False
    finally:
        watcher.cancel()
    return True


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_bytes(
    send: Send, status: int, body: bytes, headers: RawHeaders = (), *, content_type: bytes
) -> None:
    """Send a whole response."""
    own = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*own, *headers]})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, status: int, content: object, headers: RawHeaders = ()) -> None:
    """Send ``content`` as a JSON response."""
    body = orjson.dumps(content)
    await send_bytes(send, status, body, headers, content_type=b"application/json")


async def send_error(
    send: Send,
    status: int,
    message: str,
    *,
    code: str,
    headers: RawHeaders = (),
    dialect: Dialect = Dialect.OPENAI,
) -> None:
    """Send an error response in the dialect's shape."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    content = error_body(message, kind=kind, code=code, dialect=dialect)
    await send_json(send, status, content, headers)
