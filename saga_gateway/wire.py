"""A lean HTTP/1.1 client: what the relay needs of one, at half the cost of a general one.

A connection serves one request at a time and is kept for the next. Bytes of an answer are handed on
as they come; a reader that is slow holds the worker up. What a worker sends is parsed by httptools.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from typing import cast

import httptools

_HIGH_BYTES = 2**18
_MAX_HEAD_BYTES = 2**18
_STALE_S = 1.0

RawHeaders = list[tuple[bytes, bytes]]


class ClosedError(OSError):
    """The worker closed the connection before it had answered anything.

    Attributes:
        is_stale: it had served another request before, and broke at once: the worker closed it
            while the request was on its way, and has not seen it.
    """

    def __init__(self, *, is_stale: bool) -> None:
        super().__init__("connection closed before an answer")
        self.is_stale = is_stale


class BrokenAnswerError(OSError):
    """The worker did not finish its answer, or broke its framing."""


class NotHTTPError(Exception):
    """What the worker answered is not HTTP."""


class Connection(asyncio.Protocol):
    """One connection to a worker.

    Attributes:
        reused: it has served a request before this one.
    """

    def __init__(self) -> None:
        self.reused = False
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._busy = False
        self._status = 0
        self._headers: RawHeaders = []
        self._head_bytes = 0
        self._sent_s = 0.0
        self._head_is_whole = False
        self._is_framed = False
        self._is_whole = False
        self._keeps_alive = False
        self._pieces: deque[bytes] = deque()
        self._buffered = 0
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._waits_since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        """Whether it can serve a request."""
        return self._transport is not None and not self._transport.is_closing()

    # The exchange

    async def request(self, head: bytes, body: bytes, limit_s: float) -> Response:
        """Send a request and wait for the head of its answer.

        Args:
            limit_s: longest silence of the worker, now and during its answer.

        Raises:
            ClosedError, NotHTTPError, TimeoutError: there is no answer; the connection is closed.
        """
        assert self._transport is not None
        self._busy = True
        self._timer = self._loop.call_later(limit_s, self._look, limit_s)
        self._sent_s = self._loop.time()
        self._transport.writelines((head, body))
        try:
            while not self._head_is_whole:
                await self._wait()
        except BaseException:
            self.close()
            raise
        return Response(self, self._status, self._headers)

    async def read(self) -> bytes:
        """What has come of the answer's body, when something has; empty at its end.

        Raises:
            BrokenAnswerError, TimeoutError: the rest will not come.
        """
        while not self._pieces:
            if self._is_whole:
                return b""
            await self._wait()
        pieces, self._pieces = self._pieces, deque()
        if self._buffered > _HIGH_BYTES and self._transport is not None:
            self._transport.resume_reading()
        self._buffered = 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @property
    def is_whole(self) -> bool:
        """All of the answer has come; what was not read of it is here."""
        return self._is_whole

    @property
    def is_read(self) -> bool:
        """All of the answer has come and has been read."""
        return self._is_whole and not self._pieces

    def finish(self) -> bool:
        """The answer is no longer wanted; whether the connection can serve another request."""
        can_serve = (
            self.is_read
            and self._is_framed
            and self._error is None
            and self._transport is not None
            and not self._transport.is_closing()
            # A worker may answer before it has read the request.
            and self._transport.get_write_buffer_size() == 0
            and self._keeps_alive
        )
        if not can_serve:
            self.close()
            return False
        if self._timer is not None:
            self._timer.cancel()
        self._reset()
        self.reused = True
        return True

    def close(self) -> None:
        """Close it at once."""
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        """Until something has come, or never will."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        self._waits_since_s = self._loop.time()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _look(self, limit_s: float) -> None:
        """One timer for an answer, not one for each of its pieces."""
        waited_s = 0.0 if self._waiter is None else self._loop.time() - self._waits_since_s
        if waited_s >= limit_s:
            self._fail(TimeoutError("the worker has gone silent"))
        else:
            self._timer = self._loop.call_later(limit_s - waited_s, self._look, limit_s)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        """Nothing more will come; what has come can still be read."""
        if self._error is None and not self._is_whole:
            self._error = error
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(error)

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._busy or self._is_whole:
            self.close()  # Nobody asked.
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail_parsing()
            return
        if not self._head_is_whole:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self._fail_parsing()
        elif self._buffered > _HIGH_BYTES and self._transport is not None:
            self._transport.pause_reading()

    def _fail_parsing(self) -> None:
        broken = BrokenAnswerError("the worker broke the framing of its answer")
        self._fail(broken if self._head_is_whole else NotHTTPError("the answer is not HTTP"))
        self.close()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if not self._head_is_whole and self._head_bytes:
            self._fail(NotHTTPError("the answer broke off in its head"))
        elif not self._head_is_whole:
            is_stale = self.reused and self._loop.time() - self._sent_s < _STALE_S
            self._fail(ClosedError(is_stale=is_stale))
        elif not self._is_framed and error is None:
            self._is_whole = True  # Its end is the connection's.
            self._wake()
        else:
            self._fail(BrokenAnswerError("the worker did not finish its answer"))

    # Called by the parser

    def on_message_begin(self) -> None:
        if self._is_whole:
            raise ValueError("an answer that nobody asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_is_whole:  # Else it is a trailer.
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._status = status = self._parser.get_status_code()
        if not 100 <= status <= 599:
            raise ValueError(f"there is no status {status}")
        if status < 200:
            return  # Another head follows; a change of protocol is refused by the parser.
        names = {name.lower() for name, _ in self._headers}
        self._is_framed = (
            b"content-length" in names or b"transfer-encoding" in names or status in (204, 304)
        )
        self._head_is_whole = True
        self._wake()

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)
        self._buffered += len(data)
        self._wake()

    def on_message_complete(self) -> None:
        if not self._head_is_whole:
            self._headers = []
            return
        self._is_whole = True
        self._keeps_alive = self._parser.should_keep_alive()
        self._wake()


class Response:
    """The answer to a request.

    Attributes:
        raw_headers: as the worker sent them.
    """

    def __init__(self, connection: Connection, status: int, raw_headers: RawHeaders) -> None:
        self.connection = connection
        self.status = status
        self.raw_headers = raw_headers

    def header(self, name: bytes) -> str | None:
        """The first header of that name, which is given in lower case."""
        for each, value in self.raw_headers:
            if each.lower() == name:
                return value.decode("latin-1")
        return None


class Pool:
    """Connections to workers that wait for their next request.

    Args:
        idle_s: how long one waits.
        connect_s: how long a new one may take.
    """

    def __init__(self, *, idle_s: float, connect_s: float) -> None:
        self._idle_s = idle_s
        self._connect_s = connect_s
        self._waiting: dict[str, list[tuple[float, Connection]]] = {}
        self._tls: ssl.SSLContext | None = None

    async def get(self, base_url: str, *, fresh: bool = False) -> Connection:
        """A connection to a worker, the one that was used last, or a new one.

        Raises:
            OSError: the worker takes none, or not in time (``TimeoutError``).
        """
        waiting = self._waiting.get(base_url)
        now_s = asyncio.get_running_loop().time()
        while waiting and not fresh:
            since_s, connection = waiting.pop()
            if connection.is_open and now_s - since_s < self._idle_s:
                return connection
            connection.close()
        return await self._connect(base_url)

    async def _connect(self, base_url: str) -> Connection:
        scheme, _, place = base_url.partition("://")
        host, _, port = place.rpartition(":")
        tls = None
        if scheme == "https":
            tls = self._tls = self._tls or ssl.create_default_context()
        async with asyncio.timeout(self._connect_s):
            _, connection = await asyncio.get_running_loop().create_connection(
                Connection, host.strip("[]"), int(port), ssl=tls
            )
        return connection

    def put(self, base_url: str, connection: Connection) -> None:
        """Its answer is no longer wanted: it waits for the next request, if it can serve one."""
        if not connection.finish():
            return
        loop = asyncio.get_running_loop()
        waiting = self._waiting.get(base_url)
        if waiting is None:
            waiting = self._waiting[base_url] = []
            loop.call_later(self._idle_s, self._sweep, base_url)
        waiting.append((loop.time(), connection))

    def _sweep(self, base_url: str) -> None:
        """Close those that have waited too long; the oldest come first."""
        loop = asyncio.get_running_loop()
        waiting, oldest_s = self._waiting.get(base_url, []), loop.time() - self._idle_s
        num_old = sum(since_s <= oldest_s for since_s, _ in waiting)
        for _, connection in waiting[:num_old]:
            connection.close()
        del waiting[:num_old]
        if waiting:
            loop.call_later(waiting[0][0] - oldest_s, self._sweep, base_url)
        else:
            self._waiting.pop(base_url, None)

    def close(self) -> None:
        """Close all that wait."""
        for waiting in self._waiting.values():
            for _, connection in waiting:
                connection.close()
        self._waiting.clear()
