"""A worker is killed under load, and comes back: over processes and real sockets."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from collections import defaultdict
from contextlib import AsyncExitStack

import httpx

from saga_cli.processes import Service, free_port, running

CHAT = "/v1/chat/completions"


class Fleet:
    """Two stand-in workers and a gateway before them, a process each."""

    def __init__(self, folder):
        self.workers = [self._service(f"worker{n}", folder, self._upstream) for n in range(2)]
        self.gateway = self._service("gateway", folder, self._saga)

    @staticmethod
    def _service(name, folder, command_of):
        port = free_port()
        return Service(name, [sys.executable, "-m", *command_of(port)], port, folder / name)

    @staticmethod
    def _upstream(port):
        return ["saga_sim.gateway_bench.upstream", str(port)]

    def _saga(self, port):
        words = ["saga_cli.main", "gateway", "--port", str(port)]
        for worker in self.workers:
            words += ["--worker", worker.url]
        for setting in ("health_interval_s=0.1", "worker_backoff_s=0.2", "slow_start_s=0.2"):
            words += ["--set", setting]
        return words


class Load:
    """Sessions that ask one request after the other, and what came of each."""

    def __init__(self, client):
        self.client = client
        self.answers = defaultdict(list)  # By session: status and worker.

    async def session(self, name, stop):
        while not stop.is_set():
            await self.ask(name)

    async def newcomers(self, stop):
        for number in itertools.count():
            if stop.is_set():
                return
            await self.ask(f"new{number}")

    async def ask(self, name):
        headers = {"X-SAGA-Session-ID": name, "X-Bench-Interval-Ms": "10"}
        answer = await self.client.post(CHAT, json={}, headers=headers)
        self.answers[name].append((answer.status_code, answer.headers.get("X-SAGA-Worker")))

    async def stream(self, name, opened):
        """Text of a stream of five seconds, and the worker that it came from."""
        headers = {"X-Bench-Events": "500", "X-Bench-Interval-Ms": "10", "X-SAGA-Session-ID": name}
        pieces = []
        async with self.client.stream("POST", CHAT, json={}, headers=headers) as answer:
            async for piece in answer.aiter_text():
                pieces.append(piece)
                opened.add(name)
        return answer.headers["X-SAGA-Worker"], "".join(pieces)

    def homes(self, names):
        return {name: self.answers[name][-1][1] for name in names}

    def grown(self, names, by):
        counts = {name: len(self.answers[name]) + by for name in names}
        return lambda: all(len(self.answers[name]) >= count for name, count in counts.items())


async def test_a_killed_worker_costs_no_request_that_had_sent_no_byte(tmp_path, eventually):
    fleet = Fleet(tmp_path)
    names = [f"s{number}" for number in range(16)]
    async with AsyncExitStack() as stack:
        for service in (*fleet.workers, fleet.gateway):
            await stack.enter_async_context(running(service))
            await service.wait_ready(30)
        limits = httpx.Limits(max_connections=100)
        client = await stack.enter_async_context(
            httpx.AsyncClient(
                base_url=fleet.gateway.url, trust_env=False, timeout=30, limits=limits
            )
        )
        load, stop, opened = Load(client), asyncio.Event(), set()
        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(load.session(name, stop))
            group.create_task(load.newcomers(stop))
            streams = [group.create_task(load.stream(f"t{n}", opened)) for n in range(8)]
            await eventually(lambda: len(opened) == 8)
            await eventually(load.grown(names, 3))
            before = load.homes(names)
            victim = fleet.workers[0]
            killed = victim.url.removeprefix("http://")
            assert set(before.values()) == {w.url.removeprefix("http://") for w in fleet.workers}
            os.kill(victim.pid, signal.SIGKILL)
            await eventually(load.grown(names, 5))
            victim.stop()
            back = Service("worker0", victim.command, victim.port, tmp_path / "worker0-again")
            await stack.enter_async_context(running(back))
            known = set(load.answers)

            def is_used_again():
                new = (load.answers[name] for name in load.answers if name not in known)
                return any(worker == killed for seen in new for _, worker in seen)

            await back.wait_ready(30)
            await eventually(is_used_again)  # Within its ten seconds.
            await eventually(load.grown(names, 3))
            stop.set()
            texts = [await stream for stream in streams]
    assert {status for seen in load.answers.values() for status, _ in seen} == {200}
    for name, home in before.items():
        if home != killed:
            assert {worker for _, worker in load.answers[name]} == {home}, "it has moved"
    assert {worker for worker, _ in texts} == {w.url.removeprefix("http://") for w in fleet.workers}
    for worker, text in texts:
        is_cut = worker == killed
        assert ('"code":"worker_failed"' in text) is is_cut
        assert ("[DONE]" in text) is not is_cut
