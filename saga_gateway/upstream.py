"""Requests to workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import aiohttp
from aiohttp.connector import Connection
from yarl import URL

from saga_gateway.engines import engine_headers
from saga_gateway.headers import Headers
from saga_gateway.settings import GatewaySettings
from saga_gateway.stats import Stats
from saga_gateway.workers import Worker

_SMALL_BODY_BYTES = 2**20
_SLICE_BYTES = 2**18
_WATCH_SILENCE_S = 10.0
_MAX_EVENT_BYTES = 2**20
_CONNECT_ERRORS = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


class WorkerDownError(Exception):
    """A worker took no connection, or closed it before it answered anything.

    Attributes:
        unreachable: it took no connection.
    """

    def __init__(self, message: str, *, unreachable: bool) -> None:
        super().__init__(message)
        self.unreachable = unreachable


class WorkerTimeoutError(Exception):
    """A worker took the request and was silent for longer than the settings allow."""


class WorkerAnswerError(Exception):
    """What a worker answered is not HTTP."""


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """A request as a worker gets it: path with query, end-to-end headers, body.

    Attributes:
        session_id, priority: what the worker's engine is told in its own words.
    """

    target: str
    headers: Headers
    body: bytes
    method: str = "POST"
    session_id: str | None = None
    priority: int = 0


class Silence:
    """Ends the wait for a worker's next bytes when it has lasted too long.

    One timer for an answer, not one for each of its pieces. aiohttp's own limit does not count
    when a worker breaks the framing of its chunks.

    Args:
        content: what is waited for.
    """

    def __init__(self, content: aiohttp.StreamReader, limit_s: float) -> None:
        self._content = content
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._since_s: float | None = None
        self._timer = self._loop.call_later(limit_s, self._look)

    async def next_bytes(self) -> bytes:
        """The next bytes, empty at the end.

        Raises:
            aiohttp.ClientError, OSError: the worker has not finished its answer.
        """
        self._since_s = self._loop.time()
        data = await self._content.readany()
        self._since_s = None
        return data

    def stop(self) -> None:
        """Nothing more is waited for."""
        self._timer.cancel()

    def _look(self) -> None:
        waited_s = 0.0 if self._since_s is None else self._loop.time() - self._since_s
        if waited_s >= self._limit_s:
            self._content.set_exception(TimeoutError("the worker has gone silent"))
        else:
            self._timer = self._loop.call_later(self._limit_s - waited_s, self._look)


@dataclass(slots=True)
class _Connection:
    reused: bool = False


_connection: ContextVar[_Connection] = ContextVar("connection")


class _Connector(aiohttp.TCPConnector):
    """Notes whether a request's connection has been used before. Tracing could, at ten times the
    cost."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._used = WeakSet[Any]()

    async def connect(self, *args: Any, **kwargs: Any) -> Connection:
        connection = await super().connect(*args, **kwargs)
        if connection.protocol in self._used:
            _connection.get().reused = True
        else:
            self._used.add(connection.protocol)
        return connection


class Upstream:
    """The HTTP client that all requests to workers go through."""

    def __init__(self, settings: GatewaySettings, stats: Stats) -> None:
        self._settings = settings
        self._stats = stats
        self._timeout = aiohttp.ClientTimeout(
            total=None,
            sock_connect=settings.connect_timeout_s,
            sock_read=settings.idle_timeout_s,
        )
        key = settings.worker_api_key
        self._key = [("Authorization", f"Bearer {key}")] if key else []
        self._pooled = self._session(_Connector(limit=0, keepalive_timeout=settings.pool_idle_s))
        self._fresh = self._session(aiohttp.TCPConnector(limit=0, force_close=True))

    def _session(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            timeout=self._timeout,
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._pooled.close()
        await self._fresh.close()

    async def send(self, worker: Worker, request: UpstreamRequest) -> aiohttp.ClientResponse:
        """Send a request and wait for the head of its response.

        A pooled connection that turns out to be closed before it answers anything is tried once
        more on a fresh one.

        Raises:
            WorkerDownError: see there; the request can be sent to another worker.
            WorkerTimeoutError: the request may be at work there.
            WorkerAnswerError: the answer cannot be read.
        """
        try:
            if not self._settings.first_byte_timeout_s:
                return await self._send_fresh(worker, request)
            async with asyncio.timeout(self._settings.first_byte_timeout_s):
                return await self._send_fresh(worker, request)
        except _CONNECT_ERRORS as error:
            raise WorkerDownError(_reason(error), unreachable=True) from error
        except TimeoutError as error:  # aiohttp's are of this kind too.
            raise WorkerTimeoutError from error
        except aiohttp.ClientConnectionError as error:
            raise WorkerDownError(_reason(error), unreachable=False) from error
        except aiohttp.ClientError as error:
            raise WorkerAnswerError(_reason(error)) from error

    async def _send_fresh(self, worker: Worker, request: UpstreamRequest) -> aiohttp.ClientResponse:
        connection = _Connection()
        _connection.set(connection)
        try:
            return await self._send(self._pooled, worker, request)
        except (*_CONNECT_ERRORS, aiohttp.SocketTimeoutError):
            raise
        except aiohttp.ClientConnectionError:
            if not connection.reused:
                raise
        self._stats.stale_retries += 1
        return await self._send(self._fresh, worker, request)

    def _with_key(self, headers: Headers) -> Headers:
        """The headers with the key that the workers ask for, if they ask for one."""
        if not self._key:
            return headers
        return [*(each for each in headers if each[0].lower() != "authorization"), *self._key]

    async def _send(
        self,
        session: aiohttp.ClientSession,
        worker: Worker,
        request: UpstreamRequest,
    ) -> aiohttp.ClientResponse:
        told = engine_headers(worker.engine, request.session_id, request.priority)
        body, headers = request.body, [*self._with_key(request.headers), *told]
        if body or request.method == "POST":
            headers = [*headers, ("Content-Length", str(len(body)))]
        return await session.request(
            request.method,
            URL(worker.base_url + request.target, encoded=True),
            data=_slices(body) if len(body) > _SMALL_BODY_BYTES else body or None,
            headers=headers,
            allow_redirects=False,
        )

    async def get(
        self, worker: Worker, target: str, headers: Headers, timeout_s: float
    ) -> tuple[int, bytes]:
        """Status and body of a GET, on a connection of its own: whether it takes one is asked too.

        Raises:
            aiohttp.ClientError, OSError: the worker did not answer in time, or not at all.
        """
        async with self._fresh.get(
            URL(worker.base_url + target, encoded=True),
            headers=self._with_key(headers),
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
        ) as response:
            return response.status, await response.read()

    async def watch(self, worker: Worker, target: str) -> AsyncIterator[bytes]:
        """Data of the server-sent events at a worker's path, an event a line.

        Raises:
            aiohttp.ClientError, OSError: there is no such stream, or it has ended or gone silent.
        """
        async with self._fresh.get(
            URL(worker.base_url + target, encoded=True),
            headers=self._with_key([]),
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_read=_WATCH_SILENCE_S),
            raise_for_status=True,
            read_bufsize=_MAX_EVENT_BYTES,
        ) as response:
            async for line in response.content:
                if line.startswith(b"data: "):
                    yield line[6:]

    async def notify(self, worker: Worker, body: bytes) -> int:
        """Send notices; the status of the worker's answer.

        Raises:
            aiohttp.ClientError, OSError: the worker did not answer in time, or not at all.
        """
        _connection.set(_Connection())
        async with self._pooled.post(
            URL(worker.base_url + "/saga/v1/sessions:notify", encoded=True),
            data=body,
            headers=self._with_key([("Content-Type", "application/json")]),
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=self._settings.notice_timeout_s),
        ) as response:
            await response.read()
            return response.status


async def _slices(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), _SLICE_BYTES):
        yield body[start : start + _SLICE_BYTES]


def _reason(error: BaseException) -> str:
    """A failure in words that name no address; the caller says which worker it was."""
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return "no connection in time"
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error.strerror or "no connection"
    if isinstance(error, aiohttp.ClientConnectionError):
        return "connection closed before an answer"
    return "the answer is not HTTP"
