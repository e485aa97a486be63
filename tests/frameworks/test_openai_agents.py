"""Hints of OpenAI Agents SDK programs: what stands on each request."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from agents import (
    Agent,
    AgentHooks,
    GuardrailFunctionOutput,
    LocalShellTool,
    Model,
    ModelResponse,
    ModelRetryBackoffSettings,
    ModelRetrySettings,
    ModelSettings,
    ModelTracing,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    RunHooks,
    Runner,
    SQLiteSession,
    Usage,
    function_tool,
    input_guardrail,
    retry_policies,
    set_trace_processors,
    set_tracing_disabled,
    trace,
)
from agents.exceptions import UserError
from agents.run import AgentRunner
from agents.run_internal import run_loop, tool_execution
from agents.tracing.traces import TraceImpl
from openai import AsyncOpenAI
from openai.types.responses.response_output_item import LocalShellCall, LocalShellCallAction

import saga_sdk as saga
from saga_core.hints import Hints
from saga_core.types import ToolType
from saga_sdk.context import calls
from saga_sdk.integrations import openai_agents
from saga_sdk.runs import tracker
from saga_sdk.testing import Failure, Held, ScriptedServer, ToolCall

PLAN = "read_file > run_python"
THREE_STEPS = [
    (0, None, None),
    (1, "read_file", ToolType.FILE_IO),
    (2, "run_python", ToolType.CODE_EXEC),
]
MODELS = (OpenAIChatCompletionsModel, OpenAIResponsesModel)
WAYS = ("run", "run_sync", "run_streamed")


@function_tool
def read_file(text: str) -> str:
    """Read a file."""
    return text


@function_tool
async def run_python(text: str) -> str:
    """Run code."""
    return text


@pytest.fixture(autouse=True)
def integration(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Install it; afterwards SAGA may not have warned of anything."""
    set_trace_processors([])
    set_tracing_disabled(False)
    openai_agents.install()
    yield
    openai_agents.uninstall()
    assert [r.getMessage() for r in caplog.records if r.name == "saga_sdk"] == []


def make_client(server: ScriptedServer, **kwargs: Any) -> AsyncOpenAI:
    # Connections end with their responses: a loop that is gone could not close them.
    headers = {"connection": "close"}
    return AsyncOpenAI(base_url=server.base_url, api_key="none", default_headers=headers, **kwargs)


def make_agent(
    server: ScriptedServer,
    name: str = "helper",
    *,
    model: type[Model] = OpenAIChatCompletionsModel,
    tools: Sequence[Any] = (read_file, run_python),
    **kwargs: Any,
) -> Agent[Any]:
    saga.instrument(base_urls=[server.base_url])
    return Agent(
        name=name, model=model("scripted", make_client(server)), tools=list(tools), **kwargs
    )


async def ask(agent: Agent[Any], how: str, plan: str, **kwargs: Any) -> str:
    """Run the agent by the Runner's method ``how`` and return its last words."""
    if how == "run":
        return str((await Runner.run(agent, plan, **kwargs)).final_output)
    if how == "run_sync":
        # In a thread: it wants an event loop of its own.
        return str((await asyncio.to_thread(run_sync, agent, plan, **kwargs)).final_output)
    result = Runner.run_streamed(agent, plan, **kwargs)
    async for _ in result.stream_events():
        pass
    return str(result.final_output)


def run_sync(agent: Agent[Any], plan: str, **kwargs: Any) -> Any:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        return Runner.run_sync(agent, plan, **kwargs)
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def steps_and_tools(hints: list[Hints]) -> list[tuple[int | None, str | None, str | None]]:
    return [(h.step, h.tool_name, h.tool) for h in hints]


def by_session(hints: list[Hints]) -> dict[str, list[Hints]]:
    """The hints of each session, the sessions by the node of their first call."""
    sessions: dict[str | None, list[Hints]] = {}
    for each in hints:
        sessions.setdefault(each.session_id, []).append(each)
    return {str(of_one[0].node): of_one for of_one in sessions.values()}


@pytest.mark.parametrize("tracing", [True, False])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("how", WAYS)
async def test_every_call_carries_its_hints(
    server: ScriptedServer, how: str, model: type[Model], tracing: bool
) -> None:
    set_tracing_disabled(not tracing)
    agent = make_agent(server, model=model)

    answer = await ask(agent, how, PLAN)

    assert answer.strip() == f"done: {PLAN}"
    assert steps_and_tools(server.hints) == THREE_STEPS
    assert {(h.workflow_id, h.node) for h in server.hints} == {("helper", "helper")}
    assert len({h.session_id for h in server.hints}) == 1
    assert all(h.task_id == h.session_id is not None for h in server.hints)
    assert {h.parent_session_id for h in server.hints} == {None}
    assert (len(tracker), len(calls)) == (0, 0)


async def test_tracing_can_be_off_for_one_run(server: ScriptedServer) -> None:
    config = RunConfig(tracing_disabled=True, workflow_name="triage")
    await ask(make_agent(server), "run", PLAN, run_config=config)
    assert steps_and_tools(server.hints) == THREE_STEPS
    assert {h.workflow_id for h in server.hints} == {"triage"}


async def test_two_runs_are_two_tasks(server: ScriptedServer) -> None:
    agent = make_agent(server)
    for _ in range(2):
        await ask(agent, "run", "read_file")
    assert [h.step for h in server.hints] == [0, 1, 0, 1]
    assert len({h.task_id for h in server.hints}) == 2


async def test_gateways_hear_of_tools_and_ends(server: ScriptedServer) -> None:
    await ask(make_agent(server), "run_streamed", "read_file")
    ids = (server.hints[0].session_id, server.hints[0].task_id)
    assert events(server, 3) == [
        ("tool_start", "read_file", *ids),
        ("session_end", None, *ids),
        ("task_end", None, None, ids[1]),
    ]


def events(server: ScriptedServer, count: int) -> list[tuple[str | None, ...]]:
    """The first events, as soon as they are there."""
    server.wait_for_events(count)
    fields = ("event", "tool_name", "session_id", "task_id")
    return [tuple(each.get(field) for field in fields) for each in server.events[:count]]


@pytest.mark.parametrize("last", ["wait_on_file", "wait_on_url"])
async def test_of_parallel_tools_the_last_one_to_end_counts(
    server: ScriptedServer, last: str
) -> None:
    first_ended = asyncio.Event()

    class Ends(RunHooks[Any]):
        async def on_tool_end(self, *args: Any) -> None:
            first_ended.set()

    @function_tool
    async def wait_on_file(text: str) -> str:
        """Wait for the other tool when it is this one's turn to be last."""
        if last == "wait_on_file":
            await first_ended.wait()
        return text

    @function_tool
    async def wait_on_url(text: str) -> str:
        """Wait for the other tool when it is this one's turn to be last."""
        if last == "wait_on_url":
            await first_ended.wait()
        return text

    agent = make_agent(server, tools=[wait_on_file, wait_on_url])
    await ask(agent, "run", "wait_on_file+wait_on_url", hooks=Ends())
    assert [h.tool_name for h in server.hints] == [None, last]


@pytest.mark.parametrize("how", ["run", "run_streamed"])
async def test_agents_as_tools_are_sessions_of_their_own(how: str) -> None:
    script = {
        "BOSS": [
            [ToolCall("ask_helper", {"input": "one"}), ToolCall("ask_writer", {"input": "two"})],
            "done",
        ],
        "HELPER": [ToolCall("read_file", {"text": "x"}), "read"],
        "WRITER": [ToolCall("run_python", {"text": "x"}), "written"],
    }
    with ScriptedServer(script) as server:
        helper = make_agent(server, "helper", instructions="HELPER")
        writer = make_agent(server, "writer", instructions="WRITER")
        tools = [helper.as_tool("ask_helper", "helps"), writer.as_tool("ask_writer", "writes")]
        answer = await ask(make_agent(server, "boss", tools=tools, instructions="BOSS"), how, "go")
    assert answer.strip() == "done"
    boss, *others = (by_session(server.hints)[name] for name in ("boss", "helper", "writer"))
    assert [h.step for h in boss] == [0, 1]
    assert boss[1].tool_name in ("ask_helper", "ask_writer")
    for child, tool in zip(others, ("read_file", "run_python"), strict=True):
        assert [(h.step, h.tool_name) for h in child] == [(0, None), (1, tool)]
        assert {h.parent_session_id for h in child} == {boss[0].session_id}
    assert {(h.task_id, h.workflow_id) for h in server.hints} == {(boss[0].session_id, "boss")}
    assert len({h.session_id for h in server.hints}) == 3


async def test_agents_that_one_tool_runs_do_not_share_a_session() -> None:
    script = {
        "BOSS": [ToolCall("research", {"text": "x"}), "done"],
        "FIRST": [ToolCall("read_file", {"text": "x"}), "read"],
        "SECOND": [ToolCall("read_file", {"text": "x"}), "read"],
    }
    with ScriptedServer(script) as server:
        inner = [make_agent(server, n.lower(), instructions=n) for n in ("FIRST", "SECOND")]

        @function_tool
        async def research(text: str) -> str:
            """Ask two agents at once."""
            answers = await asyncio.gather(*(ask(agent, "run", text) for agent in inner))
            return ", ".join(answers)

        boss_agent = make_agent(server, "boss", tools=[research], instructions="BOSS")
        await ask(boss_agent, "run", "go")
    sessions = by_session(server.hints)
    assert [h.step for of_one in sessions.values() for h in of_one] == [0, 1, 0, 1, 0, 1]
    parents = {name: of_one[0].parent_session_id for name, of_one in sessions.items()}
    boss_id = sessions["boss"][0].session_id
    assert parents == {"boss": None, "first": boss_id, "second": boss_id}


async def test_what_a_tool_asks_itself_is_a_child_session(server: ScriptedServer) -> None:
    agent = make_agent(server)
    model = agent.model
    assert isinstance(model, Model)

    @function_tool
    async def research(text: str) -> str:
        """Ask a model three times, past the Runner."""
        messages: Any = [{"role": "user", "content": "# bare"}]
        client = make_client(server)
        for _ in range(2):
            await client.chat.completions.create(model="scripted", messages=messages)
        answer = await model.get_response(
            None,
            "# direct",
            ModelSettings(),
            [],
            None,
            [],
            ModelTracing.DISABLED,
            previous_response_id=None,
            conversation_id=None,
            prompt=None,
        )
        return str(answer.response_id)

    agent.tools = [research]
    await ask(agent, "run", "research")
    first, *inner, last = server.hints
    assert [(h.step, h.session_id) for h in (first, last)] == [
        (0, first.session_id),
        (1, first.session_id),
    ]
    assert [h.step for h in inner] == [0, 1, 2]
    assert {(h.parent_session_id, h.task_id) for h in inner} == {(first.session_id, first.task_id)}
    assert len({h.session_id for h in inner}) == 1


async def test_a_handoff_goes_on_with_the_conversation() -> None:
    script = {
        "TRIAGE": [ToolCall("read_file", {"text": "x"}), ToolCall("transfer_to_writer", {})],
        "WRITER": [ToolCall("run_python", {"text": "x"}), "written"],
    }
    with ScriptedServer(script) as server:
        writer = make_agent(server, "writer", instructions="WRITER")
        triage = make_agent(server, "triage", instructions="TRIAGE", handoffs=[writer])
        answer = await ask(triage, "run_streamed", "go")
    assert answer.strip() == "written"
    assert [(h.step, h.node, h.tool_name) for h in server.hints] == [
        (0, "triage", None),
        (1, "triage", "read_file"),
        (2, "writer", None),
        (3, "writer", "run_python"),
    ]
    assert len({h.session_id for h in server.hints}) == 1


async def test_a_guardrail_with_an_agent_is_a_child_session() -> None:
    with ScriptedServer({"GUARD": ["fine"], "MAIN": ["hello"]}) as server:
        guard_agent = make_agent(server, "guard", instructions="GUARD")

        @input_guardrail(run_in_parallel=False)
        async def check(context: Any, agent: Any, said: Any) -> GuardrailFunctionOutput:
            answer = await ask(guard_agent, "run", "check this")
            return GuardrailFunctionOutput(answer, tripwire_triggered=False)

        main = make_agent(server, "main", instructions="MAIN", input_guardrails=[check])
        await ask(main, "run", "go")
    sessions = by_session(server.hints)
    assert [h.step for h in server.hints] == [0, 0]
    assert sessions["guard"][0].parent_session_id == sessions["main"][0].session_id
    assert len({h.task_id for h in server.hints}) == 1


async def test_a_trace_is_one_task_of_its_runs(server: ScriptedServer) -> None:
    writer, critic = make_agent(server, "writer"), make_agent(server, "critic")
    with trace("Joke") as joke:
        await ask(writer, "run", "read_file")
        await ask(critic, "run_streamed", "read_file")
    await ask(writer, "run", "# alone")
    *in_trace, alone = server.hints
    assert {(h.workflow_id, h.task_id) for h in in_trace} == {("Joke", joke.trace_id)}
    assert [(h.node, h.step) for h in in_trace] == [
        ("writer", 0),
        ("writer", 1),
        ("critic", 0),
        ("critic", 1),
    ]
    assert len({h.session_id for h in in_trace}) == 2
    assert alone.task_id != joke.trace_id


async def test_a_block_around_a_trace_says_the_task(server: ScriptedServer) -> None:
    agent = make_agent(server)
    with saga.workflow("mine", task_id="t1"), trace("Joke"):
        await ask(agent, "run", "# x")
    assert [h.task_id for h in server.hints] == ["t1"]


@pytest.mark.parametrize("named", ["session", "conversation_id", "group_id", "group of the trace"])
async def test_a_named_conversation_goes_on_over_runs(server: ScriptedServer, named: str) -> None:
    agent = make_agent(server, model=OpenAIResponsesModel)
    # Named sessions go on counting for the life of the process.
    name = f"chat by {named}"
    for _ in range(2):
        if named == "group of the trace":
            with trace("Chat", group_id=name):
                await ask(agent, "run", "read_file")
            continue
        given: dict[str, Any] = {
            "session": {"session": SQLiteSession(name)},
            "conversation_id": {"conversation_id": name},
            "group_id": {"run_config": RunConfig(group_id=name)},
        }[named]
        await ask(agent, "run", "read_file", **given)
    assert [h.step for h in server.hints] == [0, 1, 2, 3]
    assert [h.tool_name for h in server.hints] == [None, "read_file", None, "read_file"]
    (session_id,) = {h.session_id for h in server.hints}
    assert session_id is not None
    assert session_id.startswith("chat-by-")
    assert len({h.task_id for h in server.hints}) == 2


async def test_an_exception_in_a_tool_stays_the_programs(server: ScriptedServer) -> None:
    @function_tool(failure_error_function=None)
    def run_shell(text: str) -> str:
        """Fail."""
        raise ZeroDivisionError("mine")

    agent = make_agent(server, tools=[run_shell])
    with pytest.raises(UserError, match="mine"):
        await ask(agent, "run", "run_shell")
    with pytest.raises(UserError, match="mine"):
        await ask(agent, "run_streamed", "run_shell")
    assert (len(tracker), len(calls)) == (0, 0)


async def test_a_tool_that_reports_its_failure_counts_as_ended(server: ScriptedServer) -> None:
    @function_tool
    def run_shell(text: str) -> str:
        """Fail."""
        raise ZeroDivisionError("mine")

    await ask(make_agent(server, tools=[run_shell]), "run", "run_shell")
    assert [h.tool_name for h in server.hints] == [None, "run_shell"]


@pytest.mark.parametrize("how", ["run", "run_streamed"])
async def test_a_retry_repeats_the_step(server: ScriptedServer, how: str) -> None:
    agent = make_agent(server)
    server.interject(Failure(503))
    await ask(agent, how, "read_file")
    assert [(h.step, h.tool_name) for h in server.hints] == [
        (0, None),
        (0, None),
        (1, "read_file"),
    ]


@pytest.mark.parametrize("how", ["run", "run_streamed"])
async def test_a_retry_of_the_framework_repeats_the_step(server: ScriptedServer, how: str) -> None:
    backoff = ModelRetryBackoffSettings(initial_delay=0.001, jitter=False)
    retry = ModelRetrySettings(
        max_retries=3, backoff=backoff, policy=retry_policies.http_status([503])
    )
    agent = make_agent(server, model_settings=ModelSettings(retry=retry))
    assert isinstance(agent.model, OpenAIChatCompletionsModel)
    agent.model._client = make_client(server, max_retries=0)
    server.interject(Failure(503), Failure(503))
    await ask(agent, how, "read_file")
    assert [(h.step, h.tool_name) for h in server.hints] == [(0, None)] * 3 + [(1, "read_file")]


async def test_a_tool_of_the_sdks_own_counts(server: ScriptedServer) -> None:
    class ShellFirst(OpenAIResponsesModel):
        """Begins with a call of the local shell."""

        async def get_response(self, *args: Any, **kwargs: Any) -> Any:
            if server.requests:
                return await super().get_response(*args, **kwargs)
            action = LocalShellCallAction(type="exec", command=["ls"], env={})
            output = LocalShellCall(
                id="1", action=action, call_id="1", status="completed", type="local_shell_call"
            )
            await super().get_response(*args, **kwargs)
            return ModelResponse(output=[output], usage=Usage(), response_id=None)

    shell = LocalShellTool(executor=lambda request: "a.py")
    await ask(make_agent(server, model=ShellFirst, tools=[shell]), "run", "# list")
    assert [(h.step, h.tool_name) for h in server.hints] == [(0, None), (1, "local_shell")]


@pytest.mark.parametrize("how", ["run", "run_streamed"])
async def test_a_cancelled_run_leaves_nothing(server: ScriptedServer, how: str) -> None:
    agent = make_agent(server)
    server.gate.clear()
    running = asyncio.create_task(ask(agent, how, "read_file"))
    await asyncio.to_thread(server.wait_for_requests)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    server.gate.set()
    await all_tasks_ended()
    assert (len(tracker), len(calls)) == (0, 0)


async def all_tasks_ended() -> None:
    """Wait for the tasks that the program has let go of, and for what is called at their ends."""
    current = asyncio.current_task()
    others = [task for task in asyncio.all_tasks() if task is not current]
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.sleep(0)


async def test_a_stream_that_is_cancelled_or_left_leaves_nothing(server: ScriptedServer) -> None:
    agent = make_agent(server)
    cancelled = Runner.run_streamed(agent, PLAN)
    async for _ in cancelled.stream_events():
        cancelled.cancel()
    left = Runner.run_streamed(agent, PLAN)
    async for _ in left.stream_events():
        break
    await all_tasks_ended()
    assert (len(tracker), len(calls)) == (0, 0)
    # The SDK runs on what nobody reads.
    assert steps_and_tools(server.hints[-3:]) == THREE_STEPS


async def test_other_calls_while_a_response_streams_are_no_steps(server: ScriptedServer) -> None:
    read_on = threading.Event()
    agent = make_agent(server)
    server.interject(Held("slow", read_on, after_events=1))
    running = asyncio.create_task(ask(agent, "run_streamed", "# x"))
    await asyncio.to_thread(server.wait_for_requests)
    client = make_client(server)
    messages: Any = [{"role": "user", "content": "# bare"}]
    await client.chat.completions.create(model="scripted", messages=messages)
    read_on.set()
    await running
    assert [h.step for h in server.hints] == [0, None]


async def test_a_model_of_the_users_own_counts_once(server: ScriptedServer) -> None:
    class Logged(Model):
        """Passes on to another model."""

        def __init__(self, inner: Model) -> None:
            self.inner = inner
            self.seen = 0

        async def get_response(self, *args: Any, **kwargs: Any) -> Any:
            self.seen += 1
            return await self.inner.get_response(*args, **kwargs)

        def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            self.seen += 1
            return self.inner.stream_response(*args, **kwargs)

    agent = make_agent(server)
    assert isinstance(agent.model, Model)
    agent.model = Logged(agent.model)
    for how in ("run", "run_streamed"):
        await ask(agent, how, PLAN)
    assert steps_and_tools(server.hints) == THREE_STEPS * 2
    assert agent.model.seen == 6


async def test_the_programs_own_hooks_see_what_they_saw(server: ScriptedServer) -> None:
    seen: list[str] = []

    class OfRun(RunHooks[Any]):
        async def on_llm_start(self, *args: Any) -> None:
            seen.append("llm")

    class OfAgent(AgentHooks[Any]):
        async def on_tool_start(self, *args: Any) -> None:
            seen.append("tool")

    await ask(make_agent(server, hooks=OfAgent()), "run", "read_file", hooks=OfRun())
    assert seen == ["llm", "tool", "llm"]
    assert [h.step for h in server.hints] == [0, 1]


@pytest.mark.parametrize("how", WAYS)
async def test_sixty_at_once_do_not_mix(server: ScriptedServer, how: str) -> None:
    plans = [f"read_file > run_python # {i}" for i in range(60)]
    agents = [make_agent(server, f"agent-{i}") for i in range(60)]
    if how == "run_sync":
        with ThreadPoolExecutor(16) as pool:
            results = list(pool.map(run_sync, agents, plans))
        answers = [str(result.final_output) for result in results]
    else:
        answers = await asyncio.gather(*map(ask, agents, [how] * 60, plans))
    assert [answer.strip() for answer in answers] == [f"done: {plan}" for plan in plans]
    sessions = by_session(server.hints)
    assert set(sessions) == {agent.name for agent in agents}
    for name, of_one in sessions.items():
        assert steps_and_tools(of_one) == THREE_STEPS
        assert {(h.node, h.workflow_id) for h in of_one} == {(name, name)}
    prompts = {r.hints.session_id: r.hints.node for r in server.requests}
    assert all(
        r.user_text.endswith(str(prompts[r.hints.session_id]).replace("agent-", "# "))
        for r in server.requests
    )
    assert (len(tracker), len(calls)) == (0, 0)


@pytest.mark.parametrize(
    "broken",
    [
        "tracker",
        "calls",
        "uuid4",
        "enter_call",
        "enter_block",
        "current_workflow",
        "WorkflowContext",
        "WorkflowRun",
        "_Enclosing",
        "_source",
        "_session_of",
        "_wrap_model",
    ],
)
@pytest.mark.parametrize("how", WAYS)
async def test_a_fault_of_ours_changes_nothing(
    server: ScriptedServer,
    how: str,
    broken: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Faulty:
        """Fails however it is used."""

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise ZeroDivisionError("ours")

        def __getattr__(self, name: str) -> Any:
            raise ZeroDivisionError("ours")

    agent = make_agent(server)
    monkeypatch.setattr(openai_agents, broken, Faulty())
    with trace("Joke"):
        answer = await ask(agent, how, PLAN)
    assert answer.strip() == f"done: {PLAN}"
    assert len(server.requests) == 3
    monkeypatch.undo()
    caplog.clear()


def restored() -> list[Any]:
    return [
        AgentRunner.run,
        AgentRunner.run_streamed,
        OpenAIChatCompletionsModel.get_response,
        OpenAIChatCompletionsModel.stream_response,
        OpenAIResponsesModel.get_response,
        OpenAIResponsesModel.stream_response,
        TraceImpl.__enter__,
        TraceImpl.__exit__,
        run_loop.get_model,
        tool_execution._invoke_function_tool_with_metadata,
    ]


async def test_uninstall_restores_the_originals(server: ScriptedServer) -> None:
    openai_agents.uninstall()
    originals = restored()
    openai_agents.install()
    openai_agents.install()
    wrapped = restored()
    assert all(new is not old for new, old in zip(wrapped, originals, strict=True))
    assert [new.__wrapped__ for new in wrapped] == originals
    openai_agents.uninstall()
    openai_agents.uninstall()
    assert restored() == originals


async def test_uninstalled_below_a_wrapper_of_others_it_sleeps(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours: Callable[..., Awaitable[Any]] = AgentRunner.run

    async def theirs(*args: Any, **kwargs: Any) -> Any:
        return await ours(*args, **kwargs)

    monkeypatch.setattr(AgentRunner, "run", theirs)
    agent = make_agent(server)
    openai_agents.uninstall()
    await ask(agent, "run", "read_file")
    assert {(h.session_id, h.step) for h in server.hints} == {(None, None)}
    monkeypatch.undo()
    openai_agents.uninstall()


async def test_a_run_under_way_ends_after_uninstall(server: ScriptedServer) -> None:
    agent = make_agent(server)
    server.gate.clear()
    running = asyncio.create_task(ask(agent, "run", "read_file"))
    await asyncio.to_thread(server.wait_for_requests)
    openai_agents.uninstall()
    server.gate.set()
    await running
    assert (len(tracker), len(calls)) == (0, 0)


def test_faults_are_said(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("saga_sdk.guard._logged", set())
    monkeypatch.setattr(openai_agents, "uuid4", None)
    with caplog.at_level(logging.WARNING, "saga_sdk"):
        run_sync(make_agent(server), "read_file")
    said = [record.getMessage() for record in caplog.records if record.name == "saga_sdk"]
    assert len(said) == 1
    assert "report of an agent's start" in said[0]
    caplog.clear()
