"""What a gateway is told: by one file, by the environment, by flags; later wins."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from saga_core.errors import SettingsError
from saga_gateway.settings import GatewaySettings

TABLE = "gateway"
PREFIX = "SAGA_GATEWAY_"

SECRETS = frozenset({"session_secret", "worker_api_key"})
"""Settings that no flag gives: anybody on the host can read a process's flags."""

KINDS: dict[str, str] = {field.name: str(field.type) for field in fields(GatewaySettings)}
"""Type of each setting, as it is written in its class."""

_SOURCES = ("workers", "workers_file", "kubernetes_service", "kubernetes_selector")
_WORDS = {"0": False, "false": False, "1": True, "true": True}
_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "tuple[str, ...]": "a list of texts",
}


def read_settings(
    path: str | None, environment: Mapping[str, str], flags: Mapping[str, Any]
) -> GatewaySettings:
    """The settings of a gateway.

    Args:
        path: TOML file with a table ``[gateway]``; None: no file.
        environment: ``SAGA_GATEWAY_<SETTING>``; lists with commas between; an empty one says
            nothing.
        flags: settings by name; None says nothing.

    Raises:
        SettingsError: the file cannot be read, something in it is no setting, or a value is not one
            that its setting takes; the message names where it stands.
    """
    given: dict[str, Any] = {} if path is None else _read_file(Path(path))
    for name, kind in KINDS.items():
        variable = PREFIX + name.upper()
        if text := environment.get(variable):
            given[name] = parse(text, kind, f"{variable}={text!r}", hide=name in SECRETS)
    given |= {name: value for name, value in flags.items() if value is not None}
    if not any(given.get(name) for name in _SOURCES):
        raise SettingsError(
            "no worker is named: give --worker URL, workers, workers_file or kubernetes_service in "
            f"the file, or {PREFIX}WORKERS, such as http://10.0.0.1:8000"
        )
    return GatewaySettings(**given)


def parse(text: str, kind: str, where: str, *, hide: bool = False) -> Any:
    """The value of a setting of that kind, from text.

    Raises:
        SettingsError: it is none.
    """
    try:
        match kind:
            case "int":
                return int(text)
            case "float":
                return float(text)
            case "bool":
                return _WORDS[text.lower()]
            case "tuple[str, ...]":
                return tuple(part.strip() for part in text.split(",") if part.strip())
    except (ValueError, KeyError):
        shown = where.partition("=")[0] if hide else where
        raise SettingsError(f"{shown} must be {_WANTED[kind]}") from None
    return text


def default_of(name: str) -> Any:
    """The value of a setting that nobody gives; None where somebody has to."""
    (field,) = (field for field in fields(GatewaySettings) if field.name == name)
    return None if field.default is MISSING else field.default


def help_of(name: str) -> str:
    """What a setting means, from its class."""
    _, _, attributes = (GatewaySettings.__doc__ or "").partition("Attributes:")
    texts: dict[str, list[str]] = {}
    for line in attributes.splitlines():
        head, colon, rest = line.strip().partition(": ")
        if colon and head in KINDS:
            texts[head] = [rest]
        elif texts and line.strip():
            texts[next(reversed(texts))].append(line.strip())
    return " ".join(texts[name]).replace("``", "")


def _read_file(path: Path) -> dict[str, Any]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # No such file, not UTF-8, not TOML.
        raise SettingsError(f"{path} cannot be read as TOML: {error}") from error
    table = tables.get(TABLE, {})
    if not isinstance(table, dict):
        raise SettingsError(f"{path}: {TABLE} must be a table")
    return {name: _checked(name, value, path) for name, value in table.items()}


def _checked(name: str, value: Any, path: Path) -> Any:
    where = f"{path}, [{TABLE}] {name}"
    kind = KINDS.get(name)
    if kind is None:
        raise SettingsError(f"{where} is not known; there are {', '.join(KINDS)}")
    if kind == "tuple[str, ...]" and isinstance(value, list):
        if all(isinstance(item, str) for item in value):
            return tuple(value)
    elif kind == "float" and type(value) in (int, float):
        return float(value)
    elif type(value).__name__ == kind.removesuffix(" | None"):
        return value
    raise SettingsError(f"{where} must be {_WANTED.get(kind, 'a text')}")
