"""`saga bench scheduler`: what the plugin adds to the CPU time of vLLM's scheduler."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from saga_cli.output import writable
from saga_sim.report import write_json

if TYPE_CHECKING:
    from saga_sim.scheduler_bench import BenchOptions, LoadResult, Median

# An engine that computes nothing needs no hub, no room and no log of its start.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
_MIN_COLUMNS = 150


def run(words: argparse.Namespace) -> int:
    """Measure, print a table and write JSON where it is asked for.

    Raises:
        SagaError: an option is wrong, or the plugin was off.
    """
    json_path = writable("--json", words.json)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from saga_sim import scheduler_bench as bench

    options = bench.BenchOptions(
        sessions=words.sessions,
        blocks=words.blocks,
        policy=words.policy,
        pairs=words.pairs,
        steps=words.steps,
        seed=words.seed,
    )
    results = bench.measure(options, say=lambda line: print(line, file=sys.stderr, flush=True))
    summary = bench.summarise(options, results)
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=_MIN_COLUMNS)
    console.print(_table(options, results))
    for result in results:
        sizes = ", ".join(f"{size:,} {name}" for name, size in result.peak.items())
        console.print(f"{result.load.name}: the index held at most {sizes}", highlight=False)
    ran_on = {**summary["versions"], **summary["machine"]}
    console.print(", ".join(f"{name} {value}" for name, value in ran_on.items()), highlight=False)
    if json_path is not None:
        write_json(summary, json_path)
        console.print(f"Written to {json_path}", highlight=False)
    return 0


def _table(options: BenchOptions, results: Sequence[LoadResult]) -> Table:
    title = (
        f"CPU of vLLM's scheduler, {options.sessions:,} sessions, {options.blocks:,} blocks, "
        f"policy {options.policy}: median (interval) over {options.pairs} rounds"
    )
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column("load")
    for name in (
        "stock ms/step",
        "subclass ÷ stock",
        "SAGA ÷ stock",
        "added ms/step",
        "evicted/step",
        "added µs/evicted",
    ):
        table.add_column(name, justify="right")
    for result in results:
        per_block = result.added_us_per_evicted_block()
        table.add_row(
            result.load.name,
            _text(result.cpu_ms_per_step("stock")),
            _text(result.ratio("subclass")),
            _text(result.ratio("saga")),
            _text(result.added_ms_per_step()),
            f"{result.per_step('saga', 'evicted_blocks'):.1f}",
            "-" if per_block is None else _text(per_block),
        )
    return table


def _text(value: Median) -> str:
    return f"{value.median:.3g} ({value.low:.3g}-{value.high:.3g})"
