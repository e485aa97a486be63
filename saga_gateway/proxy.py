"""The relay of requests to workers: one worker's bytes in, the same bytes out."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import orjson

from saga_core import hints
from saga_core.hints import HEADERS, Hints
from saga_core.placement import Route
from saga_gateway.answers import Answer, Usage
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
from saga_gateway.dispatch import Dispatcher, NoWorkerError, QueueFullError
from saga_gateway.exchange import Choice, Exchange, Refusals
from saga_gateway.headers import Headers, decode_headers, downstream_headers, upstream_headers
from saga_gateway.identity import Identity, admit
from saga_gateway.notifier import Notifier
from saga_gateway.parts import Parts
from saga_gateway.responses import Made, Responses, UnreadableError, named_response
from saga_gateway.routes import APIS, Dialect, dialect_of, error_event
from saga_gateway.sse import SideReader, is_event_stream
from saga_gateway.upstream import (
    Upstream,
    UpstreamRequest,
    WorkerAnswerError,
    WorkerDownError,
    WorkerTimeoutError,
)
from saga_gateway.usage import UsageDesk
from saga_gateway.wire import Response
from saga_gateway.worker_state import WorkerStates
from saga_gateway.workers import Outcome

logger = logging.getLogger(__name__)
_requests_log = logging.getLogger("saga_gateway.requests")

_ATTEMPTS = 2
_SESSION_HEADER = HEADERS["session_id"]
# What a worker says of itself. Any other error, 500 included, may be the request's own fault.
_WORKER_FAULTS = frozenset({502, 503, 504})
_FULL = frozenset({429, 503})


class Proxy:
    """Serves requests over the workers."""

    def __init__(
        self,
        parts: Parts,
        upstream: Upstream,
        notifier: Notifier,
        states: WorkerStates,
        desk: UsageDesk,
        dispatcher: Dispatcher,
    ) -> None:
        self._settings = parts.settings
        self._sessions = parts.sessions
        self._gatekeeper = parts.gatekeeper
        self._stats = parts.stats
        self._metrics = parts.metrics
        self._tracing = parts.tracing
        self._clock = parts.clock
        self._notifier = notifier
        self._upstream = upstream
        self._refusals = Refusals(parts.settings)
        self._states, self._desk = states, desk
        self._responses = Responses(parts.settings.max_sessions)
        self._identifier = parts.identifier
        self._reads_text = parts.settings.identify_sessions
        self._dispatcher = dispatcher

    async def step(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a step of a session; returns when it is answered or its client has left."""
        await self._serve(scope, receive, send, is_step=True)

    async def single(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request that is no step, as :meth:`step` does.

        One about a response goes to the worker that made it.
        """
        await self._serve(scope, receive, send, is_step=False)

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
        made: Made | None = None
        if dialect is Dialect.RESPONSES:
            try:
                named = named_response(scope["path"], body)
            except UnreadableError as error:
                if caller.tenant is not None:
                    message = f"the body is not JSON: {error}"
                    await send_error(send, 400, message, code="malformed_body", dialect=dialect)
                    return
                named = None  # The worker says what is wrong with it.
            made = self._responses.get(caller.tenant, named)
            if named is not None and made is None and caller.tenant is not None:
                # Workers know no tenants: whose response it is, the gateway alone can tell.
                message = f"no response {named[:64]} of this tenant"
                await send_error(send, 404, message, code="not_found", dialect=dialect)
                return
        if not self._gatekeeper.enter(caller):
            await _send_too_many(send, caller, dialect)
            return
        self._stats.requests += 1
        exchange: Exchange | None = None
        try:
            exchange = self._begin(scope, headers, body, caller, dialect, made, is_step=is_step)
            completed = await run_until_gone(receive, self._exchange(exchange, send))
            if not completed and not exchange.over:
                self._stats.clients_gone += 1
        finally:
            self._gatekeeper.leave(caller)
            if exchange is not None:
                self._end(exchange, None)

    def _begin(
        self,
        scope: Scope,
        headers: Headers,
        body: bytes,
        caller: Identity,
        dialect: Dialect,
        made: Made | None,
        *,
        is_step: bool,
    ) -> Exchange:
        said = self._hints(headers)
        path, query = scope["path"], scope["query_string"]
        said_session_id, found = said.session_id, None
        if said_session_id is None and is_step and self._settings.identify_sessions:
            follows = None if made is None else made.session_id
            is_running = follows is not None and self._sessions.is_running(
                self._gatekeeper.session_id(caller, follows)
            )
            found = self._identifier.session(
                APIS[path], caller.tenant, body, follows, is_running=is_running
            )
            self._stats.identified["unknown" if found is None else found.relation.value] += 1
            said_session_id = None if found is None else found.session_id
        session_id = None
        if said_session_id is not None:
            session_id = self._gatekeeper.session_id(caller, said_session_id)
        span = self._tracing.begin(path, headers, said)
        in_session = is_step and session_id is not None
        passed = upstream_headers(self._gatekeeper.strip(headers), is_step_of_session=in_session)
        request = UpstreamRequest(
            target=path + (f"?{query.decode('latin-1')}" if query else ""),
            headers=self._tracing.carry(span, passed),
            body=body,
            method=scope["method"],
            session_id=session_id if in_session else None,
            priority=self._gatekeeper.priority(caller, headers, body),
        )
        now_s = self._clock()
        exchange = Exchange(
            request,
            dialect,
            caller.tenant,
            found=found,
            home=None if made is None else made.worker_id,
            began_s=now_s,
            span=span,
            is_step=is_step,
            task_id=said.task_id,
            deadline_ms=said.deadline_ms,
        )
        if caller.tenant is not None:
            self._dispatcher.weigh(caller.tenant, caller.weight)
        if in_session and session_id is not None:
            workflow_id = None if found is None else found.workflow_id
            if found is None and said.workflow_id is None and self._settings.identify_sessions:
                known = self._sessions.get(session_id)
                if known is None or not known.has_workflow:
                    workflow_id = self._identifier.workflow(APIS[path], caller.tenant, body)
            exchange.session = self._sessions.begin(
                session_id,
                said,
                now_s,
                tenant=caller.tenant,
                found=found,
                workflow_id=workflow_id,
            )
            exchange.said_session_id = said_session_id
            exchange.final = said.final
        return exchange

    def _hints(self, headers: Headers) -> Hints:
        """The request's hints; ``X-Session-ID`` names the session where no hint does."""
        names = {name for name, _ in headers}
        said = Hints()
        if "baggage" in names or any(name.startswith("x-saga-") for name in names):
            decoded = hints.decode(headers)
            said = decoded.hints
            self._stats.hints_dropped += len(decoded.dropped)
        if said.session_id is None and "x-session-id" in names:
            plain = [(_SESSION_HEADER, value) for name, value in headers if name == "x-session-id"]
            decoded = hints.decode(plain)
            named = decoded.hints
            said = named if said == Hints() else replace(said, session_id=named.session_id)
            self._stats.hints_dropped += len(decoded.dropped)
        return said

    async def _exchange(self, exchange: Exchange, send: Send) -> None:
        """Send the request to a worker, to another one if that is down, and relay the answer."""
        failures: list[str] = []
        for _ in range(_ATTEMPTS):
            began_s = self._clock()
            try:
                choice = await self._dispatcher.place(exchange)
            except NoWorkerError:
                break
            except QueueFullError:
                choice = None
            if choice is None:
                await self._refusals.busy(exchange, send, len(self._dispatcher))
                return
            worker = choice.worker
            exchange.worker_id = worker.worker_id
            self._metrics.waited(self._clock() - began_s)
            self._metrics.routed(choice.route)
            if choice.route is Route.FAILOVER:
                self._stats.failovers += 1
            try:
                response = await self._upstream.send(worker, exchange.request, choice.priority)
                try:
                    await self._relay(exchange, response, choice, send)
                finally:
                    self._upstream.done(worker, response)
                return
            except WorkerDownError as error:
                choice.outcome = Outcome.UNREACHABLE if error.unreachable else Outcome.FAILED
                failures.append(f"{worker.worker_id}: {error}")
            except (WorkerTimeoutError, WorkerAnswerError) as error:
                choice.outcome = Outcome.FAILED
                await self._refusals.failed(exchange, send, worker, error)
                return
            finally:
                self._dispatcher.leave(choice)
        await self._refusals.unavailable(exchange, send, failures)

    async def _relay(
        self,
        exchange: Exchange,
        response: Response,
        choice: Choice,
        send: Send,
    ) -> None:
        """Pass a response on as it comes.

        The head of an answer that has come whole says what the answer says of the cache.
        The step ends when its last byte has come, or a stream says ``[DONE]``, and before the
        client can see that: so the client's next request or event always finds the step ended.
        """
        exchange.status = response.status
        if response.status in _FULL and (retry_after := response.header(b"retry-after")):
            choice.worker.asked_for_rest(retry_after, self._clock())
        content_type = response.header(b"content-type") or ""
        encoding = response.header(b"content-encoding") or ""
        reader = SideReader(
            content_type, encoding, with_text=self._reads_text and exchange.session is not None
        )
        headers = self._response_headers(exchange, response, choice)
        head = {"type": "http.response.start", "status": response.status, "headers": headers}
        connection = response.connection
        head_is_sent = is_event_stream(content_type) or not connection.is_whole
        if head_is_sent:
            await send(head)
        while True:
            try:
                data = await connection.read()
            except OSError as error:
                if not exchange.over:
                    choice.outcome = Outcome.FAILED
                if not head_is_sent:
                    await send(head)
                await self._break_off(exchange, response, choice.worker.worker_id, error, send)
                return
            last = connection.is_read
            if exchange.first_s is None:
                exchange.first_s = self._clock()
                self._metrics.first_byte(exchange.first_s - exchange.began_s)
            if exchange.is_step:
                reader.feed(data)
            if last or reader.done:
                is_fault = response.status in _WORKER_FAULTS
                choice.outcome = Outcome.FAILED if is_fault else Outcome.SERVED
                is_read = exchange.is_step and response.status == 200
                answer = self._end(exchange, reader if is_read else None)
                if not head_is_sent and answer is not None:
                    headers += _cached_tokens(answer)
            if not head_is_sent:
                head_is_sent = True
                await send(head)
            await send({"type": "http.response.body", "body": data, "more_body": not last})
            if last:
                return

    def _response_headers(
        self, exchange: Exchange, response: Response, choice: Choice
    ) -> list[tuple[bytes, bytes]]:
        headers = downstream_headers(response.raw_headers)
        headers.append((b"x-saga-worker", choice.worker.worker_id.encode()))
        headers.append((b"x-saga-route", choice.route.encode()))
        if exchange.said_session_id is not None:
            headers.append((b"x-saga-session-id", exchange.said_session_id.encode()))
        if is_event_stream(response.header(b"content-type") or "") and not any(
            name == b"x-accel-buffering" for name, _ in headers
        ):
            headers.append((b"x-accel-buffering", b"no"))
        return headers

    async def _break_off(
        self,
        exchange: Exchange,
        response: Response,
        worker_id: str,
        error: Exception,
        send: Send,
    ) -> None:
        """Show the client that a worker did not finish its answer.

        A plain event stream gets an error event and no ``[DONE]``. Any other response is left
        incomplete, upon which the server closes the connection.
        """
        plain_stream = (
            is_event_stream(response.header(b"content-type") or "")
            and response.header(b"content-encoding") is None
            and response.header(b"content-length") is None
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

    def _account(self, exchange: Exchange, answer: Answer | None, now_s: float) -> None:
        """Tell metrics and traces of the exchange, when its token counts are known."""
        ended_ns = time.time_ns()

        def tell(usage: Usage | None) -> None:
            if exchange.first_s is not None:
                stream_s = now_s - exchange.first_s
                self._metrics.finished(now_s - exchange.began_s, stream_s, usage)
            self._tracing.end(exchange.span, answer, exchange.status, usage, ended_ns)

        session, worker_id = exchange.session, exchange.worker_id
        usage = answer.usage if answer is not None else None
        is_told = worker_id is not None and self._states.follows(worker_id)
        if answer is None or session is None or worker_id is None or not is_told:
            tell(usage)
        elif usage is None:
            self._desk.wait_for(worker_id, session.session_id, tell)
        else:
            tell(usage)
            # The worker will say it too: that is of no other answer of the session.
            self._desk.wait_for(worker_id, session.session_id, lambda _: None)

    def _end(self, exchange: Exchange, reader: SideReader | None) -> Answer | None:
        """The exchange is over, once; ``reader`` knows its answer, None when it has none."""
        if exchange.over:
            return None
        exchange.over = True
        answer = reader.finish() if reader is not None else None
        if reader is not None and answer is None:
            self._stats.answers_unread += 1
        worker_id = exchange.worker_id
        if answer is not None and answer.response_id is not None and worker_id is not None:
            made = Made(worker_id, exchange.said_session_id)
            self._responses.put(exchange.tenant, answer.response_id, made)
        now_s = self._clock()
        # First of all: a session that is not told of its request's end would run for ever.
        self._dispatcher.ended(exchange, None if answer is None else answer.usage)
        if exchange.found is not None:
            self._identifier.ended(exchange.found, answer)
        session = exchange.session
        if session is not None:
            addressed = self._sessions.end_step(session, answer, final=exchange.final, now_s=now_s)
            if addressed is not None:
                self._notifier.put(addressed.worker_id, addressed.notice)
            if session.paused_s is not None:
                self._dispatcher.paused(session.session_id, session.p_return, session.pause_s)
        self._account(exchange, answer, now_s)
        if _requests_log.isEnabledFor(logging.INFO):
            _requests_log.info("request", extra={"fields": exchange.log_fields(now_s)})
        return answer


def _cached_tokens(answer: Answer) -> list[tuple[bytes, bytes]]:
    """The header that says how much of the prompt was cached, where the worker has said so."""
    if answer.usage is None or answer.usage.cached_tokens is None:
        return []
    return [(b"x-saga-cached-tokens", str(answer.usage.cached_tokens).encode())]


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
