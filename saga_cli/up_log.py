"""One view of the output of several processes: each line behind the name of its process."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

OWN_NAME = "saga"

_KEPT_LINES = 30
_LONGEST_LINE_BYTES = 2**16
_CLOSE_S = 2.0
_COLORS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


def use_color(stream: IO[str], environment: Mapping[str, str]) -> bool:
    """Whether to colour what is written there: on a terminal, unless NO_COLOR is set."""
    return stream.isatty() and not environment.get("NO_COLOR")


class LogView:
    """Writes lines of processes to one stream, and keeps the last ones of each.

    Attributes:
        broken: set once nobody reads the stream any more; what is written then is lost.
    """

    def __init__(self, names: Sequence[str], stream: IO[str], *, color: bool) -> None:
        self.broken = asyncio.Event()
        self._stream = stream
        width = max(map(len, (*names, OWN_NAME)))
        self._prefixes = {name: f"{name:{width}} | " for name in (*names, OWN_NAME)}
        if color:
            for number, name in enumerate(names):
                code = _COLORS[number % len(_COLORS)]
                self._prefixes[name] = f"\x1b[{code}m{self._prefixes[name]}\x1b[0m"
            self._prefixes[OWN_NAME] = f"\x1b[1m{self._prefixes[OWN_NAME]}\x1b[0m"
        self._kept = {name: deque[str](maxlen=_KEPT_LINES) for name in names}
        self._inputs: list[int] = []
        self._readers: list[_Reader] = []

    async def open(self, name: str) -> int:
        """A descriptor for a process's output, for one after the other that goes by the name."""
        output, descriptor = os.pipe()
        reader = _Reader(self, name)
        await asyncio.get_running_loop().connect_read_pipe(lambda: reader, os.fdopen(output, "rb"))
        self._readers.append(reader)
        self._inputs.append(descriptor)
        return descriptor

    def write(self, name: str, line: str) -> None:
        """Write a line of a process."""
        if name in self._kept:
            self._kept[name].append(line)
        if self.broken.is_set():
            return
        try:
            self._stream.write(f"{self._prefixes[name]}{line}\n")
            self._stream.flush()
        except OSError:
            self.broken.set()

    def say(self, line: str) -> None:
        """Write a line of this command itself."""
        self.write(OWN_NAME, line)

    def last_lines(self, name: str) -> str:
        """The last lines of a process, indented, to stand below a message."""
        for reader in self._readers:
            reader.flush()
        return "\n".join(f"  | {line}" for line in self._kept[name])

    async def close(self) -> None:
        """Write what the processes, which have ended, have left unread."""
        for descriptor in self._inputs:
            os.close(descriptor)
        ends = [reader.ended.wait() for reader in self._readers]
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*ends), _CLOSE_S)


class _Reader(asyncio.Protocol):
    """Cuts a process's output into lines."""

    def __init__(self, view: LogView, name: str) -> None:
        self.ended = asyncio.Event()
        self._view = view
        self._name = name
        self._begun = b""

    def data_received(self, data: bytes) -> None:
        *lines, self._begun = (self._begun + data).split(b"\n")
        for line in lines:
            self._write(line)
        if len(self._begun) > _LONGEST_LINE_BYTES:
            self.flush()

    def connection_lost(self, error: Exception | None) -> None:
        self.flush()
        self.ended.set()

    def flush(self) -> None:
        """Write a line that has begun."""
        if self._begun:
            self._write(self._begun)
            self._begun = b""

    def _write(self, line: bytes) -> None:
        # A progress bar writes itself anew after each carriage return; its last state counts.
        text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
        self._view.write(self._name, text)
