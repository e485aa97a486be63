"""Runs the two arms on real engines and compares them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp

from gpu_backend.kv_retention import OBSERVE
from saga_cli.demo import report
from saga_cli.demo.agents import MODEL
from saga_cli.demo.model import cache_folder, prepare_model
from saga_cli.demo.workload import (
    BLOCK_TOKENS,
    MAX_MODEL_TOKENS,
    POOL_BLOCKS,
    Progress,
    run_workload,
)
from saga_cli.output import writable
from saga_cli.processes import Service, free_port
from saga_core.errors import SagaError
from saga_core.policies import DEFAULT_POLICY

STOCK = "stock"
SAGA = "saga"
_READY_S = 240.0


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the command line says.

    Attributes:
        json_path: file for the results; None writes none.
        runs: pairs of runs, at least 1; the table shows medians.
    """

    json_path: str | None = None
    runs: int = 1


def run(options: DemoOptions) -> int:
    """Run the demo to its end and print the table.

    Raises:
        SagaError: something needed is missing, or a process of the demo died.
    """
    if options.runs < 1:
        raise SagaError(f"--runs {options.runs}: there must be at least one")
    json_path = writable("--json", options.json_path)
    signal.signal(signal.SIGTERM, _stop)  # So that a half-made model folder is taken away.
    _quieten()
    view = report.LiveView()
    view.say("Preparing the model SmolLM2-135M-Instruct (once, about 20 s) ...")
    model = prepare_model()
    logs = cache_folder() / "demo-logs"  # Kept: an error message names the file.
    logs.mkdir(parents=True, exist_ok=True)
    try:
        pairs = asyncio.run(_run_pairs(model, options.runs, logs, view))
    except asyncio.CancelledError as error:
        raise SagaError("stopped by a signal; no process is left") from error
    result = report.summarise(pairs)
    view.table(result)
    if json_path is not None:
        report.write_json(result, json_path)
        view.say(f"Written to {json_path}")
    return 0


async def _run_pairs(
    model: Path, runs: int, logs: Path, view: report.LiveView
) -> list[dict[str, report.Arm]]:
    main_task = asyncio.current_task()
    assert main_task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main_task.cancel)
    pairs = []
    for number in range(runs):
        # Alternated, so that a drift of the machine's speed falls on both.
        order = (STOCK, SAGA) if number % 2 == 0 else (SAGA, STOCK)
        arms = {}
        for arm in order:
            view.say(f"Run {number + 1} of {runs}: {arm}")
            arms[arm] = await _run_arm(arm, model, number, logs, view)
        pairs.append(arms)
    return pairs


async def _run_arm(
    arm: str, model: Path, seed: int, logs: Path, view: report.LiveView
) -> report.Arm:
    worker = _worker(arm, model, logs)
    async with _running(worker):
        view.say("  starting vLLM ...")
        await worker.wait_ready(_READY_S)
        if arm == STOCK:
            return await _measure(arm, worker, worker.url, [worker], seed, view)
        gateway = _gateway(worker, logs)
        async with _running(gateway):
            await gateway.wait_ready(30.0)
            import saga_sdk as saga

            saga.instrument(base_urls=[gateway.url], workflow="demo")
            try:
                return await _measure(arm, worker, gateway.url, [worker, gateway], seed, view)
            finally:
                saga.uninstrument()


async def _measure(
    arm: str,
    worker: Service,
    base_url: str,
    services: list[Service],
    seed: int,
    view: report.LiveView,
) -> report.Arm:
    progress = Progress()
    work = asyncio.create_task(run_workload(base_url, seed, progress))
    watches = [asyncio.create_task(service.watch()) for service in services]
    started_s = monotonic()
    with view.arm(arm, progress):
        await _first(work, watches)
    elapsed_s = monotonic() - started_s
    return report.Arm.from_run(progress, await _worker_state(worker), elapsed_s)


async def _first(work: asyncio.Task[None], watches: list[asyncio.Task[None]]) -> None:
    """Wait for the work; the death of a service ends it and is the error to report."""
    try:
        await asyncio.wait({work, *watches}, return_when=asyncio.FIRST_COMPLETED)
        if work.done() and work.exception() is not None:
            # A dying worker breaks the requests first; give the watch time to see the cause.
            await asyncio.wait(watches, timeout=3.0, return_when=asyncio.FIRST_COMPLETED)
        for watch in watches:
            if watch.done():
                watch.result()
        try:
            await work
        except SagaError:
            raise
        except Exception as error:
            raise SagaError(f"an agent failed: {type(error).__name__}: {error}") from error
    finally:
        for task in (work, *watches):
            task.cancel()
        await asyncio.gather(work, *watches, return_exceptions=True)


async def _worker_state(worker: Service) -> dict[str, Any]:
    url = f"{worker.url}/saga/v1/state"
    try:
        async with aiohttp.ClientSession() as client, client.get(url) as response:
            state: dict[str, Any] = await response.json()
    except (aiohttp.ClientError, ValueError) as error:
        raise SagaError(f"the worker's counters cannot be read: {error}") from error
    if not state.get("enabled"):
        raise SagaError(f"the worker's counters are off: {state.get('off_reason')}")
    return state


@asynccontextmanager
async def _running(service: Service) -> AsyncIterator[None]:
    service.start()
    try:
        yield
    finally:
        service.stop()


def _worker(arm: str, model: Path, logs: Path) -> Service:
    port = free_port()
    options = {
        "--served-model-name": MODEL,
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": _dtype(),
        "--block-size": str(BLOCK_TOKENS),
        "--num-gpu-blocks-override": str(POOL_BLOCKS),
        "--max-model-len": str(MAX_MODEL_TOKENS),
        "--max-num-batched-tokens": "1024",
        "--max-num-seqs": "16",
        "--chat-template": str(Path(__file__).with_name("chat_template.jinja")),
        "--tool-call-parser": "hermes",
        "--tool-strict-level": "parameter",
        "--structured-outputs-config": '{"backend": "xgrammar", "disable_any_whitespace": true}',
    }
    command = [sys.executable, "-m", "saga_cli.main", "worker", str(model)]
    command += ["--saga-policy", OBSERVE if arm == STOCK else DEFAULT_POLICY]
    command += ["--enforce-eager", "--enable-auto-tool-choice", "--enable-prompt-tokens-details"]
    command += [word for pair in options.items() for word in pair]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return Service("vLLM worker", command, port, logs / f"worker-{arm}.log", environment)


def _gateway(worker: Service, logs: Path) -> Service:
    port = free_port()
    command = [sys.executable, "-m", "saga_cli.main", "gateway"]
    command += ["--worker", worker.url, "--port", str(port)]
    return Service("gateway", command, port, logs / "gateway.log")


def _dtype() -> str:
    """bfloat16 where the CPU multiplies it, float32 elsewhere: there it is 2 to 6 times faster."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "float32"
    return "bfloat16" if "avx512_bf16" in flags or "amx_bf16" in flags else "float32"


def _stop(number: int, frame: object) -> None:
    raise SagaError("stopped by a signal; no process is left")


def _quieten() -> None:
    """Keep libraries from drawing over the view; the model is local, nothing is to be fetched."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
