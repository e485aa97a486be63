"""`saga gateway` and `saga key`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from saga_core.errors import SettingsError
from saga_core.hints import clean

if TYPE_CHECKING:
    from saga_gateway.settings import GatewaySettings

_FIRST = ("workers", "host", "port")


def add_to(commands: Any) -> None:
    """Add both commands; the gateway's options are read off its settings when they are needed."""
    gateway = commands.add_parser(
        "gateway",
        help="serve an OpenAI-compatible gateway over workers",
        description="Every option can also stand in the file, or in a variable "
        "SAGA_GATEWAY_<SETTING>; an option wins over a variable, a variable over the file. "
        "`saga gateway --help-settings` describes all settings.",
    )
    gateway.add_argument("--worker", action="append", dest="workers", metavar="URL", help="a "
        "worker, such as http://10.0.0.1:8000; may be repeated")  # fmt: skip
    add_settings(gateway)
    gateway.add_argument(
        "--help-settings", action="store_true", help="describe every setting, and stop"
    )

    key = commands.add_parser(
        "key", help="make an API key for the gateway, and its entry for the file of keys"
    )
    key.add_argument("tenant", metavar="TENANT", help="whose key it is")


def add_settings(parser: Any) -> None:
    """Add the options by which a gateway is told its settings, its workers left out."""
    parser.add_argument("--host", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (8800; 0: any free one)")
    parser.add_argument("--config", metavar="FILE", help="TOML file with a table [gateway]")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="NAME=VALUE",
        help="any other setting; may be repeated",
    )


def run(options: argparse.Namespace) -> int:
    """Serve until a signal comes.

    Raises:
        SettingsError: a setting is missing or wrong; the message says which and what it takes.
    """
    from saga_gateway.app import serve
    from saga_gateway.config import KINDS, SECRETS, default_of, help_of

    if options.help_settings:
        for name, kind in KINDS.items():
            shown = "" if name in SECRETS or name == "workers" else f" = {default_of(name)!r}"
            print(f"{name}: {kind}{shown}\n    {help_of(name)}")
        return 0
    serve(settings_of(options, options.workers or ()))
    return 0


def settings_of(options: argparse.Namespace, workers: Sequence[str]) -> GatewaySettings:
    """The settings that options, variables and the file come to; ``workers`` as by ``--worker``.

    Raises:
        SettingsError: a setting is missing or wrong; the message says which and what it takes.
    """
    from saga_gateway.config import KINDS, SECRETS, parse, read_settings

    flags: dict[str, Any] = {"host": options.host, "port": options.port}
    if workers:
        flags["workers"] = tuple(workers)
    for word in options.settings:
        name, equals, text = word.partition("=")
        if not equals or name not in KINDS or name in SECRETS:
            known = ", ".join(name for name in KINDS if name not in SECRETS)
            raise SettingsError(f"--set {name} must be NAME=VALUE; names are {known}")
        flags[name] = parse(text, KINDS[name], f"--set {word}")
    return read_settings(options.config, os.environ, flags)


def make_key(options: argparse.Namespace) -> int:
    """Print a new key, once, and its entry for the file.

    Raises:
        SettingsError: the tenant's name is not a legal one.
    """
    from saga_gateway.identity import new_key

    if clean(options.tenant) != options.tenant:
        raise SettingsError("TENANT must be 1 to 256 characters of A-Z a-z 0-9 . _ ~ : -")
    key, entry = new_key(options.tenant)
    print(f"The key, which is stored nowhere:\n\n{key}\n\nFor the file of keys:\n\n{entry}", end="")
    return 0
