"""The hook in the HTTP clients: it adds the hints to the requests that are LLM calls.

The OpenAI client builds a request, shows it to ``_prepare_request``, and sends it with httpx.
Other clients, and programs that speak HTTP themselves, come by httpx alone.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

from saga_core.hints import HEADERS, Hints
from saga_sdk import headers, semconv
from saga_sdk.context import Call, current_call
from saga_sdk.dialects import Dialect
from saga_sdk.guard import Guard
from saga_sdk.hosts import allowed
from saga_sdk.imports import ImportWatch
from saga_sdk.options import options
from saga_sdk.patches import Patches

# In the extensions of a request that was seen: the headers of other dialects that were added.
_MARK = "saga_sdk"
_SESSION_ID = HEADERS["session_id"].lower().encode()
_TASK_ID = HEADERS["task_id"].lower().encode()
_HOOK = Guard("request hook")
_TRACE = Guard("trace context")
_REDIRECT = Guard("redirect hook")

_patches = Patches()


def watch(imports: ImportWatch) -> None:
    """Wrap the clients that the program has imported, and the others once it imports them."""
    imports.watch("openai", _wrap_openai)
    imports.watch("httpx", _wrap_httpx)
    imports.watch("httpx2", _wrap_httpx)


def unwrap() -> None:
    """Restore the clients."""
    _patches.undo()


def add_headers(request: headers.Request) -> None:
    """Add the hints to a request, if it is an LLM call to an allow-listed host; never raises."""
    with _HOOK:
        if request.method != "POST" or not allowed or _MARK in request.extensions:
            return
        # The request's own URL, not the client's: it says where the headers go.
        events_url = allowed.events_url(str(request.url))
        if events_url is None:
            return
        request.extensions[_MARK] = ()
        sent = headers.read(request)
        call = current_call(is_retry=headers.is_retry(sent))
        if call is None and options.workflow is not None:
            call = Call(Hints(workflow_id=options.workflow))
        if call is not None:
            _add_hints(request, sent, call, events_url)
        with _TRACE:
            span = semconv.current_span()
            if span is not None:
                headers.add_trace_context(request.headers)
                if call is not None and options.span_attributes:
                    semconv.annotate(span, call.hints)


def _add_hints(request: headers.Request, sent: headers.Sent, call: Call, events_url: str) -> None:
    deadline_ms = None
    if call.deadline_at_s is not None:
        deadline_ms = call.deadline_ms(time.monotonic())
    dialects = options.dialects
    request.extensions[_MARK] = headers.add_hints(
        request.headers, sent, call.hints, deadline_ms=deadline_ms, dialects=dialects
    )
    if Dialect.SAGA in dialects:
        _note_gateway(sent, call, events_url)


def _note_gateway(sent: headers.Sent, call: Call, events_url: str) -> None:
    for told, header in ((call.session, _SESSION_ID), (call.task, _TASK_ID)):
        if told is None or told.is_sent_to(events_url):
            continue
        # An id that the user set by hand is not ours to end.
        if sent.get(header, b"").decode("latin-1") not in ("", told.id):
            return
        authorization = sent.get(b"authorization")
        told.sent_to(events_url, None if authorization is None else authorization.decode("latin-1"))


def _wrap_openai(openai: ModuleType) -> None:
    _patches.wrap(openai.OpenAI, "_prepare_request", _prepare_request)
    _patches.wrap(openai.AsyncOpenAI, "_prepare_request", _prepare_request_async)


def _wrap_httpx(httpx: ModuleType) -> None:
    for client, send in ((httpx.Client, _send), (httpx.AsyncClient, _send_async)):
        # First this: a redirect would carry the hints to any host.
        _patches.wrap(client, "_build_redirect_request", _build_redirect_request)
        _patches.wrap(client, "send", send)


def _prepare_request(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare_request(self: Any, request: headers.Request) -> Any:
        result = original(self, request)
        add_headers(request)
        return result

    return prepare_request


def _prepare_request_async(original: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def prepare_request(self: Any, request: headers.Request) -> Any:
        result = await original(self, request)
        add_headers(request)
        return result

    return prepare_request


def _send(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def send(self: Any, request: headers.Request, *args: Any, **kwargs: Any) -> Any:
        add_headers(request)
        return original(self, request, *args, **kwargs)

    return send


def _send_async(original: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def send(self: Any, request: headers.Request, *args: Any, **kwargs: Any) -> Any:
        add_headers(request)
        return await original(self, request, *args, **kwargs)

    return send


def _build_redirect_request(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_redirect_request(self: Any, request: headers.Request, response: Any) -> Any:
        redirected = original(self, request, response)
        with _REDIRECT:
            added = redirected.extensions.get(_MARK)
            if added is not None and str(redirected.url) not in allowed:
                headers.remove_hints(redirected.headers, added)
        return redirected

    return build_redirect_request
