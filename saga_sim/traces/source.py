"""Files of a trace: opened, split into records and checked field by field."""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

from saga_core.errors import SagaError
from saga_sim.traces.model import Call

_GZIP_MAGIC = b"\x1f\x8b"
_MISSING: Any = object()

T = TypeVar("T")


class TraceError(SagaError, ValueError):
    """A trace cannot be read; the message gives the file, the line, the reason and what fits."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one file holds.

    Attributes:
        sessions: its calls by session, each in the order of arrival.
        clock: as in :class:`~saga_sim.traces.model.Trace`; "world" when arrivals are seconds since
            1970, so that they compare with those of other such files.
    """

    sessions: list[tuple[Call, ...]]
    block_tokens: int
    clock: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Record:
    """A JSON object of a file, read field by field.

    Attributes:
        where: its file and line, for messages.
    """

    values: Mapping[str, Any]
    where: str

    def error(self, reason: str) -> TraceError:
        """The error to raise about this record."""
        return TraceError(f"{self.where}: {reason}")

    def check_block(self, recorded: int, wanted: int | None) -> int:
        """The recorded block size, if it is the one that is wanted or none is."""
        if wanted not in (None, recorded):
            raise self.error(
                f"has blocks of {recorded} tokens; expected {wanted}, as asked for or as read "
                "before: recorded blocks cannot be cut anew"
            )
        return recorded

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    @overload
    def text(self, name: str) -> str: ...
    @overload
    def text(self, name: str, default: T) -> str | T: ...
    def text(self, name: str, default: Any = _MISSING) -> Any:
        """A string; ``default`` stands for a field that is missing or null."""
        value = self._get(name, default)
        if value is not default and not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    @overload
    def name(self, name: str) -> str: ...
    @overload
    def name(self, name: str, default: T) -> str | T: ...
    def name(self, name: str, default: Any = _MISSING) -> Any:
        """An identifier: a string or an integer, as a string."""
        value = self._get(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise self._wrong(name, value, "a string or an integer")
        return str(value)

    @overload
    def integer(self, name: str, *, at_least: int = 0) -> int: ...
    @overload
    def integer(self, name: str, default: T, *, at_least: int = 0) -> int | T: ...
    def integer(self, name: str, default: Any = _MISSING, *, at_least: int = 0) -> Any:
        """An integer of ``at_least`` or more."""
        value = self._get(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise self._wrong(name, value, f"an integer of {at_least} or more")
        return value

    @overload
    def number(self, name: str) -> float: ...
    @overload
    def number(self, name: str, default: T) -> float | T: ...
    def number(self, name: str, default: Any = _MISSING) -> Any:
        """A finite number of 0 or more, as a float."""
        value = self._get(name, default)
        if value is default:
            return value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= sys.float_info.max:
            raise self._wrong(name, value, "a number of 0 or more")
        return float(value)

    def ids(self, name: str) -> list[int]:
        """A list of integers of 0 or more."""
        value = self._get(name, _MISSING)
        if not isinstance(value, list) or not set(map(type, value)) <= {int}:
            raise self._wrong(name, value, "a list of integers of 0 or more")
        if value and min(value) < 0:
            raise self.error(f"{name!r} holds {min(value)}; expected integers of 0 or more")
        return value

    def records(self, name: str) -> list[Record]:
        """A list of objects, as records; their place names the field and the index."""
        value = self._get(name, _MISSING)
        if not isinstance(value, list):
            raise self._wrong(name, value, "a list of objects")
        result = []
        for i, item in enumerate(value):
            where = f"{self.where}, {name}[{i}]"
            if not isinstance(item, dict):
                raise TraceError(f"{where}: is {_shown(item)}; expected a JSON object")
            result.append(Record(item, where))
        return result

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is _MISSING:
            is_null = name in self.values
            raise self.error(f"{name!r} is null" if is_null else f"{name!r} is missing")
        return default

    def _wrong(self, name: str, value: Any, expected: str) -> TraceError:
        return self.error(f"{name!r} is {_shown(value)}; expected {expected}")


@dataclass(frozen=True, slots=True)
class Source:
    """A file of JSON objects, plain or gzip: one a line, or one that spans all lines."""

    path: Path

    def records(self) -> Iterator[Record]:
        """Its objects in order; blank lines are skipped.

        Raises:
            TraceError: the file cannot be opened or unpacked, or a line is not a JSON object.
        """
        is_first = True
        lines = self._lines()
        for number, line in lines:
            if not line.strip():
                continue
            if is_first and _is_unfinished(line):
                line += b"".join(rest for _, rest in lines)
            is_first = False
            yield self._parse(line, number)

    def first(self) -> Record:
        """Its first object.

        Raises:
            TraceError: the file has none, or cannot be read.
        """
        for record in self.records():
            return record
        raise TraceError(f"{self.path}: is empty; expected JSON objects, one a line")

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Its lines, unpacked, each with its number from 1."""
        number = 0
        try:
            with self.path.open("rb") as raw:
                is_gzip = raw.peek(2)[:2] == _GZIP_MAGIC
                for line in gzip.GzipFile(fileobj=raw) if is_gzip else raw:
                    number += 1
                    yield number, line
        except EOFError as error:
            raise TraceError(
                f"{self.path}:{number + 1}: the gzip data ends too early; expected a whole file"
            ) from error
        except (OSError, zlib.error) as error:
            reason = (isinstance(error, OSError) and error.strerror) or str(error)
            place = f"{self.path}:{number + 1}" if number else str(self.path)
            raise TraceError(f"{place}: cannot be read: {reason}") from error

    def _parse(self, text: bytes, number: int) -> Record:
        try:
            value = json.loads(text.rstrip(), parse_constant=_refuse)
        except json.JSONDecodeError as error:
            place = f"{self.path}:{number + error.lineno - 1}"
            raise TraceError(
                f"{place}: is not valid JSON: {error.msg} at column {error.colno}"
            ) from error
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{self.path}:{number}: is not valid JSON: {error}") from error
        if not isinstance(value, dict):
            shown = _shown(value)
            raise TraceError(f"{self.path}:{number}: is {shown}; expected a JSON object")
        return Record(value, f"{self.path}:{number}")


def _is_unfinished(line: bytes) -> bool:
    """Whether the object that the line opens goes on in the next line."""
    try:
        json.loads(line)
    except json.JSONDecodeError as error:
        return line.endswith(b"\n") and error.pos >= len(error.doc.rstrip())
    except (ValueError, RecursionError):
        return False
    return False


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a number of JSON")


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    shown = repr(value)
    return shown if len(shown) <= 40 else shown[:37] + "..."
