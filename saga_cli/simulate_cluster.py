"""`saga simulate cluster`: agents on a cluster of vLLM's own schedulers, on a virtual clock."""

from __future__ import annotations

import argparse
import os
import sys

from saga_cli.output import writable

# An engine that computes nothing needs no hub, no room and no log of its start.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
_MIN_COLUMNS = 150


def add_words(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    load = parser.add_argument_group("load")
    load.add_argument(
        "--profile", default="swe", metavar="NAME", help="swe, web, chat or tree (swe)"
    )
    load.add_argument("--workers", type=int, default=4, metavar="N", help="engines (4)")
    load.add_argument("--tasks", type=int, default=64, metavar="N", help="tasks in all (64)")
    load.add_argument(
        "--live-tasks", type=int, metavar="N", help="tasks at a time (half of all of them)"
    )
    load.add_argument(
        "--pressure",
        type=float,
        default=2.0,
        metavar="P",
        help="KV of live tasks ÷ room for KV, which is fitted (2)",
    )
    load.add_argument(
        "--scale", type=int, default=1, metavar="N", help="divide lengths and pauses by N (1)"
    )
    load.add_argument(
        "--block-tokens", type=int, default=64, metavar="N", help="tokens in a block (64)"
    )
    load.add_argument("--seed", type=int, default=0, metavar="N", help="the first seed (0)")
    load.add_argument("--seeds", type=int, default=1, metavar="N", help="how many seeds (1)")
    engine = parser.add_argument_group("engines")
    engine.add_argument(
        "--arms",
        default="vllm,vllm-apc,least-loaded,vllm-apc-affinity,saga",
        metavar="NAMES",
        help="names with commas between (vllm,vllm-apc,least-loaded,vllm-apc-affinity,saga); also "
        "saga-coordinator, saga-sticky, saga-no-affinity, saga-stock-retention, saga-no-notices, "
        "saga-no-ordering and saga-no-prefetch",
    )
    engine.add_argument(
        "--cost",
        default="a100",
        metavar="NAME",
        help="how long steps take: a100, h100 or h200, each with Llama-3-70B on four GPUs, or a "
        "JSON file with prefill_tokens_per_s, step_overhead_s, decode_s_per_sequence and "
        "decode_s_per_context_token (a100)",
    )
    engine.add_argument(
        "--batched-tokens",
        type=int,
        metavar="N",
        help="most tokens of a step (vLLM's default for the GPU)",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="also write the results to FILE")


def run(options: argparse.Namespace) -> int:
    """Simulate, print the comparison and write it where it is asked for.

    Raises:
        SagaError: an option is wrong, or an engine could not go on.
    """
    json_path = writable("--json", options.json)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from rich.console import Console

    from saga_sim.cluster.load import LoadOptions
    from saga_sim.cluster.study import ClusterStudy, StudyOptions, print_report, summarise
    from saga_sim.report import write_json

    study = ClusterStudy(
        StudyOptions(
            load=LoadOptions(
                profile=options.profile,
                workers=options.workers,
                tasks=options.tasks,
                live_tasks=options.live_tasks,
                pressure=options.pressure,
                scale=options.scale,
                block_tokens=options.block_tokens,
                seed=options.seed,
            ),
            seeds=options.seeds,
            arms=tuple(name.strip() for name in options.arms.split(",") if name.strip()),
            cost=options.cost,
            batched_tokens=options.batched_tokens,
        )
    )
    study.run(say=lambda line: print(line, file=sys.stderr, flush=True))
    summary = summarise(study)
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=_MIN_COLUMNS)
    print_report(study, summary, console)
    if json_path is not None:
        write_json(summary, json_path)
        console.print(f"Written to {json_path}", highlight=False)
    return 0
