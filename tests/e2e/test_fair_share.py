"""Two tenants before a real worker that is full: what fair shares are worth to the lesser one."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from saga_cli.processes import Service, free_port
from saga_gateway.identity import new_key
from tests.e2e.conftest import MODEL, worker_service

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

CROWD = 24
ROUNDS = 8


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """It runs two requests at a time, and says so."""
    from gpu_backend.model_free import write_tiny_model

    model = write_tiny_model(tmp_path_factory.mktemp("tiny-llama"))
    folder = tmp_path_factory.mktemp("engine-log")
    service = worker_service("saga", model, folder, "--max-num-seqs", "2")
    service.start()
    try:
        asyncio.run(service.wait_ready(240))
        yield service
    finally:
        service.stop()


@contextmanager
def gateway_before(worker: Service, folder: Path, *words: str) -> Iterator[Service]:
    port = free_port()
    command = [sys.executable, "-m", "saga_cli.main", "gateway", "--port", str(port)]
    command += ["--worker", worker.url, "--set", "max_worker_requests=2", *words]
    service = Service("gateway", command, port, folder / f"gateway-{port}.log")
    service.start()
    try:
        asyncio.run(service.wait_ready(60))
        yield service
    finally:
        service.stop()


async def play(url: str, crowd_key: str, few_key: str) -> list[float]:
    """A tenant has 24 agents at work; how long another one's requests take meanwhile, seconds."""
    took = []
    is_over = asyncio.Event()
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def ask(key: str, session: str, tokens: int) -> None:
            body = {"model": MODEL, "prompt": "one two three", "max_tokens": tokens}
            headers = {"Authorization": f"Bearer {key}", "X-SAGA-Session-ID": session}
            answer = await client.post(
                "/v1/completions", json=body | {"ignore_eos": True}, headers=headers
            )
            answer.raise_for_status()

        async def agent(number: int) -> None:
            while not is_over.is_set():
                await ask(crowd_key, f"crowd-{number}", 60)

        crowd = [asyncio.create_task(agent(number)) for number in range(CROWD)]
        for step in range(ROUNDS + 2):
            began_s = time.monotonic()
            await ask(few_key, "few", 10)
            if step >= 2:  # Until then the crowd was gathering.
                took.append(time.monotonic() - began_s)
        is_over.set()
        await asyncio.gather(*crowd)
    return took


def test_a_tenant_with_little_to_do_is_not_held_up_by_one_with_much(
    worker: Service, tmp_path: Path
) -> None:
    keys, entries = zip(*(new_key(name) for name in ("crowd", "few")), strict=True)
    path = tmp_path / "keys.toml"
    path.write_text("".join(entries))
    found = {}
    for fair in ("true", "false"):
        words = ("--set", f"keys_file={path}", "--set", f"fair_share={fair}")
        with gateway_before(worker, tmp_path, *words) as gateway:
            took = asyncio.run(play(gateway.url, *keys))
        p95_s = statistics.quantiles(took, n=20, method="inclusive")[-1]
        found[fair] = statistics.median(took), p95_s
    for fair, (median_s, p95_s) in found.items():
        print(f"the lesser tenant, fair_share {fair}: median {median_s:.2f} s, p95 {p95_s:.2f} s")
    assert found["true"][0] < 0.6 * found["false"][0]
