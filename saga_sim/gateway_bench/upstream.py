"""A stand-in for a worker that costs next to nothing, so that a gateway's own cost shows.

``python -m saga_sim.gateway_bench.upstream PORT``. A request is answered with a short completion,
after ``X-Bench-Interval-Ms``; with ``X-Bench-Events: N`` with a stream of N events, one each
``X-Bench-Interval-Ms``. A body that asks for a stream says the same by ``max_tokens`` and ``seed``.
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import cast

import uvloop

_BODY = (
    b'{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"hello"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":1000,"completion_tokens":1,"total_tokens":1001}}'
)
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
    len(_BODY),
    _BODY,
)
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_EVENT = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":'
    b'[{"index":0,"delta":{"content":" token"},"finish_reason":null}]}\n\n'
)
_CHUNK = b"%x\r\n%s\r\n" % (len(_EVENT), _EVENT)
_STREAM = re.compile(rb'"stream": ?true')
_WANTED = re.compile(rb'"(max_tokens|seed)": ?(\d+)')
_DONE = b"data: [DONE]\n\n"
_END = b"%x\r\n%s\r\n0\r\n\r\n" % (len(_DONE), _DONE)


class _Connection(asyncio.Protocol):
    """One kept-alive connection, a request at a time."""

    def __init__(self) -> None:
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, blank, body = self._buffer.partition(b"\r\n\r\n")
        if not blank:
            return
        length, events, interval_s = _read_head(head)
        if len(body) < length:
            return
        self._buffer = body[length:]
        if _STREAM.search(body) is not None:
            wanted = {name: int(value) for name, value in _WANTED.findall(body)}
            events = wanted.get(b"max_tokens", 1)
            interval_s = wanted.get(b"seed", 0) / 1000
        assert self._transport is not None
        if not events and not interval_s:
            self._transport.write(_ANSWER)
        elif not events:
            asyncio.get_running_loop().call_later(interval_s, self._transport.write, _ANSWER)
        else:
            self._task = asyncio.ensure_future(_stream(self._transport, events, interval_s))


def _read_head(head: bytes) -> tuple[int, int, float]:
    length, events, interval_s = 0, 0, 0.0
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        match name.lower():
            case b"content-length":
                length = int(value)
            case b"x-bench-events":
                events = int(value)
            case b"x-bench-interval-ms":
                interval_s = float(value) / 1000
    return length, events, interval_s


async def _stream(transport: asyncio.Transport, events: int, interval_s: float) -> None:
    transport.write(_HEAD)
    for _ in range(events):
        transport.write(_CHUNK)
        await asyncio.sleep(interval_s)
    transport.write(_END)


async def _serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(_Connection, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
