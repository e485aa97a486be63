"""Side readers: what a model answered, read from a copy of the response's bytes.

They are fed the bytes as these come, in any cut. Nothing that comes may raise out of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import orjson

from saga_core.hints import MAX_VALUE_CHARS

MAX_BUFFERED_BYTES = 16 * 2**20
"""An event or JSON answer beyond this size is not read."""

_MAX_TOOLS = 256


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of an answer; 0 where the worker did not say."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What one step of a session ended with.

    Attributes:
        tool_names: tools that it called, in the order of the calls.
        finish_reason: the last one said; None when there was none.
        usage: token counts; None when the worker sent none.
    """

    tool_names: tuple[str, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None


class SideReader:
    """Reads one response.

    Attributes:
        done: the stream has said that it is complete.
    """

    def __init__(self, content_type: str, content_encoding: str) -> None:
        self.done = False
        self._draft = _Draft()
        self._failed = False
        self._inflate = _inflater(content_encoding)
        self._lines = _EventSplitter() if is_event_stream(content_type) else None
        self._body = bytearray()

    def feed(self, data: bytes) -> None:
        """Read the next bytes of the response."""
        if self._failed or self.done:
            return
        try:
            self._read(data if self._inflate is None else self._inflate(data))
        except Exception:  # noqa: BLE001 - whatever a worker sends, the relay goes on
            self._failed = True

    def finish(self) -> Answer | None:
        """The answer, once the response is complete; None when it could not be read."""
        if not self._failed and not self.done:
            try:
                self._read_end()
            except Exception:  # noqa: BLE001 - whatever a worker sends, the relay goes on
                self._failed = True
        return None if self._failed else self._draft.answer()

    def _read(self, data: bytes) -> None:
        if self._lines is None:
            self._body += data
            if len(self._body) > MAX_BUFFERED_BYTES:
                self._body.clear()
                raise ValueError("the answer is too large to read")
            return
        for event in self._lines.feed(data):
            self._read_event(event)

    def _read_end(self) -> None:
        if self._lines is None:
            self._draft.add(orjson.loads(self._body))
            return
        for event in self._lines.finish():
            self._read_event(event)

    def _read_event(self, data: bytes) -> None:
        if data.strip() == b"[DONE]":
            self.done = True
            return
        try:
            content = orjson.loads(data)
        except orjson.JSONDecodeError:
            return
        self._draft.add(content)


def is_event_stream(content_type: str) -> bool:
    """Whether a content type is that of server-sent events."""
    return content_type.partition(";")[0].strip().lower() == "text/event-stream"


def _inflater(content_encoding: str) -> Callable[[bytes], bytes] | None:
    encoding = content_encoding.strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding in ("gzip", "deflate"):
        return zlib.decompressobj(wbits=47).decompress

    def refuse(_data: bytes) -> bytes:
        raise ValueError(f"content encoding {encoding} is not read")

    return refuse


class _EventSplitter:
    """Cuts bytes into the data of server-sent events.

    Lines end in LF, CR or CRLF. A CR at the end of a piece waits for the next one, which may
    begin with its LF. Comments and fields other than ``data`` are passed over. Data that no empty
    line follows counts when the stream ends.
    """

    def __init__(self) -> None:
        self._held_cr = False
        self._partial = bytearray()
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._first = True

    def feed(self, piece: bytes) -> Iterator[bytes]:
        if self._held_cr:
            piece = b"\r" + piece
        self._held_cr = piece.endswith(b"\r")
        if self._held_cr:
            piece = piece[:-1]
        if b"\r" in piece:
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        whole, newline, rest = piece.rpartition(b"\n")
        self._partial += whole if newline else rest
        if len(self._partial) + self._data_bytes > MAX_BUFFERED_BYTES:
            raise ValueError("the event is too large to read")
        if not newline:
            return
        lines = bytes(self._partial).split(b"\n")
        self._partial = bytearray(rest)
        for line in lines:
            yield from self._line(line)

    def finish(self) -> Iterator[bytes]:
        yield from self._line(bytes(self._partial))
        self._partial.clear()
        yield from self._line(b"")

    def _line(self, line: bytes) -> Iterator[bytes]:
        if self._first:
            self._first = False
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line:
            if self._data:
                event = b"\n".join(self._data)
                self._data.clear()
                self._data_bytes = 0
                yield event
            return
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
            self._data_bytes += len(value) + 1


class _Draft:
    """An answer as far as it has been read, from whole answers and from deltas alike."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, int], str] = {}
        self._finish_reason: str | None = None
        self._usage: Usage | None = None
        self._choices = 0
        self._error = False

    def answer(self) -> Answer | None:
        """The answer; None after an error, or when nothing looked like one."""
        if self._error or not self._choices:
            return None
        names = tuple(name for _, name in sorted(self._names.items()) if name)
        return Answer(names, self._finish_reason, self._usage)

    def add(self, content: object) -> None:
        if not isinstance(content, dict):
            return
        if content.get("error"):
            self._error = True
        for choice in _objects(content.get("choices")):
            self._choices += 1
            reason = choice.get("finish_reason")
            if isinstance(reason, str):
                self._finish_reason = reason
            number = _int(choice.get("index"))
            for part in (choice.get("delta"), choice.get("message")):
                if isinstance(part, dict):
                    self._add_calls(number, part)
        usage = content.get("usage")
        if isinstance(usage, dict):
            self._usage = _usage(usage)

    def _add_calls(self, choice: int, part: dict[str, object]) -> None:
        for position, call in enumerate(_objects(part.get("tool_calls"))):
            function = call.get("function")
            if isinstance(function, dict):
                self._add_name((choice, _int(call.get("index"), position)), function.get("name"))
        legacy = part.get("function_call")
        if isinstance(legacy, dict):
            self._add_name((choice, -1), legacy.get("name"))

    def _add_name(self, key: tuple[int, int], name: object) -> None:
        """Append a piece of a tool's name; a piece that repeats all there is is a repetition."""
        known = self._names.get(key, "")
        if not isinstance(name, str) or name == known or len(self._names) >= _MAX_TOOLS:
            return
        self._names[key] = (known + name)[:MAX_VALUE_CHARS]


def _objects(value: object) -> list[dict[str, object]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _int(value: object, default: int = 0) -> int:
    return value if isinstance(value, int) else default


def _usage(usage: dict[str, object]) -> Usage:
    details = usage.get("prompt_tokens_details")
    return Usage(
        prompt_tokens=_int(usage.get("prompt_tokens")),
        completion_tokens=_int(usage.get("completion_tokens")),
        cached_tokens=_int(details.get("cached_tokens")) if isinstance(details, dict) else 0,
    )
