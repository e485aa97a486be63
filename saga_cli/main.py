"""The `saga` command: parses the words of a subcommand and hands over to its module."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeAlias

from saga_cli import aeg, bench, gateway, simulate_cluster, top, up_words
from saga_core.errors import SagaError

if TYPE_CHECKING:
    _Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]

_NEEDS = {
    "worker": "pip install 'saga-sdk[vllm]'",
    "up": "pip install 'saga-sdk[gateway,vllm]'",
    "gateway": "pip install 'saga-sdk[gateway]'",
    "simulate": "pip install 'saga-sdk[sim]'",
    "aeg": "pip install 'saga-sdk[gateway,sim]'",
    "bench": "pip install 'saga-sdk[gateway,sim,vllm]'",
    "top": "pip install 'saga-sdk[top]'",
    "demo": "the demo runs from the repository: type `make demo` there",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code: 0 done, 1 failed with a message, 130 stopped,
    141 nobody reads what is printed."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    words, worker_words = up_words.split(words)
    # `saga worker` passes what it does not know to vLLM; every other command refuses it.
    options, rest = parser.parse_known_args(words)
    if rest and options.command != "worker":
        hint = up_words.HINT if options.command == "up" else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    if options.command == "up":
        # Its workers' words are read as `saga worker` will read them, so that a wrong one is told
        # before anything is started.
        options.worker_words = worker_words
        options.worker, rest = parser.parse_known_args(["worker", options.model, *worker_words])
    try:
        return _run(options, rest)
    except SagaError as error:
        print(f"saga {options.command}: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        needed = _NEEDS[options.command]
        print(f"saga {options.command}: {error.name} is missing: {needed}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Who reads has seen enough, as `head` does. What is still buffered goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print(f"saga {options.command}: stopped", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace, rest: list[str]) -> int:
    if options.command == "worker":
        from saga_cli import worker

        return worker.run(options.model, worker.WorkerOptions.from_words(options), rest)
    if options.command == "up":
        from saga_cli import up

        return up.run(options, rest)
    if options.command == "gateway":
        return gateway.run(options)
    if options.command == "key":
        return gateway.make_key(options)
    if options.command == "simulate":
        if options.simulation is None:
            options.print_help()
            return 0
        if options.simulation == "cluster":
            return simulate_cluster.run(options)
        from saga_cli import simulate

        return simulate.cache(simulate.CacheOptions.from_words(options))
    if options.command == "aeg":
        return aeg.run(options)
    if options.command == "bench":
        return bench.run(options)
    if options.command == "top":
        return top.run(options)
    from saga_cli.demo import run as demo

    return demo.run(demo.DemoOptions(json_path=options.json, runs=options.runs))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="saga", description="KV cache retention and routing for AI agents on vLLM."
    )
    parser.add_argument("--version", action="version", version=f"saga {version('saga-sdk')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    _add_worker(commands)
    up_words.add_to(commands)
    gateway.add_to(commands)
    top.add_to(commands)
    _add_simulate(commands)
    aeg.add_to(commands)
    bench.add_to(commands)

    demo = commands.add_parser(
        "demo", help="run the same agents on stock vLLM and on SAGA, on this machine, and compare"
    )
    demo.add_argument("--json", metavar="FILE", help="also write the results to FILE")
    demo.add_argument(
        "--runs", type=int, default=1, metavar="N", help="pairs of runs; medians are shown (1)"
    )
    return parser


def _add_worker(commands: _Commands) -> None:
    worker = commands.add_parser(
        "worker",
        help="serve a model with vLLM and workflow-aware KV retention",
        description="Starts vLLM's OpenAI server with the SAGA plugin. Options that are not listed "
        "here go to vLLM as they are: see `vllm serve --help`. Every option below can also stand "
        "in the file or in a variable, SAGA_POLICY and so on; an option wins over a variable, a "
        "variable over the file.",
        allow_abbrev=False,
    )
    worker.add_argument("model", metavar="MODEL", help="model name or folder, as for `vllm serve`")

    def add(name: str, **arguments: Any) -> None:
        worker.add_argument(f"--saga-{name}", dest=name.replace("-", "_"), **arguments)

    add("config", metavar="FILE", help="TOML file with settings in its table [saga]")
    add(
        "policy",
        metavar="NAME",
        help="saga (default), prefix-lru, session-lru, wa-lru, wa-lru-ttl, thresholds, fixed-ttl, "
        "steps-to-execution or gdsf; vllm keeps vLLM's own order and only counts; "
        "off starts stock vLLM without the plugin",
    )
    add("host-gib", metavar="G", help="GiB of host memory for KV that leaves the GPU (0: none)")
    add(
        "prefetch",
        action=argparse.BooleanOptionalAction,
        help="bring KV back to the GPU before its session's next request (on)",
    )
    add(
        "order-waiting",
        action=argparse.BooleanOptionalAction,
        help="admit waiting sessions whose KV is there before those that would evict it (on)",
    )
    add(
        "preempt-waiting",
        action=argparse.BooleanOptionalAction,
        help="preempt a running request for a waiting one of higher priority (off)",
    )
    add(
        "shadow",
        nargs="?",
        const="vllm",
        metavar="NAME",
        help="count what another policy would have hit on this traffic; vllm where NAME is left "
        "out (off)",
    )


def _add_simulate(commands: _Commands) -> None:
    simulate = commands.add_parser("simulate", help="replay traces of agents through the policies")
    simulate.set_defaults(print_help=simulate.print_help)
    simulations = simulate.add_subparsers(dest="simulation", metavar="SIMULATION")
    simulate_cluster.add_words(
        simulations.add_parser(
            "cluster",
            help="agents on a cluster of vLLM's own schedulers, on a virtual clock",
            description="Runs agents in a closed loop on workers with vLLM's real scheduler and "
            "block manager and no model, on a virtual clock: stock vLLM with several routers, "
            "SAGA, and SAGA without one part or another.",
        )
    )
    cache = simulations.add_parser(
        "cache",
        help="one worker's prefix cache, policy by policy, against Bélády's optimum",
        description="Replays a trace through one worker's prefix cache, policy by policy, and "
        "compares the prompt tokens that are prefilled with the least that any cache could do.",
    )
    cache.add_argument(
        "trace",
        nargs="+",
        metavar="TRACE",
        help="a file or a folder of a trace; profile:swe, web, chat and tree are made up",
    )
    _add_trace_options(cache)
    _add_grid_options(cache)
    _add_memory_options(cache)
    output = cache.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="also write the results to FILE")
    output.add_argument("--plot", metavar="FILE", help="also draw them to FILE, .png or .svg")


def _add_trace_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("trace")
    group.add_argument("--format", metavar="NAME", help="how files are read (told from the file)")
    group.add_argument(
        "--block-tokens",
        type=int,
        metavar="N",
        help="tokens in a block, where the trace does not fix it (64)",
    )
    group.add_argument(
        "--live-sessions",
        type=float,
        default=40.0,
        metavar="N",
        help="sessions alive at a time on average (40); a trace on one clock keeps its own",
    )
    group.add_argument(
        "--calls", type=int, default=12_000, metavar="N", help="calls to measure, about (12000)"
    )


def _add_grid_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is compared, with commas between")
    group.add_argument(
        "--policies", default="prefix-lru,wa-lru,saga", metavar="NAMES", help="(%(default)s)"
    )
    group.add_argument(
        "--signals",
        default="none,close,forecast,all",
        metavar="NAMES",
        help="what the worker is told of sessions (%(default)s); "
        "a forecast is injected, with a log-normal error of σ 0.5",
    )
    group.add_argument(
        "--pressure",
        metavar="NUMBERS",
        help="tokens that live sessions hold ÷ capacity (1.2,2,4)",
    )
    group.add_argument(
        "--seeds", type=int, default=3, metavar="N", help="draws of the sessions (%(default)s)"
    )


def _add_memory_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory, of one GPU; it takes the place of --pressure")
    group.add_argument("--capacity-gib", type=float, metavar="G", help="GiB for the KV cache")
    group.add_argument(
        "--model", metavar="PATH", help="config.json of a model, or its folder: KV bytes of a token"
    )
    group.add_argument(
        "--kv-bytes-per-token", type=int, metavar="N", help="the same as a number, without a model"
    )
    group.add_argument(
        "--kv-dtype", choices=("auto", "fp8"), help="type of the model's KV cache (auto: its own)"
    )
    group.add_argument(
        "--tensor-parallel", type=int, metavar="N", help="GPUs that share the model's KV heads (1)"
    )
    group.add_argument(
        "--host-gib",
        type=float,
        metavar="G",
        help="GiB of a host tier that takes what is evicted; needs --host-gbps",
    )
    group.add_argument(
        "--host-gbps", type=float, metavar="B", help="its bandwidth, 10^9 bytes per second"
    )


if __name__ == "__main__":
    sys.exit(main())
