"""`saga simulate cluster`: agents on a cluster of vLLM's own schedulers, on a virtual clock."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from saga_cli.output import writable
from saga_core.errors import SagaError, SettingsError

if TYPE_CHECKING:
    from rich.console import Console

    from saga_sim.cluster.study import ClusterStudy, StudyOptions

# An engine that computes nothing needs no hub, no room and no log of its start.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
_MIN_COLUMNS = 150
_LABEL_COLUMNS, _ARM_COLUMNS = 40, 26
_LIST = "list"
# What of a scenario's load another number can be asked for.
_LOAD_WORDS = ("profile", "workers", "tasks", "live_tasks", "pressure", "scale", "block_tokens")


def add_words(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    load = parser.add_argument_group("load")
    load.add_argument(
        "--scenario",
        metavar="NAME",
        help="a load with its pressure and the arms that it is for: swe, web, tenants, "
        "tenants-crowded, chat, mixed, bursty, worker-loss, wrong-hints, heavy-tails or "
        "ablations; list shows them. The options below stand above it",
    )
    load.add_argument(
        "--full", action="store_true", help="the scenario with the paper's workers and tasks: hours"
    )
    load.add_argument(
        "--profile",
        metavar="NAME",
        help="swe, web, chat or tree, or several with + between (swe)",
    )
    load.add_argument("--workers", type=int, metavar="N", help="engines (4)")
    load.add_argument("--tasks", type=int, metavar="N", help="tasks in all (64)")
    load.add_argument(
        "--live-tasks", type=int, metavar="N", help="tasks at a time (half of all of them)"
    )
    load.add_argument(
        "--pressure",
        type=float,
        metavar="P",
        help="KV of live tasks ÷ room for KV, which is fitted (2)",
    )
    load.add_argument("--scale", type=int, metavar="N", help="divide lengths and pauses by N (1)")
    load.add_argument("--block-tokens", type=int, metavar="N", help="tokens in a block (64)")
    load.add_argument("--seed", type=int, default=0, metavar="N", help="the first seed (0)")
    load.add_argument("--seeds", type=int, default=1, metavar="N", help="how many seeds (1)")
    engine = parser.add_argument_group("engines")
    engine.add_argument(
        "--arms",
        metavar="NAMES",
        help="names with commas between (the scenario's, or "
        "vllm,vllm-apc,least-loaded,vllm-apc-affinity,saga); also prefix-aware, kvflow-style, "
        "continuum-style, autellix-style, thunderagent-style, and saga- with coordinator, "
        "preempting, untold-deadlines, pausing, no-stealing, no-keeping, sticky, no-affinity, "
        "stock-retention, wa-lru-ttl, wa-lru, no-tools, no-notices, no-ordering, no-prefetch, "
        "random-hints, adversarial-hints, random-homes-kept or adversarial-homes-kept",
    )
    engine.add_argument(
        "--cost",
        default="a100",
        metavar="NAME",
        help="how long steps take: a100, h100 or h200, each with Llama-3-70B on four GPUs, or a "
        "JSON file with prefill_tokens_per_s, step_overhead_s, decode_s_per_sequence, "
        "decode_s_per_context_token, kv_bytes_per_token and host_link_gib_per_s (a100)",
    )
    engine.add_argument(
        "--batched-tokens",
        type=int,
        metavar="N",
        help="most tokens of a step (vLLM's default for the GPU)",
    )
    engine.add_argument(
        "--host-pool-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="host memory ÷ KV pool of each worker; stock arms keep vLLM's order there (0: none)",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="also write the results to FILE")
    output.add_argument(
        "--plots",
        metavar="FOLDER",
        help="also draw them, as PNG and SVG: completion times, regret, memory, tasks on time, "
        "throughput, moves",
    )


def run(options: argparse.Namespace) -> int:
    """Simulate, print the comparison and write it where it is asked for.

    Raises:
        SagaError: an option is wrong, or an engine could not go on.
    """
    if options.full and options.scenario is None:
        raise SettingsError("--full is of a scenario: --scenario says which")
    json_path = writable("--json", options.json)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from saga_sim.cluster.scenarios import SCENARIOS

    if options.scenario == _LIST:
        for scenario in SCENARIOS.values():
            _console(0).print(scenario.line, highlight=False, soft_wrap=True)
        return 0

    from saga_sim.cluster.study import ClusterStudy, print_report, summarise
    from saga_sim.report import write_json

    draw = _drawer(options.plots)
    study = ClusterStudy(_study_options(options))
    _watch(study)
    summary = summarise(study)
    console = _console(len(study.options.arms))
    print_report(study, summary, console)
    if json_path is not None:
        write_json(summary, json_path)
        console.print(f"Written to {json_path}", highlight=False)
    if draw is not None:
        for path in draw(study):
            console.print(f"Drawn in {path}", highlight=False)
    return 0


def _study_options(options: argparse.Namespace) -> StudyOptions:
    """What the words ask for: the scenario, and what is asked for beside it."""
    from saga_sim.cluster.arms import DEFAULT_ARMS, REFERENCE
    from saga_sim.cluster.load import LoadOptions
    from saga_sim.cluster.scenarios import scenario_of
    from saga_sim.cluster.study import StudyOptions

    given = {name: getattr(options, name) for name in _LOAD_WORDS}
    given = {name: value for name, value in given.items() if value is not None}
    if options.scenario is not None:
        scenario = scenario_of(options.scenario)
        load = scenario.at(given, is_full=options.full, seed=options.seed)
        arms, reference = scenario.arms, scenario.reference
    else:
        load = LoadOptions(**{"tasks": 64, **given, "seed": options.seed})
        arms, reference = DEFAULT_ARMS, REFERENCE
    if options.arms is not None:
        arms = tuple(name.strip() for name in options.arms.split(",") if name.strip())
    return StudyOptions(
        load=load,
        seeds=options.seeds,
        arms=arms,
        cost=options.cost,
        batched_tokens=options.batched_tokens,
        host_pool_ratio=options.host_pool_ratio,
        reference=reference,
        scenario=options.scenario,
    )


def _console(arms: int) -> Console:
    """Where the tables go; where that is no terminal they may be wide."""
    from rich.console import Console

    console = Console()
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(width=max(_MIN_COLUMNS, _LABEL_COLUMNS + _ARM_COLUMNS * arms))


def _drawer(folder: str | None) -> Callable[[ClusterStudy], list[Path]] | None:
    """What draws the plots; only they need matplotlib."""
    if folder is None:
        return None
    from saga_sim.cluster.charts import draw_charts

    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SagaError(f"--plots {folder} cannot be made: {error.strerror}") from error
    return lambda study: draw_charts(study, path)


def _watch(study: ClusterStudy) -> None:
    """Run it with its progress on stderr: a bar on a terminal, a line a run elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    with _progress(console, study.num_tasks) as (say, on_task):
        study.run(say, on_task)


@contextmanager
def _progress(
    console: Console, total: int
) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    if not console.is_terminal:
        yield lambda line: print(line, file=sys.stderr, flush=True), lambda: None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("tasks"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=total)
        yield lambda line: console.print(line, highlight=False), lambda: progress.advance(bar)
