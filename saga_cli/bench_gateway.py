"""`saga bench gateway`: what a gateway costs, beside a bare pass-through and other gateways."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from saga_cli.output import writable
from saga_cli.processes import Service, free_port, running
from saga_core.errors import SagaError
from saga_sim.gateway_bench import wrk
from saga_sim.gateway_bench.client import Load
from saga_sim.machine import machine, versions
from saga_sim.report import write_json

_READY_S = 60.0

_SESSIONS = 1000


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load, and how much of it: ``scale`` multiplies the requests, and the seconds of wrk."""

    name: str
    load: Load

    def scaled(self, scale: float, *, named: bool = True) -> Load:
        count = max(self.load.at_a_time, round(self.load.requests * scale))
        return replace(self.load, requests=count, named=named)


_CROWD = "20 events, 1,000 open"
SCENARIOS = (
    Scenario("4 KB, 1 at a time", Load(2000, 1, sessions=_SESSIONS)),
    Scenario("4 KB, 32 at a time", Load(8000, 32, sessions=_SESSIONS)),
    Scenario("400 KB, 8 at a time", Load(400, 8, body_bytes=400_000, sessions=_SESSIONS)),
    Scenario("100 events, 64 open", Load(256, 64, events=100, interval_ms=20, sessions=_SESSIONS)),
    Scenario(
        "100 events, 256 open", Load(512, 256, events=100, interval_ms=20, sessions=_SESSIONS)
    ),
    Scenario(
        _CROWD,
        Load(3000, 1000, events=20, interval_ms=100, sessions=_SESSIONS, health_every_ms=20),
    ),
)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one gateway under one load, in one round.

    Attributes:
        cpu_us: CPU microseconds of the gateway's processes for a request.
        first_ms, whole_ms, health_ms: median and 99th percentile, see
            ``saga_sim.gateway_bench.client``.
    """

    cpu_us: float
    per_s: float
    failed: int
    first_ms: tuple[float, float]
    whole_ms: tuple[float, float]
    health_ms: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a gateway is to listen, whom it is to serve, and a folder of its own."""

    port: int
    upstream: str
    folder: Path


Command = Callable[[Place], list[str] | None]
"""How a gateway is started; None: it is not installed."""


def _saga(place: Place) -> list[str] | None:
    words = ["gateway", "--worker", place.upstream, "--port", str(place.port)]
    return [sys.executable, "-m", "saga_cli.main", *words, "--set", "health_interval_s=0"]


def _pass_through(place: Place) -> list[str] | None:
    module = "saga_sim.gateway_bench.passthrough"
    return [sys.executable, "-m", module, str(place.port), place.upstream]


def _vllm_router(place: Place) -> list[str] | None:
    program = shutil.which("vllm-router")
    words = ["--host", "127.0.0.1", "--port", str(place.port), "--worker-urls", place.upstream]
    return None if program is None else [program, *words, "--policy", "cache_aware"]


def _sglang_router(place: Place) -> list[str] | None:
    program = shutil.which("sglang-router")
    words = ["--host", "127.0.0.1", "--port", str(place.port), "--worker-urls", place.upstream]
    return None if program is None else [program, "launch", *words, "--policy", "cache_aware"]


def _litellm(place: Place) -> list[str] | None:
    program = shutil.which("litellm")
    parameters = {"model": "openai/m", "api_base": f"{place.upstream}/v1", "api_key": "none"}
    config = {"model_list": [{"model_name": "m", "litellm_params": parameters}]}
    path = place.folder / "litellm.json"  # JSON is YAML.
    path.write_text(json.dumps(config))
    words = ["--config", str(path), "--host", "127.0.0.1", "--port", str(place.port)]
    return None if program is None else [program, *words]


@dataclass(frozen=True, slots=True)
class Arm:
    """A gateway, and where it says that it serves.

    Attributes:
        share: of the requests, it is so slow.
        environment: what it needs.
        is_peer: it is somebody else's: without it the others are measured all the same.
        named: whether it is told the sessions of its requests.
    """

    command: Command
    ready_path: str = "/health"
    share: float = 1.0
    environment: Mapping[str, str] = field(default_factory=dict)
    is_peer: bool = True
    named: bool = True


ARMS: dict[str, Arm] = {
    "pass-through": Arm(_pass_through, is_peer=False),
    "saga": Arm(_saga, is_peer=False),
    "saga, sessions found": Arm(_saga, is_peer=False, named=False),
    "vllm-router": Arm(_vllm_router),
    "sglang-router": Arm(_sglang_router),
    "litellm": Arm(
        _litellm,
        "/health/liveliness",
        share=0.1,
        environment={"LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"},
    ),
}


def run(options: argparse.Namespace) -> int:
    """Measure, print a table and write JSON where it is asked for.

    Raises:
        SagaError: an option is wrong, or a server does not start.
    """
    json_path = writable("--json", options.json)
    if options.rounds < 1 or options.scale <= 0:
        raise SagaError("--rounds must be 1 or more, --scale above 0")
    summary = asyncio.run(measure(options.rounds, options.scale))
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=120)
    for table in _tables(summary):
        console.print(table)
    if json_path is not None:
        write_json(summary, json_path)
        console.print(f"Written to {json_path}", highlight=False)
    return 0


async def measure(rounds: int, scale: float) -> dict[str, Any]:
    """All figures: every round starts each gateway anew, one after the other.

    Raises:
        SagaError: a server does not start.
    """
    results: dict[str, dict[str, list[Figures]]] = {}
    memory_mb: dict[str, list[float]] = {}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        upstream_port = free_port()
        upstream = [sys.executable, "-m", "saga_sim.gateway_bench.upstream", str(upstream_port)]
        service = Service("upstream", upstream, upstream_port, folder / "upstream.log")
        await stack.enter_async_context(running(service))
        await service.wait_ready(_READY_S)
        for _ in range(rounds):
            direct = results.setdefault("direct", {})
            for scenario in SCENARIOS:
                seen = await _play(upstream_port, scenario.scaled(scale), scale)
                direct.setdefault(scenario.name, []).append(_figures(seen, 0.0))
            for name, arm in ARMS.items():
                place = Place(free_port(), service.url, folder)
                command = arm.command(place)
                if command is None:
                    continue
                log = folder / f"{name.replace(' ', '-')}.log"
                gateway = Service(
                    name, command, place.port, log, arm.environment, ready_path=arm.ready_path
                )
                async with running(gateway):
                    try:
                        await gateway.wait_ready(_READY_S)
                    except SagaError as error:
                        if not arm.is_peer:
                            raise
                        print(f"{name} is left out: {error}", file=sys.stderr)
                        continue
                    warm = Load(200, 8, sessions=_SESSIONS, named=arm.named)
                    await _play(place.port, warm, 0.0)
                    for scenario in SCENARIOS:
                        before_s = gateway.cpu_s()
                        share = scale * arm.share
                        load = scenario.scaled(share, named=arm.named)
                        seen = await _play(place.port, load, share)
                        used_s = gateway.cpu_s() - before_s
                        figures = _figures(seen, used_s)
                        results.setdefault(name, {}).setdefault(scenario.name, []).append(figures)
                    if arm.share == 1.0:
                        many = round(100_000 * scale)
                        load = Load(many, 32, body_bytes=600, sessions=many, named=arm.named)
                        await _play(place.port, load, 0.0)
                        memory_mb.setdefault(name, []).append(_memory_mb(gateway.pid))
    return {
        "benchmark": "gateway",
        "options": {"rounds": rounds, "scale": scale},
        "client": "asyncio" if wrk.find_wrk() is None else "wrk, asyncio for streams",
        "gateways": {
            name: {scenario: _summary(each) for scenario, each in by_scenario.items()}
            for name, by_scenario in results.items()
        },
        "memory_mb_after_100000_sessions": {
            name: statistics.median(each) for name, each in memory_mb.items()
        },
        "versions": versions(["aiohttp", "uvicorn", "uvloop", "httptools"]),
        "machine": machine(),
    }


async def _play(port: int, load: Load, wrk_share: float) -> dict[str, Any]:
    """The load, from a process of its own.

    Args:
        wrk_share: of ten seconds, in which wrk, where it is there, asks for whole answers; with 0,
            it does not.
    """
    if wrk_share and not load.events and wrk.find_wrk() is not None:
        return await wrk.run(port, load, max(1, round(10 * wrk_share)))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "saga_sim.gateway_bench.client", str(port)),
        json.dumps(asdict(load)),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise SagaError(f"the load client ended with exit code {process.returncode}")
    seen: dict[str, Any] = json.loads(output)
    return seen


def _figures(seen: dict[str, Any], cpu_s: float) -> Figures:
    return Figures(
        cpu_us=1e6 * cpu_s / seen["requests"],
        per_s=seen["requests"] / seen["seconds"],
        failed=seen["failed"],
        first_ms=tuple(seen["first_ms"]),
        whole_ms=tuple(seen["whole_ms"]),
        health_ms=tuple(seen.get("health_ms", (0.0, 0.0))),
    )


def _summary(rounds: Sequence[Figures]) -> dict[str, Any]:
    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    return {
        "cpu_us": median([each.cpu_us for each in rounds]),
        "cpu_us_range": [min(e.cpu_us for e in rounds), max(e.cpu_us for e in rounds)],
        "per_s": median([each.per_s for each in rounds]),
        "failed": sum(each.failed for each in rounds),
        "first_p50_ms": median([each.first_ms[0] for each in rounds]),
        "first_p99_ms": median([each.first_ms[1] for each in rounds]),
        "whole_p50_ms": median([each.whole_ms[0] for each in rounds]),
        "whole_p99_ms": median([each.whole_ms[1] for each in rounds]),
        "health_p99_ms": median([each.health_ms[1] for each in rounds]),
    }


def _memory_mb(pid: int) -> float:
    """Resident memory of a process; 0 where the system has no ``/proc``."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return 0.0
    (line,) = [each for each in status.read_text().splitlines() if each.startswith("VmRSS:")]
    return int(line.split()[1]) / 1024


def _tables(summary: dict[str, Any]) -> list[Table]:
    gateways, tables = summary["gateways"], []
    for scenario in SCENARIOS:
        table = Table(title=scenario.name, box=box.SIMPLE)
        for column in ("gateway", "CPU µs", "÷ pass-through", "added p50 ms", "added p99 ms"):
            table.add_column(column, justify="left" if column == "gateway" else "right")
        for column in ("first byte p50 ms", "requests/s", "failed"):
            table.add_column(column, justify="right")
        direct = gateways["direct"][scenario.name]
        bare = gateways["pass-through"][scenario.name]["cpu_us"]
        for name, by_scenario in gateways.items():
            each = by_scenario[scenario.name]
            is_direct = name == "direct"
            table.add_row(
                name,
                "" if is_direct else f"{each['cpu_us']:,.0f}",
                "" if is_direct or not bare else f"{each['cpu_us'] / bare:.2f}×",
                "" if is_direct else f"{each['whole_p50_ms'] - direct['whole_p50_ms']:.2f}",
                "" if is_direct else f"{each['whole_p99_ms'] - direct['whole_p99_ms']:.2f}",
                f"{each['first_p50_ms']:.2f}",
                f"{each['per_s']:,.0f}",
                str(each["failed"]),
            )
        tables.append(table)
    crowd = Table(title=f"/health under {_CROWD}", box=box.SIMPLE)
    crowd.add_column("gateway")
    crowd.add_column("p99 ms", justify="right")
    for name, by_scenario in gateways.items():
        if name != "direct":
            crowd.add_row(name, f"{by_scenario[_CROWD]['health_p99_ms']:.1f}")
    memory = Table(title="resident memory after 100,000 sessions", box=box.SIMPLE)
    memory.add_column("gateway")
    memory.add_column("MB", justify="right")
    for name, megabytes in summary["memory_mb_after_100000_sessions"].items():
        memory.add_row(name, f"{megabytes:.0f}")
    return [*tables, crowd, memory]
