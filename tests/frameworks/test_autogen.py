"""Hints of AutoGen agents and teams: what stands on each request."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from autogen_agentchat.agents import (
    AssistantAgent,
    BaseChatAgent,
    CodeExecutorAgent,
    SocietyOfMindAgent,
)
from autogen_agentchat.agents._code_executor_agent import ApprovalResponse
from autogen_agentchat.base import Response, TaskResult
from autogen_agentchat.conditions import TextMentionTermination
from autogen_agentchat.messages import HandoffMessage, TextMessage
from autogen_agentchat.teams import (
    BaseGroupChat,
    DiGraphBuilder,
    GraphFlow,
    MagenticOneGroupChat,
    RoundRobinGroupChat,
    SelectorGroupChat,
    Swarm,
)
from autogen_agentchat.tools import AgentTool, TeamTool
from autogen_core import CancellationToken, SingleThreadedAgentRuntime
from autogen_core.code_executor import CodeExecutor, CodeResult
from autogen_core.models import ChatCompletionClient, ModelFamily
from autogen_core.tools import FunctionTool
from autogen_ext.models.cache import ChatCompletionCache
from autogen_ext.models.openai import OpenAIChatCompletionClient

import saga_sdk as saga
from saga_core.hints import Hints
from saga_core.types import ToolType
from saga_sdk import guard, reporting, runs
from saga_sdk.context import calls
from saga_sdk.integrations import autogen
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

MODEL = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "family": ModelFamily.UNKNOWN,
    "structured_output": True,
    "multiple_system_messages": True,
}


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(follow_role) as scripted:
        yield scripted


@pytest.fixture(autouse=True)
def instrumented(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_logged", set())
    saga.instrument(server.base_url)


async def read_file(text: str) -> str:
    """Read a file."""
    return text


async def run_python(text: str) -> str:
    """Run code."""
    return text


async def fail(text: str) -> str:
    """Fail."""
    raise ValueError(text)


TOOLS = [read_file, run_python, fail]


def make_client(server: ScriptedServer, kind: Any = OpenAIChatCompletionClient) -> Any:
    return _client(server.base_url, kind, threading.get_ident())


@functools.lru_cache
def _client(base_url: str, kind: Any, thread: int) -> Any:
    # One for each thread and its loop: making one takes long.
    return kind(
        model="scripted",
        base_url=base_url,
        api_key="none",
        model_info=MODEL,
        # Nobody closes the client, so no connection may stay open.
        default_headers={"connection": "close"},
    )


def make_agent(
    server: ScriptedServer, name: str = "coder", plan: str = "read_file", **kwargs: Any
) -> AssistantAgent:
    tag = kwargs.pop("tag", "")
    kwargs = {"tools": TOOLS, "max_tool_iterations": 5, "description": name} | kwargs
    message = role_of(name, plan, tag)
    return AssistantAgent(name, make_client(server), system_message=message, **kwargs)


def make_team(server: ScriptedServer, *, turns: int = 3, **kwargs: Any) -> RoundRobinGroupChat:
    tag = kwargs.pop("tag", "")
    agents = [make_agent(server, tag=tag), make_agent(server, "critic", "", tag=tag)]
    return RoundRobinGroupChat(agents, max_turns=turns, **kwargs)


async def answer_of(stream: AsyncIterator[Any]) -> str:
    last = None
    async for item in stream:
        last = item
    if isinstance(last, Response):
        return str(last.chat_message.to_text())
    return text_of(last)


def text_of(result: Any) -> str:
    assert isinstance(result, TaskResult)
    return str(result.messages[-1].to_text())


async def on_messages(agent: AssistantAgent) -> str:
    message = TextMessage(content="go", source="user")
    return str((await agent.on_messages([message], CancellationToken())).chat_message.to_text())


async def on_messages_stream(agent: AssistantAgent) -> str:
    message = TextMessage(content="go", source="user")
    return await answer_of(agent.on_messages_stream([message], CancellationToken()))


async def run(agent: AssistantAgent) -> str:
    return text_of(await agent.run(task="go"))


async def run_stream(agent: AssistantAgent) -> str:
    return await answer_of(agent.run_stream(task="go"))


# --- agents


@pytest.mark.parametrize("streams_tokens", [False, True])
@pytest.mark.parametrize("how", [run, run_stream, on_messages, on_messages_stream])
async def test_every_call_of_an_agent_carries_its_hints(
    server: ScriptedServer, how: Callable[[AssistantAgent], Any], streams_tokens: bool
) -> None:
    agent = make_agent(server, plan="read_file > run_python", model_client_stream=streams_tokens)
    assert (await how(agent)).strip() == "done"
    assert said(server.hints) == [*TWO_STEPS, ("coder", 2, "run_python")]
    assert [h.tool for h in server.hints] == [None, ToolType.FILE_IO, ToolType.CODE_EXEC]
    assert len({(h.session_id, h.task_id) for h in server.hints}) == 1
    assert {(h.workflow_id, h.parent_session_id) for h in server.hints} == {("coder", None)}
    assert (len(tracker), len(calls), reporting.current_run()) == (0, 0, None)


async def test_an_agent_that_runs_again_goes_on_with_its_session(server: ScriptedServer) -> None:
    agent = make_agent(server)
    for _ in range(2):
        await agent.run(task="go")
    assert said(server.hints) == [*TWO_STEPS, ("coder", 2, None), ("coder", 3, "read_file")]
    assert len({h.session_id for h in server.hints}) == 1
    assert [h.task_id for h in server.hints[::2]] != [h.task_id for h in server.hints[1::2]][::-1]
    assert len({h.task_id for h in server.hints}) == 2


async def test_two_agents_are_two_sessions(server: ScriptedServer) -> None:
    for _ in range(2):
        await make_agent(server).run(task="go")
    assert said(server.hints) == TWO_STEPS * 2
    assert len({h.session_id for h in server.hints}) == 2


@pytest.mark.parametrize("last", ["read_file", "run_python"])
async def test_of_parallel_tools_the_last_one_to_end_counts(
    server: ScriptedServer, last: str
) -> None:
    ended: dict[str, asyncio.Event] = {
        name: asyncio.Event() for name in ("read_file", "run_python")
    }

    async def work(name: str) -> str:
        if name == last:
            other = next(each for each in ended if each != last)
            await ended[other].wait()
            # The run of the other tool ends when its task does.
            await until(lambda: other not in {r.tool_name for r in tracker._runs.values()})
        ended[name].set()
        return name

    async def wait_for_file(text: str) -> str:
        return await work("read_file")

    async def wait_for_code(text: str) -> str:
        return await work("run_python")

    tools = [
        FunctionTool(wait_for_file, "", name="read_file"),
        FunctionTool(wait_for_code, "", name="run_python"),
    ]
    await make_agent(server, plan="read_file+run_python", tools=tools).run(task="go")
    assert said(server.hints) == [("coder", 0, None), ("coder", 1, last)]


async def test_a_tool_that_fails_ends(server: ScriptedServer) -> None:
    result = await make_agent(server, plan="fail").run(task="go")
    assert text_of(result).strip() == "done"
    assert said(server.hints) == [("coder", 0, None), ("coder", 1, "fail")]


async def test_a_tool_call_that_cannot_be_read_is_a_tool_call(server: ScriptedServer) -> None:
    server.interject(ToolCall("read_file", "{"))
    await make_agent(server, plan="").run(task="go")
    assert said(server.hints) == TWO_STEPS


async def test_a_retry_repeats_its_step(server: ScriptedServer) -> None:
    server.interject(Failure(500))
    await make_agent(server).run(task="go")
    assert said(server.hints) == [TWO_STEPS[0], *TWO_STEPS]


async def test_a_call_that_fails_leaves_nothing(server: ScriptedServer) -> None:
    agent = make_agent(server)
    server.interject(Failure(400))
    with pytest.raises(Exception, match="scripted failure"):
        await agent.run(task="go")
    assert (len(tracker), len(calls), reporting.current_run()) == (0, 0, None)
    await agent.run(task="go")
    assert [h.step for h in server.hints] == [0, 1, 2]


async def test_a_result_that_waits_for_the_next_turn(server: ScriptedServer) -> None:
    # Without a limit of its own an agent answers with what the tool said.
    agents = [make_agent(server, max_tool_iterations=1), make_agent(server, "critic", "")]
    await RoundRobinGroupChat(agents, max_turns=3).run(task="go")
    assert said(server.hints) == [
        ("coder", 0, None),
        ("critic", 0, None),
        ("coder", 1, "read_file"),
    ]


class Executor(CodeExecutor):
    """Runs no code, but says so."""

    component_type = "code_executor"

    async def execute_code_blocks(self, code_blocks: Any, cancellation_token: Any) -> CodeResult:
        return CodeResult(exit_code=0, output="ran")

    async def start(self) -> None:
        return None

    async def stop(self) -> None:
        return None

    async def restart(self) -> None:
        return None


async def test_code_that_an_agent_runs_is_a_tool(server: ScriptedServer) -> None:
    server.interject("```python\nprint(1)\n```", "It prints.")
    agent = CodeExecutorAgent(
        "coder",
        Executor(),
        model_client=make_client(server),
        approval_func=lambda request: ApprovalResponse(approved=True, reason=""),
    )
    await agent.run(task="go")
    assert said(server.hints) == [("coder", 0, None), ("coder", 1, "execute_code")]
    assert server.hints[1].tool is ToolType.CODE_EXEC


class Loop(BaseChatAgent):
    """An agent written by hand, with a model client and a tool."""

    def __init__(self, client: ChatCompletionClient) -> None:
        super().__init__("loop", "by hand")
        self._client = client

    @property
    def produced_message_types(self) -> Any:
        return (TextMessage,)

    async def on_messages(self, messages: Any, cancellation_token: CancellationToken) -> Response:
        await self._client.create([messages[-1].to_model_message()])
        await FunctionTool(read_file, "").run_json({"text": "x"}, cancellation_token)
        result = await self._client.create([messages[-1].to_model_message()])
        return Response(chat_message=TextMessage(content=str(result.content), source=self.name))

    async def on_reset(self, cancellation_token: CancellationToken) -> None:
        return None


@pytest.mark.parametrize("how", [run, run_stream])
async def test_an_agent_written_by_hand(server: ScriptedServer, how: Callable[[Any], Any]) -> None:
    await how(Loop(make_client(server)))
    assert said(server.hints) == [("loop", 0, None), ("loop", 1, "read_file")]
    assert len({h.session_id for h in server.hints}) == 1


async def test_a_client_that_the_program_defines_later(server: ScriptedServer) -> None:
    class Careful(OpenAIChatCompletionClient):
        async def create(self, *args: Any, **kwargs: Any) -> Any:
            return await super().create(*args, **kwargs)

    await Loop(make_client(server, Careful)).run(task="go")
    assert said(server.hints) == [("loop", 0, None), ("loop", 1, "read_file")]


async def test_an_answer_from_a_cache_is_no_step(server: ScriptedServer) -> None:
    client = ChatCompletionCache(make_client(server))
    with saga.workflow("swe"):
        for text in ("a", "a", "b"):
            await client.create([TextMessage(content=text, source="user").to_model_message()])
    assert [h.step for h in server.hints] == [0, 1]


# --- teams


def check_round_robin(hints: list[Hints], *, parent: str | None = None) -> None:
    """Coder with a tool, critic, coder with a tool."""
    assert said(hints) == [
        *TWO_STEPS,
        ("critic", 0, None),
        ("coder", 2, None),
        ("coder", 3, "read_file"),
    ]
    by_node = sessions_by_node(hints)
    assert {len(ids) for ids in by_node.values()} == {1}
    assert by_node["coder"] != by_node["critic"]
    assert len({h.task_id for h in hints}) == 1
    (found,) = {h.parent_session_id for h in hints}
    assert found is not None
    assert parent in (None, found)
    assert found not in {h.session_id for h in hints}


async def test_a_team_on_its_own_runtime(server: ScriptedServer) -> None:
    result = await make_team(server).run(task="go")
    assert text_of(result).strip() == "done"
    check_round_robin(server.hints)
    assert {h.workflow_id for h in server.hints} == {"RoundRobinGroupChat:coder:critic"}
    assert (len(tracker), len(calls), reporting.current_run()) == (0, 0, None)


async def test_a_name_of_a_team_is_its_workflow(server: ScriptedServer) -> None:
    await make_team(server, name="swe").run(task="go")
    assert {h.workflow_id for h in server.hints} == {"swe"}


async def test_a_team_on_a_runtime_that_was_started_elsewhere(server: ScriptedServer) -> None:
    runtime = SingleThreadedAgentRuntime()
    with saga.workflow("server"):
        runtime.start()
    with saga.workflow("job", task_id="task-1") as job:
        await make_team(server, runtime=runtime).run(task="go")
    await make_team(server, runtime=runtime).run(task="go")
    await runtime.stop_when_idle()
    check_round_robin(server.hints[:5])
    assert {(h.workflow_id, h.task_id) for h in server.hints[:5]} == {("job", "task-1")}
    assert job.session_id not in {h.session_id for h in server.hints}
    check_round_robin(server.hints[5:])
    workflow = "RoundRobinGroupChat:coder:critic"
    assert {h.workflow_id for h in server.hints[5:]} == {workflow}
    assert {h.task_id for h in server.hints[5:]}.isdisjoint({"task-1"})


async def test_a_manager_that_asks_a_model_has_the_session_of_the_team(
    server: ScriptedServer,
) -> None:
    team = SelectorGroupChat(
        [make_agent(server, "writer", ""), make_agent(server, "critic", ""), make_agent(server)],
        make_client(server),
        max_turns=2,
    )
    server.interject("writer", "text", "critic", "text")
    await team.run(task="go")
    manager = "SelectorGroupChatManager"
    assert said(server.hints) == [
        (manager, 0, None),
        ("writer", 0, None),
        (manager, 1, None),
        ("critic", 0, None),
    ]
    own = [h for h in server.hints if h.node == manager]
    assert {h.parent_session_id for h in own} == {None}
    (session_id,) = {h.session_id for h in own}
    others = [h for h in server.hints if h.node != manager]
    assert {h.parent_session_id for h in others} == {session_id}
    assert len({h.session_id for h in others}) == 2


async def test_a_swarm_hands_off(server: ScriptedServer) -> None:
    first = make_agent(server, "planner", "transfer_to_coder", tools=None, handoffs=["coder"])
    team = Swarm([first, make_agent(server)], termination_condition=TextMentionTermination("done"))
    await team.run(task="go")
    assert said(server.hints) == [("planner", 0, None), *TWO_STEPS]
    assert [len(ids) for ids in sessions_by_node(server.hints).values()] == [1, 1]
    assert len({h.task_id for h in server.hints}) == 1
    # What the planner is handed back carries the result of its handoff.
    await team.run(task=HandoffMessage(content="again", source="coder", target="planner"))
    back = next(h for h in server.hints[3:] if h.node == "planner")
    assert (back.step, back.tool) == (1, ToolType.SUBAGENT)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
async def test_magentic_one(server: ScriptedServer) -> None:
    ledger = (
        '{"is_request_satisfied": {"reason": "", "answer": %s}, "is_in_loop": {"reason": "", '
        '"answer": false}, "is_progress_being_made": {"reason": "", "answer": true}, '
        '"next_speaker": {"reason": "", "answer": "coder"}, '
        '"instruction_or_question": {"reason": "", "answer": "go"}}'
    )
    server.interject(
        "facts", "plan", ledger % "false", ToolCall("read_file", {"text": "x"}), "text"
    )
    server.interject(ledger % "true", "final")
    team = MagenticOneGroupChat([make_agent(server)], make_client(server))
    assert text_of(await team.run(task="go")) == "final"
    manager = "MagenticOneOrchestrator"
    assert said(server.hints) == [
        (manager, 0, None),
        (manager, 1, None),
        (manager, 2, None),
        *TWO_STEPS,
        (manager, 3, None),
        (manager, 4, None),
    ]
    assert [len(ids) for ids in sessions_by_node(server.hints).values()] == [1, 1]


async def test_agents_of_a_graph_at_once(server: ScriptedServer) -> None:
    builder = DiGraphBuilder()
    nodes = [make_agent(server, name) for name in ("start", "left", "right", "join")]
    for node in nodes:
        builder.add_node(node)
    builder.add_edge(nodes[0], nodes[1]).add_edge(nodes[0], nodes[2])
    builder.add_edge(nodes[1], nodes[3]).add_edge(nodes[2], nodes[3])
    await GraphFlow(nodes, graph=builder.build()).run(task="go")
    assert sorted(said(server.hints)) == sorted(
        (node.name, step, tool) for node in nodes for _, step, tool in TWO_STEPS
    )
    by_node = sessions_by_node(server.hints)
    assert len(set.union(*by_node.values())) == 4
    assert len({h.task_id for h in server.hints}) == 1


async def test_a_team_in_a_team(server: ScriptedServer) -> None:
    inner = RoundRobinGroupChat([make_agent(server)], max_turns=1, name="inner")
    team = RoundRobinGroupChat([make_agent(server, "boss", ""), inner], max_turns=2)
    await team.run(task="go")
    assert said(server.hints) == [("boss", 0, None), *TWO_STEPS]
    assert len({h.parent_session_id for h in server.hints}) == 1
    assert {h.workflow_id for h in server.hints} == {"RoundRobinGroupChat:boss:inner"}


async def test_a_society_of_mind_is_the_parent_of_its_team(server: ScriptedServer) -> None:
    team = RoundRobinGroupChat([make_agent(server)], max_turns=1)
    agent = SocietyOfMindAgent("society", team, make_client(server))
    for _ in range(2):
        await agent.run(task="go")
    # It resets its team after each run, so the coder begins anew.
    assert said(server.hints) == [
        *TWO_STEPS,
        ("society", 0, None),
        *TWO_STEPS,
        ("society", 1, None),
    ]
    by_node = sessions_by_node(server.hints)
    assert (len(by_node["coder"]), len(by_node["society"])) == (2, 1)
    coder = [h for h in server.hints if h.node == "coder"]
    assert {h.parent_session_id for h in coder} == by_node["society"]


# --- agents and teams as tools


@pytest.mark.parametrize("streams_tokens", [False, True])
async def test_an_agent_in_a_tool_is_a_child(server: ScriptedServer, streams_tokens: bool) -> None:
    helper = make_agent(server, "helper", model_client_stream=streams_tokens)
    boss = make_agent(server, "boss", "helper > helper", tools=[AgentTool(helper)])
    await boss.run(task="go")
    assert said(server.hints) == [
        ("boss", 0, None),
        ("helper", 0, None),
        ("helper", 1, "read_file"),
        ("boss", 1, "helper"),
        ("helper", 2, None),
        ("helper", 3, "read_file"),
        ("boss", 2, "helper"),
    ]
    by_node = sessions_by_node(server.hints)
    assert (len(by_node["boss"]), len(by_node["helper"])) == (1, 1)
    inner = [h for h in server.hints if h.node == "helper"]
    assert {h.parent_session_id for h in inner} == by_node["boss"]
    assert len({h.task_id for h in server.hints}) == 1
    assert {h.workflow_id for h in server.hints} == {"boss"}


async def test_a_team_in_a_tool(server: ScriptedServer) -> None:
    tool = TeamTool(make_team(server), "writing_team", "Writes.")
    await make_agent(server, "boss", "writing_team", tools=[tool]).run(task="go")
    boss = [h for h in server.hints if h.node == "boss"]
    assert said(boss) == [("boss", 0, None), ("boss", 1, "writing_team")]
    check_round_robin([h for h in server.hints if h.node != "boss"], parent=boss[0].session_id)
    assert len({h.task_id for h in server.hints}) == 1


# --- how long a session lasts


async def test_a_team_that_runs_again_goes_on(server: ScriptedServer) -> None:
    team = make_team(server)
    for _ in range(2):
        await team.run(task="go")
    coder = [h for h in server.hints if h.node == "coder"]
    assert [h.step for h in coder] == list(range(len(coder)))
    assert {len(ids) for ids in sessions_by_node(server.hints).values()} == {1}
    assert len({h.parent_session_id for h in server.hints}) == 1
    assert len({h.task_id for h in server.hints}) == 2


def ended_sessions(server: ScriptedServer) -> list[str | None]:
    return [session_id for kind, session_id, _ in events_of(server) if kind == "session_end"]


async def reset_team(team: BaseGroupChat, agent: AssistantAgent) -> None:
    await team.reset()


async def load_team(team: BaseGroupChat, agent: AssistantAgent) -> None:
    await team.load_state(await team.save_state())


async def reset_agent(team: BaseGroupChat, agent: AssistantAgent) -> None:
    await agent.on_reset(CancellationToken())


async def load_agent(team: BaseGroupChat, agent: AssistantAgent) -> None:
    await agent.load_state(await agent.save_state())


@pytest.mark.parametrize("forget", [reset_team, load_team, reset_agent, load_agent])
async def test_a_session_ends_when_the_agent_forgets(
    server: ScriptedServer, forget: Callable[[Any, Any], Any]
) -> None:
    agent = make_agent(server)
    team = RoundRobinGroupChat([agent], max_turns=1)
    await team.run(task="go")
    before = server.hints[0].session_id
    assert ended_sessions(server) == []
    await forget(team, agent)
    await team.run(task="go")
    assert ended_sessions(server) == [before]
    assert said(server.hints) == TWO_STEPS * 2
    assert server.hints[2].session_id != before


async def test_a_session_ends_with_its_agent(server: ScriptedServer) -> None:
    agent = make_agent(server)
    await agent.run(task="go")
    session_id = server.hints[0].session_id
    del agent
    # What it left behind in the loop keeps it for a few rounds.
    await until(lambda: gc.collect() >= 0 and not len(autogen._state.memories))
    assert ended_sessions(server) == [session_id]


async def test_a_named_session_lasts_longer_than_the_objects(server: ScriptedServer) -> None:
    for _ in range(2):
        with saga.workflow("chat", session_id="s-1"):
            await make_team(server, turns=2).run(task="go")
    with saga.workflow("chat", session_id="s-1"):
        await make_agent(server, "alone", "").run(task="go")
    assert [(h.session_id, h.step) for h in server.hints] == [
        ("s-1:coder", 0),
        ("s-1:coder", 1),
        ("s-1:critic", 0),
        ("s-1:coder", 2),
        ("s-1:coder", 3),
        ("s-1:critic", 1),
        ("s-1", 0),
    ]
    assert [h.parent_session_id for h in server.hints] == ["s-1"] * 6 + [None]
    gc.collect()
    assert ended_sessions(server) == []


async def test_an_agent_in_a_block_belongs_to_its_task(server: ScriptedServer) -> None:
    with saga.workflow("swe", task_id="task-1", deadline_s=60) as block:
        await make_agent(server).run(task="go")
        client = make_client(server)
        await client.create([TextMessage(content="a", source="user").to_model_message()])
    assert {(h.workflow_id, h.task_id) for h in server.hints} == {("swe", "task-1")}
    assert all(h.deadline_ms for h in server.hints)
    assert {h.parent_session_id for h in server.hints[:2]} == {block.session_id}
    assert (server.hints[2].session_id, server.hints[2].step) == (block.session_id, 0)


async def test_gateways_hear_of_tools_and_of_the_end(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A tool that is over at once is not worth an event.
    monkeypatch.setattr(runs, "MIN_TOOL_S", 0.0)
    agent = make_agent(server)
    await agent.run(task="go")
    session_id, task_id = server.hints[0].session_id, server.hints[0].task_id
    assert events_of(server) == [
        ("tool_start", session_id, "read_file"),
        ("tool_end", session_id, "read_file"),
        ("task_end", None, None),
    ]
    assert {e["task_id"] for e in server.events} == {task_id}
    assert {e["workflow_id"] for e in server.events} == {"coder"}


# --- early ends


async def test_the_reader_is_outside_of_the_run(server: ScriptedServer) -> None:
    agent = make_agent(server, model_client_stream=True)
    async for _ in agent.run_stream(task="go"):
        assert reporting.current_run() is None
        with saga.workflow("reader"):
            client = make_client(server)
            await client.create([TextMessage(content="a", source="user").to_model_message()])
    own = [h for h in server.hints if h.workflow_id == "coder"]
    assert said(own) == TWO_STEPS
    others = [h for h in server.hints if h.workflow_id != "coder"]
    assert {(h.workflow_id, h.step, h.node) for h in others} == {("reader", 0, None)}


@pytest.mark.parametrize("make", [make_agent, make_team])
async def test_a_stream_that_is_left_early(
    server: ScriptedServer, make: Callable[[ScriptedServer], Any]
) -> None:
    runner = make(server)
    stream = runner.run_stream(task="go")
    async for item in stream:
        if getattr(item, "source", "") == "coder":
            break
    assert len(tracker) > 0
    await stream.aclose()
    assert (len(tracker), len(calls), reporting.current_run()) == (0, 0, None)


async def test_a_stream_that_is_forgotten(server: ScriptedServer) -> None:
    stream = make_agent(server, model_client_stream=True).run_stream(task="go")
    await anext(stream)
    assert len(tracker) == 1
    del stream
    gc.collect()
    await until(lambda: len(tracker) == 0)
    assert len(calls) == 0


@pytest.mark.parametrize("how", ["token", "task"])
@pytest.mark.parametrize("external", [False, True])
async def test_a_run_that_is_cancelled(server: ScriptedServer, how: str, external: bool) -> None:
    runtime = None
    if external:
        runtime = SingleThreadedAgentRuntime()
        runtime.start()
    never = threading.Event()
    server.interject(ToolCall("read_file", {"text": "x"}), Held("late", never))
    token = CancellationToken()
    team = make_team(server, runtime=runtime)
    task = asyncio.ensure_future(team.run(task="go", cancellation_token=token))
    await asyncio.to_thread(server.wait_for_requests, 2)
    if how == "token":
        token.cancel()
    else:
        task.cancel()
    if how == "task":
        # The team waits for its runtime, so the answer has to come.
        never.set()
    with pytest.raises((asyncio.CancelledError, RuntimeError)):
        await task
    if runtime is not None:
        never.set()
        await runtime.stop_when_idle()
    assert said(server.hints)[:2] == TWO_STEPS
    assert (len(tracker), len(calls), reporting.current_run()) == (0, 0, None)


# --- many at once


def check_no_cross_talk(server: ScriptedServer, count: int) -> None:
    by_team: dict[str, list[Hints]] = {}
    for request in server.requests:
        by_team.setdefault(tag_of(request), []).append(request.hints)
    assert len(by_team) == count
    for hints in by_team.values():
        check_round_robin(hints)
    assert len({h.task_id for h in server.hints}) == count
    assert len({h.session_id for h in server.hints}) == 2 * count
    assert (len(tracker), len(calls), reporting.current_run()) == (0, 0, None)


@pytest.mark.parametrize("external", [False, True])
async def test_teams_at_once_do_not_mix(server: ScriptedServer, external: bool) -> None:
    runtime = SingleThreadedAgentRuntime() if external else None
    if runtime is not None:
        runtime.start()
    teams = [make_team(server, runtime=runtime, tag=f"{n:03}") for n in range(60)]
    await asyncio.gather(*(team.run(task="go") for team in teams))
    if runtime is not None:
        await runtime.stop_when_idle()
    check_no_cross_talk(server, 60)


async def test_streams_at_once_do_not_mix(server: ScriptedServer) -> None:
    async def stream(number: int) -> None:
        with saga.workflow("swe", task_id=f"task-{number:03}"):
            await answer_of(make_team(server, tag=f"{number:03}").run_stream(task="go"))

    await asyncio.gather(*(stream(number) for number in range(60)))
    check_no_cross_talk(server, 60)
    for request in server.requests:
        assert request.hints.task_id == f"task-{tag_of(request)}"


def test_teams_in_threads_do_not_mix(server: ScriptedServer) -> None:
    def work(number: int) -> None:
        asyncio.run(make_team(server, tag=f"{number:03}").run(task="go"))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check_no_cross_talk(server, 60)


# --- failures of ours, and the way back


async def everything(server: ScriptedServer) -> list[str]:
    """Run each kind of hook once, and say what the program sees."""
    helper = AgentTool(make_agent(server, "helper", model_client_stream=True))
    boss = make_agent(server, "boss", "helper > fail", tools=[helper, fail])
    seen = [text_of(await boss.run(task="go"))]
    runtime = SingleThreadedAgentRuntime()
    with saga.workflow("server"):
        runtime.start()
    team = make_team(server, runtime=runtime)
    async for item in team.run_stream(task="go"):
        seen.append(type(item).__name__)
    await team.reset()
    await runtime.stop_when_idle()
    seen.append(await on_messages(make_agent(server)))
    return seen


FAULTS = [
    (autogen, "_run_of"),
    (autogen, "_memory_of"),
    (autogen, "_team_of"),
    (autogen, "_run_of_speaker"),
    (autogen, "Run"),
    (autogen, "Conversation"),
    (autogen, "current_run"),
    (autogen, "named_block"),
    (autogen, "finalize"),
    (reporting, "current_run"),
    (reporting, "current_workflow"),
    (reporting, "enter_call"),
    (reporting, "RunStart"),
    (reporting, "Source"),
    (reporting.Run, "begin"),
    (reporting.Conversation, "called"),
    (reporting.sender, "put"),
    (reporting, "enter_block"),
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
    autogen.uninstall()
    expected = await everything(server)
    autogen.install()
    end = tracker.end
    with caplog.at_level(logging.WARNING, "saga_sdk"), monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        assert await everything(server) == expected
    warnings = [r for r in caplog.records if r.exc_info and r.exc_info[0] is Broken]
    assert warnings
    assert len(warnings) == len({r.getMessage() for r in warnings})
    for run_id in list(tracker._runs):
        end(run_id)


PATCHED = [
    (BaseChatAgent, "run"),
    (BaseChatAgent, "run_stream"),
    (AssistantAgent, "on_messages_stream"),
    (AssistantAgent, "on_reset"),
    (AssistantAgent, "load_state"),
    (AssistantAgent, "_execute_tool_call"),
    (BaseGroupChat, "run_stream"),
    (BaseGroupChat, "reset"),
    (BaseGroupChat, "load_state"),
    (autogen.SequentialRoutedAgent, "on_message_impl"),
    (autogen.BaseTool, "run_json"),
    (autogen.BaseStreamTool, "run_json_stream"),
    (OpenAIChatCompletionClient.__bases__[0], "create"),
    (OpenAIChatCompletionClient.__bases__[0], "create_stream"),
    (ChatCompletionClient, "__init_subclass__"),
]


def in_place() -> list[Any]:
    return [vars(owner).get(name) for owner, name in PATCHED]


def test_uninstall_restores_the_originals() -> None:
    autogen.uninstall()
    originals = in_place()
    for _ in range(2):
        autogen.install()
    wrapped = in_place()
    assert all(now is not before for now, before in zip(wrapped, originals, strict=True))
    for _ in range(2):
        autogen.uninstall()
    assert in_place() == originals


async def test_below_a_wrapper_of_others_ours_does_nothing(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = BaseChatAgent.run

    @functools.wraps(ours)
    async def theirs(*args: Any, **kwargs: Any) -> Any:
        return await ours(*args, **kwargs)

    monkeypatch.setattr(BaseChatAgent, "run", theirs)
    autogen.uninstall()
    assert vars(BaseChatAgent)["run"] is theirs
    await make_agent(server).run(task="go")
    assert all(request.hints == Hints() for request in server.requests)
    autogen.install()
    assert vars(BaseChatAgent)["run"] is theirs
    await make_agent(server).run(task="go")
    assert said(server.hints[2:]) == TWO_STEPS


def test_a_static_method_stays_one(server: ScriptedServer) -> None:
    agent = make_agent(server)
    call = ToolCall("read_file", "{")
    arguments = {"workbench": [], "handoff_tools": [], "agent_name": "a"}
    arguments |= {"cancellation_token": None, "stream": None}
    for way in (agent._execute_tool_call, AssistantAgent._execute_tool_call):
        named = asyncio.run(way(tool_call=_call_of(call), **arguments))
        placed = asyncio.run(way(_call_of(call), **arguments))
        assert named[1].is_error
        assert placed[1].name == "read_file"
    assert len(tracker) == 0


def _call_of(call: ToolCall) -> Any:
    from autogen_core import FunctionCall

    return FunctionCall(id="c", name=call.name, arguments=str(call.arguments))
