"""Side readers: what a model answered, read from a copy of the response's bytes.

They are fed the bytes as these come, in any cut. Nothing that comes may raise out of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

import orjson

from saga_gateway.answers import Answer, Draft

MAX_BUFFERED_BYTES = 16 * 2**20
"""An event or JSON answer beyond this size is not read."""
_TEXT = b'"content":"'


class SideReader:
    """Reads one response.

    Args:
        with_text: whether the answer's text and the arguments of its calls are wanted.

    Attributes:
        done: the stream has said that it is complete.
    """

    def __init__(
        self, content_type: str, content_encoding: str, *, with_text: bool = False
    ) -> None:
        self.done = False
        self._draft = Draft(with_text=with_text)
        self._with_text = with_text
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
        if self._failed:
            return None
        try:
            return self._draft.answer()
        except Exception:  # noqa: BLE001 - whatever a worker sends, the relay goes on
            return None

    def _read(self, data: bytes) -> None:
        if self._lines is None:
            self._body += data
            if len(self._body) > MAX_BUFFERED_BYTES:
                self._body.clear()
                raise ValueError("the answer is too large to read")
            return
        event = self._lines.whole_event(data)
        if event is not None:
            if not self._draft.found or not _is_plain_delta(event):
                self._read_event(event)
            elif self._with_text:
                self._read_text(event)
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
        self.done = self._draft.done

    def _read_text(self, event: bytes) -> None:
        """Read the text of a plain delta, which ends at the first quote without a backslash."""
        start = event.index(_TEXT) + len(_TEXT)
        end = event.index(b'"', start)
        if b"\\" in event[start:end] or event.count(_TEXT) != 1 or b'"index":0' not in event:
            self._read_event(event)
        else:
            self._draft.add_raw_text(event[start:end])


def _is_plain_delta(event: bytes) -> bool:
    """Whether an event of OpenAI's chat has a piece of text and nothing that is read.

    Most events of a stream are such; this takes a tenth of the time of parsing one.
    """
    return (
        b'"finish_reason":null' in event
        and event.count(b'"finish_reason"') == 1
        and b'"error"' not in event
        and _TEXT in event
        and b'"tool_calls"' not in event
        and b'"function_call"' not in event
        and b'"usage"' not in event
    )


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

    def whole_event(self, piece: bytes) -> bytes | None:
        """The data of a piece that is just one event on one line, with nothing waiting before it.

        None for any other piece, which is to be fed.
        """
        if (
            self._first
            or self._held_cr
            or self._partial
            or self._data
            or not piece.startswith(b"data: ")
            or not piece.endswith(b"\n\n")
            or b"\r" in piece
            or piece.find(b"\n") != len(piece) - 2
        ):
            return None
        return piece[6:-2]

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
