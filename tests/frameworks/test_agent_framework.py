"""Hints of Agent Framework agents and workflows: what stands on each request."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import agent_framework
import pytest
from agent_framework import (
    Agent,
    AgentMiddleware,
    AgentResponse,
    AgentSession,
    BaseAgent,
    BaseChatClient,
    FunctionTool,
    Message,
    RawAgent,
    ResponseStream,
    SummarizationStrategy,
    Workflow,
    WorkflowBuilder,
    tool,
)
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
from openai import AsyncOpenAI

import saga_sdk as saga
from saga_core.hints import Hints
from saga_core.types import ToolType
from saga_sdk import guard, reporting, runs
from saga_sdk.context import calls
from saga_sdk.integrations import agent_framework as integration
from saga_sdk.runs import tracker
from saga_sdk.testing import Failure, Held, ScriptedServer, ToolCall
from tests.frameworks.roles import (
    TWO_STEPS,
    Broken,
    broken,
    events_of,
    follow_role,
    role_of,
    said,
    sessions_by_node,
    tag_of,
    until,
)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(follow_role) as scripted:
        yield scripted


@pytest.fixture(autouse=True)
def instrumented(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_logged", set())
    saga.instrument(server.base_url)


@tool(approval_mode="never_require")
async def read_file(text: str) -> str:
    """Read a file."""
    return text


@tool(approval_mode="never_require")
def run_python(text: str) -> str:
    """Run code, in a thread."""
    return text


@tool(approval_mode="never_require")
async def fail(text: str) -> str:
    """Fail."""
    raise ValueError(text)


TOOLS: list[Any] = [read_file, run_python, fail]


def make_client(server: ScriptedServer, kind: Any = OpenAIChatCompletionClient) -> Any:
    return _client(server.base_url, kind, threading.get_ident())


@functools.lru_cache
def _client(base_url: str, kind: Any, thread: int) -> Any:
    # One for each thread and its loop: making one takes long. Nobody closes it, so no connection
    # may stay open.
    openai = AsyncOpenAI(base_url=base_url, api_key="none", default_headers={"connection": "close"})
    return kind(model="scripted", async_client=openai)


def make_agent(
    server: ScriptedServer, name: str | None = "coder", plan: str = "read_file", **kwargs: Any
) -> Agent[Any]:
    role = role_of(str(name), plan, kwargs.pop("tag", ""))
    kwargs = {"tools": TOOLS} | kwargs
    client = kwargs.pop("client", None) or make_client(server)
    return Agent(client, role, name=name, **kwargs)


async def run(agent: Any, **kwargs: Any) -> str:
    return str((await agent.run("go", **kwargs)).text)


async def run_stream(agent: Any, **kwargs: Any) -> str:
    return "".join([update.text async for update in agent.run("go", stream=True, **kwargs)])


async def final_response(agent: Any, **kwargs: Any) -> str:
    return str((await agent.run("go", stream=True, **kwargs).get_final_response()).text)


WAYS = [run, run_stream, final_response]


def ended_sessions(server: ScriptedServer) -> list[str | None]:
    return [session_id for kind, session_id, _ in events_of(server) if kind == "session_end"]


def nothing_is_left() -> bool:
    return (len(tracker), len(calls), reporting.current_run()) == (0, 0, None)


# --- agents


@pytest.mark.parametrize("client", [OpenAIChatCompletionClient, OpenAIChatClient])
@pytest.mark.parametrize("how", WAYS)
async def test_every_call_of_an_agent_carries_its_hints(
    server: ScriptedServer, how: Callable[..., Any], client: Any
) -> None:
    agent = make_agent(
        server,
        plan="read_file > run_python",
        client=make_client(server, client),
        # The server remembers no response.
        default_options={"store": False},
    )
    assert (await how(agent)).split()[0] == "done"
    assert said(server.hints) == [*TWO_STEPS, ("coder", 2, "run_python")]
    assert [h.tool for h in server.hints] == [None, ToolType.FILE_IO, ToolType.CODE_EXEC]
    assert {(h.workflow_id, h.parent_session_id) for h in server.hints} == {("coder", None)}
    ((session_id, task_id),) = {(h.session_id, h.task_id) for h in server.hints}
    assert session_id == task_id
    assert nothing_is_left()
    # It remembers nothing, so its session is over.
    assert ended_sessions(server) == [session_id]


@pytest.mark.parametrize("how", WAYS)
async def test_a_session_of_the_program_goes_on(
    server: ScriptedServer, how: Callable[..., Any]
) -> None:
    agent = make_agent(server)
    session = agent.create_session(session_id="chat-1")
    for _ in range(2):
        await how(agent, session=session)
    assert said(server.hints) == [*TWO_STEPS, ("coder", 2, None), ("coder", 3, "read_file")]
    assert {h.session_id for h in server.hints} == {"chat-1"}
    assert len({h.task_id for h in server.hints}) == 2
    assert ended_sessions(server) == []


async def test_an_agent_without_a_name_has_a_workflow_of_its_own(server: ScriptedServer) -> None:
    for plan in ("", "", "read_file"):
        await make_agent(server, None, plan).run("go")
    first, again, *other = (h.workflow_id for h in server.hints)
    assert first == again
    assert first is not None
    assert first.startswith("Agent-")
    assert len({first, *other}) == 2
    assert all(h.node == h.workflow_id for h in server.hints)


@pytest.mark.parametrize("last", ["read_file", "run_python"])
async def test_of_parallel_tools_the_last_one_to_end_counts(
    server: ScriptedServer, last: str
) -> None:
    names = {r"read_file", "run_python"}

    async def work(name: str) -> str:
        if name == last:
            (other,) = names - {last}
            await until(lambda: other in {r.tool_name for r in tracker._runs.values()} or ended)
            await until(lambda: other not in {r.tool_name for r in tracker._runs.values()})
        else:
            ended.append(name)
        return name

    ended: list[str] = []
    tools = [
        FunctionTool(
            name=name,
            func=functools.partial(_call, work, name),
            input_model={"type": "object", "properties": {"text": {"type": "string"}}},
        )
        for name in sorted(names)
    ]
    await make_agent(server, plan="read_file+run_python", tools=tools).run("go")
    assert said(server.hints) == [("coder", 0, None), ("coder", 1, last)]


async def _call(work: Callable[[str], Any], name: str, text: str) -> str:
    return str(await work(name))


async def test_a_tool_that_fails_ends(server: ScriptedServer) -> None:
    assert (await run(make_agent(server, plan="fail"))).strip() == "done"
    assert said(server.hints) == [("coder", 0, None), ("coder", 1, "fail")]


async def test_a_retry_repeats_its_step(server: ScriptedServer) -> None:
    server.interject(Failure(500))
    await make_agent(server).run("go")
    assert said(server.hints) == [TWO_STEPS[0], *TWO_STEPS]


@pytest.mark.parametrize("how", WAYS)
async def test_a_call_that_fails_leaves_nothing(
    server: ScriptedServer, how: Callable[..., Any]
) -> None:
    agent = make_agent(server)
    server.interject(Failure(400))
    with pytest.raises(Exception, match="scripted failure"):
        await how(agent)
    assert nothing_is_left()
    await how(agent)
    assert said(server.hints) == [TWO_STEPS[0], *TWO_STEPS]


class Asks(AgentMiddleware):
    """A user's middleware, which asks a model of its own."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def process(self, context: Any, call_next: Any) -> None:
        await self._client.get_response([Message("user", ["may I?"])])
        await call_next()


@pytest.mark.parametrize("how", WAYS)
async def test_a_middleware_of_the_user_is_a_part_of_the_run(
    server: ScriptedServer, how: Callable[..., Any]
) -> None:
    agent = make_agent(server, middleware=[Asks(make_client(server))])
    await how(agent)
    assert said(server.hints) == [
        ("coder", 0, None),
        ("coder", 1, None),
        ("coder", 2, "read_file"),
    ]
    assert len({(h.session_id, h.task_id) for h in server.hints}) == 1
    assert nothing_is_left()


async def test_a_summary_of_the_messages_is_a_conversation_of_its_own(
    server: ScriptedServer,
) -> None:
    client = make_client(server)
    summary = SummarizationStrategy(client=client, target_count=2, threshold=0)
    agent = make_agent(server, plan="", compaction_strategy=summary)
    session = agent.create_session(session_id="chat-1")
    server.interject("one", "two")
    for _ in range(2):
        await agent.run("go", session=session)
    own = [h for h in server.hints if h.session_id == "chat-1"]
    assert said(own)[:2] == [("coder", 0, None), ("coder", 1, None)]
    (other,) = {h.session_id for h in server.hints} - {"chat-1"}
    spawned = [h for h in server.hints if h.session_id == other]
    assert [(h.step, h.parent_session_id) for h in spawned] == [(0, "chat-1")]
    assert ended_sessions(server) == [other]


class Team(BaseAgent):
    """An agent written by hand, which asks a model and another agent."""

    def __init__(self, client: Any, helper: Any) -> None:
        super().__init__(name="team")
        self._client, self._helper = client, helper

    def run(self, messages: Any = None, *, stream: bool = False, **kwargs: Any) -> Any:
        if not stream:
            return self._run()
        return ResponseStream(self._stream(), finalizer=AgentResponse.from_updates)

    async def _run(self) -> Any:
        await self._client.get_response([Message("user", ["go"])])
        return await self._helper.run("go")

    async def _stream(self) -> Any:
        await self._client.get_response([Message("user", ["go"])])
        async for update in self._helper.run("go", stream=True):
            yield update


@pytest.mark.parametrize("how", WAYS)
async def test_an_agent_written_by_hand(server: ScriptedServer, how: Callable[..., Any]) -> None:
    await how(Team(make_client(server), make_agent(server)))
    assert said(server.hints) == [("team", 0, None), *TWO_STEPS]
    own, *inner = server.hints
    assert {h.parent_session_id for h in inner} == {own.session_id}
    assert {h.workflow_id for h in server.hints} == {"team"}
    assert nothing_is_left()


class Odd(BaseAgent):
    """An agent whose ``run`` returns what no agent should."""

    def run(self, messages: Any = None, **kwargs: Any) -> Any:
        return [messages]


async def test_what_is_no_run_is_left_as_it_is(server: ScriptedServer) -> None:
    assert Odd(name="odd").run("go") == ["go"]
    assert nothing_is_left()


# --- agents as tools


async def test_an_agent_in_a_tool_is_a_child(server: ScriptedServer) -> None:
    helper = make_agent(server, "helper").as_tool()
    boss = make_agent(server, "boss", "helper > helper", tools=[helper])
    await boss.run("go", session=AgentSession(session_id="s-1"))
    assert said(server.hints) == [
        ("boss", 0, None),
        ("helper", 0, None),
        ("helper", 1, "read_file"),
        ("boss", 1, "helper"),
        ("helper", 0, None),
        ("helper", 1, "read_file"),
        ("boss", 2, "helper"),
    ]
    inner = [h for h in server.hints if h.node == "helper"]
    assert {h.parent_session_id for h in inner} == {"s-1"}
    assert {h.session_id for h in server.hints if h.node == "boss"} == {"s-1"}
    sessions = [h.session_id for h in inner]
    assert sessions[0] == sessions[1] != sessions[2] == sessions[3]
    assert len({h.task_id for h in server.hints}) == 1
    gc.collect()
    assert set(ended_sessions(server)) == set(sessions)


async def test_an_agent_in_a_tool_that_shares_the_session_is_a_child(
    server: ScriptedServer,
) -> None:
    helper = make_agent(server, "helper").as_tool(propagate_session=True)
    boss = make_agent(server, "boss", "helper", tools=[helper])
    await boss.run("go", session=AgentSession(session_id="s-1"))
    assert [h.node for h in server.hints] == ["boss", "helper", "helper", "boss"]
    assert [h.step for h in server.hints] == [0, 0, 1, 1]
    assert [h.session_id == "s-1" for h in server.hints] == [True, False, False, True]
    assert [h.parent_session_id for h in server.hints] == [None, "s-1", "s-1", None]
    gc.collect()
    assert "s-1" not in ended_sessions(server)


async def test_agents_that_one_tool_runs_are_apart(server: ScriptedServer) -> None:
    @tool(approval_mode="never_require")
    async def ask_both(text: str) -> str:
        """Ask two agents."""
        agents = [make_agent(server, "left"), make_agent(server, "right")]
        return str([await run(agent) for agent in agents])

    await make_agent(server, "boss", "ask_both", tools=[ask_both]).run("go")
    by_node = sessions_by_node(server.hints)
    assert [len(by_node[node]) for node in ("boss", "left", "right")] == [1, 1, 1]
    assert len(set.union(*by_node.values())) == 3
    inner = [h for h in server.hints if h.node != "boss"]
    assert {h.parent_session_id for h in inner} == by_node["boss"]
    assert set(ended_sessions(server)) == set.union(*by_node.values())


async def test_an_agent_in_a_tool_that_runs_in_a_thread(server: ScriptedServer) -> None:
    @tool(approval_mode="never_require")
    async def ask_helper(text: str) -> str:
        """Ask another agent, in a loop of its own."""
        return await asyncio.to_thread(lambda: asyncio.run(run(make_agent(server, "helper"))))

    await make_agent(server, "boss", "ask_helper", tools=[ask_helper]).run("go")
    by_node = sessions_by_node(server.hints)
    inner = [h for h in server.hints if h.node == "helper"]
    assert [h.step for h in inner] == [0, 1]
    assert {h.parent_session_id for h in inner} == by_node["boss"]


# --- workflows


async def consume(workflow: Any, message: str = "go") -> None:
    async for _ in workflow.run(message, stream=True):
        pass


async def run_workflow(workflow: Any, message: str = "go") -> None:
    await workflow.run(message)


def check_children(hints: list[Hints], nodes: list[str], *, asks: str | None = None) -> None:
    """Each agent has a session of its own, whose parent makes no call, and all read a file once.

    All but one, that is: ``asks`` finds the question answered already.
    """
    assert sorted(said(hints), key=str) == sorted(
        (
            (node, step, name)
            for node in nodes
            for _, step, name in TWO_STEPS[: 1 if node == asks else 2]
        ),
        key=str,
    )
    sessions = {h.session_id for h in hints}
    assert len(sessions) == len(nodes)
    (parent,) = {h.parent_session_id for h in hints}
    assert parent is not None
    assert parent not in sessions
    assert {h.task_id for h in hints} == {parent}


def make_workflow(server: ScriptedServer, **kwargs: Any) -> Workflow:
    """A coder, then a critic, who sees that the file was read."""
    first, second = (make_agent(server, name, **kwargs) for name in ("coder", "critic"))
    return WorkflowBuilder(start_executor=first).add_edge(first, second).build()


@pytest.mark.parametrize("how", [run_workflow, consume])
async def test_the_agents_of_a_workflow_are_its_children(
    server: ScriptedServer, how: Callable[[Any], Any]
) -> None:
    flow = make_workflow(server)
    await how(flow)
    check_children(server.hints, ["coder", "critic"], asks="critic")
    assert {h.workflow_id for h in server.hints} == {"Workflow:coder:critic"}
    assert nothing_is_left()
    # The workflow keeps what its agents remember.
    await how(flow)
    by_node = sessions_by_node(server.hints)
    assert [len(by_node[node]) for node in ("coder", "critic")] == [1, 1]
    assert [h.step for h in server.hints if h.node == "critic"] == [0, 1]
    assert len({h.task_id for h in server.hints}) == 2


async def test_a_workflow_goes_by_its_name_or_by_its_parts(server: ScriptedServer) -> None:
    for name in ("swe", None, None):
        agent = make_agent(server, None, "")
        await WorkflowBuilder(start_executor=agent, name=name).build().run("go")
    named, unnamed, again = (str(h.workflow_id) for h in server.hints)
    assert named == "swe"
    assert unnamed == again
    assert unnamed.startswith("Workflow:Agent-")


@pytest.mark.skipif(
    not hasattr(agent_framework, "FunctionalWorkflow"), reason="this release has none"
)
@pytest.mark.filterwarnings("ignore:.*is experimental")
async def test_a_workflow_written_as_a_function(server: ScriptedServer) -> None:
    agents = [make_agent(server, name) for name in ("left", "right")]

    @agent_framework.workflow
    async def review(message: str) -> str:
        return "".join(await asyncio.gather(*(run(agent) for agent in agents)))

    await review.build().run("go")
    check_children(server.hints, ["left", "right"])
    assert {h.workflow_id for h in server.hints} == {"review"}
    assert set(ended_sessions(server)) == {h.session_id for h in server.hints}


async def test_a_workflow_as_an_agent(server: ScriptedServer) -> None:
    await run(make_workflow(server).as_agent(name="team"))
    check_children(server.hints, ["coder", "critic"], asks="critic")
    assert nothing_is_left()


async def test_a_workflow_in_a_workflow_is_one_task(server: ScriptedServer) -> None:
    boss = make_agent(server, "boss", "")
    inner = make_workflow(server, plan="").as_agent(name="inner")
    await WorkflowBuilder(start_executor=boss).add_edge(boss, inner).build().run("go")
    assert said(server.hints) == [("boss", 0, None), ("coder", 0, None), ("critic", 0, None)]
    assert len({h.task_id for h in server.hints}) == 1
    assert len({h.session_id for h in server.hints}) == 3


# --- orchestrations, which are a package of their own


@pytest.fixture
def orchestrations() -> Any:
    return pytest.importorskip("agent_framework_orchestrations")


@pytest.mark.parametrize("how", [run_workflow, consume])
async def test_agents_at_once(
    server: ScriptedServer, orchestrations: Any, how: Callable[[Any], Any]
) -> None:
    agents = [make_agent(server, name) for name in ("left", "right")]
    await how(orchestrations.ConcurrentBuilder(participants=agents).build())
    check_children(server.hints, ["left", "right"])
    (name,) = {h.workflow_id for h in server.hints}
    assert str(name).partition(":")[2] == "dispatcher:left:right:aggregator"
    assert nothing_is_left()


async def test_a_handoff(server: ScriptedServer, orchestrations: Any) -> None:
    kwargs = {"require_per_service_call_history_persistence": True}
    agents = [
        make_agent(server, "planner", "handoff_to_coder", **kwargs),
        make_agent(server, **kwargs),
    ]
    builder = orchestrations.HandoffBuilder(participants=agents).with_start_agent(agents[0])
    await builder.build().run("go")
    assert said(server.hints) == [("planner", 0, None), *TWO_STEPS]
    assert [len(ids) for ids in sessions_by_node(server.hints).values()] == [1, 1]
    assert len({h.task_id for h in server.hints}) == 1


async def test_a_group_chat(server: ScriptedServer, orchestrations: Any) -> None:
    choice = '{{"terminate": {}, "reason": "", "next_speaker": {}, "final_message": "done"}}'
    server.interject(choice.format("false", '"coder"'), ToolCall("read_file", {"text": "x"}), "ok")
    server.interject(choice.format("true", "null"))
    boss = make_agent(server, "boss", tools=[])
    builder = orchestrations.GroupChatBuilder(
        participants=[make_agent(server)], orchestrator_agent=boss
    )
    await builder.build().run("go")
    assert said(server.hints) == [("boss", 0, None), *TWO_STEPS, ("boss", 1, None)]
    assert [len(ids) for ids in sessions_by_node(server.hints).values()] == [1, 1]


async def test_magentic(server: ScriptedServer, orchestrations: Any) -> None:
    ledger = (
        '{"is_request_satisfied": {"reason": "", "answer": %s}, "is_in_loop": {"reason": "", '
        '"answer": false}, "is_progress_being_made": {"reason": "", "answer": true}, '
        '"next_speaker": {"reason": "", "answer": "coder"}, '
        '"instruction_or_question": {"reason": "", "answer": "go"}}'
    )
    server.interject("facts", "plan", ledger % "false", ToolCall("read_file", {"text": "x"}), "ok")
    server.interject(ledger % "true", "final")
    boss = make_agent(server, "boss", tools=[])
    builder = orchestrations.MagenticBuilder(participants=[make_agent(server)], manager_agent=boss)
    await builder.build().run("go")
    assert [h.node for h in server.hints] == ["boss"] * 3 + ["coder"] * 2 + ["boss"] * 2
    assert said([h for h in server.hints if h.node == "coder"]) == TWO_STEPS
    assert len({h.task_id for h in server.hints}) == 1


# --- blocks


async def test_an_agent_in_a_block_belongs_to_its_task(server: ScriptedServer) -> None:
    with saga.workflow("swe", task_id="task-1", deadline_s=60) as block:
        await make_agent(server).run("go")
        await make_client(server).get_response([Message("user", ["a"])])
    assert {(h.workflow_id, h.task_id) for h in server.hints} == {("swe", "task-1")}
    assert all(h.deadline_ms for h in server.hints)
    assert {h.parent_session_id for h in server.hints[:2]} == {block.session_id}
    assert (server.hints[2].session_id, server.hints[2].step) == (block.session_id, 0)


async def test_a_block_in_a_tool_names_the_session_of_its_agents(server: ScriptedServer) -> None:
    @tool(approval_mode="never_require")
    async def ask_helper(text: str) -> str:
        """Ask another agent, always in the same conversation."""
        with saga.workflow("help", session_id="s-2"):
            return await run(make_agent(server, "helper"))

    await make_agent(server, "boss", "ask_helper > ask_helper", tools=[ask_helper]).run("go")
    inner = [h for h in server.hints if h.node == "helper"]
    assert {h.session_id for h in inner} == {"s-2"}
    assert {h.workflow_id for h in inner} == {"help"}


async def test_a_named_session_of_a_block_holds_its_agents(server: ScriptedServer) -> None:
    with saga.workflow("swe", session_id="s-1"):
        for _ in range(2):
            await make_agent(server).run("go")
    assert [(h.session_id, h.step) for h in server.hints] == [("s-1", n) for n in range(4)]
    assert ended_sessions(server) == []


async def test_gateways_hear_of_tools_and_of_the_end(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A tool that is over at once is not worth an event.
    monkeypatch.setattr(runs, "MIN_TOOL_S", 0.0)
    await make_agent(server).run("go")
    session_id, task_id = server.hints[0].session_id, server.hints[0].task_id
    assert events_of(server) == [
        ("tool_start", session_id, "read_file"),
        ("tool_end", session_id, "read_file"),
        ("session_end", session_id, None),
        ("task_end", None, None),
    ]
    assert {e["task_id"] for e in server.events} == {task_id}
    assert {e["workflow_id"] for e in server.events} == {"coder"}


# --- early ends


async def test_the_reader_is_outside_of_the_run(server: ScriptedServer) -> None:
    async for _ in make_agent(server).run("go", stream=True):
        assert reporting.current_run() is None
        with saga.workflow("reader"):
            await make_client(server).get_response([Message("user", ["a"])])
    own = [h for h in server.hints if h.workflow_id == "coder"]
    assert said(own) == TWO_STEPS
    others = [h for h in server.hints if h.workflow_id != "coder"]
    assert {(h.workflow_id, h.step, h.node) for h in others} == {("reader", 0, None)}


@pytest.mark.skipif(not hasattr(ResponseStream, "close"), reason="this release has no close")
@pytest.mark.parametrize("make", [make_agent, make_workflow])
async def test_a_stream_that_is_closed_early(
    server: ScriptedServer, make: Callable[[ScriptedServer], Any]
) -> None:
    stream = make(server).run("go", stream=True)
    await anext(aiter(stream))
    assert len(tracker) > 0
    await stream.close()
    assert nothing_is_left()


@pytest.mark.parametrize("make", [make_agent, make_workflow])
async def test_a_stream_that_is_forgotten(
    server: ScriptedServer, make: Callable[[ScriptedServer], Any]
) -> None:
    stream = make(server).run("go", stream=True)
    await anext(aiter(stream))
    assert len(tracker) > 0
    del stream
    await until(lambda: gc.collect() >= 0 and len(tracker) == 0)
    assert nothing_is_left()


async def test_a_stream_that_is_never_read(server: ScriptedServer) -> None:
    stream = make_workflow(server).run("go", stream=True)
    assert nothing_is_left()
    del stream
    gc.collect()
    assert server.requests == []


@pytest.mark.parametrize("how", [run, run_stream])
@pytest.mark.parametrize("make", [make_agent, make_workflow])
async def test_a_run_that_is_cancelled(
    server: ScriptedServer, make: Callable[[ScriptedServer], Any], how: Callable[..., Any]
) -> None:
    never = threading.Event()
    server.interject(ToolCall("read_file", {"text": "x"}), Held("late", never))
    runner = make(server)
    run_it = {run: run_workflow, run_stream: consume}[how] if make is make_workflow else how
    task = asyncio.ensure_future(run_it(runner))
    await asyncio.to_thread(server.wait_for_requests, 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert said(server.hints) == TWO_STEPS
    await until(nothing_is_left)


@pytest.mark.parametrize("make", [make_agent, make_workflow])
async def test_a_run_that_is_cancelled_before_it_begins(
    server: ScriptedServer, make: Callable[[ScriptedServer], Any]
) -> None:
    runner = make(server)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        task = asyncio.ensure_future(runner.run("go"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        gc.collect()
    assert [str(each.message) for each in warned if each.category is RuntimeWarning] == []
    assert nothing_is_left()
    assert server.requests == []


# --- many at once


def check_no_cross_talk(server: ScriptedServer, count: int) -> None:
    by_tag: dict[str, list[Hints]] = {}
    for request in server.requests:
        by_tag.setdefault(tag_of(request), []).append(request.hints)
    assert len(by_tag) == count
    for hints in by_tag.values():
        check_children(hints, ["coder", "critic"], asks="critic")
    assert len({h.task_id for h in server.hints}) == count
    assert nothing_is_left()


@pytest.mark.parametrize("how", [run_workflow, consume])
async def test_workflows_at_once_do_not_mix(
    server: ScriptedServer, how: Callable[[Any], Any]
) -> None:
    await asyncio.gather(*(how(make_workflow(server, tag=f"{number:03}")) for number in range(60)))
    check_no_cross_talk(server, 60)


def test_workflows_in_threads_do_not_mix(server: ScriptedServer) -> None:
    def work(number: int) -> None:
        asyncio.run(run_workflow(make_workflow(server, tag=f"{number:03}")))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check_no_cross_talk(server, 60)


@pytest.mark.parametrize("how", WAYS)
async def test_one_agent_at_once(server: ScriptedServer, how: Callable[..., Any]) -> None:
    agent = make_agent(server)
    sessions = [AgentSession(session_id=f"s-{number}") for number in range(60)]
    await asyncio.gather(*(how(agent, session=session) for session in sessions))
    for session in sessions:
        own = [h for h in server.hints if h.session_id == session.session_id]
        assert said(own) == TWO_STEPS
        assert len({h.task_id for h in own}) == 1
    assert nothing_is_left()


# --- failures of ours, and the way back


async def everything(server: ScriptedServer) -> list[str]:
    """Run each kind of hook once, and say what the program sees."""
    helper = make_agent(server, "helper").as_tool()
    boss = make_agent(server, "boss", "helper > fail", tools=[helper, fail])
    seen = [await how(boss) for how in WAYS]
    async for event in make_workflow(server).run("go", stream=True):
        seen.append(event.type)
    return seen


FAULTS = [
    (integration, "_name_of"),
    (integration, "_workflow_name"),
    (integration, "_follow"),
    (integration, "Run"),
    (integration, "Conversation"),
    (integration, "current_run"),
    (integration, "named_block"),
    (integration, "finalize"),
    (reporting, "current_run"),
    (reporting, "current_workflow"),
    (reporting, "enter_call"),
    (reporting, "RunStart"),
    (reporting, "Source"),
    (reporting.Run, "begin"),
    (reporting.Conversation, "called"),
    (tracker, "start"),
    (tracker, "end"),
    (calls, "get"),
]


@pytest.mark.parametrize(("owner", "name"), FAULTS, ids=lambda value: str(value)[-40:])
async def test_a_fault_of_ours_changes_nothing(
    server: ScriptedServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: Any,
    name: str,
) -> None:
    integration.uninstall()
    expected = await everything(server)
    integration.install()
    end = tracker.end
    with caplog.at_level(logging.WARNING, "saga_sdk"), monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        assert await everything(server) == expected
        gc.collect()
    warnings = [r for r in caplog.records if r.exc_info and r.exc_info[0] is Broken]
    assert warnings
    assert len(warnings) == len({r.getMessage() for r in warnings})
    for run_id in list(tracker._runs):
        end(run_id)


PATCHED: list[tuple[Any, str]] = [
    (Agent, "run"),
    (RawAgent, "run"),
    (Workflow, "run"),
    (ResponseStream, "__anext__"),
    (ResponseStream, "get_final_response"),
    (BaseChatClient, "get_response"),
    (FunctionTool, "invoke"),
    (BaseAgent, "__init_subclass__"),
]


def in_place() -> list[Any]:
    return [vars(owner).get(name) for owner, name in PATCHED]


def test_uninstall_restores_the_originals() -> None:
    integration.uninstall()
    originals = in_place()
    for _ in range(2):
        integration.install()
    wrapped = in_place()
    assert all(now is not before for now, before in zip(wrapped, originals, strict=True))
    for _ in range(2):
        integration.uninstall()
    assert in_place() == originals


async def test_below_a_wrapper_of_others_ours_does_nothing(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = BaseChatClient.get_response

    @functools.wraps(ours)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    monkeypatch.setattr(BaseChatClient, "get_response", theirs)
    integration.uninstall()
    assert vars(BaseChatClient)["get_response"] is theirs
    await make_agent(server).run("go")
    assert all(request.hints == Hints() for request in server.requests)
    integration.install()
    assert vars(BaseChatClient)["get_response"] is theirs
    await make_agent(server).run("go")
    assert said(server.hints[2:]) == TWO_STEPS
