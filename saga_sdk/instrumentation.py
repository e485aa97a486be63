"""The switch: wraps the OpenAI client's request hook."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from saga_core.hints import HEADERS, Hints
from saga_sdk import headers
from saga_sdk.context import Call, current_call
from saga_sdk.guard import Guard, warn_once
from saga_sdk.hosts import allowed

_METHOD = "_prepare_request"


@dataclass(slots=True)
class _Patch:
    """One wrapped method: where it stands, what it was and what it is now."""

    owner: type
    original: Callable[..., Any]
    wrapper: Callable[..., Any]


@dataclass(slots=True)
class _State:
    """What is switched on in this process. Changed under the lock, read without it."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    workflow: str | None = None
    patches: list[_Patch] = field(default_factory=list)


_state = _State()


def instrument(base_urls: str | Iterable[str] | None = None, workflow: str | None = None) -> None:
    """Add hints to every LLM call of this process that goes to an allow-listed host.

    Wraps the OpenAI client, sync and async, and installs a LangChain handler where LangChain is
    there. Calling it again adds base URLs and changes nothing else.

    Args:
        base_urls: hosts that may see hints, by scheme, host and port; by default the URLs of the
            environment variable SAGA_BASE_URL (separated by commas), else OPENAI_BASE_URL.
        workflow: the workflow of calls that nothing else names.

    Raises:
        SettingsError: a URL in ``base_urls`` is not an absolute http or https one.
    """
    allowed.add(base_urls)
    if workflow is not None:
        with _state.lock:
            _state.workflow = str(workflow)
    patch_openai()
    _switch_langchain(on=True)


def uninstrument() -> None:
    """Undo :func:`instrument`: no more hints, the wrapped methods are the original ones again.

    Handlers added by hand stay where they are, but their hints are no longer sent.
    """
    allowed.clear()
    with _state.lock:
        _state.workflow = None
        kept = []
        for patch in _state.patches:
            if vars(patch.owner).get(_METHOD) is patch.wrapper:
                setattr(patch.owner, _METHOD, patch.original)
            else:
                # Somebody wrapped our wrapper: it stays below theirs, and no host is allowed.
                kept.append(patch)
        _state.patches = kept
    _switch_langchain(on=False)


def default_workflow() -> str | None:
    """The workflow that :func:`instrument` was told."""
    return _state.workflow


def patch_openai() -> None:
    """Wrap the OpenAI client's request hook, once; without that client, say so and go on."""
    with Guard("patch of the OpenAI client"), _state.lock:
        try:
            openai = importlib.import_module("openai")
        except ImportError as error:
            warn_once("import of openai", f"no hints: openai cannot be imported ({error})")
            return
        _patch(openai.OpenAI, _wrap)
        _patch(openai.AsyncOpenAI, _wrap_async)


def _patch(owner: type, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, _METHOD)
    ours = {id(patch.wrapper) for patch in _state.patches}
    layer = original
    while layer is not None:
        if id(layer) in ours:
            return
        layer = getattr(layer, "__wrapped__", None)
    wrapper = wrap(original)
    setattr(owner, _METHOD, wrapper)
    _state.patches.append(_Patch(owner, original, wrapper))


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare_request(self: Any, request: headers.Request) -> Any:
        result = original(self, request)
        _add_headers(request)
        return result

    return prepare_request


def _wrap_async(original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(original)
    async def prepare_request(self: Any, request: headers.Request) -> Any:
        result = await original(self, request)
        _add_headers(request)
        return result

    return prepare_request


def _add_headers(request: headers.Request) -> None:
    with Guard("request hook"):
        if not allowed or not headers.is_llm_call(request):
            return
        # The request's own URL, not the client's: it says where the headers go.
        url = str(request.url)
        if url not in allowed:
            return
        call = current_call(is_retry=headers.is_retry(request))
        if call is None and _state.workflow is not None:
            call = Call(Hints(workflow_id=_state.workflow))
        if call is not None:
            headers.add_hints(request.headers, call.hints_at(time.monotonic()))
            _note_session(request, call, url)
        with Guard("trace context"):
            headers.add_trace_context(request.headers)


def _note_session(request: headers.Request, call: Call, url: str) -> None:
    # A session id that the user set by hand is not ours to end.
    session = call.session
    if session is not None and request.headers.get(HEADERS["session_id"]) == session.id:
        session.sent_to(headers.events_url(url))


def _switch_langchain(*, on: bool) -> None:
    with Guard("LangChain hook"):
        # Switching off something that was never imported must not import it.
        if on and importlib.util.find_spec("langchain_core") is None:
            return
        langchain = _loaded_langchain(load=on)
        if langchain is not None:
            langchain.switch_automatic(on=on)


def _loaded_langchain(*, load: bool) -> Any:
    name = "saga_sdk.integrations.langchain"
    return importlib.import_module(name) if load else sys.modules.get(name)
