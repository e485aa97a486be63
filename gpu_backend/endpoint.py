"""The `vllm.endpoint_plugins` entry point: control API and metrics on vLLM's own HTTP port."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import State
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from vllm import envs
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from gpu_backend import compat
from gpu_backend.config import PLUGIN, WorkerConfig
from gpu_backend.control import Answer, EngineControl, EngineSilent, Sleep, keep_ticking
from gpu_backend.metrics import exposition
from gpu_backend.state_feed import (
    MAX_INTERVAL_S,
    MAX_SESSIONS,
    MIN_INTERVAL_S,
    StateFeed,
    merged,
)
from gpu_backend.telemetry import GPUMemoryReader
from saga_core.errors import NoticeError, SagaError
from saga_core.notices import decode_notices

logger = logging.getLogger("vllm.saga")

MAX_BODY_BYTES = 2 * 2**20
SCRAPE_MAX_AGE_S = 1.0

_METRICS = "/metrics"
_STATE = "saga_endpoint"


class SagaEndpoint:
    """Routes of the control API, which ask for vLLM's API key where one is set, and metrics.

    Args:
        clock: monotonic seconds.
        sleep: waits for so many seconds.
    """

    name = PLUGIN
    required_tasks: Any = ("generate",)

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Sleep = asyncio.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._control = EngineControl(None)
        self._feed = StateFeed(self._control.ask)
        self._gpus = GPUMemoryReader()
        self._authentication: AuthenticationMiddleware | None = None
        self._app_state: State | None = None
        self._stock_metrics: Callable[[Request], Response] | None = None
        self._ticking: asyncio.Task[None] | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes to vLLM's app, and our series to those that it exposes."""
        app.add_api_route("/saga/v1/sessions:notify", self.notify, methods=["POST"])
        app.add_api_route("/saga/v1/state", self.state, methods=["GET"])
        app.add_api_route("/saga/v1/state:watch", self.watch, methods=["GET"])
        self._attach_metrics(app)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Keep what the routes need: the way to the engine, and the API keys."""
        self._control = EngineControl(getattr(engine_client, "engine_core", None))
        self._feed = StateFeed(self._control.ask, self._clock, self._sleep)
        keys = [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]
        if keys:
            self._authentication = AuthenticationMiddleware(state, keys)  # type: ignore[arg-type]
        self._app_state = state
        setattr(state, _STATE, self)
        if engine_client is not None and _prefetches():
            ticking = keep_ticking(self._control.ask, self._is_stopping, self._sleep)
            self._ticking = asyncio.create_task(ticking)

    def _attach_metrics(self, app: FastAPI) -> None:
        """Put our route in front of vLLM's of the same path, which it calls."""
        routes = app.router.routes
        stock = (r for r in routes if isinstance(r, APIRoute) and r.path == _METRICS)
        route = next(stock, None)
        if route is None or inspect.iscoroutinefunction(route.endpoint):
            logger.warning("SAGA has no metrics: vLLM's route %s is not what it was", _METRICS)
            return
        self._stock_metrics = route.endpoint
        place = routes.index(route)
        app.add_api_route(_METRICS, self.metrics, methods=["GET"])
        routes.insert(place, routes.pop())

    async def notify(self, request: Request) -> Response:
        """Take notices about sessions. 422 when the body is malformed; nothing changes then."""
        if not self._may(request):
            return _unauthorized()
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                return _error(413, f"the body must be at most {MAX_BODY_BYTES} bytes")
        try:
            notices = json.loads(body)
            decode_notices(notices)
        except NoticeError as error:
            return _error(422, str(error))
        except (ValueError, RecursionError) as error:
            return _error(422, f"the body is not JSON: {error}")
        try:
            return _json(merged(await self._control.ask({"notify": notices})))
        except EngineSilent as error:
            return _error(503, str(error))

    async def state(self, request: Request) -> Response:
        """What the worker holds, and its counters."""
        if not self._may(request):
            return _unauthorized()
        try:
            sessions = int(_number(request, "sessions", 0, 0, MAX_SESSIONS))
            steps = bool(_number(request, "steps", 0, 0, 1))
            return _json(await self._feed.now(sessions, steps=steps))
        except EngineSilent as error:
            return _error(503, str(error))
        except SagaError as error:
            return _error(422, str(error))

    async def watch(self, request: Request) -> Response:
        """The state as a stream of server-sent events."""
        if not self._may(request):
            return _unauthorized()
        try:
            interval_s = _number(request, "interval_s", 1.0, MIN_INTERVAL_S, MAX_INTERVAL_S)
            sessions = int(_number(request, "sessions", 0, 0, MAX_SESSIONS))
            steps = bool(_number(request, "steps", 0, 0, 1))
        except SagaError as error:
            return _error(422, str(error))
        states = self._feed.watch(
            interval_s=interval_s, sessions=sessions, stopping=self._is_stopping, steps=steps
        )
        try:
            first = await anext(states)
        except EngineSilent as error:
            return _error(503, str(error))
        return _EventStream(_events(first, states))

    async def metrics(self, request: Request) -> Response:
        """vLLM's own metrics, and the worker's."""
        assert self._stock_metrics is not None
        try:
            state = await self._feed.recent(SCRAPE_MAX_AGE_S)
        except EngineSilent:
            state = None
        return await run_in_threadpool(self._with_ours, self._stock_metrics, request, state)

    def _with_ours(
        self, stock: Callable[[Request], Response], request: Request, state: Answer | None
    ) -> Response:
        response = stock(request)
        try:
            ours = exposition(state, self._gpus.read())
        except Exception:
            logger.exception("SAGA's metrics are left out of vLLM's")
            return response
        response.body = bytes(response.body) + ours
        response.headers["Content-Length"] = str(len(response.body))
        return response

    def _is_stopping(self) -> bool:
        server = getattr(self._app_state, "server", None)
        return bool(getattr(server, "should_exit", False))

    def _may(self, request: Request) -> bool:
        return self._authentication is None or self._authentication.verify_token(request.headers)


class _EventStream(StreamingResponse):
    """Server-sent events; the source is closed as soon as the client has gone."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().__call__(scope, receive, send)


async def _events(first: Answer, states: Any) -> AsyncIterator[str]:
    async with aclosing(states):
        yield _event("state", first)
        try:
            async for state in states:
                yield _event("state", state)
        except EngineSilent as error:
            yield _event("error", _error_body(503, str(error)))


def _event(kind: str, data: Answer) -> str:
    return f"event: {kind}\ndata: {_dumps(data)}\n\n"


def _prefetches() -> bool:
    try:
        return WorkerConfig.from_environment().prefetch
    except SagaError:
        return False  # The scheduler has found the same and said so.


def _number(request: Request, name: str, default: float, low: float, high: float) -> float:
    text = request.query_params.get(name)
    if text is None:
        return default
    kind = "a number" if isinstance(default, float) else "a whole number"
    try:
        value = float(text) if isinstance(default, float) else int(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise SagaError(f"{name} must be {kind} from {low:g} to {high:g}")
    return value


def _dumps(data: Answer) -> str:
    """JSON in ASCII: a session id may hold what UTF-8 cannot."""
    return json.dumps(data, separators=(",", ":"))


def _json(data: Answer, status: int = 200) -> Response:
    return Response(_dumps(data), status, media_type="application/json")


def _error_body(status: int, message: str) -> Answer:
    return {"error": {"message": message, "code": status}}


def _error(status: int, message: str) -> Response:
    return _json(_error_body(status, message), status)


def _unauthorized() -> Response:
    return _error(401, "this worker asks for an API key: send Authorization: Bearer KEY")


def plugin() -> SagaEndpoint:
    """The factory that vLLM calls.

    Raises:
        RuntimeError: this vLLM is not one that the routes fit; it serves without them.
    """
    if (mismatch := compat.find_endpoint_mismatch()) is not None:
        raise RuntimeError(mismatch)
    return SagaEndpoint()
