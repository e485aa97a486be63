"""A stand-in for a worker, which can misbehave at any byte, and a gateway on real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import httpx
import pytest
import uvicorn
import uvloop

from saga_gateway.app import Gateway, GatewaySettings, server_config
from saga_gateway.worker_state import StateTold


def pytest_asyncio_loop_factories(config, item):
    """Run on the event loop that the gateway is shipped with."""
    return {"uvloop": uvloop.new_event_loop}


CHAT = "/v1/chat/completions"


async def eventually(predicate, timeout_s=10.0):
    """Wait until ``predicate`` holds."""
    async with asyncio.timeout(timeout_s):
        while not predicate():  # noqa: ASYNC110 - any state may be waited for
            await asyncio.sleep(0.001)


def event(content) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def delta(finish_reason=None, **delta_fields):
    choice = {"index": 0, "delta": delta_fields, "finish_reason": finish_reason}
    return {"id": "c", "object": "chat.completion.chunk", "model": "m", "choices": [choice]}


def completion(*tools, finish_reason=None):
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": tool, "arguments": "{}"}}
        for i, tool in enumerate(tools)
    ]
    message = {"role": "assistant", "content": "hi"} | ({"tool_calls": calls} if calls else {})
    reason = finish_reason or ("tool_calls" if calls else "stop")
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9},
    }


@dataclass
class Exchange:
    """One request that a stand-in got, and its connection.

    Attributes:
        number: which request of its connection it is, from 1.
        closed: the gateway has closed the connection; set by ``gone``.
    """

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    number: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    def header(self, name):
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self, status=200, **headers) -> None:
        lines = [f"HTTP/1.1 {status} X"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self.send("\r\n".join([*lines, "", ""]).encode())

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    async def stream_head(self) -> None:
        await self.head(content_type="text/event-stream", transfer_encoding="chunked")

    async def stream(self, *pieces: bytes) -> None:
        await self.stream_head()
        for piece in pieces:
            await self.chunk(piece)
        await self.send(b"0\r\n\r\n")

    async def answer(self, content, status=200, **headers) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = {"content_type": "application/json", "content_length": len(body)} | headers
        await self.head(status, **headers)
        await self.send(body)

    async def gone(self) -> None:
        """Wait until the gateway closes the connection."""
        try:
            while await self.reader.read(4096):
                pass
        except ConnectionError:
            pass
        self.closed.set()

    def cut(self) -> None:
        """Reset the connection."""
        self.writer.transport.abort()


class StandInWorker:
    """A stand-in for a vLLM worker. ``script`` answers its chat requests.

    Attributes:
        chats: chat requests it got.
        notices: notices it got, in order.
        notify_status: how it answers notices.
        notify_posts: how often notices were sent to it.
        health_status: how it answers health checks.
        health_checks: how many it got.
        kind: what it says it is: saga, vllm, vllm-dev, sglang, sglang-old or other.
        scheduling: the order of its queue.
        asked: paths at which it was asked what it is.
        steps: what its state lists as answered; None: it has no stream of its state. ``tell``
            appends one.
        facts: what its state says besides.
        watchers: how many follow the stream.
    """

    def __init__(self) -> None:
        self.port = 0
        self.chats: list[Exchange] = []
        self.notices: list[dict] = []
        self.notify_status = 200
        self.notify_posts = 0
        self.health_status = 200
        self.health_checks = 0
        self.kind = "saga"
        self.scheduling = "fcfs"
        self.asked: list[str] = []
        self.steps: list[dict] | None = None
        self.facts: dict = {}
        self.watchers = 0
        self._step_told = asyncio.Event()
        self.models: list[str] = ["m"]
        self.script: Callable[[Exchange], Awaitable[None]] = self._say_hi
        self.connections = 0
        self._tasks: set[asyncio.Task] = set()

    @property
    def worker_id(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.worker_id}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def call_tools(self, *tools) -> None:
        async def script(exchange):
            await exchange.answer(completion(*tools))

        self.script = script

    @staticmethod
    async def _say_hi(exchange: Exchange) -> None:
        await exchange.answer(completion())

    async def _serve(self, reader, writer) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        self.connections += 1
        try:
            number = 0
            while not writer.is_closing():
                number += 1
                await self._answer(await self._read(reader, writer, number))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # The gateway closed the connection, or the test stopped the worker.
        finally:
            self._tasks.discard(task)
            writer.close()

    @staticmethod
    async def _read(reader, writer, number) -> Exchange:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("utf-8")
        first, *lines = head.strip().split("\r\n")
        method, target, _ = first.split(" ")
        headers = [(name, value.strip()) for name, _, value in (x.partition(":") for x in lines)]
        exchange = Exchange(method, target, headers, b"", number, reader, writer)
        exchange.body = await reader.readexactly(int(exchange.header("content-length") or 0))
        return exchange

    def tell(self, session_id: str, prompt: int, cached: int, output: int) -> None:
        """Say in the state that a request has been answered."""
        step = {"engine": "e", "number": len(self.steps), "session_id": session_id}
        step |= {"prompt_tokens": prompt, "cached_tokens": cached, "output_tokens": output}
        self.steps.append(step)
        self._step_told.set()

    async def _tell_state(self, exchange: Exchange) -> None:
        if self.steps is None:
            await exchange.answer({}, status=404)
            return
        await exchange.stream_head()
        self.watchers += 1
        try:
            while True:
                await exchange.chunk(
                    b"event: state\n" + event({"last_steps": self.steps[-256:]} | self.facts)
                )
                self._step_told.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._step_told.wait(), 0.05)
        finally:
            self.watchers -= 1

    def _self_portrait(self, path: str) -> dict | None:
        policy = self.scheduling
        return {
            "saga": {
                "/saga/v1/state": {"enabled": True, "scheduling_policy": policy},
                "/version": {"version": "0.32.0"},
            },
            "vllm": {"/version": {"version": "0.32.0"}},
            "vllm-dev": {
                "/server_info": {"vllm_config": {"scheduler_config": {"policy": policy}}},
                "/version": {"version": "0.32.0"},
            },
            "sglang": {"/server_info": {"schedule_policy": "lpm", "version": "0.5.9"}},
            "sglang-old": {"/get_server_info": {"schedule_policy": "lpm", "version": "0.4.1"}},
        }.get(self.kind, {}).get(path)

    async def _answer(self, exchange: Exchange) -> None:
        path = exchange.target.partition("?")[0]
        if path in ("/saga/v1/state", "/server_info", "/get_server_info", "/version"):
            self.asked.append(path)
            content = self._self_portrait(path)
            await exchange.answer(content or {}, status=200 if content else 404)
        elif path == "/saga/v1/state:watch":
            await self._tell_state(exchange)
        elif exchange.target.startswith("/saga/"):
            self.notify_posts += 1
            if self.notify_status == 200:
                self.notices += json.loads(exchange.body)["notices"]
            await exchange.answer({}, status=self.notify_status)
        elif exchange.target.startswith("/v1/models"):
            own = {"object": "model", "by": self.worker_id}
            if self.kind in ("vllm", "saga"):
                own["owned_by"] = "vllm"
            data = [{"id": name, **own} for name in self.models]
            await exchange.answer({"object": "list", "data": data})
        elif exchange.target == "/health":
            self.health_checks += 1
            await exchange.answer({}, status=self.health_status)
        else:
            self.chats.append(exchange)
            await self.script(exchange)


class Clock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, by_s: float) -> None:
        self.now_s += by_s


@dataclass
class RunningGateway:
    app: Gateway
    url: str
    port: int
    clock: Clock
    client: httpx.AsyncClient
    server: uvicorn.Server

    async def chat(self, session=None, body=None, **headers):
        named = {"X-SAGA-Session-ID": session} if session else {}
        named |= {f"X-SAGA-{name.replace('_', '-')}": value for name, value in headers.items()}
        return await self.client.post(CHAT, json=body or {"model": "m"}, headers=named)

    async def events(self, *events):
        return await self.client.post("/saga/v1/events", json=list(events))

    def tell(self, worker, **facts):
        """The worker says of itself how much it has to do."""
        self.app._dispatcher.told(worker.worker_id, StateTold(**facts))


@pytest.fixture
async def workers():
    """Two stand-in workers."""
    started = [StandInWorker(), StandInWorker()]
    for worker in started:
        await worker.start()
    yield started
    for worker in started:
        await worker.stop()


@pytest.fixture
async def worker(workers):
    return workers[0]


@pytest.fixture
async def start_gateway(workers):
    """Starts gateways in this process; each ends with the test."""
    running = []

    async def start(*targets, **settings) -> RunningGateway:
        clock = Clock()
        settings.setdefault("health_interval_s", 0.0)  # A test that wants checks says so.
        app = Gateway(GatewaySettings(tuple(w.url for w in targets), **settings), clock=clock)
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        server = uvicorn.Server(server_config(app))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await eventually(lambda: server.started or task.done())
        url = f"http://127.0.0.1:{port}"
        client = httpx.AsyncClient(base_url=url, trust_env=False, timeout=30)
        running.append((server, task, client))
        return RunningGateway(app, url, port, clock, client, server)

    yield start
    for server, task, client in running:
        await client.aclose()
        server.should_exit = True
        await task


@pytest.fixture
async def gateway(start_gateway, worker):
    """A gateway over one worker."""
    return await start_gateway(worker)


@pytest.fixture
async def gateway2(start_gateway, workers):
    """A gateway over two workers."""
    return await start_gateway(*workers)


@pytest.fixture(name="eventually")
def _eventually():
    return eventually


@pytest.fixture
def wire():
    """Makers of what a worker sends: ``event``, ``delta``, ``completion``."""

    class Wire:
        pass

    Wire.event, Wire.delta, Wire.completion = map(staticmethod, (event, delta, completion))
    return Wire
