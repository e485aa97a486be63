"""Reading values that came as JSON: what is wrong is named by its field."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from saga_core.errors import SagaError

MAX_LABEL_CHARS = 1024


class StateError(SagaError, ValueError):
    """A saved state or a graph cannot be read; the message names the field and what it takes."""


def fields_of(value: Any, where: str) -> Mapping[str, Any]:
    """The value as a JSON object."""
    if not isinstance(value, dict):
        raise StateError(f"{where}: is {_shown(value)}; expected an object")
    return value


def items_of(of: Mapping[str, Any], name: str, where: str) -> Iterator[tuple[Any, str]]:
    """The items of the list ``name``, each with where it stands; none where there is no list."""
    value = of.get(name, [])
    if not isinstance(value, list):
        raise StateError(f"{where}{name}: is {_shown(value)}; expected a list")
    return ((item, f"{where}{name}[{at}]") for at, item in enumerate(value))


def number_of(
    of: Mapping[str, Any],
    name: str,
    where: str,
    *,
    default: float | None = None,
    most: float = math.inf,
    least: float = 0.0,
) -> float:
    """The finite number ``name``, from ``least`` to ``most``."""
    value = of.get(name)
    return number(default if value is None else value, f"{where}.{name}", least=least, most=most)


def number(value: Any, where: str, *, least: float = 0.0, most: float = math.inf) -> float:
    """The value as a finite number from ``least`` to ``most``."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        if is_number and least <= value <= most and math.isfinite(value):
            return float(value)
    except OverflowError:
        pass
    wanted = "a number" if least == -math.inf else f"a number of at least {least:g}"
    wanted += f", at most {most:g}" if most < math.inf else ""
    raise StateError(f"{where}: is {_shown(value)}; expected {wanted}")


def label_of(of: Mapping[str, Any], name: str, where: str) -> str | None:
    """The text ``name``; None where there is none."""
    return label(of.get(name), f"{where}.{name}")


def label(value: Any, where: str) -> str | None:
    """The value as a text of 1 to 1,024 characters, or None."""
    if value is None or (isinstance(value, str) and 0 < len(value) <= MAX_LABEL_CHARS):
        return value
    wanted = f"a text of 1 to {MAX_LABEL_CHARS:,} characters or null"
    raise StateError(f"{where}: is {_shown(value)}; expected {wanted}")


def numbers(value: Any, count: int | None, where: str) -> list[float]:
    """The value as a list of numbers that are not negative, ``count`` of them if that is said."""
    if not isinstance(value, list) or (count is not None and len(value) != count):
        wanted = "a list of numbers" if count is None else f"a list of {count} numbers"
        raise StateError(f"{where}: is {_shown(value)}; expected {wanted}")
    return [number(item, f"{where}[{at}]") for at, item in enumerate(value)]


def check_version(of: Mapping[str, Any], version: int, where: str) -> None:
    """Raise StateError when ``version`` is not that one."""
    found = of.get("version")
    if found != version or isinstance(found, bool):
        shown = "missing" if found is None else _shown(found)
        raise StateError(f"{where}.version: is {shown}; expected {version}")


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    shown = repr(value)
    return shown if len(shown) <= 40 else shown[:37] + "..."
