"""Runs the two arms on real engines and compares them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from gpu_backend.shadow import STOCK_ORDER
from saga_cli.demo import report
from saga_cli.demo.agents import MODEL
from saga_cli.demo.model import prepare_model
from saga_cli.demo.workload import (
    BLOCK_TOKENS,
    MAX_MODEL_TOKENS,
    POOL_BLOCKS,
    Progress,
    run_workload,
)
from saga_cli.output import cache_folder, writable
from saga_cli.processes import Service, free_port, run_beside, running
from saga_cli.workers import ENVIRONMENT, cpu_dtype, worker_state
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
    async with running(worker):
        view.say("  starting vLLM ...")
        await worker.wait_ready(_READY_S)
        if arm == STOCK:
            return await _measure(arm, worker, worker.url, [worker], seed, view)
        gateway = _gateway(worker, logs)
        async with running(gateway):
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
    started_s = monotonic()
    with view.arm(arm, progress):
        await run_beside(run_workload(base_url, seed, progress), services, "an agent")
    elapsed_s = monotonic() - started_s
    return report.Arm.from_run(progress, await worker_state(worker), elapsed_s)


def _worker(arm: str, model: Path, logs: Path) -> Service:
    port = free_port()
    options = {
        "--served-model-name": MODEL,
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": cpu_dtype(),
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
    command += ["--saga-policy", STOCK_ORDER if arm == STOCK else DEFAULT_POLICY]
    command += ["--enforce-eager", "--enable-auto-tool-choice", "--enable-prompt-tokens-details"]
    command += [word for pair in options.items() for word in pair]
    environment = {**ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "2"}
    return Service("vLLM worker", command, port, logs / f"worker-{arm}.log", environment)


def _gateway(worker: Service, logs: Path) -> Service:
    port = free_port()
    command = [sys.executable, "-m", "saga_cli.main", "gateway"]
    command += ["--worker", worker.url, "--port", str(port)]
    return Service("gateway", command, port, logs / "gateway.log")


def _stop(number: int, frame: object) -> None:
    raise SagaError("stopped by a signal; no process is left")


def _quieten() -> None:
    """Keep libraries from drawing over the view; the model is local, nothing is to be fetched."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
