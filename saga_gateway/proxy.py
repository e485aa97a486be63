"""The relay of chat requests: one worker's bytes in, the same bytes out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

import aiohttp
import orjson

from saga_core import hints
from saga_core.hints import HEADERS, Hints
from saga_core.placement import Placement, Route, place
from saga_gateway.asgi import (
    BodyTooLargeError,
    ClientGoneError,
    Receive,
    Scope,
    Send,
    error_body,
    read_body,
    run_until_gone,
    send_error,
)
from saga_gateway.headers import Headers, decode_headers, downstream_headers, upstream_headers
from saga_gateway.notifier import Notifier
from saga_gateway.sessions import Session, SessionTable
from saga_gateway.settings import GatewaySettings
from saga_gateway.sse import SideReader, is_event_stream
from saga_gateway.stats import Stats
from saga_gateway.upstream import (
    Upstream,
    UpstreamRequest,
    WorkerAnswerError,
    WorkerDownError,
    WorkerTimeoutError,
)
from saga_gateway.workers import Worker, Workers

logger = logging.getLogger(__name__)

_ATTEMPTS = 2


@dataclass(slots=True)
class _Step:
    """One chat request on its way: what is sent, whose it is, and whether it is over."""

    request: UpstreamRequest
    session: Session | None
    final: bool
    over: bool = False


class Proxy:
    """Serves chat requests over the workers."""

    def __init__(
        self,
        settings: GatewaySettings,
        workers: Workers,
        sessions: SessionTable,
        notifier: Notifier,
        upstream: Upstream,
        stats: Stats,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._workers = workers
        self._sessions = sessions
        self._notifier = notifier
        self._upstream = upstream
        self._stats = stats
        self._clock = clock

    async def chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; returns when it is answered or its client has left."""
        limit = self._settings.max_body_bytes
        try:
            body = await read_body(receive, limit)
        except ClientGoneError:
            self._stats.clients_gone += 1
            return
        except BodyTooLargeError:
            message = f"the request body is larger than {limit} bytes (max_body_bytes)"
            await send_error(send, 413, message, code="body_too_large")
            return
        self._stats.requests += 1
        now_s = self._clock()
        step = self._begin(scope, body, now_s)
        try:
            completed = await run_until_gone(receive, self._exchange(step, send, now_s))
            if not completed and not step.over:
                self._stats.clients_gone += 1
        finally:
            self._end(step, None)

    def _begin(self, scope: Scope, body: bytes, now_s: float) -> _Step:
        headers = decode_headers(scope["headers"])
        said = self._hints(headers)
        session = None
        if said.session_id is not None:
            session = self._sessions.begin(said.session_id, said, now_s)
        query = scope["query_string"]
        target = scope["path"] + (f"?{query.decode('latin-1')}" if query else "")
        request = UpstreamRequest(target, upstream_headers(headers, said.session_id), body)
        return _Step(request, session, said.final)

    def _hints(self, headers: Headers) -> Hints:
        """The request's hints; ``X-Session-ID`` names the session where no hint does."""
        decoded = hints.decode(headers)
        said, dropped = decoded.hints, len(decoded.dropped)
        if said.session_id is None:
            plain = [
                (HEADERS["session_id"], value) for name, value in headers if name == "x-session-id"
            ]
            fallback = hints.decode(plain)
            dropped += len(fallback.dropped)
            said = replace(said, session_id=fallback.hints.session_id)
        self._stats.hints_dropped += dropped
        return said

    async def _exchange(self, step: _Step, send: Send, now_s: float) -> None:
        """Send the request to a worker, to another one if that is down, and relay the answer."""
        failures: list[str] = []
        down: str | None = None
        for _ in range(_ATTEMPTS):
            placement = self._place(step.session, down, now_s)
            if placement is None:
                break
            if placement.route is Route.FAILOVER:
                self._stats.failovers += 1
            worker = self._workers[placement.worker_id]
            with worker.serving():
                try:
                    response = await self._upstream.post(worker, step.request)
                except WorkerDownError as error:
                    failures.append(f"{worker.worker_id}: {error}")
                    now_s = self._clock()
                    down = worker.worker_id
                    if error.unreachable:
                        self._workers.mark_unreachable(down, now_s)
                    continue
                except (WorkerTimeoutError, WorkerAnswerError) as error:
                    await self._refuse(send, worker, error)
                    return
                try:
                    await self._relay(step, response, placement, send)
                finally:
                    response.close()
                return
        await self._unavailable(send, failures)

    def _place(self, session: Session | None, down: str | None, now_s: float) -> Placement | None:
        """Choose a worker other than ``down``, and make it the session's home."""
        loads = self._workers.loads(now_s, without=down)
        if session is None:
            return place(None, down, loads)
        placement = place(session.session_id, session.home, loads)
        if placement is not None:
            session.home = placement.worker_id
        return placement

    async def _unavailable(self, send: Send, failures: list[str]) -> None:
        tried = "; ".join(failures) or "all are in back-off after failures"
        retry = str(max(1, ceil(self._settings.worker_backoff_s))).encode()
        await send_error(
            send,
            502,
            f"no worker is available ({tried})",
            code="worker_unavailable",
            headers=[(b"retry-after", retry)],
        )

    async def _refuse(self, send: Send, worker: Worker, error: Exception) -> None:
        if isinstance(error, WorkerTimeoutError):
            silence = self._settings.idle_timeout_s
            message = f"worker {worker.worker_id} was silent for {silence:g} s (idle_timeout_s)"
            await send_error(send, 504, message, code="worker_timeout")
        else:
            message = f"worker {worker.worker_id}: {error}"
            await send_error(send, 502, message, code="worker_bad_answer")

    async def _relay(
        self,
        step: _Step,
        response: aiohttp.ClientResponse,
        placement: Placement,
        send: Send,
    ) -> None:
        """Pass a response on as it comes.

        The step ends when its last byte has come, or a stream says ``[DONE]``, and before the
        client can see that: so the client's next request or event always finds the step ended.
        """
        reader = SideReader(
            response.headers.get("Content-Type", ""), response.headers.get("Content-Encoding", "")
        )
        await send(
            {
                "type": "http.response.start",
                "status": response.status,
                "headers": self._response_headers(step, response, placement),
            }
        )
        content = response.content
        while True:
            try:
                # aiohttp waits for ever when a worker breaks the framing of its chunks.
                async with asyncio.timeout(self._settings.idle_timeout_s):
                    data = await content.readany()
            except (aiohttp.ClientError, OSError) as error:
                await self._break_off(step, response, placement.worker_id, error, send)
                return
            last = content.at_eof()
            reader.feed(data)
            if last or reader.done:
                self._end(step, reader if response.status == 200 else None)
            await send({"type": "http.response.body", "body": data, "more_body": not last})
            if last:
                return

    def _response_headers(
        self, step: _Step, response: aiohttp.ClientResponse, placement: Placement
    ) -> list[tuple[bytes, bytes]]:
        headers = downstream_headers(response.raw_headers)
        headers.append((b"x-saga-worker", placement.worker_id.encode()))
        headers.append((b"x-saga-route", placement.route.encode()))
        if step.session is not None:
            headers.append((b"x-saga-session-id", step.session.session_id.encode()))
        if is_event_stream(response.headers.get("Content-Type", "")) and not any(
            name == b"x-accel-buffering" for name, _ in headers
        ):
            headers.append((b"x-accel-buffering", b"no"))
        return headers

    async def _break_off(
        self,
        step: _Step,
        response: aiohttp.ClientResponse,
        worker_id: str,
        error: Exception,
        send: Send,
    ) -> None:
        """Show the client that a worker did not finish its answer.

        A plain event stream gets an error event and no ``[DONE]``. Any other response is left
        incomplete, upon which the server closes the connection.
        """
        headers = response.headers
        plain_stream = (
            is_event_stream(headers.get("Content-Type", ""))
            and "Content-Encoding" not in headers
            and "Content-Length" not in headers
        )
        if step.over and plain_stream:
            await send({"type": "http.response.body", "body": b""})
            return
        self._stats.answers_broken += 1
        logger.warning("worker %s broke off an answer: %s", worker_id, type(error).__name__)
        if not plain_stream:
            return
        content = error_body(
            f"worker {worker_id} broke off its answer", kind="server_error", code="worker_failed"
        )
        event = b"\n\ndata: " + orjson.dumps(content) + b"\n\n"
        await send({"type": "http.response.body", "body": event})

    def _end(self, step: _Step, reader: SideReader | None) -> None:
        """The step is over, once; ``reader`` knows its answer, None when it has none."""
        if step.over:
            return
        step.over = True
        answer = reader.finish() if reader is not None else None
        if reader is not None and answer is None:
            self._stats.answers_unread += 1
        if step.session is None:
            return
        addressed = self._sessions.end_step(
            step.session, answer, final=step.final, now_s=self._clock()
        )
        if addressed is not None:
            self._notifier.put(addressed.worker_id, addressed.notice)
