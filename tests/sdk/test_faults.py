"""Every function of ours that runs inside a hook fails in turn: the program notices nothing."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import openai
import pytest
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from opentelemetry import context

import saga_sdk as saga
from saga_sdk.context import calls, enter_block
from saga_sdk.events import sender
from saga_sdk.guard import Guard
from saga_sdk.runs import tracker
from saga_sdk.testing import ScriptedServer
from tests.sdk.agents import TOOLS, answer_of, ask, make_agent

MODULES = [
    "saga_core.hints",
    "saga_core.types",
    *(
        f"saga_sdk.{name}"
        for name in (
            "clients",
            "context",
            "dialects",
            "ends",
            "events",
            "headers",
            "hosts",
            "integrations.langchain",
            "post",
            "runs",
            "semconv",
            "sessions",
            "tool_table",
            "tools",
        )
    ),
]
# What the program, a client or a framework calls itself, and what has a guard inside.
HOOKS = {
    "clients": {"add_headers", "watch", "unwrap"},
    "context": {"workflow", "WorkflowContext.__enter__", "WorkflowContext.__exit__"},
    "ends": {"end_session", "end_task"},
    "events": {
        "EventSender.flush",
        "EventSender.stop",
        "EventSender.put",
        "EventSender._work",
        "EventSender._flush_at_exit",
    },
    "tool_table": {"tool_types"},
    "tools": {
        "tool",
        "_ToolRun.start",
        "_ToolRun.end",
        "_ToolRun.enter",
        "_ToolRun.leave",
        "_ToolRun.run",
    },
}


def functions() -> Iterator[tuple[str, Any, str]]:
    """Each function and method, with where it stands."""
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        hooks = HOOKS.get(module_name.rpartition(".")[2], set())
        owners = [module, *(c for c in vars(module).values() if inspect.isclass(c))]
        for owner in owners:
            if getattr(owner, "__module__", module_name) != module_name:
                continue
            for name, value in vars(owner).items():
                label = name if owner is module else f"{owner.__name__}.{name}"
                is_ours = inspect.isfunction(value) and value.__module__ == module_name
                is_init = name.startswith("__") and name not in ("__contains__", "__bool__")
                # A framework calls these; they are one line above a guarded one.
                is_callback = name.startswith("on_") or name in ("_start", "_start_call", "_end")
                if not is_ours or is_init or label in hooks:
                    continue
                if module_name.endswith("langchain") and is_callback:
                    continue
                if label.startswith(("_of_", "_prepare", "_send", "_build_redirect", "_wrap_")):
                    continue
                yield f"{module_name.rpartition('.')[2]}.{label}", owner, name


FUNCTIONS = {label: (owner, name) for label, owner, name in functions()}


class InjectedFault(Exception):
    """A failure of SAGA's own code."""


def break_function(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    """Make it raise, wherever it was imported to; returns a list that grows with each call."""
    called: list[int] = []

    def fail(*args: Any, **kwargs: Any) -> Any:
        called.append(1)
        raise InjectedFault

    original = vars(owner)[name]
    patch.setattr(owner, name, fail)
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(("saga_sdk", "saga_core")):
            for alias, value in list(vars(module).items()):
                if value is original:
                    patch.setattr(module, alias, fail)
    return called


@pytest.fixture(autouse=True)
def forget_runs() -> Iterator[None]:
    """What a broken function did not clean up is not for the next test."""
    yield
    tracker._runs.clear()
    tracker._trees.clear()
    tracker._ended.clear()
    calls._calls.clear()
    enter_block(None)
    context.attach(context.Context())


@tool
def read_file(text: str) -> str:
    """Read a file."""
    return look_up(text)


@saga.tool
def look_up(text: str) -> str:
    return text.upper()


@saga.tool
def numbers() -> Iterator[int]:
    yield from (1, 2)


def program(server: ScriptedServer) -> list[Any]:
    """A program that comes through every hook, and what it works out."""
    results: list[Any] = []
    agent = make_agent(server.base_url, tools=[read_file, *TOOLS[1:]], checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "t"}}
    with openai.OpenAI(base_url=server.base_url, api_key="none") as client:

        def chat(text: str) -> str:
            answer = client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": text}]
            )
            return str(answer.choices[0].message.content)

        with saga.workflow("swe", deadline_s=60, session_id="会話"):
            results += [chat("a"), look_up("b"), chat("c"), *numbers()]
            with saga.workflow("inner"):
                results += [chat("d"), saga.wrap(chat)("e")]
                results.append(answer_of(agent.invoke(ask("read_file"), config)))
            saga.end_session()
            saga.end_task()
        results.append(answer_of(agent.invoke(ask("read_file > run_python"), config)))
        results += [chat("f"), look_up("g")]
        saga.end_session("t")
    return results


EXPECTED = [
    *("done: a", "B", "done: c", 1, 2),
    *("done: d", "done: e", "done: read_file"),
    *("done: read_file > run_python", "done: f", "G"),
]


def test_the_program_without_a_fault(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    saga.instrument(server.base_url, dialects=["saga", "dynamo"], attach_baggage=True)
    assert program(server) == EXPECTED
    assert sender.flush(30)
    assert caplog.records == []


@pytest.mark.parametrize("label", FUNCTIONS)
def test_a_fault_changes_nothing(
    label: str,
    server: ScriptedServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    saga.instrument(server.base_url, dialects=["saga", "dynamo"], attach_baggage=True)
    with monkeypatch.context() as patch:
        called = break_function(patch, *FUNCTIONS[label])
        assert program(server) == EXPECTED
        with suppress(InjectedFault):
            sender.flush(0.2)
    said = [r.getMessage() for r in caplog.records if r.name == "saga_sdk"]
    assert len(said) == len(set(said)), "a kind of failure is said once"
    assert bool(said) == bool(called)
    assert len(server.requests) == 10


def test_guards_let_interrupts_through() -> None:
    def interrupt() -> None:
        with Guard("test"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_most_functions_are_in_a_hook(server: ScriptedServer) -> None:
    # Else the discovery above would pass by finding nothing.
    assert len(FUNCTIONS) > 80
    assert {"headers.add_hints", "runs.RunTracker.start", "sessions.Session.take_step"} <= set(
        FUNCTIONS
    )
