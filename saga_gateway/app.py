"""The gateway as an ASGI application, and as a process."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from importlib.metadata import version
from typing import Any

import uvicorn
from starlette.middleware.cors import CORSMiddleware

from saga_core.errors import SagaError, SettingsError
from saga_gateway.asgi import (
    BodyTooLargeError,
    ClientGoneError,
    Message,
    Receive,
    Scope,
    Send,
    read_body,
    run_until_gone,
    send_bytes,
    send_error,
    send_json,
)
from saga_gateway.dashboard import Dashboard, is_below
from saga_gateway.discovery import Discovery
from saga_gateway.dispatch import Dispatcher
from saga_gateway.events import EventError, EventKind, parse_events
from saga_gateway.graphs import WORKFLOWS_PATH, GraphFile, GraphRoutes, workflow_of
from saga_gateway.headers import OWN_RESPONSE_HEADERS, decode_headers, upstream_headers
from saga_gateway.health import HealthChecks
from saga_gateway.http import bounded
from saga_gateway.identity import Identity, KeyFile, admit, client_of, is_loopback
from saga_gateway.logs import set_up
from saga_gateway.metrics import CONTENT_TYPE as METRICS_TYPE
from saga_gateway.models import merged_models
from saga_gateway.notifier import Notifier
from saga_gateway.overview import Overview, counts_of
from saga_gateway.parts import Parts
from saga_gateway.proxy import Proxy
from saga_gateway.routes import RESPONSE_PREFIX, SINGLE, STEPS, response_method
from saga_gateway.settings import GatewaySettings
from saga_gateway.upstream import Upstream
from saga_gateway.usage import UsageDesk
from saga_gateway.worker_state import WorkerStates
from saga_gateway.workers import Worker

__all__ = ["Gateway", "GatewaySettings", "ListenError", "serve"]

_CLIENT_KEEP_ALIVE_S = 75
_MAX_EVENTS_BYTES = 2**20
_OVERVIEW_PATH = "/saga/v1/overview"
_WORKERS_PATH = "/saga/v1/workers"

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


class ListenError(SagaError):
    """The gateway cannot listen where it was told to; the message says where and what to do."""


class Gateway:
    """The ASGI application.

    Its connections and tasks live from the lifespan's startup to its shutdown.
    """

    def __init__(
        self, settings: GatewaySettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.parts = parts = Parts.make(settings, clock)
        self.settings, self.stats = settings, parts.stats
        self.workers, self.sessions = parts.workers, parts.sessions
        self.gatekeeper, self.metrics = parts.gatekeeper, parts.metrics
        self._clock = clock
        self._graphs = GraphRoutes(parts.sessions.graphs, self._admit, time.time)
        self._routes: dict[str, dict[str, Handler]] = {}
        self._proxy: Proxy | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        watched = _Watched(send)
        await self._serve(scope, receive, watched)
        if watched.status:
            path = scope["path"].rstrip("/")
            name = path if path in self._routes else "other"
            self.metrics.answered(
                RESPONSE_PREFIX if response_method(path) else name, watched.status
            )

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        handlers = self._handlers(path)
        if handlers is None and path.endswith("/"):
            path = path.rstrip("/")
            handlers, scope = self._handlers(path), {**scope, "path": path}
        if handlers is None:
            await send_error(send, 404, f"no such path: {path}", code="not_found")
            return
        handler = handlers.get(method)
        if handler is not None:
            await handler(scope, receive, send)
        elif method == "HEAD" and "GET" in handlers:
            await handlers["GET"]({**scope, "method": "GET"}, receive, _without_body(send))
        else:
            await _refuse_method(path, method, handlers, send)

    def _handlers(self, path: str) -> dict[str, Handler] | None:
        """What a path takes, by method; None when there is no such path."""
        handlers = self._routes.get(path)
        if handlers is not None or self._proxy is None:
            return handlers
        method = response_method(path)
        if method is not None:
            return {method: self._proxy.single}
        if workflow_of(path) is not None:
            return {"GET": self._graphs.show, "PUT": self._graphs.declare}
        if is_below(path):
            return {"GET": self._dashboard.serve}
        return {"POST": self._drain} if path.startswith(_WORKERS_PATH + "/") else None

    async def startup(self) -> None:
        """Open the client to the workers; start delivering notices and checking health."""
        self._upstream = Upstream(self.settings, self.stats)
        self._notifier = Notifier(
            self.workers,
            self._upstream.notify,
            max_queued=self.settings.max_queued_notices,
            stats=self.stats,
        )
        self._desk = desk = UsageDesk(self._clock)
        self._dispatcher = dispatcher = Dispatcher(
            self.settings,
            self.workers,
            self.sessions,
            self._clock,
            self._notifier.put,
            self.parts.event_log,
        )
        self.metrics.watch_queue(dispatcher)
        self._states = WorkerStates(
            self.workers,
            self._upstream.watch,
            lambda worker_id, step: desk.tell(worker_id, step.session_id, step.usage),
            dispatcher.told,
            desk.give_up,
        )
        self._proxy = proxy = Proxy(
            self.parts, self._upstream, self._notifier, self._states, desk, dispatcher
        )
        self._overview = Overview(self.parts, dispatcher, self._ask)
        graphs = self.sessions.graphs
        self._dashboard = Dashboard(self.gatekeeper, graphs, self._overview)
        passed: dict[str, Handler] = {"GET": proxy.single, "POST": proxy.single}
        self._routes = {
            **dict.fromkeys(self.settings.pass_paths, passed),
            **{path: {"POST": proxy.single} for path in SINGLE},
            **{path: {"POST": proxy.step} for path in STEPS},
            "/v1/models": {"GET": self._models},
            "/saga/v1/events": {"POST": self._events},
            **self._dashboard.routes(),
            _OVERVIEW_PATH: {"GET": self._show_overview},
            _WORKERS_PATH: {"GET": self._list_workers},
            WORKFLOWS_PATH: {"GET": self._graphs.list},
            "/health": {"GET": self._health},
            "/ready": {"GET": self._ready},
            "/metrics": {"GET": self._metrics},
            "/version": {"GET": self._version},
        }
        self._health_checks = HealthChecks(
            self.workers,
            self._get,
            self.settings.health_interval_s,
            self._clock,
            dispatcher.workers_changed,
        )
        await self._notifier.follow()
        await self._health_checks.follow()
        await self._states.follow()
        watched = [self._watch_source(source) for source in self.workers.sources]
        watched.append(dispatcher.run())
        if self.gatekeeper.keys is not None:
            watched.append(self._watch_keys(self.gatekeeper.keys))
        if self.parts.graph_file is not None:
            watched.append(self._keep_graphs(self.parts.graph_file))
        self._watching = [asyncio.create_task(each) for each in watched]

    async def shutdown(self) -> None:
        """Stop delivering notices and checks, and close the connections to the workers."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await self._health_checks.stop()
        await self._states.stop()
        self._desk.close()
        self._dispatcher.close()
        await self._notifier.stop()
        await self._upstream.close()
        if self.parts.graph_file is not None:
            await self.parts.graph_file.save(self.sessions.graphs)
        await asyncio.to_thread(self.parts.tracing.close)

    async def _watch_keys(self, keys: KeyFile) -> None:
        while True:
            await asyncio.sleep(self.settings.reload_s)
            keys.reload()

    async def _keep_graphs(self, file: GraphFile) -> None:
        while True:
            await asyncio.sleep(self.settings.state_save_s)
            await file.save(self.sessions.graphs)

    async def _watch_source(self, source: Discovery) -> None:
        async with aclosing(source.changes()) as changes:
            async for found in changes:
                self.workers.found(source, found)
                self._dispatcher.workers_changed()
                await self._notifier.follow()
                await self._health_checks.follow()
                await self._states.follow()

    async def _get(self, worker: Worker, target: str) -> tuple[int, bytes]:
        return await self._upstream.get(worker, target, [], self.settings.health_timeout_s)

    async def _ask(self, worker: Worker, target: str, timeout_s: float) -> tuple[int, bytes]:
        return await self._upstream.get(worker, target, [], timeout_s)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await self.startup()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.shutdown()
        await send({"type": "lifespan.shutdown.complete"})

    async def _models(self, scope: Scope, receive: Receive, send: Send) -> None:
        await run_until_gone(receive, self._send_models(scope, send))

    async def _send_models(self, scope: Scope, send: Send) -> None:
        came = decode_headers(scope["headers"])
        if await admit(self.gatekeeper, scope, came, send) is None:
            return
        passed = self.gatekeeper.strip(upstream_headers(came, is_step_of_session=False))
        headers = [(name, value) for name, value in passed if name != "accept-encoding"]
        reachable = {load.worker_id for load in self.workers.loads(self._clock()) if load.available}
        workers = [worker for worker in self.workers if worker.worker_id in reachable]
        answer = await merged_models(self._upstream, workers, headers)
        if answer is None:
            await send_error(send, 502, "no worker is available", code="worker_unavailable")
        else:
            await send_bytes(send, *answer, content_type=b"application/json")

    async def _health(self, scope: Scope, _receive: Receive, send: Send) -> None:
        loads = self.workers.loads(self._clock())
        healthy = any(load.available for load in loads)
        content: dict[str, object] = {"status": "ok" if healthy else "unavailable"}
        caller = self.gatekeeper.identify(decode_headers(scope["headers"]), client_of(scope))
        if caller is not None and caller.admin:
            now_s = self._clock()
            content |= {
                "workers": [worker.describe(now_s) for worker in self.workers],
                "sessions": len(self.sessions),
                "stats": self.stats.as_dict(),
            }
        await send_json(send, 200 if healthy else 503, content)

    async def _ready(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        loads = self.workers.loads(self._clock())
        ready = any(load.available for load in loads)
        await send_json(send, 200 if ready else 503, {"ready": ready})

    async def _list_workers(self, scope: Scope, _receive: Receive, send: Send) -> None:
        if await self._admit_operator(scope, send):
            now_s = self._clock()
            listed = [worker.describe(now_s) for worker in self.workers]
            await send_json(send, 200, {"workers": listed})

    async def _show_overview(self, scope: Scope, _receive: Receive, send: Send) -> None:
        if not await self._admit_operator(scope, send):
            return
        try:
            counts = counts_of(scope["query_string"])
        except ValueError as error:
            await send_error(send, 422, str(error), code="malformed_query")
            return
        await send_json(send, 200, await self._overview.snapshot(**counts))

    async def _drain(self, scope: Scope, _receive: Receive, send: Send) -> None:
        if not await self._admit_operator(scope, send):
            return
        worker_id, _, verb = scope["path"].removeprefix(_WORKERS_PATH + "/").rpartition(":")
        worker = self.workers.get(worker_id)
        if worker is None or verb not in ("drain", "undrain"):
            message = f"{scope['path']}: POST {_WORKERS_PATH}/HOST:PORT:drain, or :undrain"
            await send_error(send, 404, message, code="not_found")
            return
        worker.draining = verb == "drain"
        self._dispatcher.workers_changed()
        await send_json(send, 200, worker.describe(self._clock()))

    async def _admit(self, scope: Scope, send: Send) -> Identity | None:
        return await admit(self.gatekeeper, scope, decode_headers(scope["headers"]), send)

    async def _admit_operator(self, scope: Scope, send: Send) -> bool:
        caller = await self._admit(scope, send)
        if caller is not None and not caller.admin:
            message = "this key may not see how the gateway is: its entry needs admin = true"
            await send_error(send, 403, message, code="not_admin")
        return caller is not None and caller.admin

    async def _metrics(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send_bytes(send, 200, self.metrics.text(), content_type=METRICS_TYPE)

    async def _version(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send_json(send, 200, {"version": version("saga-sdk")})

    async def _events(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = await self._admit(scope, send)
        if caller is None:
            return
        try:
            events = parse_events(await read_body(receive, _MAX_EVENTS_BYTES))
        except ClientGoneError:
            return
        except BodyTooLargeError:
            message = f"the body is larger than {_MAX_EVENTS_BYTES} bytes"
            await send_error(send, 413, message, code="body_too_large")
            return
        except EventError as error:
            await send_error(send, 422, str(error), code="malformed_events")
            return
        for event in events:
            self.stats.events[event.kind.value] += 1
            if event.session_id is not None:
                self._apply(event.kind, self.gatekeeper.session_id(caller, event.session_id))
            elif event.kind is EventKind.TASK_END and event.task_id is not None:
                self._dispatcher.task_ended(caller.tenant, event.task_id)
        await send_json(send, 202, {"accepted": len(events)})

    def _apply(self, kind: EventKind, session_id: str) -> None:
        addressed = None
        if kind is EventKind.SESSION_END:
            addressed = self.sessions.end(session_id)
        elif kind is EventKind.TOOL_END:
            addressed = self.sessions.resume(session_id)
        if addressed is not None:
            self._notifier.put(addressed.worker_id, addressed.notice)


class _Watched:
    """A ``send`` that remembers the status."""

    __slots__ = ("_send", "status")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if not self.status:
            self.status = message["status"]  # The first message is the response's start.
        await self._send(message)


def _without_body(send: Send) -> Send:
    """For HEAD: the response to GET, without its body."""

    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return send_head


async def _refuse_method(path: str, method: str, handlers: dict[str, Handler], send: Send) -> None:
    """Say what the path takes; that is also the answer to OPTIONS."""
    takes = [*handlers, *(["HEAD"] if "GET" in handlers else []), "OPTIONS"]
    allow = [(b"allow", ", ".join(takes).encode())]
    if method == "OPTIONS":
        await send({"type": "http.response.start", "status": 204, "headers": allow})
        await send({"type": "http.response.body", "body": b""})
        return
    message = f"{path} takes {', '.join(handlers)}"
    await send_error(send, 405, message, code="method_not_allowed", headers=allow)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready_line: str) -> None:
        super().__init__(config)
        self._ready_line = ready_line

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        print(self._ready_line, flush=True)


def server_config(gateway: Gateway) -> uvicorn.Config:
    """How uvicorn serves the gateway: nothing of its own in the responses or the logs."""
    app: Any = gateway
    if gateway.settings.cors_origins:
        app = CORSMiddleware(
            gateway,
            allow_origins=gateway.settings.cors_origins,
            allow_methods=("GET", "POST", "PUT"),
            allow_headers=("*",),
            expose_headers=OWN_RESPONSE_HEADERS,
        )
    return uvicorn.Config(
        app,
        http=bounded(gateway.settings.max_head_bytes),
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=_CLIENT_KEEP_ALIVE_S,
        timeout_graceful_shutdown=gateway.settings.drain_s,
    )


def serve(settings: GatewaySettings) -> None:
    """Serve until SIGINT or SIGTERM; open requests may finish within ``drain_s``.

    Raises:
        ListenError: the address cannot be listened on.
        SettingsError: other hosts could call, and nothing would tell them apart.
    """
    if settings.keys_file is None and not settings.open and not is_loopback(settings.host):
        raise SettingsError(
            f"without API keys the gateway listens to its own host alone, and {settings.host} is "
            "open to others: give keys_file (see `saga key`), or open where the network is trusted"
        )
    set_up(settings.log_format, requests=settings.log_requests)
    gateway = Gateway(settings)
    # A parsed body is a thousand objects that are gone at once, beside tables that stay: looked at
    # as often as Python does by itself, those cost a twentieth of a request.
    gc.set_threshold(20_000, 50, 50)
    with _listen(settings) as listener, _signals_end_quietly():
        port = listener.getsockname()[1]
        workers = ", ".join(worker.worker_id for worker in gateway.workers) or "none yet"
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        ready_line = f"SAGA gateway on http://{host}:{port}, workers: {workers}"
        _Server(server_config(gateway), ready_line).run(sockets=[listener])


def _listen(settings: GatewaySettings) -> socket.socket:
    where = f"{settings.host}:{settings.port}"
    listener: socket.socket | None = None
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ListenError(
            f"cannot listen on {where}: {error.strerror or error}. Choose another port (0 takes "
            "any free one) or address, or stop what listens there."
        ) from error
    return listener


@contextmanager
def _signals_end_quietly() -> Iterator[None]:
    """Keep the signals that uvicorn raises again after its shutdown from ending the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda _number, _frame: None) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
