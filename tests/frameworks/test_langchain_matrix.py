"""LangChain and LangGraph programs as people write them; what stands on each request.

What a single agent's requests carry, whichever way it is run, is tested in tests/sdk.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import add
from typing import Annotated, Any, TypedDict

import openai
import pytest
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.messages import AnyMessage, HumanMessage
from langchain_core.tools import BaseTool, ToolException, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, Send, interrupt

import saga_sdk as saga
from saga_core.hints import Hints
from saga_core.types import ToolType
from saga_sdk.context import calls
from saga_sdk.runs import tracker
from saga_sdk.testing import Dropped, Failure, Held, Reply, ScriptedServer, ToolCall
from tests.sdk.agents import WAYS, ask, make_agent, make_model, run

PLAN = "read_file > run_python+fetch_url"
AGENTS = 60


def steps_and_tools(hints: list[Hints]) -> list[tuple[int | None, str | None]]:
    return [(h.step, h.tool_name) for h in hints]


def check_agents(server: ScriptedServer) -> None:
    """Each of 60 agents made three steps in its own session and its own task."""
    by_agent: dict[str, list[Hints]] = {}
    for request in server.requests:
        by_agent.setdefault(request.user_text, []).append(request.hints)
    assert len(by_agent) == AGENTS
    for text, hints in by_agent.items():
        number = text.partition("#")[2]
        assert steps_and_tools(hints[:2]) == [(0, None), (1, "read_file")]
        assert (hints[2].step, hints[2].tool_name in ("run_python", "fetch_url")) == (2, True)
        assert {h.workflow_id for h in hints} == {f"workflow-{int(number) % 7}"}
        assert len({h.session_id for h in hints}) == 1
        assert {h.parent_session_id for h in hints} == {None}
    sessions = {h.session_id for h in server.hints}
    assert len(sessions) == len({h.task_id for h in server.hints}) == AGENTS
    server.wait_until(lambda: ended(server) >= sessions)
    assert ended(server) == sessions
    assert (len(tracker), len(calls)) == (0, 0)


def ended(server: ScriptedServer) -> set[str | None]:
    return {e["session_id"] for e in list(server.events) if e["event"] == "session_end"}


def config_of(number: int) -> dict[str, Any]:
    return {"metadata": {"saga_workflow": f"workflow-{number % 7}"}}


@pytest.mark.parametrize("how", ["ainvoke", "astream", "astream tokens"])
async def test_sixty_async_agents_do_not_mix(server: ScriptedServer, how: str) -> None:
    saga.instrument(server.base_url)
    agent = make_agent(server.base_url)
    await asyncio.gather(
        *(run(agent, how, f"{PLAN} #{n}", config_of(n)) for n in range(AGENTS)),
    )
    check_agents(server)


@pytest.mark.parametrize("tokens", [False, True])
def test_sixty_agents_in_threads_do_not_mix(server: ScriptedServer, tokens: bool) -> None:
    saga.instrument(server.base_url)
    agent = make_agent(server.base_url)
    together = threading.Barrier(AGENTS)

    def work(number: int) -> None:
        together.wait(30)
        prompt = ask(f"{PLAN} #{number}")
        if tokens:
            assert list(agent.stream(prompt, config_of(number), stream_mode="messages"))
        else:
            agent.invoke(prompt, config_of(number))

    with ThreadPoolExecutor(AGENTS) as pool:
        list(pool.map(work, range(AGENTS)))
    check_agents(server)


def test_a_thread_that_was_interrupted_goes_on_as_the_same_session(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    model = make_model(server.base_url)

    def draft(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    def review(state: MessagesState) -> dict[str, Any]:
        said = interrupt("fine?")
        return {"messages": [HumanMessage(said)]}

    builder = StateGraph(MessagesState)
    builder.add_node("draft", draft)
    builder.add_node("review", review)
    builder.add_node("final", draft)
    builder.add_edge(START, "draft")
    builder.add_edge("draft", "review")
    builder.add_edge("review", "final")
    builder.add_edge("final", END)
    graph = builder.compile(checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "thread-of-the-interrupt"}}

    paused = graph.invoke(ask("write"), config)
    assert paused["__interrupt__"][0].value == "fine?"
    assert len(tracker) == 0
    graph.invoke(Command(resume="shorter"), config)

    assert [(h.step, h.node) for h in server.hints] == [(0, "draft"), (1, "final")]
    assert {h.session_id for h in server.hints} == {"thread-of-the-interrupt"}
    assert len({h.task_id for h in server.hints}) == 2
    assert server.requests[1].user_text == "shorter"


def test_branches_of_a_map_take_a_step_each(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    model = make_model(server.base_url)
    together = threading.Barrier(3)

    class State(TypedDict):
        texts: Annotated[list[str], add]

    def write(state: dict[str, str]) -> dict[str, list[str]]:
        together.wait(30)
        return {"texts": [str(model.invoke(state["topic"]).content)]}

    def join(state: State) -> dict[str, list[str]]:
        return {"texts": [str(model.invoke("join").content)]}

    builder = StateGraph(State)
    builder.add_node("write", write)
    builder.add_node("join", join)
    builder.add_conditional_edges(
        START, lambda state: [Send("write", {"topic": topic}) for topic in "abc"], ["write"]
    )
    builder.add_edge("write", "join")
    graph = builder.compile(name="map")

    assert sorted(graph.invoke({"texts": []})["texts"])[:3] == ["done: a", "done: b", "done: c"]
    assert sorted((h.step, h.node) for h in server.hints) == [
        (0, "write"),
        (1, "write"),
        (2, "write"),
        (3, "join"),
    ]
    assert {h.workflow_id for h in server.hints} == {"map"}
    assert len({h.session_id for h in server.hints}) == 1


@pytest.mark.parametrize("how", WAYS)
async def test_parallel_sub_agents_are_children_of_their_caller(
    server: ScriptedServer, how: str
) -> None:
    saga.instrument(server.base_url)

    def delegate(name: str) -> BaseTool:
        inner = make_agent(server.base_url, name=f"inner_{name}")

        def in_sync(text: str) -> str:
            """Ask another agent."""
            return str(inner.invoke(ask(f"fetch_url #{name}"))["messages"][-1].content)

        async def in_async(text: str) -> str:
            return str((await inner.ainvoke(ask(f"fetch_url #{name}")))["messages"][-1].content)

        made = tool(name)(in_sync)
        made.coroutine = in_async
        return made

    agent = make_agent(server.base_url, tools=[delegate("researcher"), delegate("critic")])
    plan = "researcher+critic"
    assert await run(agent, how, plan) == f"done: {plan}"

    by_text: dict[str, list[Hints]] = {}
    for request in server.requests:
        by_text.setdefault(request.user_text, []).append(request.hints)
    outer = by_text.pop(plan)
    assert [h.step for h in outer] == [0, 1]
    assert outer[1].tool_name in ("researcher", "critic")
    assert len({h.session_id for h in outer}) == 1
    children = set()
    for hints in by_text.values():
        assert steps_and_tools(hints) == [(0, None), (1, "fetch_url")]
        assert {h.parent_session_id for h in hints} == {outer[0].session_id}
        children |= {h.session_id for h in hints}
    assert len(by_text) == len(children) == 2
    assert outer[0].session_id not in children
    assert {h.task_id for h in server.hints} == {outer[0].task_id}


class Witness(BaseCallbackHandler):
    """A user's own handler, which may fail."""

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails
        self.seen: list[str] = []

    def note(self, what: str) -> None:
        self.seen.append(what)
        if self.fails:
            raise RuntimeError("the user's own")

    def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
        self.note("model")

    def on_tool_end(self, *args: Any, **kwargs: Any) -> None:
        self.note("tool")

    def on_llm_end(self, *args: Any, **kwargs: Any) -> None:
        self.note("answer")


class AsyncWitness(AsyncCallbackHandler):
    """One in async code."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append("model")

    async def on_tool_end(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append("tool")

    async def on_llm_end(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append("answer")


SEEN = ["model", "answer", "tool", "model", "answer"]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("by_hand", ["before", "after", None])
async def test_the_users_own_callbacks_work_beside_ours(
    server: ScriptedServer, how: str, fails: bool, by_hand: str | None
) -> None:
    witness, async_witness = Witness(fails=fails), AsyncWitness()
    callbacks: list[BaseCallbackHandler] = [witness]
    if how.startswith("a"):
        callbacks.append(async_witness)
    if by_hand is None:
        saga.instrument(server.base_url)
    else:
        ours = saga.SagaCallbackHandler(base_urls=server.base_url)
        callbacks.insert(0 if by_hand == "before" else len(callbacks), ours)
    await run(make_agent(server.base_url), how, "read_file", {"callbacks": callbacks})
    assert witness.seen == SEEN
    assert async_witness.seen == (SEEN if how.startswith("a") else [])
    assert steps_and_tools(server.hints) == [(0, None), (1, "read_file")]


@pytest.mark.parametrize("how", WAYS)
async def test_a_tool_whose_error_the_agent_reads_has_ended(
    server: ScriptedServer, how: str
) -> None:
    saga.instrument(server.base_url)

    def run_query(text: str) -> str:
        """Ask the database."""
        raise ToolException("no such table")

    failing = tool(run_query)
    failing.handle_tool_error = True
    await run(make_agent(server.base_url, tools=[failing]), how, "run_query > run_query")
    assert [(h.step, h.tool_name, h.tool) for h in server.hints] == [
        (0, None, None),
        (1, "run_query", ToolType.CODE_EXEC),
        (2, "run_query", ToolType.CODE_EXEC),
    ]
    assert "no such table" in server.requests[2].text


@pytest.mark.parametrize("how", WAYS)
async def test_every_attempt_repeats_its_step(server: ScriptedServer, how: str) -> None:
    saga.instrument(server.base_url)
    server.interject(Failure(429, retry_after_s=0.01), Dropped())
    await run(make_agent(server.base_url), how, "read_file")
    assert [(r.status, r.hints.step) for r in server.requests] == [
        (429, 0),
        (0, 0),
        (200, 0),
        (200, 1),
    ]


def leave(stream: Iterator[Any]) -> None:
    """Read the first item, then let go of the stream."""
    next(stream)
    del stream


async def leave_async(stream: AsyncIterator[Any]) -> None:
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]


LEFT_EARLY: dict[str, Callable[[Any], Any]] = {
    "agent": lambda base_url: make_agent(base_url).stream(ask("read_file")),
    "agent tokens": lambda base_url: make_agent(base_url).stream(
        ask("read_file"), stream_mode="messages"
    ),
    "model": lambda base_url: make_model(base_url).stream("a b c"),
}
LEFT_EARLY_ASYNC: dict[str, Callable[[Any], Any]] = {
    "agent": lambda base_url: make_agent(base_url).astream(ask("read_file")),
    "agent tokens": lambda base_url: make_agent(base_url).astream(
        ask("read_file"), stream_mode="messages"
    ),
    "model": lambda base_url: make_model(base_url).astream("a b c"),
}


@pytest.mark.parametrize("what", LEFT_EARLY)
def test_what_follows_an_abandoned_stream_is_a_run_of_its_own(
    server: ScriptedServer, what: str
) -> None:
    saga.instrument(server.base_url)
    leave(LEFT_EARLY[what](server.base_url))
    assert (len(tracker), len(calls)) == (0, 0)
    make_agent(server.base_url).invoke(ask("read_file"))
    check_own_run(server)


@pytest.mark.parametrize("what", LEFT_EARLY_ASYNC)
async def test_what_follows_an_abandoned_async_stream_is_a_run_of_its_own(
    server: ScriptedServer, what: str
) -> None:
    saga.instrument(server.base_url)
    await leave_async(LEFT_EARLY_ASYNC[what](server.base_url))
    assert (len(tracker), len(calls)) == (0, 0)
    await make_agent(server.base_url).ainvoke(ask("read_file"))
    check_own_run(server)


def check_own_run(server: ScriptedServer) -> None:
    before, (first, second) = server.hints[:-2], server.hints[-2:]
    assert steps_and_tools([first, second]) == [(0, None), (1, "read_file")]
    assert first.session_id == second.session_id
    assert first.session_id not in {h.session_id for h in before}
    assert before[0].workflow_id is not None


async def test_a_cancelled_agent_leaves_nothing_to_the_next() -> None:
    until = threading.Event()
    script = [Held("never", until), ToolCall("read_file", {"text": "x"}), "done"]
    with ScriptedServer(script) as server:
        saga.instrument(server.base_url)
        agent = make_agent(server.base_url)
        task = asyncio.create_task(agent.ainvoke(ask("go")))
        await asyncio.to_thread(server.wait_for_requests, 1)
        await check_cancelled(task)
        until.set()
        assert await run(agent, "ainvoke", "go") == "done"
        check_own_run(server)


async def test_an_agent_cancelled_in_mid_stream_leaves_nothing_to_the_next() -> None:
    until, begun = threading.Event(), asyncio.Event()
    script = [Held("one two", until, after_events=2), ToolCall("read_file", {"text": "x"}), "done"]
    with ScriptedServer(script) as server:
        saga.instrument(server.base_url)
        agent = make_agent(server.base_url)

        async def read() -> None:
            async for _ in agent.astream(ask("go"), stream_mode="messages"):
                begun.set()

        task = asyncio.create_task(read())
        # Cancelled while a chunk arrives, LangChain forgets it on Python 3.11: not before that.
        await begun.wait()
        await check_cancelled(task)
        until.set()
        assert await run(agent, "astream tokens", "go") == "done"
        check_own_run(server)


async def check_cancelled(task: asyncio.Task[Any]) -> None:
    assert len(tracker) > 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (len(tracker), len(calls)) == (0, 0)


async def test_an_agent_cancelled_in_a_tool_leaves_nothing(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    begun = asyncio.Event()

    @tool
    async def wait_for_ever(text: str) -> str:
        """Wait."""
        begun.set()
        await asyncio.Event().wait()
        return text

    agent = make_agent(server.base_url, tools=[wait_for_ever])
    task = asyncio.create_task(agent.ainvoke(ask("wait_for_ever")))
    await begun.wait()
    await check_cancelled(task)


def test_an_answer_that_is_cut_off_is_the_programs_to_see() -> None:
    with ScriptedServer([Dropped("one two three", after_events=2), Reply("whole")]) as server:
        saga.instrument(server.base_url)
        model = make_model(server.base_url, max_retries=0)
        with pytest.raises(Exception, match=r"incomplete chunked read|Connection error") as cut:
            list(model.stream("a"))
        assert type(cut.value).__module__.partition(".")[0] in ("httpx", "langchain_openai")
        assert (len(tracker), len(calls)) == (0, 0)
        assert model.invoke("b").content == "whole"
        assert [h.workflow_id for h in server.hints] == ["ChatOpenAI", "ChatOpenAI"]


def test_a_bare_client_in_a_node_is_a_step_of_the_block(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    model = make_model(server.base_url)

    def work(state: dict[str, list[AnyMessage]]) -> dict[str, list[AnyMessage]]:
        model.invoke("through LangChain")
        with openai.OpenAI(base_url=server.base_url, api_key="none") as client:
            client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "bare"}]
            )
        return {"messages": []}

    builder = StateGraph(MessagesState)
    builder.add_node("work", work)
    builder.add_edge(START, "work")
    with saga.workflow("mixed") as block:
        builder.compile().invoke({"messages": []})
    chain, bare = server.hints
    assert (chain.step, chain.node, chain.parent_session_id) == (0, "work", block.session_id)
    assert (bare.step, bare.session_id) == (0, block.session_id)
    assert {h.task_id for h in server.hints} == {block.task_id}
