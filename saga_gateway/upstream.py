"""Requests to workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
from yarl import URL

from saga_gateway.engines import engine_headers
from saga_gateway.headers import Headers
from saga_gateway.settings import GatewaySettings
from saga_gateway.stats import Stats
from saga_gateway.wire import ClosedError, NotHTTPError, Pool, Response
from saga_gateway.workers import Worker

_WATCH_SILENCE_S = 10.0
_MAX_EVENT_BYTES = 2**20


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
        session_id: what the worker's engine is told in its own words; None: nothing.
        priority: added to what the coordinator gives it; None: no engine is told any.
    """

    target: str
    headers: Headers
    body: bytes
    method: str = "POST"
    session_id: str | None = None
    priority: int | None = None


class Upstream:
    """What talks to workers: a lean client for what is relayed, aiohttp for all else."""

    def __init__(self, settings: GatewaySettings, stats: Stats) -> None:
        self._settings = settings
        self._stats = stats
        key = settings.worker_api_key
        self._key = [("Authorization", f"Bearer {key}")] if key else []
        self._pool = Pool(idle_s=settings.pool_idle_s, connect_s=settings.connect_timeout_s)
        self._pooled = self._session(
            aiohttp.TCPConnector(limit=0, keepalive_timeout=settings.pool_idle_s)
        )
        self._fresh = self._session(aiohttp.TCPConnector(limit=0, force_close=True))

    def _session(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        )

    async def close(self) -> None:
        """Close all connections."""
        self._pool.close()
        await self._pooled.close()
        await self._fresh.close()

    async def send(self, worker: Worker, request: UpstreamRequest, priority: int = 0) -> Response:
        """Send a request and wait for the head of its response, which is to be given to ``done``.

        ``priority`` is the coordinator's.

        A pooled connection that turns out to be closed before it answers anything is tried once
        more on a fresh one.

        Raises:
            WorkerDownError: see there; the request can be sent to another worker.
            WorkerTimeoutError: the request may be at work there.
            WorkerAnswerError: the answer cannot be read.
        """
        limit_s = self._settings.first_byte_timeout_s
        try:
            if not limit_s:
                return await self._send_fresh(worker, request, priority)
            async with asyncio.timeout(limit_s):
                return await self._send_fresh(worker, request, priority)
        except TimeoutError as error:
            raise WorkerTimeoutError from error
        except ClosedError as error:
            raise WorkerDownError(str(error), unreachable=False) from error
        except NotHTTPError as error:
            raise WorkerAnswerError(str(error)) from error

    def done(self, worker: Worker, response: Response) -> None:
        """The response is no longer wanted: its connection waits for the next, or is closed."""
        self._pool.put(worker.base_url, response.connection)

    async def _send_fresh(
        self, worker: Worker, request: UpstreamRequest, priority: int
    ) -> Response:
        head = self._head(worker, request, priority)
        try:
            return await self._send(worker, head, request.body, fresh=False)
        except ClosedError as error:
            if not error.is_stale:
                raise
        self._stats.stale_retries += 1
        return await self._send(worker, head, request.body, fresh=True)

    async def _send(self, worker: Worker, head: bytes, body: bytes, *, fresh: bool) -> Response:
        try:
            connection = await self._pool.get(worker.base_url, fresh=fresh)
        except TimeoutError as error:
            raise WorkerDownError("no connection in time", unreachable=True) from error
        except (OSError, UnicodeError) as error:  # A host may be no name at all.
            reason = getattr(error, "strerror", None) or "no connection"
            raise WorkerDownError(reason, unreachable=True) from error
        return await connection.request(head, body, self._settings.idle_timeout_s)

    def _head(self, worker: Worker, request: UpstreamRequest, priority: int) -> bytes:
        """Request line and headers, up to the empty line that ends them."""
        total = None if request.priority is None else request.priority + priority
        told = engine_headers(worker.engine, request.session_id, total)
        lines = [f"{request.method} {request.target} HTTP/1.1", f"Host: {worker.worker_id}"]
        lines += [f"{name}: {value}" for name, value in self._with_key(request.headers)]
        lines += [f"{name}: {value}" for name, value in told]
        if request.body or request.method == "POST":
            lines.append(f"Content-Length: {len(request.body)}")
        return "\r\n".join([*lines, "", ""]).encode()

    def _with_key(self, headers: Headers) -> Headers:
        """The headers with the key that the workers ask for, if they ask for one."""
        if not self._key:
            return headers
        return [*(each for each in headers if each[0].lower() != "authorization"), *self._key]

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
        async with self._pooled.post(
            URL(worker.base_url + "/saga/v1/sessions:notify", encoded=True),
            data=body,
            headers=self._with_key([("Content-Type", "application/json")]),
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=self._settings.notice_timeout_s),
        ) as response:
            await response.read()
            return response.status
