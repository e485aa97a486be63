"""Events of agents and blocks: which sessions end, when, and who is told."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any
from uuid import UUID

import openai
import pytest
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

import saga_sdk as saga
from saga_core.hints import Hints
from saga_sdk.events import Event, EventKind, sender
from saga_sdk.runs import RunKind, RunStart, RunTracker, Source
from saga_sdk.sessions import CallMap
from saga_sdk.testing import ScriptedServer
from tests.plans import follow_plan
from tests.sdk.agents import TOOLS, WAYS, ask, make_agent, make_model, run

WAIT_S = 30.0


def events_of(server: ScriptedServer, *kinds: str) -> list[dict[str, Any]]:
    assert sender.flush(WAIT_S)
    return [event for event in server.events if not kinds or event["event"] in kinds]


def ended(server: ScriptedServer) -> list[str]:
    return [event["session_id"] for event in events_of(server, "session_end")]


def ended_tasks(server: ScriptedServer) -> list[str]:
    return [event["task_id"] for event in events_of(server, "task_end")]


def chat(server: ScriptedServer, **kwargs: Any) -> None:
    with openai.OpenAI(base_url=server.base_url, api_key="none") as client:
        client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "a"}], **kwargs
        )


@tool
def break_down(text: str) -> str:
    """Fail."""
    raise KeyError(text)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("plan", ["read_file", "break_down"])
async def test_a_run_that_ends_says_so_once(server: ScriptedServer, how: str, plan: str) -> None:
    saga.instrument(server.base_url)
    agent = make_agent(server.base_url, tools=[*TOOLS, break_down])
    for _ in range(2):
        if plan == "break_down":
            with pytest.raises(KeyError):
                await run(agent, how, plan, {"metadata": {"saga_workflow": "my flow"}})
        else:
            await run(agent, how, plan, {"metadata": {"saga_workflow": "my flow"}})
    sessions = list(dict.fromkeys(h.session_id for h in server.hints))
    assert len(sessions) == 2
    events = events_of(server)
    now_s = time.time()
    assert all(now_s - 60 < event.pop("timestamp") <= now_s + 1 for event in events)
    assert events == [
        {"event": kind, "task_id": session_id, "workflow_id": "my-flow"} | more
        for session_id in sessions
        for kind, more in (
            ("tool_start", {"session_id": session_id, "tool_name": plan}),
            ("session_end", {"session_id": session_id}),
            ("task_end", {}),
        )
    ]


async def test_a_cancelled_run_says_so(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    server.gate.clear()
    task = asyncio.create_task(make_agent(server.base_url).ainvoke(ask("read_file")))
    await asyncio.to_thread(server.wait_for_requests, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    server.gate.set()
    assert ended(server) == [h.session_id for h in server.hints]


def test_a_stream_left_early_says_so(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    stream = make_agent(server.base_url).stream(ask("read_file"), stream_mode="messages")
    next(stream)
    stream.close()
    assert ended(server) == [server.hints[0].session_id]


@pytest.mark.parametrize("named", ["thread", "metadata", "argument", "block"])
def test_a_session_that_may_go_on_does_not_end(server: ScriptedServer, named: str) -> None:
    session_id = "s" if named == "argument" else None
    handler = saga.SagaCallbackHandler(base_urls=server.base_url, session_id=session_id)
    config: dict[str, Any] = {"callbacks": [handler], "configurable": {"thread_id": "t"}}
    if named == "metadata":
        config["metadata"] = {"saga_session_id": "m"}
    if named == "block":
        with saga.workflow("swe", session_id="b"):
            make_agent(server.base_url).invoke(ask("read_file"), {"callbacks": [handler]})
    else:
        agent = make_agent(server.base_url, checkpointer=InMemorySaver())
        agent.invoke(ask("read_file"), config)
    assert len(server.requests) == 2
    assert ended(server) == []
    # The session may go on, this task does not.
    (task_id,) = {h.task_id for h in server.hints}
    assert ended_tasks(server) == [task_id]


def test_a_model_called_on_its_own_does_not_end_a_session(server: ScriptedServer) -> None:
    # It may be one turn of the program's own loop, whose next turn sends the same prefix.
    saga.instrument(server.base_url)
    make_model(server.base_url).invoke("a")
    assert server.hints == [Hints(workflow_id="ChatOpenAI")]
    assert events_of(server) == []


@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
async def test_a_sub_agents_session_ends_with_it(server: ScriptedServer, how: str) -> None:
    saga.instrument(server.base_url)
    inner = make_agent(server.base_url)

    @tool
    async def ask_helper(text: str) -> str:
        """Ask another agent."""
        return str(await inner.ainvoke(ask("fetch_url")))

    @tool
    def ask_helper_sync(text: str) -> str:
        """Ask another agent."""
        return str(inner.invoke(ask("fetch_url")))

    name = "ask_helper" if how == "ainvoke" else "ask_helper_sync"
    agent = make_agent(server.base_url, tools=[ask_helper, ask_helper_sync, *TOOLS])
    await run(agent, how, f"{name} > read_file", {"configurable": {"thread_id": "t"}})
    spawned = {h.session_id for h in server.hints if h.session_id != "t"}
    assert ended(server) == list(spawned)
    await run(agent, how, name)
    root = server.hints[-1].session_id
    assert ended(server)[2:] == [root]
    ends = events_of(server, "session_end")
    assert ends[1]["task_id"] == root
    assert len({event["session_id"] for event in ends}) == 3


def test_blocks_end_their_own_sessions(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    with saga.workflow("outer", task_id="task") as outer:
        chat(server)
        with saga.workflow("inner") as inner:
            chat(server)
        assert ended(server) == [inner.session_id]
        with saga.workflow("named", session_id="named"):
            chat(server)
        with saga.workflow("silent"):
            pass
        make_agent(server.base_url).invoke(ask(""))
    agent = server.hints[-1].session_id
    assert ended(server) == [inner.session_id, agent, outer.session_id]
    assert {event["task_id"] for event in server.events} == {"task"}
    assert ended_tasks(server) == ["task"]


async def test_a_block_left_by_an_exception_says_so(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)

    async def fail() -> None:
        async with saga.workflow("swe"):
            await asyncio.to_thread(chat, server)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert ended(server) == [server.hints[0].session_id]


def test_a_session_id_that_the_user_set_is_not_ours_to_end(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    with saga.workflow("swe"):
        chat(server, extra_headers={"x-saga-session-id": "mine"})
    assert ended(server) == []


def test_only_servers_that_saw_the_session_are_told(
    server: ScriptedServer, other_server: ScriptedServer
) -> None:
    with ScriptedServer(follow_plan) as foreign:
        saga.instrument([server.base_url, other_server.base_url])
        with saga.workflow("swe"):
            make_agent(server.base_url).invoke(ask("read_file"))
            make_agent(foreign.base_url).invoke(ask("read_file"))
        assert len(ended(server)) == 1
        assert len(ended_tasks(server)) == 1
        assert (len(other_server.event_requests), len(foreign.event_requests)) == (0, 0)
        assert len(foreign.requests) == 2


def test_after_uninstrument_nothing_is_said(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    with saga.workflow("swe"):
        chat(server)
        saga.uninstrument()
    assert ended(server) == []


def test_an_endpoint_that_takes_no_events_is_asked_once(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    server.events_status = 404
    agent = make_agent(server.base_url)
    for _ in range(3):
        agent.invoke(ask("read_file"))
        assert sender.flush(WAIT_S)
    assert len(server.event_requests) == 1


@pytest.mark.parametrize("fault", [ConnectionRefusedError("dead"), RuntimeError("ours")])
def test_a_dead_endpoint_does_no_harm(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    attempts = []

    def fail(url: str, body: bytes, timeout_s: float, authorization: str | None) -> int:
        attempts.append(url)
        raise fault

    monkeypatch.setattr(sender, "_post", fail)
    monkeypatch.setattr(sender, "_timer", lambda: 0.0)
    saga.instrument(server.base_url)
    agent = make_agent(server.base_url)
    for _ in range(3):
        assert agent.invoke(ask("read_file"))["messages"][-1].content == "done: read_file"
        assert sender.flush(WAIT_S)
    assert len(attempts) == 1


def test_a_fault_of_the_sender_never_reaches_the_program(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "_queue", None)
    saga.instrument(server.base_url)
    with saga.workflow("swe"):
        chat(server)
        make_agent(server.base_url).invoke(ask("read_file"))
    monkeypatch.undo()
    assert len(server.requests) == 3


def test_the_gateway_reads_what_is_sent() -> None:
    gateway = pytest.importorskip("saga_gateway.events")
    sent = [Event(kind, "s-1", "t", "w", (), "read_file") for kind in EventKind]
    parsed = gateway.parse_events(json.dumps([event.fields() for event in sent]).encode())
    assert [(event.kind, event.session_id) for event in parsed] == [(k, "s-1") for k in EventKind]


class Tools:
    """A tracker, with a clock, whose root run ``1`` has made a call to a gateway."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events: list[Event] = []
        calls = CallMap()
        self.tracker = RunTracker(calls, emit=self.events.append, timer=lambda: self.now_s)
        self.start(RunKind.CHAIN, 1, None)
        self.start(RunKind.CALL, 2, 1)
        call = calls.get(UUID(int=2))
        assert call is not None
        assert call.session is not None
        call.session.sent_to("http://gateway:80/saga/v1/events")
        self.end(2)

    def start(self, kind: RunKind, number: int, parent: int | None) -> None:
        parent_id = None if parent is None else UUID(int=parent)
        start = RunStart(kind, UUID(int=number), parent_id, f"tool-{number}", {"thread_id": "t"})
        self.tracker.start(start, Source())

    def end(self, number: int, *, at_s: float | None = None) -> list[tuple[str, str | None]]:
        self.now_s = self.now_s if at_s is None else at_s
        self.events.clear()
        self.tracker.end(UUID(int=number))
        self.tracker.check_integrity()
        assert {event.session_id for event in self.events} <= {"t"}
        return [(event.kind.value, event.tool_name) for event in self.events]


@pytest.mark.parametrize(("took_s", "said"), [(1.0, False), (1.5, True)])
def test_a_long_tools_end_is_said(took_s: float, said: bool) -> None:
    tools = Tools()
    tools.start(RunKind.CHAIN, 3, 1)
    tools.start(RunKind.TOOL, 4, 3)
    assert tools.end(4, at_s=took_s) == ([("tool_end", "tool-4")] if said else [])


def test_of_parallel_tools_the_end_of_the_last_is_said() -> None:
    tools = Tools()
    for number in (4, 5):
        tools.start(RunKind.CHAIN, 10 * number, 1)
        tools.start(RunKind.TOOL, number, 10 * number)
    assert tools.end(5, at_s=2.0) == []
    assert tools.end(4, at_s=3.0) == [("tool_end", "tool-4")]
    assert tools.end(1, at_s=4.0) == []


def test_a_long_tool_in_a_block_is_awaited_by_the_block() -> None:
    tools = Tools()
    with saga.workflow("swe", session_id="t") as block:
        block.session.sent_to("http://gateway:80/saga/v1/events")
        tools.start(RunKind.TOOL, 6, None)
        assert tools.end(6, at_s=2.0) == [("tool_end", "tool-6")]
