"""The `saga` command: parses the words of a subcommand and hands over to its module."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from saga_core.errors import SagaError

_NEEDS = {
    "worker": "pip install 'saga-sdk[vllm]'",
    "gateway": "pip install 'saga-sdk[gateway]'",
    "demo": "the demo runs from the repository: type `make demo` there",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code: 0 done, 1 failed with a message, 130 stopped."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    # `saga worker` passes what it does not know to vLLM; every other command refuses it.
    options, rest = parser.parse_known_args(words)
    if rest and options.command != "worker":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return _run(options, rest)
    except SagaError as error:
        print(f"saga {options.command}: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        needed = _NEEDS[options.command]
        print(f"saga {options.command}: {error.name} is missing: {needed}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"saga {options.command}: stopped", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace, rest: list[str]) -> int:
    if options.command == "worker":
        from saga_cli import worker

        return worker.run(options.model, options.policy, rest)
    if options.command == "gateway":
        from saga_gateway.app import GatewaySettings, serve

        serve(GatewaySettings(workers=tuple(options.worker), host=options.host, port=options.port))
        return 0
    from saga_cli.demo import run as demo

    return demo.run(demo.DemoOptions(json_path=options.json, runs=options.runs))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="saga", description="KV cache retention and routing for AI agents on vLLM."
    )
    parser.add_argument("--version", action="version", version=f"saga {version('saga-sdk')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    worker = commands.add_parser(
        "worker",
        help="serve a model with vLLM and workflow-aware KV retention",
        description="Starts vLLM's OpenAI server with the SAGA plugin. Options that are not listed "
        "here go to vLLM as they are: see `vllm serve --help`.",
        allow_abbrev=False,
    )
    worker.add_argument("model", metavar="MODEL", help="model name or folder, as for `vllm serve`")
    worker.add_argument(
        "--saga-policy",
        dest="policy",
        default="wa-lru",
        metavar="NAME",
        help="wa-lru (default) or prefix-lru; vllm keeps vLLM's own order and only counts; "
        "off starts stock vLLM without the plugin",
    )

    gateway = commands.add_parser("gateway", help="serve an OpenAI-compatible gateway over workers")
    gateway.add_argument(
        "--worker", action="append", required=True, metavar="URL", help="a worker; may be repeated"
    )
    gateway.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    gateway.add_argument("--port", type=int, default=8800, help="port to listen on (%(default)s)")

    demo = commands.add_parser(
        "demo", help="run the same agents on stock vLLM and on SAGA, on this machine, and compare"
    )
    demo.add_argument("--json", metavar="FILE", help="also write the results to FILE")
    demo.add_argument(
        "--runs", type=int, default=1, metavar="N", help="pairs of runs; medians are shown (1)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
