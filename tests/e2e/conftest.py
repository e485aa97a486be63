"""Real vLLM engines with a tiny random-weight Llama, each started once for all tests."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from saga_cli.processes import Service, free_port

MODEL = "tiny"
BLOCK_TOKENS = 32
NUM_BLOCKS = 100


def worker_service(policy: str, model: Path, folder: Path, *words: str) -> Service:
    """A worker that is not yet started; of an option that is given twice the later value counts."""
    port = free_port()
    options = {
        "--saga-policy": policy,
        "--load-format": "dummy",
        "--served-model-name": MODEL,
        "--dtype": "float32",
        "--block-size": str(BLOCK_TOKENS),
        "--num-gpu-blocks-override": str(NUM_BLOCKS),
        "--max-model-len": "2048",
        "--seed": "0",
        "--host": "127.0.0.1",
        "--port": str(port),
    }
    command = [sys.executable, "-m", "saga_cli.main", "worker", str(model)]
    command += ["--enforce-eager", "--enable-prompt-tokens-details"]
    command += [*(word for pair in options.items() for word in pair), *words]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return Service(f"{policy} worker", command, port, folder / f"{policy}.log", environment)


@pytest.fixture(scope="session")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Service]]:
    """Stock vLLM without the plugin ("off"), and the plugin with a policy that learns nothing."""
    from gpu_backend.model_free import write_tiny_model

    model = write_tiny_model(tmp_path_factory.mktemp("tiny-llama"))
    folder = tmp_path_factory.mktemp("engine-logs")
    services = {policy: worker_service(policy, model, folder) for policy in ("off", "wa-lru-ttl")}
    with ExitStack() as stack:
        for service in services.values():
            service.start()
            stack.callback(service.stop)

        async def ready() -> None:
            await asyncio.gather(*(service.wait_ready(240) for service in services.values()))

        asyncio.run(ready())
        yield services


@pytest.fixture(scope="session")
def gateway(
    workers: dict[str, Service], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """The gateway in front of the worker with the plugin."""
    port = free_port()
    command = [sys.executable, "-m", "saga_cli.main", "gateway", "--port", str(port)]
    command += ["--worker", workers["wa-lru-ttl"].url]
    service = Service("gateway", command, port, tmp_path_factory.mktemp("gateway") / "log")
    service.start()
    try:
        asyncio.run(service.wait_ready(60))
        yield service
    finally:
        service.stop()
