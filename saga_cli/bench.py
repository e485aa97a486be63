"""`saga bench`: benchmarks of what ships. A benchmark's module is loaded when it is run."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]


def add_to(commands: Commands) -> None:
    """Add the subcommand and its benchmarks to the parser."""
    bench = commands.add_parser("bench", help="measure what retention costs and what it saves")
    bench.set_defaults(print_help=bench.print_help)
    benchmarks = bench.add_subparsers(dest="benchmark", metavar="BENCHMARK")
    _add_engine(benchmarks)
    _add_scheduler(benchmarks)
    _add_coordinator(benchmarks)
    _add_sdk(benchmarks)
    _add_gateway(benchmarks)


def run(options: argparse.Namespace) -> int:
    """Run the benchmark that was named; without one, show which there are."""
    if options.benchmark == "engine":
        from saga_cli import bench_engine

        return bench_engine.run(options)
    if options.benchmark == "coordinator":
        from saga_cli import bench_coordinator

        return bench_coordinator.run(options)
    if options.benchmark == "scheduler":
        from saga_cli import bench_scheduler

        return bench_scheduler.run(options)
    if options.benchmark == "sdk":
        from saga_cli import bench_sdk

        return bench_sdk.run(options)
    if options.benchmark == "gateway":
        from saga_cli import bench_gateway

        return bench_gateway.run(options)
    options.print_help()
    return 0


def _add_engine(benchmarks: Commands) -> None:
    parser = benchmarks.add_parser(
        "engine",
        help="agents on a real vLLM worker, stock against SAGA",
        description="Plays agents in a closed loop against one real vLLM worker after the other, "
        "arm by arm, in pairs with the same seeds, and compares completion times, prefill and "
        "regret; the offline optimum on the same requests is shown beside them.",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--profile", default="swe", metavar="NAME", help="swe (default), web, chat or tree"
    )
    source.add_argument("--trace", nargs="+", metavar="PATH", help="files or a folder of a trace")

    def add(name: str, kind: type, default: object, metavar: str, text: str) -> None:
        parser.add_argument(name, type=kind, default=default, metavar=metavar, help=text)

    add("--pressure", float, 2.0, "X", "tokens that live tasks hold ÷ pool (%(default)s)")
    add("--pairs", int, 1, "N", "runs of each arm (%(default)s)")
    add(
        "--arms",
        str,
        "stock,saga",
        "NAMES",
        "of stock, off, prefix-lru, vllm-host, saga and saga-noprefetch, with commas between; the "
        "others are compared with the first (%(default)s)",
    )
    add("--host-pool-ratio", float, 0.0, "R", "host memory ÷ GPU pool, for arms that use it (0)")
    add("--sessions", int, None, "N", "tasks alive at a time (as many as press on the pool)")
    add("--seed", int, 0, "N", "of the first pair (%(default)s)")
    add("--model", str, None, "FOLDER", "a model (a tiny Llama with random weights)")
    add("--scale", int, None, "N", "divisor of the trace's lengths (16)")
    add("--time-scale", float, None, "X", "divisor of the trace's pauses (that of the lengths)")
    parser.add_argument("--no-sessions", action="store_true", help="send no session ids")
    parser.add_argument("--quick", action="store_true", help="a small load, to see that it works")
    parser.add_argument("--json", metavar="FILE", help="also write the results to FILE")


def _add_scheduler(benchmarks: Commands) -> None:
    parser = benchmarks.add_parser(
        "scheduler",
        help="CPU that the plugin adds to vLLM's scheduler",
        description="Drives vLLM's own scheduler without a model, over an aged block pool, in "
        "three arms that take turns: stock, a subclass that adds nothing (the noise floor) and "
        "SAGA. Reports the CPU time of a step under three loads.",
    )
    parser.add_argument(
        "--sessions", type=int, default=10_000, metavar="N", help="paused sessions (%(default)s)"
    )
    parser.add_argument(
        "--blocks", type=int, default=100_000, metavar="N", help="blocks of the pool (%(default)s)"
    )
    parser.add_argument("--policy", default="saga", metavar="NAME", help="(%(default)s)")
    parser.add_argument(
        "--pairs", type=int, default=9, metavar="N", help="rounds of the three arms (%(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=100, metavar="N", help="of an arm in a round (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write the results to FILE")


def _add_coordinator(benchmarks: Commands) -> None:
    parser = benchmarks.add_parser(
        "coordinator",
        help="CPU of the coordinator's decisions",
        description="Times the coordinator's events over fleets and session tables of several "
        "sizes, with a quarter more requests than there are places.",
    )
    parser.add_argument(
        "--workers", default="10,100,1000", metavar="N,N,...", help="fleets (%(default)s)"
    )
    parser.add_argument(
        "--sessions", default="10000,100000,1000000", metavar="N,N,...", help="(%(default)s)"
    )
    parser.add_argument("--events", type=int, default=40_000, metavar="N", help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    parser.add_argument("--json", metavar="FILE", help="also write the results to FILE")


def _add_sdk(benchmarks: Commands) -> None:
    parser = benchmarks.add_parser(
        "sdk",
        help="CPU that the SDK adds to an LLM call",
        description="Makes the same calls with and without the SDK, in pairs, against a transport "
        "that answers at once. Reports the CPU time that is added to a call of a bare OpenAI "
        "client and of a LangChain model, that of an event, the memory held after many runs, and "
        "how long the import takes.",
    )
    parser.add_argument("--pairs", type=int, default=31, metavar="N", help="(%(default)s)")
    parser.add_argument(
        "--calls", type=int, default=100, metavar="N", help="of an arm in a pair (%(default)s)"
    )
    parser.add_argument(
        "--runs",
        type=int,
        default=100_000,
        metavar="N",
        help="runs after which the memory is measured (%(default)s)",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the results to FILE")


def _add_gateway(benchmarks: Commands) -> None:
    parser = benchmarks.add_parser(
        "gateway",
        help="CPU and latency of the gateway, beside a bare pass-through",
        description="Sends requests and streams to a stand-in worker: directly, through the least "
        "that a Python gateway can be, through SAGA's gateway, and through other gateways where "
        "they are installed (vllm-router, sglang-router, litellm). Every round starts each anew. "
        "Whole answers are asked for with wrk where it is installed.",
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="(%(default)s)")
    parser.add_argument(
        "--scale", type=float, default=1.0, metavar="X", help="times as many requests (%(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the results to FILE")
