"""A worker's HTTP app over an engine that answers what a test wants, on a clock of its own."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from gpu_backend.endpoint import SagaEndpoint

STATE: dict[str, Any] = {
    "enabled": True,
    "policy": "saga",
    "off_reason": None,
    "num_blocks": 100,
    "block_tokens": 16,
    "block_bytes": 1000,
    "pressure": 0.25,
    "held": {"sessions": 3, "runs": 4, "session_blocks": 25},
    "counters": {
        "requests": 7,
        "prompt_tokens": 1000,
        "cached_tokens": 600,
        "host_cached_tokens": 200,
        "computed_tokens": 400,
        "regret_tokens": 50,
        "preempted_tokens": 5,
        "evicted_blocks": 40,
        "chosen_blocks": 30,
        "pinned_block_s": 12.5,
        "notices": 9,
        "unknown_sessions": 2,
    },
}


class Clock:
    """Virtual seconds; they pass in ``advance`` only."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._sleepers: list[tuple[float, int, asyncio.Event]] = []
        self._count = itertools.count()

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        awake = asyncio.Event()
        heapq.heappush(self._sleepers, (self.now_s + seconds, next(self._count), awake))
        await awake.wait()

    async def advance(self, seconds: float) -> None:
        """Let time pass from one sleeper to the next, and all that is ready run in between."""
        end_s = self.now_s + seconds
        await settle()
        while self._sleepers and self._sleepers[0][0] <= end_s:
            self.now_s, _, awake = heapq.heappop(self._sleepers)
            awake.set()
            await settle()
        self.now_s = end_s


async def settle() -> None:
    """Let every task run until it waits for something that only a test can bring about."""
    for _ in range(50):
        await asyncio.sleep(0)


class FakeEngineCore:
    """The engines' side: answers each message with ``states``, or with ``ticks`` for a tick.

    Attributes:
        messages: what was asked, in order.
        gate: answers wait until it is set.
        error: raised instead of an answer.
    """

    def __init__(self) -> None:
        self.states = [json.loads(json.dumps(STATE))]
        self.ticks: list[dict[str, Any]] = [{"enabled": True, "wake_in_s": None}]
        self.messages: list[dict[str, Any]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None

    @property
    def state(self) -> dict[str, Any]:
        return self.states[0]

    def asked(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.messages if kind in message]

    async def call_utility_all_async(self, method: str, message: str) -> list[str]:
        assert method == "saga_control"
        asked = json.loads(message)
        self.messages.append(asked)
        answers = [json.dumps(answer) for answer in self._answers(asked)]
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return answers

    def _answers(self, asked: dict[str, Any]) -> list[dict[str, Any]]:
        if "tick" in asked:
            return self.ticks
        hidden = () if asked.get("sessions") else ("sessions",)
        return [{k: v for k, v in state.items() if k not in hidden} for state in self.states]


class FakeWorker:
    """vLLM's way of attaching an endpoint plugin, without vLLM's engine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, api_key: str | None = None) -> None:
        self.clock = Clock()
        self.engine = FakeEngineCore()
        self.server = SimpleNamespace(should_exit=False)
        self.app = FastAPI()
        self.endpoint = SagaEndpoint(self.clock, self.clock.sleep)
        self._monkeypatch = monkeypatch
        self._args = Namespace(api_key=[api_key] if api_key else None)

    async def start(self, *, with_engine: bool = True) -> FakeWorker:
        from vllm.entrypoints.serve.instrumentator.metrics import attach_router
        from vllm.plugins.endpoint_plugins.interface import attach_endpoint_plugins

        attach_router(self.app)
        self._monkeypatch.setattr("vllm.plugins.load_endpoint_plugins", lambda _: [self.endpoint])
        attach_endpoint_plugins(self.app, ("generate",))
        client = SimpleNamespace(engine_core=self.engine) if with_engine else None
        await self.endpoint.init_state(client, self.app.state, self._args)
        self.app.state.server = self.server
        return self

    def client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app)
        return httpx.AsyncClient(transport=transport, base_url="http://worker")

    async def stop(self) -> None:
        """As vLLM does: say so, and let what waits for the time see it."""
        self.server.should_exit = True
        self.engine.gate.set()
        await self.clock.advance(2.0)


class Watcher:
    """A client of an event stream that reads when the test says so."""

    def __init__(self, worker: FakeWorker, query: str = "") -> None:
        self.status: int | None = None
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.is_reading = asyncio.Event()
        self.is_reading.set()
        self._gone = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "method": "GET",
            "path": "/saga/v1/state:watch",
            "raw_path": b"/saga/v1/state:watch",
            "query_string": query.encode(),
            "headers": [],
            "root_path": "",
            "scheme": "http",
            "server": ("worker", 80),
            "client": ("test", 1),
            "http_version": "1.1",
        }
        self.task = asyncio.create_task(worker.app(scope, self._receive, self._send))

    @property
    def states(self) -> list[dict[str, Any]]:
        return [data for kind, data in self.events if kind == "state"]

    def leave(self) -> None:
        self._gone.set()

    async def _receive(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await self.is_reading.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message.get("body"):
            kind, data = message["body"].decode().strip().split("\n")
            self.events.append((kind.removeprefix("event: "), json.loads(data[len("data: ") :])))
