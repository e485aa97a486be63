"""The words of `saga up`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from saga_cli import gateway

HINT = "; options of the workers stand behind --, as in `saga up MODEL -- --max-model-len 4096`"

_DESCRIPTION = """\
Starts N workers (`saga worker MODEL`) and a gateway before them, starts what ends again, and shows
one log. The options behind -- go to every worker as they are: those of `saga worker` and of
`vllm serve`.
"""
_EPILOG = """\
examples:
  saga up meta-llama/Llama-3.1-8B-Instruct --workers 2
  saga up MODEL --workers 2 --gpus 0,1,2,3     # tensor-parallel size 2 each
  saga up MODEL --workers 3 --gpus none -- --max-model-len 4096 --saga-host-gib 4

The line with the base URL goes to standard output as soon as a worker serves; the log of all
processes goes to standard error. Ctrl-C lets the gateway finish what is open and ends all; a second
one kills.
"""


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of the command, and those behind ``--``, which are the workers'."""
    if words[:1] != ["up"] or "--" not in words:
        return list(words), []
    at = words.index("--")
    return list(words[:at]), list(words[at + 1 :])


def add_to(commands: Any) -> None:
    """Add the command."""
    up = commands.add_parser(
        "up",
        help="run workers and a gateway before them on this host",
        usage="saga up MODEL [options] [-- options of every worker]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    up.add_argument("model", metavar="MODEL", help="model name or folder, as for `vllm serve`")
    workers = up.add_argument_group("workers")
    workers.add_argument("--workers", type=int, default=1, metavar="N", help="how many (1)")
    workers.add_argument(
        "--gpus",
        metavar="LIST",
        help="GPUs to split evenly over the workers, such as 0,1,2,3, each tensor-parallel over "
        "its own (CUDA_VISIBLE_DEVICES, else all that nvidia-smi lists). With vLLM's CPU build "
        "cores and memory are split instead; none says so",
    )
    workers.add_argument(
        "--worker-port",
        type=int,
        metavar="PORT",
        help="port of the first worker, the others follow (the first free ones from 8801)",
    )
    gateway.add_settings(up.add_argument_group("gateway, as for `saga gateway`"))
