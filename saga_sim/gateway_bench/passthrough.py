"""The least that a Python gateway can be: raw ASGI and aiohttp, nothing decided, nothing read.

``python -m saga_sim.gateway_bench.passthrough PORT UPSTREAM_URL``.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import aiohttp
import uvicorn

Message = MutableMapping[str, Any]
_LEFT_OUT = frozenset({b"host", b"content-length", b"connection", b"transfer-encoding"})


class PassThrough:
    """An ASGI application that relays every request to one server."""

    def __init__(self, upstream_url: str) -> None:
        self._url = upstream_url
        self._client: aiohttp.ClientSession | None = None

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["path"] == "/health":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"ok"})
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = [(n.decode(), v.decode()) for n, v in scope["headers"] if n not in _LEFT_OUT]
        assert self._client is not None
        async with self._client.post(
            self._url + scope["path"], data=body, headers=headers
        ) as response:
            passed = [(n, v) for n, v in response.raw_headers if n.lower() not in _LEFT_OUT]
            await send(
                {"type": "http.response.start", "status": response.status, "headers": passed}
            )
            async for data in response.content.iter_any():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    async def _lifespan(
        self,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        await receive()
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), auto_decompress=False
        )
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._client.close()
        await send({"type": "lifespan.shutdown.complete"})


if __name__ == "__main__":
    uvicorn.run(
        PassThrough(sys.argv[2]),
        port=int(sys.argv[1]),
        http="httptools",
        loop="uvloop",
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
    )
