"""Symbols of another package that may move without notice, and a check that they have not."""

from __future__ import annotations

import dis
import importlib
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any


@dataclass(frozen=True, slots=True)
class Symbol:
    """Something that another package defines, and what is relied on of it.

    Names stand in one string, with spaces between.

    Attributes:
        path: module, colon, name in the module.
        takes: of a function: its first parameters; others may follow.
        accepts: of a function: parameters that may stand anywhere.
        has: of a class: attributes of its instances, its own or set by ``__init__``.
        uses: of a function: names that its body refers to or passes arguments by.
    """

    path: str
    takes: str = ""
    accepts: str = ""
    has: str = ""
    uses: str = ""


def find_moved(symbols: Iterable[Symbol]) -> str | None:
    """Return a sentence that names the first symbol that is not as expected; None: all are."""
    return next((flaw for symbol in symbols for flaw in _flaws(symbol)), None)


def resolve(path: str) -> Any:
    """Return what ``path`` names.

    Raises:
        ImportError: there is no such module, or it cannot be imported.
        AttributeError: the module has no such name.
    """
    module, _, names = path.partition(":")
    value: Any = importlib.import_module(module)
    for name in names.split("."):
        value = getattr(value, name)
    return value


def _flaws(symbol: Symbol) -> Iterator[str]:
    try:
        value = resolve(symbol.path)
    except (ImportError, AttributeError) as error:
        yield f"{symbol.path} is gone ({error})"
        return
    if symbol.takes or symbol.accepts:
        actual = tuple(inspect.signature(value).parameters)
        expected = tuple(symbol.takes.split())
        if actual[: len(expected)] != expected:
            yield f"{symbol.path} takes {actual}, expected {expected} first"
        for name in symbol.accepts.split():
            if name not in actual:
                yield f"{symbol.path} takes no {name}"
    for name in _missing(symbol.has, _instance_names, value):
        yield f"{symbol.path} has no {name}"
    for name in _missing(symbol.uses, _mentions, value):
        yield f"{symbol.path} does not use {name}"


def _missing(wanted: str, names_of: Any, value: Any) -> list[str]:
    if not wanted:
        return []
    names = set(names_of(value))
    return [name for name in wanted.split() if name not in names]


def _instance_names(cls: type) -> Iterator[str]:
    yield from dir(cls)
    yield from getattr(cls, "__dataclass_fields__", ())
    for base in cls.__mro__:
        code = _code(vars(base).get("__init__"))
        for instruction in dis.get_instructions(code) if code is not None else ():
            if instruction.opname == "STORE_ATTR":
                yield instruction.argval


def _mentions(function: Any) -> Iterator[str]:
    code = _code(function)
    pending = [code] if code is not None else []
    while pending:
        code = pending.pop()
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                pending.append(constant)
            elif isinstance(constant, tuple):  # The names of arguments in a call.
                yield from (name for name in constant if isinstance(name, str))


def _code(function: Any) -> CodeType | None:
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return code if isinstance(code, CodeType) else None
