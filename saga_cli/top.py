"""`saga top`: what a gateway and its workers are doing, in a terminal."""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from saga_cli.top_source import Snapshot, Source

_DEFAULT_URL = "http://127.0.0.1:8800"
_DEFAULT_KEY_ENV = "SAGA_API_KEY"
_PIPED_COLUMNS = 160
_ONCE_ROWS = 10


def add_to(commands: Any) -> None:
    """Add the words of this command."""
    top = commands.add_parser(
        "top",
        help="show a gateway's workers, sessions, tenants and decisions, live",
        description="Shows what the dashboard shows, in a terminal. Ctrl-C ends it.",
    )
    top.add_argument(
        "url", nargs="?", default=_DEFAULT_URL, metavar="URL", help="the gateway (%(default)s)"
    )
    top.add_argument(
        "--key-env",
        default=_DEFAULT_KEY_ENV,
        metavar="NAME",
        help="variable with an operator's API key, where the gateway asks for one (%(default)s)",
    )
    top.add_argument("--once", action="store_true", help="print one frame, and stop")
    top.add_argument("--json", action="store_true", help="print snapshots as JSON, one a line")
    top.add_argument(
        "--interval", type=float, default=2.0, metavar="S", help="seconds between frames (2)"
    )


def run(options: argparse.Namespace) -> int:
    """Show one frame, or frames until it is stopped.

    Raises:
        TopError: the gateway cannot be reached, or does not let us see.
    """
    from saga_cli.top_source import Source, TopError

    if not 0.1 <= options.interval <= 3600.0:
        raise TopError("--interval must be from 0.1 to 3600 seconds")
    source = Source(options.url, options.key_env)
    if options.json:
        return _print_json(source, options.interval, once=options.once)

    from rich.console import Console

    from saga_cli.top_frame import frame

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=_PIPED_COLUMNS)
    shot = source.snapshot()
    if options.once or not console.is_terminal:
        console.print(frame(shot, source.url, rows=_ONCE_ROWS))
        return 0
    return _live(console, source, shot, options.interval)


def _print_json(source: Source, interval_s: float, *, once: bool) -> int:
    while True:
        print(json.dumps(source.snapshot()), flush=True)
        if once:
            return 0
        time.sleep(interval_s)


def _live(console: Console, source: Source, shot: Snapshot, interval_s: float) -> int:
    from rich.live import Live

    from saga_cli.top_frame import frame, rows_for
    from saga_cli.top_source import TopError

    problem = ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            rows = rows_for(shot, console.height)
            live.update(frame(shot, source.url, rows=rows, problem=problem), refresh=True)
            time.sleep(interval_s)
            try:
                shot, problem = source.snapshot(), ""
            except TopError as error:
                problem = str(error)  # It may come back: what was seen last stays.
