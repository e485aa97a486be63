"""The relay of requests to workers: one worker's bytes in, the same bytes out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

import aiohttp
import orjson

from saga_core import hints
from saga_core.hints import HEADERS, Hints
from saga_core.placement import Route, place
from saga_gateway.asgi import (
    BodyTooLargeError,
    ClientGoneError,
    Receive,
    Scope,
    Send,
    read_body,
    run_until_gone,
    send_error,
)
from saga_gateway.headers import Headers, decode_headers, downstream_headers, upstream_headers
from saga_gateway.identity import Gatekeeper, Identity, admit
from saga_gateway.metrics import Metrics
from saga_gateway.notifier import Notifier
from saga_gateway.responses import ResponseHomes, named_response
from saga_gateway.routes import Dialect, dialect_of, error_event
from saga_gateway.sessions import Session, SessionTable
from saga_gateway.settings import GatewaySettings
from saga_gateway.sse import SideReader, is_event_stream
from saga_gateway.stats import Stats
from saga_gateway.tracing import Tracing
from saga_gateway.upstream import (
    Upstream,
    UpstreamRequest,
    WorkerAnswerError,
    WorkerDownError,
    WorkerTimeoutError,
)
from saga_gateway.waiting import RoomFullError, WaitingRoom
from saga_gateway.workers import Outcome, Worker, Workers

if TYPE_CHECKING:
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)
_requests_log = logging.getLogger("saga_gateway.requests")

_ATTEMPTS = 2
# What a worker says of itself. Any other error, 500 included, may be the request's own fault.
_WORKER_FAULTS = frozenset({502, 503, 504})


@dataclass(slots=True)
class _Exchange:
    """One request on its way: what is sent, whose step it is, and whether that is over.

    Attributes:
        session: the session that it is a step of; None for any other request.
        home: the worker that alone can serve it well; None when any can.
        said_session_id: the session's id in the client's words.
        began_s, first_s: when its body had come, and the first byte of its answer.
        span: its span, when there is tracing.
        status, worker_id: of its response, and of the worker that it was sent to last.
        is_step: whether its answer is one of a model.
    """

    request: UpstreamRequest
    dialect: Dialect
    tenant: str | None = None
    session: Session | None = None
    home: str | None = None
    said_session_id: str | None = None
    began_s: float = 0.0
    first_s: float | None = None
    span: Span | None = None
    status: int | None = None
    worker_id: str | None = None
    is_step: bool = False
    final: bool = False
    over: bool = False


@dataclass(slots=True)
class _Choice:
    """A place at a worker; ``outcome`` is what its request has shown so far."""

    worker: Worker
    route: Route
    outcome: Outcome = Outcome.NOTHING


class _NoWorkerError(Exception):
    """No worker is up."""


class Proxy:
    """Serves requests over the workers."""

    def __init__(
        self,
        settings: GatewaySettings,
        workers: Workers,
        sessions: SessionTable,
        notifier: Notifier,
        upstream: Upstream,
        gatekeeper: Gatekeeper,
        stats: Stats,
        metrics: Metrics,
        tracing: Tracing,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._workers = workers
        self._sessions = sessions
        self._notifier = notifier
        self._upstream = upstream
        self._gatekeeper = gatekeeper
        self._stats = stats
        self._metrics = metrics
        self._tracing = tracing
        self._clock = clock
        self._responses = ResponseHomes(settings.max_sessions)
        self._room = WaitingRoom[_Choice](settings.max_queued, self._leave)
        metrics.watch_queue(self._room)

    async def step(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a step of a session; returns when it is answered or its client has left."""
        await self._serve(scope, receive, send, is_step=True)

    async def single(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request that is no step, as :meth:`step` does.

        One about a response goes to the worker that made it.
        """
        await self._serve(scope, receive, send, is_step=False)

    def workers_changed(self) -> None:
        """There are other workers now, or others of them are up."""
        self._room.wake()

    async def _serve(self, scope: Scope, receive: Receive, send: Send, *, is_step: bool) -> None:
        dialect = dialect_of(scope["path"])
        headers = decode_headers(scope["headers"])
        caller = await admit(self._gatekeeper, scope, headers, send, dialect)
        if caller is None:
            return
        limit = self._settings.max_body_bytes
        try:
            body = await read_body(receive, limit)
        except ClientGoneError:
            self._stats.clients_gone += 1
            return
        except BodyTooLargeError:
            message = f"the request body is larger than {limit} bytes (max_body_bytes)"
            await send_error(send, 413, message, code="body_too_large", dialect=dialect)
            return
        home: str | None = None
        if dialect is Dialect.RESPONSES:
            named = named_response(scope["path"], body)
            home = self._responses.get(caller.tenant, named)
            if named is not None and home is None and caller.tenant is not None:
                # Workers know no tenants: whose response it is, the gateway alone can tell.
                message = f"no response {named[:64]} of this tenant"
                await send_error(send, 404, message, code="not_found", dialect=dialect)
                return
        if not self._gatekeeper.enter(caller):
            await _send_too_many(send, caller, dialect)
            return
        self._stats.requests += 1
        now_s = self._clock()
        exchange = self._begin(scope, headers, body, caller, dialect, now_s, is_step=is_step)
        exchange.home, exchange.began_s = home, now_s
        try:
            completed = await run_until_gone(receive, self._exchange(exchange, send))
            if not completed and not exchange.over:
                self._stats.clients_gone += 1
        finally:
            self._gatekeeper.leave(caller)
            self._end(exchange, None)

    def _begin(
        self,
        scope: Scope,
        headers: Headers,
        body: bytes,
        caller: Identity,
        dialect: Dialect,
        now_s: float,
        *,
        is_step: bool,
    ) -> _Exchange:
        said = self._hints(headers)
        session_id = None
        if said.session_id is not None:
            session_id = self._gatekeeper.session_id(caller, said.session_id)
        path, query = scope["path"], scope["query_string"]
        span = self._tracing.begin(path, headers, said)
        passed = upstream_headers(self._gatekeeper.strip(headers), session_id)
        request = UpstreamRequest(
            target=path + (f"?{query.decode('latin-1')}" if query else ""),
            headers=self._tracing.carry(span, passed),
            body=body,
            method=scope["method"],
        )
        exchange = _Exchange(request, dialect, caller.tenant, span=span, is_step=is_step)
        if is_step and session_id is not None:
            exchange.session = self._sessions.begin(session_id, said, now_s)
            exchange.said_session_id = said.session_id
            exchange.final = said.final
        return exchange

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

    async def _exchange(self, exchange: _Exchange, send: Send) -> None:
        """Send the request to a worker, to another one if that is down, and relay the answer."""
        failures: list[str] = []
        down: str | None = None
        for _ in range(_ATTEMPTS):
            try:
                choice = await self._wait_for_worker(exchange, down)
            except _NoWorkerError:
                break
            except RoomFullError:
                choice = None
            if choice is None:
                await self._busy(exchange, send)
                return
            worker = choice.worker
            try:
                response = await self._upstream.send(worker, exchange.request)
                try:
                    await self._relay(exchange, response, choice, send)
                finally:
                    response.close()
                return
            except WorkerDownError as error:
                choice.outcome = Outcome.UNREACHABLE if error.unreachable else Outcome.FAILED
                failures.append(f"{worker.worker_id}: {error}")
                down = worker.worker_id
            except (WorkerTimeoutError, WorkerAnswerError) as error:
                choice.outcome = Outcome.FAILED
                await self._refuse(exchange, send, worker, error)
                return
            finally:
                self._leave(choice)
        await self._unavailable(exchange, send, failures)

    async def _wait_for_worker(self, exchange: _Exchange, down: str | None) -> _Choice | None:
        """A worker with room, other than ``down``; None: there was none in time.

        Raises:
            _NoWorkerError: no worker is up.
            RoomFullError: too many wait already.
        """
        began_s = self._clock()
        choice = await self._room.wait(
            lambda: self._choose(exchange, down), self._settings.queue_wait_s
        )
        if choice is None:
            return None
        self._metrics.waited(self._clock() - began_s)
        self._metrics.routed(choice.route)
        if choice.route is Route.FAILOVER:
            self._stats.failovers += 1
        exchange.worker_id = choice.worker.worker_id
        return choice

    def _choose(self, exchange: _Exchange, down: str | None) -> _Choice | None:
        """Choose a worker, reserve a place there, and make it the session's home.

        None: those that could serve the request have no room.
        """
        loads = self._workers.loads(self._clock(), without=down)
        if not any(load.available for load in loads):
            raise _NoWorkerError
        session = exchange.session
        home = exchange.home or (down if session is None else session.home)
        limit = self._settings.max_worker_requests
        if limit:
            # A session waits for its home: elsewhere all of its KV would be computed again.
            if any(load.worker_id == home and load.available for load in loads):
                loads = [load for load in loads if load.worker_id == home]
            loads = [load for load in loads if load.in_flight < limit]
        placement = place(None if session is None else session.session_id, home, loads)
        if placement is None:
            return None
        if session is not None:
            session.home = placement.worker_id
        worker = self._workers[placement.worker_id]
        worker.begin()
        return _Choice(worker, placement.route)

    def _leave(self, choice: _Choice) -> None:
        """The place at the worker is free again."""
        choice.worker.end(choice.outcome, self._clock())
        self._room.wake()

    async def _busy(self, exchange: _Exchange, send: Send) -> None:
        exchange.status = 429
        await send_error(
            send,
            429,
            f"every worker that could serve this has {self._settings.max_worker_requests} requests "
            f"(max_worker_requests), and {len(self._room)} wait",
            code="workers_busy",
            headers=[(b"retry-after", b"1")],
            dialect=exchange.dialect,
        )

    async def _unavailable(self, exchange: _Exchange, send: Send, failures: list[str]) -> None:
        exchange.status = 502
        tried = "; ".join(failures) or "all are in back-off after failures"
        retry = str(max(1, ceil(self._settings.worker_backoff_s))).encode()
        await send_error(
            send,
            502,
            f"no worker is available ({tried})",
            code="worker_unavailable",
            headers=[(b"retry-after", retry)],
            dialect=exchange.dialect,
        )

    async def _refuse(
        self, exchange: _Exchange, send: Send, worker: Worker, error: Exception
    ) -> None:
        dialect = exchange.dialect
        exchange.status = 504 if isinstance(error, WorkerTimeoutError) else 502
        if isinstance(error, WorkerTimeoutError):
            first_s, idle_s = self._settings.first_byte_timeout_s, self._settings.idle_timeout_s
            limit = f"{idle_s:g} s (idle_timeout_s)"
            if 0.0 < first_s <= idle_s:
                limit = f"{first_s:g} s (first_byte_timeout_s)"
            message = f"worker {worker.worker_id} was silent for {limit}"
            await send_error(send, 504, message, code="worker_timeout", dialect=dialect)
        else:
            message = f"worker {worker.worker_id}: {error}"
            await send_error(send, 502, message, code="worker_bad_answer", dialect=dialect)

    async def _relay(
        self,
        exchange: _Exchange,
        response: aiohttp.ClientResponse,
        choice: _Choice,
        send: Send,
    ) -> None:
        """Pass a response on as it comes.

        The step ends when its last byte has come, or a stream says ``[DONE]``, and before the
        client can see that: so the client's next request or event always finds the step ended.
        """
        exchange.status = response.status
        reader = SideReader(
            response.headers.get("Content-Type", ""), response.headers.get("Content-Encoding", "")
        )
        await send(
            {
                "type": "http.response.start",
                "status": response.status,
                "headers": self._response_headers(exchange, response, choice),
            }
        )
        content = response.content
        while True:
            try:
                # aiohttp waits for ever when a worker breaks the framing of its chunks.
                async with asyncio.timeout(self._settings.idle_timeout_s):
                    data = await content.readany()
            except (aiohttp.ClientError, OSError) as error:
                choice.outcome = Outcome.FAILED
                await self._break_off(exchange, response, choice.worker.worker_id, error, send)
                return
            last = content.at_eof()
            if exchange.first_s is None:
                exchange.first_s = self._clock()
                self._metrics.first_byte(exchange.first_s - exchange.began_s)
            if exchange.is_step:
                reader.feed(data)
            if last or reader.done:
                is_fault = response.status in _WORKER_FAULTS
                choice.outcome = Outcome.FAILED if is_fault else Outcome.SERVED
                is_read = exchange.is_step and response.status == 200
                self._end(exchange, reader if is_read else None)
            await send({"type": "http.response.body", "body": data, "more_body": not last})
            if last:
                return

    def _response_headers(
        self, exchange: _Exchange, response: aiohttp.ClientResponse, choice: _Choice
    ) -> list[tuple[bytes, bytes]]:
        headers = downstream_headers(response.raw_headers)
        headers.append((b"x-saga-worker", choice.worker.worker_id.encode()))
        headers.append((b"x-saga-route", choice.route.encode()))
        if exchange.said_session_id is not None:
            headers.append((b"x-saga-session-id", exchange.said_session_id.encode()))
        if is_event_stream(response.headers.get("Content-Type", "")) and not any(
            name == b"x-accel-buffering" for name, _ in headers
        ):
            headers.append((b"x-accel-buffering", b"no"))
        return headers

    async def _break_off(
        self,
        exchange: _Exchange,
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
        if exchange.over and plain_stream:
            await send({"type": "http.response.body", "body": b""})
            return
        self._stats.answers_broken += 1
        logger.warning("worker %s broke off an answer: %s", worker_id, type(error).__name__)
        if not plain_stream:
            return
        message = f"worker {worker_id} broke off its answer"
        head, content = error_event(message, code="worker_failed", dialect=exchange.dialect)
        event = b"\n\n" + head + b"data: " + orjson.dumps(content) + b"\n\n"
        await send({"type": "http.response.body", "body": event})

    def _end(self, exchange: _Exchange, reader: SideReader | None) -> None:
        """The exchange is over, once; ``reader`` knows its answer, None when it has none."""
        if exchange.over:
            return
        exchange.over = True
        answer = reader.finish() if reader is not None else None
        if reader is not None and answer is None:
            self._stats.answers_unread += 1
        worker_id = exchange.worker_id
        if answer is not None and answer.response_id is not None and worker_id is not None:
            self._responses.put(exchange.tenant, answer.response_id, worker_id)
        now_s = self._clock()
        if exchange.first_s is not None:
            tokens = answer.usage.completion_tokens if answer and answer.usage else 0
            stream_s = now_s - exchange.first_s
            self._metrics.finished(now_s - exchange.began_s, stream_s, tokens)
        self._tracing.end(exchange.span, answer, exchange.status)
        if _requests_log.isEnabledFor(logging.INFO):
            self._log(exchange, now_s)
        if exchange.session is None:
            return
        addressed = self._sessions.end_step(
            exchange.session, answer, final=exchange.final, now_s=now_s
        )
        if addressed is not None:
            self._notifier.put(addressed.worker_id, addressed.notice)

    @staticmethod
    def _log(exchange: _Exchange, now_s: float) -> None:
        fields: dict[str, object] = {
            "path": exchange.request.target.partition("?")[0],
            "status": exchange.status,
            "worker": exchange.worker_id,
            "session": exchange.said_session_id,
            "tenant": exchange.tenant,
            "duration_s": round(now_s - exchange.began_s, 4),
        }
        if exchange.first_s is not None:
            fields["first_byte_s"] = round(exchange.first_s - exchange.began_s, 4)
        _requests_log.info("request", extra={"fields": fields})


async def _send_too_many(send: Send, caller: Identity, dialect: Dialect) -> None:
    message = f"tenant {caller.tenant} has {caller.max_in_flight} requests under way, its limit"
    await send_error(
        send,
        429,
        message,
        code="tenant_limit",
        headers=[(b"retry-after", b"1")],
        dialect=dialect,
    )
