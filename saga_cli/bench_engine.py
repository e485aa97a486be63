"""`saga bench engine`: agents in a closed loop on real vLLM workers, arm against arm, in pairs."""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import aiohttp

from gpu_backend.shadow import STOCK_ORDER
from saga_cli.output import cache_folder, writable
from saga_cli.processes import Service, free_port, run_beside, running
from saga_cli.worker import OFF
from saga_cli.workers import ENVIRONMENT, cpu_dtype, worker_state
from saga_core.errors import SagaError
from saga_core.policies import DEFAULT_POLICY
from saga_sim.engine_bench import (
    PROFILE_SESSIONS,
    ArmRun,
    ClosedLoop,
    Completions,
    Load,
    LoadOptions,
    Measured,
    make_load,
    measure,
    print_report,
    summarise,
)
from saga_sim.kv_bytes import kv_bytes_per_token, read_config
from saga_sim.machine import machine, versions
from saga_sim.profiles import make_profile
from saga_sim.report import write_json
from saga_sim.traces import Trace, read_trace

MODEL = "bench"
_READY_S = 240.0
_EVERY_S = 15.0
_PROFILE_SEED = 100
_QUICK = {"scale": 64, "pool_tokens": 32_768}


@dataclass(frozen=True, slots=True)
class Arm:
    """How a worker of an arm is started.

    Attributes:
        policy: value of ``--saga-policy``.
        has_host: whether it gets the host tier, where one is asked for.
    """

    policy: str
    has_host: bool = False
    prefetch: bool = True


ARMS = {
    "stock": Arm(STOCK_ORDER),
    "off": Arm(OFF),
    "prefix-lru": Arm("prefix-lru", has_host=True),
    "vllm-host": Arm(STOCK_ORDER, has_host=True),
    "saga": Arm(DEFAULT_POLICY, has_host=True),
    "saga-noprefetch": Arm(DEFAULT_POLICY, has_host=True, prefetch=False),
}
"""By name: stock vLLM whose plugin only counts, vLLM without the plugin, a policy that evicts as
vLLM does but through the plugin, vLLM with its own offloading policy, and SAGA."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the command line says.

    Attributes:
        arms: names with commas between; the others are compared with the first.
        host_pool_ratio: host memory ÷ the GPU pool.
        sessions: tasks alive at a time; None: as many as press on the default pool.
        model: a folder with weights; None: a tiny Llama with random ones.
        no_sessions: send no session ids: plain traffic.
        quick: a small load, to see that all works; its figures mean little.
    """

    profile: str
    trace: list[str] | None
    pressure: float
    pairs: int
    arms: str
    host_pool_ratio: float
    sessions: int | None
    seed: int
    model: str | None
    scale: int | None
    time_scale: float | None
    no_sessions: bool
    quick: bool
    json: str | None

    @classmethod
    def from_words(cls, words: argparse.Namespace) -> EngineOptions:
        """From parsed words."""
        return cls(**{field.name: getattr(words, field.name) for field in fields(cls)})

    def arm_names(self) -> list[str]:
        """The arms, checked.

        Raises:
            SagaError: an arm is unknown or named twice, or the options do not fit the arms.
        """
        names = self.arms.split(",")
        unknown = [name for name in names if name not in ARMS]
        if unknown or len(set(names)) < len(names):
            raise SagaError(f"--arms {self.arms}: choose, each once, from {', '.join(ARMS)}")
        if not 0 <= self.host_pool_ratio < math.inf:
            raise SagaError(f"--host-pool-ratio {self.host_pool_ratio:g} must be 0 or more")
        if "vllm-host" in names and not self.host_pool_ratio:
            raise SagaError("the arm vllm-host needs --host-pool-ratio above 0")
        if self.pairs < 1:
            raise SagaError(f"--pairs {self.pairs}: there must be at least one")
        return names

    def load_options(self, vocabulary: int) -> LoadOptions:
        """The load that is asked for."""
        options = LoadOptions(
            pressure=self.pressure,
            live_tasks=self.sessions,
            seed=self.seed,
            vocabulary=vocabulary,
        )
        if self.quick:
            options = replace(options, **_QUICK)
        if self.scale is not None:
            options = replace(options, scale=self.scale)
        return replace(options, time_scale=self.time_scale)


def run(words: argparse.Namespace) -> int:
    """Run the pairs, print the comparison and write it.

    Raises:
        SagaError: options or the trace are wrong, or a worker or a request failed.
    """
    options = EngineOptions.from_words(words)
    options.arm_names()
    json_path = writable("--json", options.json)
    trace = _trace(options)
    make_load(trace, options.load_options(vocabulary=1024))  # Checked before anything is started.
    signal.signal(signal.SIGTERM, _stop)
    logs = cache_folder() / "bench-logs"  # Kept: an error message names the file.
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="saga-bench-") as folder:
        model = Path(options.model) if options.model else _tiny_model(Path(folder))
        bench = Bench(options, trace, model, logs)
        try:
            asyncio.run(bench.run())
        except asyncio.CancelledError as error:
            raise SagaError("stopped by a signal; no process is left") from error
    summary = summarise(bench.loads, bench.runs, asdict(options), versions(), machine())
    print_report(summary)
    if json_path is not None:
        write_json(summary, json_path)
        print(f"Written to {json_path}")
    return 0


def _trace(options: EngineOptions) -> Trace:
    if options.trace:
        return read_trace([Path(path) for path in options.trace])
    sessions = PROFILE_SESSIONS.get(options.profile, 1)  # make_profile refuses an unknown one.
    return make_profile(options.profile, sessions=sessions, seed=_PROFILE_SEED)


def _tiny_model(folder: Path) -> Path:
    from gpu_backend.model_free import write_tiny_model

    return write_tiny_model(folder)


def _stop(number: int, frame: object) -> None:
    raise SagaError("stopped by a signal; no process is left")


class Bench:
    """The runs of all arms, and what they measured: ``runs[arm][pair]``, ``loads[pair]``."""

    def __init__(self, options: EngineOptions, trace: Trace, model: Path, logs: Path) -> None:
        self.loads: list[Load] = []
        self.runs: dict[str, list[ArmRun]] = {name: [] for name in options.arm_names()}
        self._options = options
        self._trace = trace
        self._model = model
        self._logs = logs
        config = read_config(model)
        self._vocabulary = int(config.get("vocab_size", 1024))
        # The KV of a float32 model stays float32 on the CPU.
        bytes_factor = 2 if cpu_dtype() == "float32" else 1
        self._token_bytes = bytes_factor * kv_bytes_per_token({**config, "dtype": "bfloat16"})

    async def run(self) -> None:
        """Run every arm in every pair; the first failure ends all."""
        main_task = asyncio.current_task()
        assert main_task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main_task.cancel)
        for number in range(self._options.pairs):
            options = self._options.load_options(self._vocabulary)
            load = make_load(self._trace, replace(options, seed=options.seed + number))
            self.loads.append(load)
            # Alternated, so that a drift of the machine's speed falls on all.
            names = list(self.runs)
            for name in names if number % 2 == 0 else reversed(names):
                print(f"Pair {number + 1} of {self._options.pairs}, {name}: {_shown(load)}")
                self.runs[name].append(await self._run_arm(name, load))

    async def _run_arm(self, name: str, load: Load) -> ArmRun:
        arm = ARMS[name]
        worker = self.worker(name, load)
        timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
        # A worker closes what is idle for 5 s: none of these may meet that moment.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
        async with (
            running(worker),
            aiohttp.ClientSession(timeout=timeout, connector=connector) as client,
        ):
            await worker.wait_ready(_READY_S)
            complete = Completions(
                client, worker.url, MODEL, with_sessions=not self._options.no_sessions
            )
            warm_up = complete([3] * (load.max_tokens // 2), 2, "warm-up")
            await run_beside(warm_up, [worker], "the first request")
            before = await _counters(worker, arm)
            cpu_s = worker.cpu_s()
            loop = ClosedLoop(load, complete)
            await run_beside(_with_progress(loop, load), [worker], "a request")
            cpu_s = worker.cpu_s() - cpu_s
            after = await _counters(worker, arm)
            growth = {key: after[key] - before.get(key, 0) for key in after}
            host_blocks = round(self._host_ratio(arm) * load.pool_blocks)
            return measure(load, loop.requests, Measured(growth, cpu_s, host_blocks))

    def worker(self, name: str, load: Load) -> Service:
        """The arm's worker, not started."""
        arm = ARMS[name]
        port = free_port()
        pool_bytes = load.pool_tokens * self._token_bytes
        options = {
            "--saga-policy": arm.policy,
            "--served-model-name": MODEL,
            "--host": "127.0.0.1",
            "--port": str(port),
            "--dtype": cpu_dtype(),
            "--block-size": str(load.options.block_tokens),
            # One block more: vLLM's null block holds nothing.
            "--num-gpu-blocks-override": str(load.pool_blocks + 1),
            "--max-model-len": str(load.max_tokens),
            "--max-num-batched-tokens": "2048",
            "--seed": "0",
        }
        if self._options.model is None:
            options["--load-format"] = "dummy"
            options["--hf-overrides"] = f'{{"max_position_embeddings": {load.max_tokens}}}'
        if ratio := self._host_ratio(arm):
            options["--saga-host-gib"] = f"{ratio * pool_bytes / 2**30:.9f}"
        command = [sys.executable, "-m", "saga_cli.main", "worker", str(self._model)]
        command += ["--enforce-eager", "--enable-prompt-tokens-details"]
        if not arm.prefetch:
            command.append("--no-saga-prefetch")
        command += [word for pair in options.items() for word in pair]
        space_gib = max(1, math.ceil(pool_bytes / 2**30))
        environment = {**ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": str(space_gib)}
        return Service(f"{name} worker", command, port, self._logs / f"{name}.log", environment)

    def _host_ratio(self, arm: Arm) -> float:
        return self._options.host_pool_ratio if arm.has_host else 0.0


def _shown(load: Load) -> str:
    return (
        f"{len(load.tasks)} tasks, {load.num_calls} requests, {load.live_tasks} tasks at a time "
        f"over a pool of {load.pool_tokens:,} tokens"
    )


async def _counters(worker: Service, arm: Arm) -> dict[str, float]:
    """The plugin's counters, those of prefetches and scheduler among them; none without it."""
    if arm.policy == OFF:
        return {}
    state = await worker_state(worker)
    prefetch = state.get("prefetch") or {}
    scheduler = state.get("scheduler") or {}
    return {
        **state["counters"],
        **{f"prefetch_{name}": n for name, n in prefetch.items()},
        **{f"scheduler_{name}": n for name, n in scheduler.items()},
    }


async def _with_progress(loop: ClosedLoop, load: Load) -> None:
    """Play the load, and say now and then how far it is."""
    playing = asyncio.ensure_future(loop.run())
    try:
        while not playing.done():
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(playing), _EVERY_S)
            print(
                f"  tasks {loop.tasks_done}/{len(load.tasks)}   "
                f"requests {len(loop.requests)}/{load.num_calls}",
                flush=True,
            )
        await playing
    finally:
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
