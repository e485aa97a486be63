"""The switch: the allow list, patching and its undoing, and faults inside the hooks."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import openai
import pytest

import saga_sdk as saga
from saga_core.errors import SettingsError
from saga_core.hints import Hints
from saga_sdk import clients, headers, semconv
from saga_sdk.hosts import allowed
from saga_sdk.integrations import langchain
from saga_sdk.testing import ScriptedServer
from tests.sdk.agents import WAYS, ask, make_agent, run


def originals() -> tuple[Any, Any]:
    return openai.OpenAI._prepare_request, openai.AsyncOpenAI._prepare_request


def call_in_block(server: ScriptedServer) -> None:
    with (
        openai.OpenAI(base_url=server.base_url, api_key="none") as client,
        saga.workflow("swe"),
    ):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])


def test_uninstrument_restores_the_methods_and_stops_headers(server: ScriptedServer) -> None:
    before = originals()
    saga.instrument(server.base_url)
    saga.instrument(server.base_url)
    assert all(now is not then for now, then in zip(originals(), before, strict=True))
    saga.uninstrument()
    saga.uninstrument()
    assert all(now is then for now, then in zip(originals(), before, strict=True))
    make_agent(server.base_url).invoke(ask("read_file"))
    call_in_block(server)
    assert [request.saga_headers for request in server.requests] == [{}, {}, {}]


def test_uninstrument_during_a_run_leaves_nothing(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    stream = make_agent(server.base_url).stream(ask("read_file"), stream_mode="values")
    next(stream)
    saga.uninstrument()
    # What began before the switch ends after it; the fixture checks that the maps are empty.
    assert len(list(stream)) == 3


def test_instrument_again_works_again(server: ScriptedServer) -> None:
    for _ in range(2):
        saga.instrument(server.base_url)
        make_agent(server.base_url).invoke(ask("read_file"))
        saga.uninstrument()
    assert [h.step for h in server.hints] == [0, 1, 0, 1]


@pytest.mark.parametrize("marked", [True, False])
def test_a_wrapper_around_ours_survives(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, marked: bool
) -> None:
    saga.instrument(server.base_url)
    ours = openai.OpenAI._prepare_request

    def theirs(self: Any, request: Any) -> Any:
        return ours(self, request)

    wrapper: Callable[..., Any] = functools.wraps(ours)(theirs) if marked else theirs
    with monkeypatch.context() as patch:
        patch.setattr(openai.OpenAI, "_prepare_request", wrapper)
        saga.uninstrument()
        assert openai.OpenAI._prepare_request is wrapper
        call_in_block(server)
        saga.instrument(server.base_url)
        call_in_block(server)
    assert [bool(r.saga_headers) for r in server.requests] == [False, True]
    assert server.hints[1].step == 0


def test_no_base_url_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    saga.instrument()
    saga.instrument()
    assert len([r for r in caplog.records if r.name == "saga_sdk"]) == 1


def test_the_environment_names_base_urls(
    server: ScriptedServer, other_server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAGA_BASE_URL", f"nonsense, {server.base_url}")
    monkeypatch.setenv("OPENAI_BASE_URL", other_server.base_url)
    saga.instrument()
    call_in_block(server)
    call_in_block(other_server)
    monkeypatch.delenv("SAGA_BASE_URL")
    saga.SagaCallbackHandler()
    call_in_block(other_server)
    assert [bool(r.saga_headers) for r in server.requests] == [True]
    assert [bool(r.saga_headers) for r in other_server.requests] == [False, True]


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://a/", "http://", "http://[x", "http://a:b"]
)
def test_a_bad_base_url_is_an_error_and_changes_nothing(url: str) -> None:
    before = originals()
    with pytest.raises(SettingsError):
        saga.instrument([url])
    with pytest.raises(SettingsError):
        saga.SagaCallbackHandler(base_urls=url)
    assert originals() == before


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("HTTP://Gateway/v1", ("http", "gateway", 80)),
        ("https://gateway", ("https", "gateway", 443)),
        ("http://user:secret@gateway:8000/v1", ("http", "gateway", 8000)),
        ("http://[::1]:8000/v1", ("http", "::1", 8000)),
    ],
)
def test_origins(url: str, origin: tuple[str, str, int]) -> None:
    assert headers.origin_of(url) == origin


def test_baggage_stays_within_the_limit() -> None:
    existing = "k=" + "v" * (headers.MAX_BAGGAGE_BYTES - 30)
    merged = headers.merge_baggage(existing, Hints(workflow_id="w", task_id="t" * 100))
    assert merged == f"{existing},saga.workflow_id=w"


class InjectedFault(Exception):
    """A failure of SAGA's own code."""


def fail(*args: Any, **kwargs: Any) -> Any:
    raise InjectedFault


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "tracker": lambda patch: patch.setattr(langchain, "tracker", None),
    "contextvar": lambda patch: patch.setattr(langchain, "enter_call", fail),
    "current call": lambda patch: patch.setattr(clients, "current_call", fail),
    "headers": lambda patch: patch.setattr(headers, "add_hints", fail),
    "trace": lambda patch: patch.setattr(semconv, "current_span", fail),
    "retry": lambda patch: patch.setattr(headers, "is_retry", fail),
    "hosts": lambda patch: patch.setattr(allowed, "_memory", None),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("how", WAYS)
async def test_a_fault_of_ours_never_reaches_the_program(
    server: ScriptedServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
    how: str,
) -> None:
    handler = saga.SagaCallbackHandler(base_urls=server.base_url)
    FAULTS[fault](monkeypatch)
    answer = await run(make_agent(server.base_url), how, "read_file", {"callbacks": [handler]})
    assert answer == "done: read_file"
    assert len(server.requests) == 2
    kinds = [r.getMessage() for r in caplog.records if r.name == "saga_sdk"]
    assert kinds
    assert len(kinds) == len(set(kinds)), "a kind of failure is logged once"
    assert not [r for r in caplog.records if r.name.startswith("langchain")]


def test_a_failed_trace_context_costs_no_hints(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    saga.instrument(server.base_url)
    monkeypatch.setattr(semconv, "current_span", fail)
    call_in_block(server)
    assert server.hints[0].step == 0


def test_an_interrupt_is_no_fault_of_ours(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    saga.instrument(server.base_url)
    monkeypatch.setattr(headers, "add_hints", interrupt)
    with pytest.raises(KeyboardInterrupt):
        call_in_block(server)


def test_the_original_methods_exception_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("user's")

    def broken(self: Any, request: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(openai.OpenAI, "_prepare_request", broken)
        saga.instrument("http://127.0.0.1:1/v1")
        with (
            openai.OpenAI(base_url="http://127.0.0.1:1/v1", api_key="none") as client,
            pytest.raises(RuntimeError) as caught,
        ):
            client.chat.completions.create(model="m", messages=[])
        saga.uninstrument()
    assert caught.value is error


def test_switching_from_many_threads_patches_once(server: ScriptedServer) -> None:
    before = originals()
    together = threading.Barrier(8)

    def work() -> None:
        together.wait(30)
        saga.instrument(server.base_url)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [getattr(now, "__wrapped__", None) for now in originals()] == list(before)
    make_agent(server.base_url).invoke(ask(""))
    assert [h.step for h in server.hints] == [0]


def test_all_is_complete() -> None:
    modules = {name for name, value in vars(saga).items() if type(value) is type(sys)}
    public = {name for name in dir(saga) if not name.startswith("_")}
    assert public - modules - {"TYPE_CHECKING", "Any"} == set(saga.__all__)
    assert all(getattr(saga, name) is not None for name in saga.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        saga.nothing  # noqa: B018 (the access is the test)


def test_the_import_is_light() -> None:
    script = "import json, sys, saga_sdk; print(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    loaded = set(json.loads(result.stdout))
    heavy = {"openai", "langchain_core", "langchain", "langgraph", "httpx", "httpx2", "pydantic"}
    assert loaded & heavy == set()
    core = {name for name in loaded if name.startswith("saga_core.")}
    allowed = {"hints", "types", "errors", "settings"}
    assert core <= {f"saga_core.{name}" for name in allowed}
    # opentelemetry-api is the one dependency; typing_extensions is its own.
    allowed_packages = {"saga_sdk", "saga_core", "opentelemetry", "typing_extensions"}
    packages = {name.partition(".")[0] for name in loaded}
    foreign = packages - set(sys.stdlib_module_names) - allowed_packages - at_start()
    assert {name for name in foreign if not name.startswith("_")} == set()


def at_start() -> set[str]:
    """What the interpreter loads by itself, through the environment's ``.pth`` files."""
    script = "import json, sys; print(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    return {name.partition(".")[0] for name in json.loads(result.stdout)}
