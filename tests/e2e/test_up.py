"""`saga up` with real engines: agents stay where their KV is, and outlive the death of a worker."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from saga_cli.processes import free_port
from tests.e2e.conftest import BLOCK_TOKENS, MODEL

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

WORKERS = 3
SESSIONS = 24
HEAVY = 6
MOVES = {"steal", "rebalance", "failover"}
WORKER_WORDS = {
    "--load-format": "dummy",
    "--served-model-name": MODEL,
    "--dtype": "float32",
    "--block-size": str(BLOCK_TOKENS),
    "--num-gpu-blocks-override": "200",
    "--max-model-len": "2048",
    "--max-num-seqs": "3",  # So that requests wait, and the gateway has something to move.
    "--seed": "0",
}
GATEWAY_WORDS = ("--set", "health_interval_s=0.5", "--set", "slow_start_s=1")


@dataclass(frozen=True, slots=True)
class Step:
    """What a client saw of a step; ``cut``: its stream ended in an error event."""

    worker: str
    route: str
    cut: bool = False


@dataclass(slots=True)
class Load:
    """Sessions that grow step by step; the first ``HEAVY`` of them make many long steps."""

    client: httpx.AsyncClient
    steps: dict[str, list[Step]] = field(default_factory=lambda: defaultdict(list))

    async def session(self, number: int) -> None:
        name = f"agent-{number}"
        rng = random.Random(number)
        is_heavy = number < HEAVY
        prompt = _words(rng, 300 if is_heavy else 60)
        done, wanted = 0, 14 if is_heavy else 5
        while done < wanted:
            body = {"prompt": prompt, "max_tokens": 48 if is_heavy else 12}
            step = await self.step(name, body, stream=number % 2 == 0)
            self.steps[name].append(step)
            if not step.cut:  # An agent asks again when its stream was cut.
                done += 1
                prompt += " " + _words(rng, 30)

    async def step(self, name: str, body: Mapping[str, object], *, stream: bool) -> Step:
        headers = {"X-SAGA-Session-ID": name}
        body = {"model": MODEL, "temperature": 0, "ignore_eos": True, "stream": stream, **body}
        request = self.client.stream("POST", "/v1/completions", json=body, headers=headers)
        async with request as answer:
            text = (await answer.aread()).decode()
        assert answer.status_code == 200, text
        cut = stream and "[DONE]" not in text
        assert not cut or '"code":"worker_failed"' in text
        return Step(answer.headers["X-SAGA-Worker"], answer.headers["X-SAGA-Route"], cut)

    def homes(self, names: Iterable[str]) -> Counter[str]:
        """Sessions by the worker of their latest step."""
        return Counter(self.steps[name][-1].worker for name in names)


def _words(rng: random.Random, count: int) -> str:
    return " ".join(f"<{rng.randrange(3, 1000)}>" for _ in range(count))


@dataclass(slots=True)
class Up:
    """The command as a process."""

    process: subprocess.Popen[bytes]
    port: int
    out: Path
    err: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def worker_pid(self, worker_id: str) -> int:
        port = worker_id.rpartition(":")[2]
        (pid,) = (
            pid
            for pid, (parent, line) in _processes().items()
            if parent == self.process.pid and f"--port {port} " in line
        )
        return pid

    def descendants(self) -> set[int]:
        found, todo = set[int](), [self.process.pid]
        processes = _processes()
        while todo:
            above = todo.pop()
            below = {pid for pid, (parent, _) in processes.items() if parent == above}
            found |= below
            todo += below
        return found

    async def logs(self, pattern: str, count: int = 1) -> None:
        """Wait until so many lines of the log fit the pattern."""
        await self.eventually(
            lambda: len(re.findall(pattern, self.err.read_text(), re.MULTILINE)) >= count
        )

    async def eventually(self, predicate: Callable[[], object], timeout_s: float = 150.0) -> None:
        """Wait until it holds, while the command runs."""
        deadline_s = time.monotonic() + timeout_s
        while not predicate():
            assert self.process.poll() is None, self.err.read_text()[-4000:]
            assert time.monotonic() < deadline_s, self.err.read_text()[-4000:]
            await asyncio.sleep(0.05)


def _processes() -> dict[int, tuple[int, str]]:
    """All processes that run: parent and command line."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                line = (folder / "cmdline").read_text().replace("\0", " ")
                found[int(folder.name)] = int(fields[1]), line
    return found


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    """The command with three workers, not yet ready; nothing of it is left after the test."""
    from gpu_backend.model_free import write_tiny_model

    model = tmp_path / "tiny"
    model.mkdir()
    port, out, err = free_port(), tmp_path / "out", tmp_path / "err"
    command = [sys.executable, "-m", "saga_cli.main", "up", str(write_tiny_model(model))]
    command += ["--workers", str(WORKERS), "--gpus", "none", "--port", str(port), *GATEWAY_WORDS]
    command += ["--", "--enforce-eager", *(w for pair in WORKER_WORDS.items() for w in pair)]
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with out.open("wb") as output, err.open("wb") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    running = Up(process, port, out, err)
    yield running
    below = running.descendants()
    process.kill()
    process.wait()
    deadline_s = time.monotonic() + 20
    while below & _processes().keys():
        assert time.monotonic() < deadline_s, "something is left"
        time.sleep(0.05)


async def test_sessions_stay_and_outlive_a_killed_worker(up: Up) -> None:
    limits = httpx.Limits(max_connections=100)
    timeout = httpx.Timeout(120)
    async with httpx.AsyncClient(
        base_url=up.url, trust_env=False, timeout=timeout, limits=limits
    ) as client:
        await up.logs(r"^saga .* worker-\d is ready", WORKERS)
        await _all_available(up, client)
        assert up.out.read_text().endswith(f" at base_url {up.url}/v1\n")

        load = Load(client)
        tasks = [asyncio.create_task(load.session(number)) for number in range(SESSIONS)]
        running = asyncio.gather(*tasks)
        await up.eventually(
            lambda: running.done() or (len(load.steps) == SESSIONS and all(load.steps.values()))
        )
        assert len(load.homes(load.steps)) == WORKERS, "a worker has no session"
        heavy = [f"agent-{number}" for number in range(HEAVY)]
        killed = load.homes(heavy).most_common(1)[0][0]
        before = {name: len(steps) for name, steps in load.steps.items()}
        os.kill(up.worker_pid(killed), signal.SIGKILL)
        await running

        _check_steps(load, killed, before)
        await _check_counts(load, client)

        await up.logs(r"^saga .* worker-\d was ended by signal 9 .*; started again in 1 s")
        await up.logs(r"^saga .* worker-\d is ready", WORKERS + 1)
        await _all_available(up, client)
        for number in range(200):
            step = await load.step(
                f"new-{number}", {"prompt": "<5>", "max_tokens": 1}, stream=False
            )
            if step.worker == killed:
                break
        assert step.worker == killed, "it serves nobody again"

    below = up.descendants()
    up.process.terminate()
    assert up.process.wait(60) == 0
    assert not below & _processes().keys()


async def _all_available(up: Up, client: httpx.AsyncClient) -> None:
    while True:
        workers = (await client.get("/saga/v1/workers")).json()["workers"]
        # One that has just come is given little yet.
        if all(w["available"] and w["engine"] and w["weight"] == 1.0 for w in workers):
            assert len(workers) == WORKERS
            return
        assert up.process.poll() is None
        await asyncio.sleep(0.05)


def _check_steps(load: Load, killed: str, before: dict[str, int]) -> None:
    """A session moves for a reason alone, and a stream is cut by nothing but the kill."""
    for name, steps in load.steps.items():
        assert steps[0].route != "affinity"
        for last, step in pairwise(steps):
            assert step.worker == last.worker or step.route in MOVES, (name, last, step)
        for number, step in enumerate(steps):
            assert not step.cut or (step.worker == killed and number >= before[name])
    moved = [n for n, s in load.steps.items() if s[before[n] - 1].worker == killed]
    assert any(len(load.steps[name]) > before[name] for name in moved), "none was going there"
    for name in moved:
        # The first may have been answered just before the kill.
        after = load.steps[name][before[name] :]
        assert len(after) < 2 or any(step.worker != killed for step in after), "it has waited"


async def _check_counts(load: Load, client: httpx.AsyncClient) -> None:
    """What the gateway counts is what clients saw, and the tries that the kill has cost."""
    text = (await client.get("/metrics")).text
    counted = {
        sample.labels["reason"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "saga_gateway_routes_total"
    }
    seen = Counter(step.route for steps in load.steps.values() for step in steps)
    assert seen["failover"] > 0
    for route, count in seen.items():
        assert counted[route] >= count
    # Each try that failed before a byte was followed by one elsewhere, whose answer came.
    assert 0 <= sum(counted.values()) - sum(seen.values()) <= seen["failover"]
    assert sum(counted[route] for route in MOVES & counted.keys()) >= sum(
        last.worker != step.worker
        for steps in load.steps.values()
        for last, step in pairwise(steps)
    )
