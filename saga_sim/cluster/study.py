"""Runs of several arms over several seeds, as a table and as JSON.

The JSON object:

    benchmark: "cluster". version: of this form.
    scenario: its name; null: none. options: what was asked for. cost: constants of the cost
        model. loads: one a seed.
    arms: by name, what it ``says``, its ``runs``, one a seed, their ``median``, and
        ``slo_median``, of the tasks on time of each kind.
    reference: an arm's name. comparisons: by arm but this, the reference's figure ÷ the arm's:
        above 1 the arm is better. Each holds the fields of ``engine_bench.figures.Paired``.
    timing: CPU seconds and steps per CPU second, by arm. machine, versions: what it ran on.

All but timing, machine and versions is the same in every run of the same options.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gpu_backend.model_free import write_tiny_model
from saga_core.errors import SettingsError
from saga_sim.cluster.arms import ARMS, DEFAULT_ARMS, REFERENCE, Arm, arms_of
from saga_sim.cluster.cost import Roofline, read_cost
from saga_sim.cluster.figures import RATIOS, SINGLE, Figures, measure
from saga_sim.cluster.load import ClusterLoad, LoadOptions, make_load
from saga_sim.cluster.simulation import Cluster
from saga_sim.engine_bench.figures import ratios
from saga_sim.machine import machine, versions

VERSION = 2
_BATCHED_TOKENS = 2048

_ROWS = (
    ("task completion time p50, s", "tct_p50_s", "{:,.1f}"),
    ("task completion time p95, s", "tct_p95_s", "{:,.1f}"),
    ("task completion time mean, s", "tct_mean_s", "{:,.1f}"),
    ("time to first token p50, s", "ttft_p50_s", "{:.2f}"),
    ("time to first token p95, s", "ttft_p95_s", "{:.2f}"),
    ("tasks a minute", "tasks_per_min", "{:.2f}"),
    ("completion time ÷ alone p50", "slowdown_p50", "{:.2f}"),
    ("completion time ÷ alone p95", "slowdown_p95", "{:.2f}"),
    ("tasks on time", "slo_share", "{:.1%}"),
    ("hit rate", "hit_rate", "{:.1%}"),
    ("regret, share of busy time", "regret_share", "{:.1%}"),
    ("workers busy", "busy_share", "{:.1%}"),
    ("KV pool held by running requests", "used_share", "{:.1%}"),
    ("KV pool with content", "cached_share", "{:.1%}"),
    ("calls that changed the worker", "moved_share", "{:.1%}"),
    ("tokens computed again, preempted", "recomputed_tokens", "{:,.0f}"),
    ("tokens prefetched by prefill", "prefetched_tokens", "{:,.0f}"),
    ("pressure, start and end included", "pressure", "{:.2f}"),
)


_HOST_ROWS = (
    ("prompt tokens found on the GPU", "hit_rate_gpu", "{:.1%}"),
    ("prompt tokens loaded from host memory", "hit_rate_host", "{:.1%}"),
    ("prompt tokens computed", "computed_share", "{:.1%}"),
    ("tokens loaded from host memory", "link_loaded_tokens", "{:,.0f}"),
    ("tokens stored to host memory", "link_stored_tokens", "{:,.0f}"),
    ("links to host memory busy, loading", "load_share", "{:.1%}"),
    ("links to host memory busy, storing", "store_share", "{:.1%}"),
    ("busy time that waits for copies", "copy_wait_share", "{:.1%}"),
)


@dataclass(frozen=True, slots=True)
class StudyOptions:
    """What is simulated.

    Attributes:
        load: of the first seed. seeds: how many, one after the other.
        arms: names. cost: see ``read_cost``.
        batched_tokens: most tokens of a step; None: vLLM's default for the hardware, or 2,048.
        host_pool_ratio: host memory ÷ KV pool of each worker; 0: none.
        reference: the arm that others are compared with, if it is among them.
        scenario: that the load is of; None: of none.
    """

    load: LoadOptions = field(default_factory=LoadOptions)
    seeds: int = 1
    arms: tuple[str, ...] = DEFAULT_ARMS
    cost: str = "a100"
    batched_tokens: int | None = None
    host_pool_ratio: float = 0.0
    reference: str = REFERENCE
    scenario: str | None = None

    def __post_init__(self) -> None:
        arms_of(self.arms)
        if self.seeds < 1:
            raise SettingsError(f"seeds={self.seeds} must be at least 1")
        if self.batched_tokens is not None and self.batched_tokens < 16:
            raise SettingsError(f"batched_tokens={self.batched_tokens} must be at least 16")
        if not 0 <= self.host_pool_ratio < math.inf:
            raise SettingsError(f"host_pool_ratio={self.host_pool_ratio} must be at least 0")


@dataclass(frozen=True, slots=True)
class Run:
    """One arm with one seed; ``cpu_s`` is what it took this process."""

    figures: Figures
    cpu_s: float


class ClusterStudy:
    """Every arm with every seed: ``loads[seed]``, ``runs[arm][seed]``.

    Raises:
        SettingsError: the options describe no load, or no cost.
    """

    def __init__(self, options: StudyOptions) -> None:
        self.options = options
        self.cost = read_cost(options.cost)
        first = options.load.seed
        self.loads = [
            make_load(replace(options.load, seed=first + n)) for n in range(options.seeds)
        ]
        self.runs: dict[str, list[Run]] = {name: [] for name in options.arms}

    @property
    def batched_tokens(self) -> int:
        """Most tokens of a step."""
        if self.options.batched_tokens is not None:
            return self.options.batched_tokens
        if isinstance(self.cost, Roofline):
            return self.cost.hardware.batched_tokens
        return _BATCHED_TOKENS

    @property
    def num_tasks(self) -> int:
        """Of all runs together."""
        return len(self.options.arms) * sum(len(load.tasks) for load in self.loads)

    def run(self, say: Callable[[str], None], on_task: Callable[[], None] = lambda: None) -> None:
        """Simulate all; ``say`` is told of each run, ``on_task`` of each task that is done.

        Raises:
            SagaError: an engine could not go on, or its plugin was off.
        """
        with tempfile.TemporaryDirectory(prefix="saga-cluster-") as folder:
            model = write_tiny_model(Path(folder))
            for load in self.loads:
                for arm in arms_of(self.options.arms):
                    run = self._run_arm(arm, load, model, on_task)
                    self.runs[arm.name].append(run)
                    say(
                        f"seed {load.options.seed}, {arm.name}: {run.figures.steps:,} steps, "
                        f"{run.cpu_s:.0f} s of CPU, mean task {run.figures.tct_mean_s:,.0f} s"
                    )

    def _run_arm(
        self, arm: Arm, load: ClusterLoad, model: Path, on_task: Callable[[], None]
    ) -> Run:
        started_s = time.process_time()
        cluster = Cluster(
            load,
            arm,
            self.cost,
            model,
            batched_tokens=self.batched_tokens,
            host_pool_ratio=self.options.host_pool_ratio,
        )
        cluster.run(lambda done: on_task())
        cluster.check_integrity()
        return Run(measure(cluster), time.process_time() - started_s)

    def figures(self, arm: str) -> list[Figures]:
        """Of an arm, one a seed."""
        return [run.figures for run in self.runs[arm]]


def results(study: ClusterStudy) -> dict[str, Any]:
    """What was asked and found, the same in every run; see the module."""
    options = study.options
    reference = options.reference
    others = [name for name in options.arms if name != reference and reference in options.arms]
    return {
        "benchmark": "cluster",
        "version": VERSION,
        "scenario": options.scenario,
        "options": {
            "arms": list(options.arms),
            "seeds": options.seeds,
            "cost": options.cost,
            "batched_tokens": study.batched_tokens,
            "host_pool_ratio": options.host_pool_ratio,
        },
        "cost": study.cost.values(),
        "loads": [load.values() for load in study.loads],
        "arms": {name: _arm_values(name, study.figures(name)) for name in options.arms},
        "reference": reference,
        "comparisons": {
            name: {
                figure: asdict(ratio)
                for figure, ratio in ratios(
                    study.figures(reference), study.figures(name), RATIOS
                ).items()
            }
            for name in others
        },
    }


def summarise(study: ClusterStudy) -> dict[str, Any]:
    """The results, with what they took and what they ran on."""
    timing = {
        name: {
            "cpu_s": [run.cpu_s for run in runs],
            "steps_per_cpu_s": sum(run.figures.steps for run in runs)
            / max(1e-9, sum(run.cpu_s for run in runs)),
        }
        for name, runs in study.runs.items()
    }
    return {
        **results(study),
        "timing": timing,
        "machine": machine(),
        "versions": versions(),
    }


def print_report(study: ClusterStudy, summary: Mapping[str, Any], console: Console) -> None:
    """Print a summary."""
    load = summary["loads"][0]
    name = summary["scenario"] or load["profile"]
    title = (
        f"{name}, {load['workers']} workers, {load['live_tasks']} of {load['tasks']} "
        f"tasks at a time, pressure {load['pressure']:g}: medians of {study.options.seeds} seeds"
    )
    table = Table(title=title)
    table.add_column("")
    for name in summary["arms"]:
        table.add_column(name, justify="right")
    rows = _ROWS + (_HOST_ROWS if summary["options"]["host_pool_ratio"] else ())
    for label, figure, form in rows:
        values = (arm["median"][figure] for arm in summary["arms"].values())
        table.add_row(label, *(form.format(value) for value in values))
    for kind in _kinds(summary):
        shares = (f"{arm['slo_median'][kind]:.1%}" for arm in summary["arms"].values())
        table.add_row(f"tasks on time, {kind}", *shares)
    speeds = (f"{one['steps_per_cpu_s']:,.0f}" for one in summary["timing"].values())
    table.add_row("steps simulated per CPU second", *speeds)
    console.print(table)
    if summary["comparisons"]:
        console.print(_comparison_table(summary["reference"], summary["comparisons"]))
    for line in _foot(study, summary):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _kinds(summary: Mapping[str, Any]) -> list[str]:
    """The kinds of tasks, where there are several."""
    kinds = list(next(iter(summary["arms"].values()))["slo_median"])
    return kinds if len(kinds) > 1 else []


def _comparison_table(reference: str, comparisons: Mapping[str, Any]) -> Table:
    labels = {figure: label for label, figure, _ in _ROWS}
    labels |= {"elapsed_s": "whole run, s", "busy_s": "busy time of the workers, s"}
    table = Table(title=f"{reference} ÷ arm, median (least to most): above 1 the arm is better")
    table.add_column("")
    for name in comparisons:
        table.add_column(name, justify="right")
    for figure in next(iter(comparisons.values())):
        cells = (
            f"{one[figure]['median']:.2f} ({one[figure]['least']:.2f} to {one[figure]['most']:.2f})"
            for one in comparisons.values()
        )
        table.add_row(labels[figure], *cells)
    return table


def _foot(study: ClusterStudy, summary: Mapping[str, Any]) -> list[str]:
    load, cost = summary["loads"][0], summary["cost"]
    pool_tokens = load["blocks_per_worker"] * load["block_tokens"]
    lines = [f"{name}: {ARMS[name].says}." for name in summary["arms"]]
    lines.append(
        f"Load: {load['calls']:,} requests; a live task holds {load['footprint_tokens']:,.0f} "
        f"tokens, a worker {pool_tokens:,}; calls end at {load['max_tokens']:,} tokens, which cut "
        f"{load['cut_tasks']} tasks short. Lengths and pauses ÷ {load['scale']}."
    )
    lines.append(
        f"On time: within {load['deadline_factor']:g} × what the task takes alone on an empty "
        "worker."
    )
    if cost["kind"] == "roofline":
        lines.append(
            f"Time: roofline of {cost['model']['name']} on {cost['hardware']['name']}, where a "
            f"worker would have room for {cost['kv_tokens']:,} tokens."
        )
    else:
        lines.append(f"Time: measured, {cost}.")
    ratio = summary["options"]["host_pool_ratio"]
    if ratio:
        lines.append(
            f"Host memory: {ratio:g} × the KV pool; a worker's links move "
            f"{study.cost.link_tokens_per_s:,.0f} tokens a second each way."
        )
    else:
        lines.append("No host memory.")
    lines.append(
        "vLLM's own scheduler and block manager, one batch in flight; sending, routing and notices "
        "take no time."
    )
    return lines


def _arm_values(name: str, figures: list[Figures]) -> dict[str, Any]:
    values = [one.values for one in figures]
    return {
        "says": ARMS[name].says,
        "runs": values,
        "median": {key: statistics.median(value[key] for value in values) for key in SINGLE},
        "slo_median": {
            kind: statistics.median(one.slo[kind] for one in figures) for kind in figures[0].slo
        },
    }
