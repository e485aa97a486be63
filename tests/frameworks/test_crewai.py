"""Hints of CrewAI programs: what stands on each request."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import saga_sdk as saga
from saga_core.hints import Hints
from saga_core.types import ToolType
from saga_sdk.context import calls
from saga_sdk.runs import tracker
from saga_sdk.testing import Failure, Request, ScriptedServer, Step, ToolCall

# Before the import: CrewAI and LiteLLM would call home, and ask about traces at the end.
os.environ["CREWAI_DISABLE_TELEMETRY"] = "true"
os.environ["CREWAI_TRACING_ENABLED"] = "false"
os.environ["CREWAI_TESTING"] = "true"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"

with warnings.catch_warnings():
    # CrewAI warns of itself while it is imported.
    warnings.simplefilter("ignore")
    from crewai import LLM, Agent, Crew, Flow, Process, Task
    from crewai.flow.flow import listen, start
    from crewai.hooks import (
        before_llm_call,
        register_after_tool_call_hook,
        unregister_after_tool_call_hook,
        unregister_before_llm_call_hook,
    )
    from crewai.llms.providers.openai.completion import OpenAICompletion
    from crewai.tools import BaseTool, tool
    from crewai.tools.base_tool import Tool
    from crewai.tools.structured_tool import CrewStructuredTool

    from saga_sdk.integrations import crewai as integration

PLAN = "read_file > run_python"
THREE_STEPS = [
    (0, None, None),
    (1, "read_file", ToolType.FILE_IO),
    (2, "run_python", ToolType.CODE_EXEC),
]
WAYS = ("kickoff", "kickoff_async", "akickoff", "stream", "astream")
# What CrewAI and its libraries warn of in themselves is not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore::Warning")


def follow_task(request: Request) -> Step:
    """Answer as the task plans: its rounds of tool calls, then ``done: <task>``."""
    found = re.search(r"Current Task: (.*)", request.user_text)
    plan = found.group(1).strip() if found else request.user_text.strip()
    rounds = [r.strip() for r in plan.partition("#")[0].split(">") if r.strip()]
    if request.turn >= len(rounds) or not request.tool_names:
        return f"done: {plan}"
    return [ToolCall(name, {"text": "x"}) for name in rounds[request.turn].split("+")]


@tool
def read_file(text: str) -> str:
    """Read a file."""
    return text


@tool("Run Python")
def run_python(text: str) -> str:
    """Run code."""
    return text


@pytest.fixture(autouse=True)
def installed(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Install it; afterwards SAGA may not have warned of anything."""
    monkeypatch.setenv("CREWAI_STORAGE_DIR", str(tmp_path))
    integration.install()
    yield
    integration.uninstall()
    assert [r.getMessage() for r in caplog.records if r.name == "saga_sdk"] == []


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(follow_task) as scripted:
        yield scripted


def make_llm(server: ScriptedServer, model: str = "openai/gpt-4o", **kwargs: Any) -> Any:
    saga.instrument(base_urls=[server.base_url])
    return LLM(model=model, base_url=server.base_url, api_key="none", **kwargs)


def make_agent(
    server: ScriptedServer,
    role: str = "Coder",
    *,
    tools: Sequence[Any] = (read_file, run_python),
    llm: Any = None,
    **kwargs: Any,
) -> Agent:
    return Agent(
        role=role,
        goal="help",
        backstory="an old hand",
        tools=list(tools),
        llm=llm or make_llm(server),
        **kwargs,
    )


def make_task(plan: str, agent: Agent | None = None, **kwargs: Any) -> Task:
    return Task(description=plan, expected_output="an answer", agent=agent, **kwargs)


def make_crew(server: ScriptedServer, plan: str = PLAN, **kwargs: Any) -> Crew:
    """A coder who works to the plan, then a writer without tools."""
    coder = make_agent(server)
    writer = make_agent(server, "Writer on {topic}", tools=())
    tasks = [make_task(plan, coder), make_task("# write", writer)]
    return Crew(agents=[coder, writer], tasks=tasks, **kwargs)


async def run(crew: Any, how: str, inputs: dict[str, Any] | None = None) -> str:
    """Run a crew or a flow and return its last words."""
    if how == "kickoff":
        return said(await asyncio.to_thread(crew.kickoff, inputs=inputs))
    if how == "stream":
        return await asyncio.to_thread(read_stream, crew, inputs)
    if how == "astream":
        crew.stream = True
        stream = await crew.akickoff(inputs=inputs)
        async for _ in stream:
            pass
        return said(stream.result)
    return said(await getattr(crew, how)(inputs=inputs))


def read_stream(crew: Crew, inputs: dict[str, Any] | None) -> str:
    crew.stream = True
    stream: Any = crew.kickoff(inputs=inputs)
    for _ in stream:
        pass
    return said(stream.result)


def said(output: Any) -> str:
    return str(getattr(output, "raw", output))


def steps_and_tools(hints: list[Hints]) -> list[tuple[int | None, str | None, str | None]]:
    return [(h.step, h.tool_name, h.tool) for h in hints]


def by_node(hints: list[Hints]) -> dict[str, list[Hints]]:
    nodes: dict[str, list[Hints]] = {}
    for each in hints:
        nodes.setdefault(str(each.node), []).append(each)
    return nodes


@pytest.mark.parametrize("how", WAYS)
async def test_every_call_carries_its_hints(server: ScriptedServer, how: str) -> None:
    answer = await run(make_crew(server), how, {"topic": "cats"})

    assert answer == "done: # write"
    nodes = by_node(server.hints)
    assert steps_and_tools(nodes["Coder"]) == THREE_STEPS
    assert steps_and_tools(nodes["Writer-on-topic"]) == [(0, None, None)]
    assert len({h.session_id for h in nodes["Coder"]}) == 1
    assert len({h.session_id for h in server.hints}) == 2
    assert len({h.task_id for h in server.hints}) == 1
    (parent,) = {h.parent_session_id for h in server.hints}
    assert parent not in (None, *(h.session_id for h in server.hints))
    assert {h.workflow_id for h in server.hints} == {"Coder-Writer-on-topic"}
    assert (len(tracker), len(calls)) == (0, 0)


@pytest.mark.parametrize("model", ["openai/gpt-4o", "hosted_vllm/scripted"])
@pytest.mark.parametrize("stream", [False, True])
def test_every_native_model_carries_them(server: ScriptedServer, model: str, stream: bool) -> None:
    agent = make_agent(server, llm=make_llm(server, model, stream=stream))
    assert said(agent.kickoff(PLAN)) == f"done: {PLAN}"
    assert steps_and_tools(server.hints) == THREE_STEPS


@pytest.mark.parametrize("model", ["openai/gpt-4o", "hosted_vllm/scripted"])
@pytest.mark.parametrize("stream", [False, True])
def test_every_model_of_litellm_carries_them(
    server: ScriptedServer, model: str, stream: bool
) -> None:
    pytest.importorskip("litellm")
    llm = make_llm(server, model, is_litellm=True, stream=stream)
    assert isinstance(llm, LLM)
    crew = Crew(agents=[agent := make_agent(server, llm=llm)], tasks=[make_task("# x", agent)])
    assert said(crew.kickoff()) == "done: # x"
    assert [(h.step, h.node, h.workflow_id) for h in server.hints] == [(0, "Coder", "Coder")]


def test_an_agent_alone_is_a_task(server: ScriptedServer) -> None:
    agent = make_agent(server)
    for _ in range(2):
        agent.kickoff("read_file")
    assert [h.step for h in server.hints] == [0, 1, 0, 1]
    assert all(h.task_id == h.session_id for h in server.hints)
    assert len({h.task_id for h in server.hints}) == 2
    assert {(h.workflow_id, h.node) for h in server.hints} == {("Coder", "Coder")}


async def test_an_agent_alone_in_async_code(server: ScriptedServer) -> None:
    assert said(await make_agent(server).kickoff_async(PLAN)) == f"done: {PLAN}"
    assert steps_and_tools(server.hints) == THREE_STEPS


@pytest.mark.parametrize("how", WAYS)
async def test_gateways_hear_of_tools_and_ends(server: ScriptedServer, how: str) -> None:
    await run(make_crew(server, "read_file"), how, {"topic": "cats"})
    coder, writer = (of_one[0].session_id for of_one in by_node(server.hints).values())
    server.wait_for_events(4)
    assert [(e["event"], e.get("tool_name"), e.get("session_id")) for e in server.events] == [
        ("tool_start", "read_file", coder),
        ("session_end", None, coder),
        ("session_end", None, writer),
        ("task_end", None, None),
    ]
    assert {e["task_id"] for e in server.events} == {server.hints[0].task_id}


def test_each_of_many_kickoffs_is_a_task(server: ScriptedServer) -> None:
    crew = make_crew(server, "read_file", name="book")
    outputs = crew.kickoff_for_each(inputs=[{"topic": "cats"}, {"topic": "dogs"}])
    assert [said(output) for output in outputs] == ["done: # write"] * 2
    assert len({h.task_id for h in server.hints}) == 2
    assert {h.workflow_id for h in server.hints} == {"book"}
    assert [h.step for h in server.hints] == [0, 1, 0] * 2


@pytest.mark.parametrize("last", ["wait_on_file", "wait_on_url"])
def test_of_parallel_tools_the_last_one_to_end_counts(server: ScriptedServer, last: str) -> None:
    first_ended = threading.Event()

    def note(context: Any) -> None:
        first_ended.set()

    @tool
    def wait_on_file(text: str) -> str:
        """Wait for the other tool when it is this one's turn to be last."""
        if last == "wait_on_file":
            assert first_ended.wait(30)
        return text

    @tool
    def wait_on_url(text: str) -> str:
        """Wait for the other tool when it is this one's turn to be last."""
        if last == "wait_on_url":
            assert first_ended.wait(30)
        return text

    register_after_tool_call_hook(note)
    try:
        make_agent(server, tools=[wait_on_file, wait_on_url]).kickoff("wait_on_file+wait_on_url")
    finally:
        unregister_after_tool_call_hook(note)
    assert [h.tool_name for h in server.hints] == [None, last]


@pytest.mark.parametrize("how", ["kickoff", "akickoff"])
async def test_async_tasks_are_sessions_of_one_task(server: ScriptedServer, how: str) -> None:
    agents = [make_agent(server, role) for role in ("One", "Two", "Three")]
    tasks = [make_task(PLAN, each, async_execution=each.role != "Three") for each in agents]
    # What one agent's tool returned is not another's.
    await run(Crew(agents=agents, tasks=tasks, cache=False), how)
    for of_one in by_node(server.hints).values():
        assert steps_and_tools(of_one) == THREE_STEPS
        assert len({h.session_id for h in of_one}) == 1
    assert len({h.session_id for h in server.hints}) == 3
    assert len({h.task_id for h in server.hints}) == 1


async def test_a_manager_that_delegates_is_the_parent() -> None:
    def script(request: Request) -> Step:
        if "delegate_work_to_coworker" not in request.tool_names:
            return follow_task(request)
        work = {"task": PLAN, "context": "none", "coworker": "Coder"}
        return [ToolCall("delegate_work_to_coworker", work), "managed"][min(request.turn, 1)]

    with ScriptedServer(script) as server:
        crew = Crew(
            agents=[make_agent(server)],
            tasks=[make_task("manage")],
            process=Process.hierarchical,
            manager_llm=make_llm(server),
        )
        assert await run(crew, "kickoff") == "managed"
    manager, coder = by_node(server.hints)["Crew-Manager"], by_node(server.hints)["Coder"]
    assert [(h.step, h.tool_name) for h in manager] == [
        (0, None),
        (1, "delegate_work_to_coworker"),
    ]
    assert steps_and_tools(coder) == THREE_STEPS
    assert {h.parent_session_id for h in coder} == {manager[0].session_id}
    assert len({h.session_id for h in server.hints}) == 2
    assert len({h.task_id for h in server.hints}) == 1


def test_a_flow_is_one_task(server: ScriptedServer) -> None:
    llm, coder = make_llm(server), make_agent(server)

    class Report(Flow[Any]):
        @start()
        def ask_the_model(self) -> Any:
            return llm.call("# direct")

        @listen(ask_the_model)
        def run_a_crew(self) -> Any:
            return make_crew(server).kickoff(inputs={"topic": "cats"})

        @listen(run_a_crew)
        async def ask_an_agent(self) -> str:
            return said(await coder.kickoff_async(PLAN))

    assert Report().kickoff() == f"done: {PLAN}"
    assert {(h.workflow_id, h.task_id) for h in server.hints} == {
        ("Report", server.hints[0].task_id)
    }
    direct, *agents = server.hints
    assert (direct.step, direct.node, direct.parent_session_id) == (0, None, None)
    assert steps_and_tools(agents) == [*THREE_STEPS, (0, None, None), *THREE_STEPS]
    assert {h.parent_session_id for h in agents} == {direct.session_id}
    assert len({h.session_id for h in agents}) == 3


@pytest.mark.parametrize("how", ["stream", "stream_events", "kickoff_async"])
async def test_a_flow_that_streams_is_one_task(server: ScriptedServer, how: str) -> None:
    if how == "stream_events" and not hasattr(Flow, "stream_events"):
        pytest.skip("this version streams in one way only")
    coder = make_agent(server)

    class Report(Flow[Any]):
        @start()
        async def ask_an_agent(self) -> str:
            return said(await coder.kickoff_async("read_file"))

    flow = Report()
    if how == "kickoff_async":
        flow.stream = True
        stream: Any = await flow.kickoff_async()
        async for _ in stream:
            pass
        answer = stream.result
    else:
        flow.stream = how == "stream"
        answer = await asyncio.to_thread(read_flow, flow)
    assert said(answer) == "done: read_file"
    assert [(h.step, h.workflow_id) for h in server.hints] == [(0, "Report"), (1, "Report")]
    server.wait_for_events(3)
    assert [e["event"] for e in server.events] == ["tool_start", "session_end", "task_end"]


def read_flow(flow: Any) -> Any:
    stream = flow.kickoff() if flow.stream else flow.stream_events()
    for _ in stream:
        pass
    return stream.result


def test_a_crew_in_a_tool_is_spawned_by_the_caller(server: ScriptedServer) -> None:
    @tool
    def hire_crew(text: str) -> str:
        """Ask a crew."""
        return said(make_crew(server, "read_file").kickoff(inputs={"topic": "cats"}))

    make_agent(server, "Boss", tools=[hire_crew]).kickoff("hire_crew")
    nodes = by_node(server.hints)
    boss = nodes.pop("Boss")
    assert steps_and_tools(boss) == [(0, None, None), (1, "hire_crew", ToolType.OTHER)]
    assert [[h.step for h in of_one] for of_one in nodes.values()] == [[0, 1], [0]]
    assert {h.parent_session_id for of_one in nodes.values() for h in of_one} == {
        boss[0].session_id
    }
    assert len({h.session_id for h in server.hints}) == 3
    assert len({h.task_id for h in server.hints}) == 1


def test_a_block_says_task_and_workflow(server: ScriptedServer) -> None:
    crew = make_crew(server, "read_file")
    with saga.workflow("mine", task_id="t1", session_id="s1"):
        crew.kickoff(inputs={"topic": "cats"})
        make_agent(server).kickoff("read_file")
    assert {(h.workflow_id, h.task_id) for h in server.hints} == {("mine", "t1")}
    *of_crew, first, second = server.hints
    assert "s1" not in {h.session_id for h in of_crew}
    assert len({h.session_id for h in of_crew}) == 2
    assert [(h.session_id, h.step) for h in (first, second)] == [("s1", 0), ("s1", 1)]


class TextLLM(OpenAICompletion):
    """A model without native tool calls: the tools stand in the prompt."""

    def supports_function_calling(self) -> bool:
        return False


def test_tools_that_are_called_in_text(server: ScriptedServer) -> None:
    action = 'Thought: read\nAction: read_file\nAction Input: {"text": "x"}'
    answer = "Thought: I now know\nFinal Answer: read"
    with ScriptedServer([action, answer]) as scripted:
        saga.instrument(base_urls=[scripted.base_url])
        llm = TextLLM(model="scripted", base_url=scripted.base_url, api_key="none")
        assert said(make_agent(scripted, llm=llm, tools=[read_file]).kickoff("read it")) == "read"
    assert steps_and_tools(scripted.hints) == THREE_STEPS[:2]


@pytest.mark.parametrize("how", ["kickoff", "akickoff"])
async def test_an_exception_in_a_tool_is_the_agents(server: ScriptedServer, how: str) -> None:
    @tool
    def run_shell(text: str) -> str:
        """Fail."""
        raise ZeroDivisionError("mine")

    agent = make_agent(server, tools=[run_shell])
    crew = Crew(agents=[agent], tasks=[make_task("run_shell", agent)])
    assert await run(crew, how) == "done: run_shell"
    assert [h.tool_name for h in server.hints] == [None, "run_shell"]


@pytest.mark.parametrize("how", ["kickoff", "akickoff"])
async def test_a_failing_model_fails_the_crew_and_leaves_nothing(
    server: ScriptedServer, how: str
) -> None:
    agent = make_agent(server, llm=make_llm(server, max_retries=0))
    crew = Crew(agents=[agent], tasks=[make_task("read_file", agent)])
    server.interject(*[Failure(400)] * 20)
    with pytest.raises(Exception, match="scripted failure"):
        await run(crew, how)
    assert (len(tracker), len(calls)) == (0, 0)
    # Each new try of the agent begins its conversation anew.
    assert {h.session_id for h in server.hints} == {server.hints[0].session_id}


def test_a_retry_of_the_client_repeats_the_step(server: ScriptedServer) -> None:
    agent = make_agent(server)
    server.interject(Failure(503))
    agent.kickoff("read_file")
    assert [(h.step, h.tool_name) for h in server.hints] == [
        (0, None),
        (0, None),
        (1, "read_file"),
    ]


@pytest.mark.parametrize("how", ["kickoff", "akickoff"])
async def test_a_retry_of_the_framework_repeats_the_step(
    server: ScriptedServer, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = pytest.importorskip("crewai.llms.retry", reason="this version has no retries")
    monkeypatch.setattr(policy, "get_retry_delay_seconds", lambda **_: 0.0)
    agent = make_agent(server, llm=make_llm(server, max_retries=0))
    crew = Crew(agents=[agent], tasks=[make_task("read_file", agent)])
    server.interject(Failure(429), Failure(429))
    assert await run(crew, how) == "done: read_file"
    assert [(h.step, h.tool_name) for h in server.hints] == [(0, None)] * 3 + [(1, "read_file")]


async def test_a_cancelled_crew_leaves_nothing(server: ScriptedServer) -> None:
    crew = make_crew(server)
    server.gate.clear()
    running = asyncio.create_task(run(crew, "akickoff", {"topic": "cats"}))
    await asyncio.to_thread(server.wait_for_requests)
    running.cancel()
    server.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.to_thread(until_idle)


def until_idle() -> None:
    """Wait until what the program has let go of has come to its end."""
    deadline = threading.Event()
    for _ in range(3000):
        if (len(tracker), len(calls)) == (0, 0):
            return
        deadline.wait(0.01)
    pytest.fail(f"{len(tracker)} runs are left")


def test_an_abandoned_stream_leaves_nothing(server: ScriptedServer) -> None:
    crew = make_crew(server, stream=True)
    stream: Any = crew.kickoff(inputs={"topic": "cats"})
    next(iter(stream))
    stream.close()
    del stream
    until_idle()


def test_what_a_tool_asks_itself_is_a_child_session(server: ScriptedServer) -> None:
    llm = make_llm(server)

    @tool
    def summarize(text: str) -> str:
        """Ask a model twice."""
        return str(llm.call("# a")) + str(llm.call("# b"))

    make_agent(server, tools=[summarize]).kickoff("summarize")
    first, *inner, last = server.hints
    assert [(h.step, h.session_id) for h in (first, last)] == [
        (0, first.session_id),
        (1, first.session_id),
    ]
    assert [h.step for h in inner] == [0, 1]
    assert {(h.parent_session_id, h.task_id) for h in inner} == {(first.session_id, first.task_id)}
    assert len({h.session_id for h in inner}) == 1


def test_calls_on_the_agents_behalf_are_sessions_apart(server: ScriptedServer) -> None:
    llm = make_llm(server)
    # Within the agent's run, and in the middle of its conversation.
    agent = make_agent(server, step_callback=lambda step: llm.call("# note"))
    crew = Crew(agents=[agent], tasks=[make_task("read_file", agent)])
    assert said(crew.kickoff()) == "done: read_file"
    notes = [r.hints for r in server.requests if r.user_text == "# note"]
    conversation = [r.hints for r in server.requests if r.user_text != "# note"]
    assert [(h.step, h.tool_name) for h in conversation] == [(0, None), (1, "read_file")]
    (session_id,) = {h.session_id for h in conversation}
    assert len(notes) > 0
    assert [h.step for h in notes] == list(range(len(notes)))
    assert {h.parent_session_id for h in notes} == {session_id}


def test_a_plan_is_a_session_apart() -> None:
    def script(request: Request) -> Step:
        if request.tool_names == ["create_reasoning_plan"]:
            plan = {"plan": "read it", "ready": True, "steps": []}
            return ToolCall("create_reasoning_plan", plan)
        return follow_task(request)

    with ScriptedServer(script) as server:
        agent = make_agent(server, planning=True)
        crew = Crew(agents=[agent], tasks=[make_task(PLAN, agent)])
        assert said(crew.kickoff()) == f"done: {PLAN}"
    plan, *conversation = server.hints
    assert steps_and_tools([plan]) == [(0, None, None)]
    assert steps_and_tools(conversation) == THREE_STEPS
    assert {h.parent_session_id for h in conversation} == {plan.session_id}


def test_the_programs_own_hooks_see_what_they_saw(server: ScriptedServer) -> None:
    seen: list[str] = []

    @before_llm_call
    def note(context: Any) -> None:
        seen.append(context.agent.role)

    try:
        make_agent(server).kickoff("read_file")
    finally:
        unregister_before_llm_call_hook(note)
    assert seen == ["Coder", "Coder"]
    assert [h.step for h in server.hints] == [0, 1]


@pytest.mark.parametrize("how", ["kickoff", "akickoff", "stream"])
async def test_sixty_at_once_do_not_mix(server: ScriptedServer, how: str) -> None:
    crews = []
    for i in range(60):
        agent = make_agent(server, f"agent-{i}")
        crews.append(Crew(agents=[agent], tasks=[make_task(f"{PLAN} # {i}", agent)]))
    if how == "akickoff":
        answers = await asyncio.gather(*(run(crew, how) for crew in crews))
    else:
        one = read_stream if how == "stream" else lambda crew, _: said(crew.kickoff())
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(one, crews, [None] * 60))
    assert answers == [f"done: {PLAN} # {i}" for i in range(60)]
    nodes = by_node(server.hints)
    assert set(nodes) == {f"agent-{i}" for i in range(60)}
    for node, of_one in nodes.items():
        assert steps_and_tools(of_one) == THREE_STEPS
        assert {h.workflow_id for h in of_one} == {node}
        assert len({(h.session_id, h.task_id) for h in of_one}) == 1
    assert len({h.session_id for h in server.hints}) == 60
    assert (len(tracker), len(calls)) == (0, 0)


@pytest.mark.parametrize(
    "broken",
    [
        "tracker",
        "uuid4",
        "calls",
        "enter_call",
        "enter_block",
        "current_workflow",
        "WorkflowContext",
        "WorkflowRun",
        "_Enclosing",
        "_opening_of",
        "sanitize_tool_name",
        "_wrap_models",
    ],
)
@pytest.mark.parametrize("how", ["kickoff", "akickoff"])
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

    crew = make_crew(server)
    monkeypatch.setattr(integration, broken, Faulty())
    assert await run(crew, how, {"topic": "cats"}) == "done: # write"
    assert len(server.requests) == 4
    monkeypatch.undo()
    caplog.clear()


def methods() -> list[Any]:
    return [
        vars(owner).get(name)
        for owner, names in (
            (Crew, ("kickoff", "akickoff")),
            (Flow, ("kickoff_async",)),
            (Agent, ("execute_task", "aexecute_task", "kickoff", "kickoff_async")),
            (BaseTool, ("run", "arun")),
            (Tool, ("run", "arun")),
            (CrewStructuredTool, ("invoke", "ainvoke")),
            (LLM, ("call", "acall")),
            (OpenAICompletion, ("call", "acall")),
        )
        for name in names
    ]


def test_uninstall_restores_the_originals(server: ScriptedServer) -> None:
    agent = make_agent(server)
    integration.uninstall()
    originals = methods()
    integration.install()
    integration.install()
    assert all(new is not old for new, old in zip(methods(), originals, strict=True))
    integration.uninstall()
    integration.uninstall()
    assert methods() == originals
    agent.kickoff("read_file")
    assert {(h.session_id, h.step) for h in server.hints} == {(None, None)}


def test_uninstalled_below_a_wrapper_of_others_it_sleeps(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Agent.kickoff
    monkeypatch.setattr(Agent, "kickoff", lambda *args, **kwargs: ours(*args, **kwargs))
    agent = make_agent(server)
    integration.uninstall()
    agent.kickoff("read_file")
    assert {(h.session_id, h.step) for h in server.hints} == {(None, None)}
    monkeypatch.undo()
    integration.uninstall()
