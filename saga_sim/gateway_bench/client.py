"""A load client in a closed loop that costs little: prepared requests over raw sockets.

``python -m saga_sim.gateway_bench.client PORT '{"requests": 1000, ...}'`` prints what it saw as
JSON; the keys are the fields of :class:`Load`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from functools import lru_cache

import uvloop


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent.

    Attributes:
        requests: in all.
        at_a_time: open at a time, each on a connection of its own.
        body_bytes: length of a request's body.
        events: of a streamed answer; 0: the answer comes whole.
        interval_ms: between two of its events.
        sessions: conversations that requests belong to in turn.
        named: whether their ids are sent.
        health_every_ms: ask for ``/health`` so often meanwhile; 0: never.
    """

    requests: int
    at_a_time: int
    body_bytes: int = 4096
    events: int = 0
    interval_ms: float = 0.0
    sessions: int = 1
    named: bool = True
    health_every_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What came of a load.

    Attributes:
        first_ms: from a request to the first byte of its answer's body: median and 99th percentile.
        whole_ms: to its last byte.
        failed: answers other than 200, and connections that broke.
        health_ms: of ``/health``: median and 99th percentile.
    """

    requests: int
    failed: int
    seconds: float
    first_ms: tuple[float, float]
    whole_ms: tuple[float, float]
    health_ms: tuple[float, float] = (0.0, 0.0)


class _Broken(Exception):
    """A connection ended before its answer did."""


async def run(port: int, load: Load) -> Seen:
    """Send the load to a server on this host."""
    numbers = iter(range(load.requests))
    first_s: list[float] = []
    whole_s: list[float] = []
    failed = 0

    async def one_connection() -> None:
        nonlocal failed
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
        for number in numbers:
            began_s = time.perf_counter()
            try:
                writer.write(_request(load, number))
                status, at_s = await _read_answer(reader)
            except (_Broken, ConnectionError, asyncio.IncompleteReadError):
                failed += 1
                writer.close()
                reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
                continue
            whole_s.append(time.perf_counter() - began_s)
            first_s.append(at_s - began_s)
            failed += status != 200
        writer.close()

    health_s: list[float] = []
    began_s = time.perf_counter()
    asking = asyncio.create_task(_ask_health(port, load.health_every_ms / 1000, health_s))
    await asyncio.gather(*(one_connection() for _ in range(load.at_a_time)))
    seconds = time.perf_counter() - began_s
    asking.cancel()
    return Seen(
        load.requests,
        failed,
        seconds,
        _spread_ms(first_s),
        _spread_ms(whole_s),
        _spread_ms(health_s),
    )


async def _ask_health(port: int, every_s: float, took_s: list[float]) -> None:
    """Ask until it is cancelled; what is asked then does not count."""
    if not every_s:
        return
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while True:
        began_s = time.perf_counter()
        writer.write(b"GET /health HTTP/1.1\r\nHost: gateway\r\n\r\n")
        await _read_answer(reader)
        took_s.append(time.perf_counter() - began_s)
        await asyncio.sleep(every_s)


SESSION_MARK = "#0000000"
"""Stands in a body wherever the number of its conversation belongs; as long as that."""

_TURN_CHARS = 300
_FIXED_CHARS = 110


@lru_cache(maxsize=8)
def body_of(load: Load) -> str:
    """A chat request of the load's length: a conversation that has gone on for some turns.

    How long the answer is to be, and how slow, is said in fields that other gateways pass on too.
    """
    wanted = '"stream":false'
    if load.events:
        wanted = f'"stream":true,"max_tokens":{load.events},"seed":{round(load.interval_ms)}'
    parts: list[str] = []
    left = load.body_bytes - _FIXED_CHARS
    for role in itertools.cycle(("assistant", "user")):
        start = f',{{"role":"{role}","content":"{SESSION_MARK} turn {len(parts)} '
        # The longest bodies have long turns: an agent reads files.
        text = min(max(_TURN_CHARS, load.body_bytes // 40), left - len(start) - 2)
        if text <= 0:
            break
        parts.append(f'{start}{"x" * text}"}}')
        left -= len(parts[-1])
    first = f'{{"role":"user","content":"{SESSION_MARK}"}}'
    return f'{{"model":"m",{wanted},"messages":[{first}{"".join(parts)}]}}'


def session_mark(number: int) -> str:
    """What takes the place of the mark in a conversation's bodies."""
    return f"#{number:07}"


def _request(load: Load, number: int) -> bytes:
    session = number % load.sessions
    body = body_of(load).replace(SESSION_MARK, session_mark(session))
    head = [
        "POST /v1/chat/completions HTTP/1.1",
        "Host: gateway",
        "Content-Type: application/json",
        "Authorization: Bearer none",
        f"Content-Length: {len(body)}",
    ]
    if load.named:
        head.append(f"X-Session-ID: session-{session}")
    return "\r\n".join([*head, "", body]).encode()


async def _read_answer(reader: asyncio.StreamReader) -> tuple[int, float]:
    """Status, and when the first byte of the body had come."""
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head[9:12])
    lowered = head.lower()
    if b"transfer-encoding: chunked" not in lowered:
        length = int(lowered.partition(b"content-length:")[2].partition(b"\r\n")[0])
        await reader.readexactly(length)
        return status, time.perf_counter()
    first_s, tail = 0.0, b""
    while True:
        data = await reader.read(65536)
        if not data:
            raise _Broken
        first_s = first_s or time.perf_counter()
        tail = (tail + data)[-5:]
        if tail == b"0\r\n\r\n":
            return status, first_s


def _spread_ms(seconds: list[float]) -> tuple[float, float]:
    if len(seconds) < 2:
        return (0.0, 0.0)
    cuts = statistics.quantiles(seconds, n=100)
    return (1e3 * statistics.median(seconds), 1e3 * cuts[98])


if __name__ == "__main__":
    print(json.dumps(asdict(uvloop.run(run(int(sys.argv[1]), Load(**json.loads(sys.argv[2])))))))
