"""Hints of LangChain agents: what stands on each request."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from itertools import pairwise
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

import saga_sdk as saga
from saga_core.hints import Hints
from saga_core.types import ToolType
from saga_sdk.context import calls
from saga_sdk.runs import tracker
from saga_sdk.testing import Failure, ScriptedServer
from tests.sdk.agents import TOOLS, WAYS, ask, make_agent, make_model, run

PLAN = "read_file > run_python"


def steps_and_tools(hints: list[Hints]) -> list[tuple[int | None, str | None, str | None]]:
    return [(h.step, h.tool_name, h.tool) for h in hints]


THREE_STEPS = [
    (0, None, None),
    (1, "read_file", ToolType.FILE_IO),
    (2, "run_python", ToolType.CODE_EXEC),
]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("by_hand", [True, False])
async def test_every_call_carries_its_hints(
    server: ScriptedServer, how: str, by_hand: bool
) -> None:
    config: dict[str, Any] = {"metadata": {"saga_workflow": "swe"}}
    if by_hand:
        config["callbacks"] = [saga.SagaCallbackHandler(base_urls=[server.base_url])]
    else:
        saga.instrument(base_urls=[server.base_url])

    answer = await run(make_agent(server.base_url), how, PLAN, config)

    assert answer == f"done: {PLAN}"
    assert steps_and_tools(server.hints) == THREE_STEPS
    assert {h.workflow_id for h in server.hints} == {"swe"}
    assert {h.node for h in server.hints} == {"model"}
    assert len({h.session_id for h in server.hints}) == 1
    assert all(h.task_id == h.session_id is not None for h in server.hints)
    assert {h.parent_session_id for h in server.hints} == {None}
    first = server.requests[0]
    assert first.get("baggage") == (
        f"saga.workflow_id=swe,saga.task_id={first.hints.task_id},"
        f"saga.session_id={first.hints.session_id}"
    )
    assert (len(tracker), len(calls)) == (0, 0)


async def test_two_runs_are_two_tasks(server: ScriptedServer) -> None:
    handler = saga.SagaCallbackHandler(base_urls=[server.base_url])
    agent = make_agent(server.base_url)
    for _ in range(2):
        await agent.ainvoke(ask("read_file"), {"callbacks": [handler]})
    assert [h.step for h in server.hints] == [0, 1, 0, 1]
    assert len({h.task_id for h in server.hints}) == 2


class EndsInOrder(BaseCallbackHandler):
    """Says when a tool has ended; it stands behind SAGA's handler."""

    run_inline = True

    def __init__(self) -> None:
        self.ended = threading.Event()

    def on_tool_end(self, output: Any, **kwargs: Any) -> None:
        self.ended.set()


@pytest.mark.parametrize("last", ["wait_on_file", "wait_on_url"])
def test_of_parallel_tools_the_last_one_to_end_counts(server: ScriptedServer, last: str) -> None:
    order = EndsInOrder()

    @tool
    def wait_on_file(text: str) -> str:
        """Wait for the other tool when it is this one's turn to be last."""
        if last == "wait_on_file":
            assert order.ended.wait(30)
        return text

    @tool
    def wait_on_url(text: str) -> str:
        """Wait for the other tool when it is this one's turn to be last."""
        if last == "wait_on_url":
            assert order.ended.wait(30)
        return text

    handler = saga.SagaCallbackHandler(base_urls=[server.base_url])
    agent = make_agent(server.base_url, tools=[wait_on_file, wait_on_url])
    agent.invoke(ask("wait_on_file+wait_on_url"), {"callbacks": [handler, order]})
    assert [h.tool_name for h in server.hints] == [None, last]


def test_a_thread_is_one_session_over_several_turns(server: ScriptedServer) -> None:
    agent = make_agent(server.base_url, checkpointer=InMemorySaver())
    for _ in range(2):
        # A handler per turn, as people write it.
        handler = saga.SagaCallbackHandler("swe", base_urls=server.base_url)
        config = {"callbacks": [handler], "configurable": {"thread_id": "thread one"}}
        agent.invoke(ask("read_file"), config)
    assert [h.step for h in server.hints] == [0, 1, 2, 3]
    assert [h.tool_name for h in server.hints] == [None, "read_file", None, "read_file"]
    assert len({h.task_id for h in server.hints}) == 2
    (session_id,) = {h.session_id for h in server.hints}
    assert session_id is not None
    assert session_id.startswith("thread-one-")


def test_a_named_session_wins_over_the_thread(server: ScriptedServer) -> None:
    model = make_model(server.base_url)
    metadata = {"saga_session_id": "named-1", "thread_id": "thread-1"}
    model.invoke("a", {"callbacks": [saga.SagaCallbackHandler(base_urls=server.base_url)]})
    handler = saga.SagaCallbackHandler(base_urls=server.base_url)
    model.invoke("a", {"callbacks": [handler], "metadata": metadata})
    handler = saga.SagaCallbackHandler(base_urls=server.base_url, session_id="argument-1")
    model.invoke("a", {"callbacks": [handler], "metadata": metadata})
    sessions = [h.session_id for h in server.hints]
    assert sessions == [None, "named-1", "argument-1"]
    assert [h.task_id is None for h in server.hints] == [True, False, False]


@pytest.mark.parametrize(
    ("argument", "block", "metadata", "expected"),
    [
        ("argument", "block", "metadata", "argument"),
        (None, "block", "metadata", "block"),
        (None, None, "metadata", "metadata"),
        (None, None, None, "agent-name"),
    ],
)
def test_the_workflow_is_the_first_that_is_said(
    server: ScriptedServer,
    argument: str | None,
    block: str | None,
    metadata: str | None,
    expected: str,
) -> None:
    handler = saga.SagaCallbackHandler(argument, base_urls=server.base_url)
    agent = make_agent(server.base_url, name="agent-name")
    config: dict[str, Any] = {"callbacks": [handler]}
    if metadata is not None:
        config["metadata"] = {"saga_workflow": metadata}
    if block is None:
        agent.invoke(ask(""), config)
    else:
        with saga.workflow(block):
            agent.invoke(ask(""), config)
    assert [h.workflow_id for h in server.hints] == [expected]


def test_unnamed_agents_are_told_apart_by_their_tools(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    for tools in (TOOLS, TOOLS[:2], TOOLS[::-1]):
        make_agent(server.base_url, tools=tools).invoke(ask("read_file"))
    workflows = [h.workflow_id or "" for h in server.hints]
    assert workflows[0::2] == workflows[1::2]
    first, fewer, reordered = workflows[::2]
    assert first == reordered != fewer
    assert all(workflow.startswith("LangGraph-") for workflow in workflows)
    # What is said wins over both.
    saga.instrument(workflow="everything")
    make_agent(server.base_url).invoke(ask(""))
    make_agent(server.base_url, name="named").invoke(ask(""), {"metadata": {"saga_workflow": "w"}})
    assert [h.workflow_id for h in server.hints[-2:]] == ["everything", "w"]


def test_the_deadline_counts_down(server: ScriptedServer) -> None:
    handler = saga.SagaCallbackHandler(base_urls=server.base_url, deadline_s=60)
    make_agent(server.base_url).invoke(ask(PLAN), {"callbacks": [handler]})
    left_ms = [h.deadline_ms for h in server.hints]
    assert all(ms is not None and 0 < ms <= 60_000 for ms in left_ms)
    assert all(later < earlier for earlier, later in pairwise(left_ms))


def test_a_past_deadline_is_zero(server: ScriptedServer) -> None:
    handler = saga.SagaCallbackHandler(base_urls=server.base_url, deadline_s=-1)
    make_model(server.base_url).invoke("a", {"callbacks": [handler]})
    assert [h.deadline_ms for h in server.hints] == [0]


@pytest.mark.parametrize(
    "deadline_s",
    [float("inf"), float("nan"), "30", True, 1e308, 10**400, Decimal(30), object()],
    ids=lambda value: str(value)[:8],
)
def test_a_deadline_that_is_no_time_is_none(server: ScriptedServer, deadline_s: Any) -> None:
    handler = saga.SagaCallbackHandler(base_urls=server.base_url, deadline_s=deadline_s)
    make_model(server.base_url).invoke("a", {"callbacks": [handler]})
    with saga.workflow("outer", deadline_s=60), saga.workflow("swe", deadline_s=deadline_s):
        make_model(server.base_url).invoke("a", {"callbacks": [handler]})
    alone, in_block = server.hints
    assert (alone.workflow_id, alone.deadline_ms) == ("ChatOpenAI", None)
    assert in_block.workflow_id == "swe"
    assert in_block.deadline_ms is not None
    assert 0 < in_block.deadline_ms <= 60_000


@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
async def test_an_agent_in_a_tool_is_a_session_of_its_own(server: ScriptedServer, how: str) -> None:
    inner = make_agent(server.base_url)

    @tool
    async def ask_helper(text: str) -> str:
        """Ask another agent."""
        return str(await inner.ainvoke(ask("fetch_url")))

    @tool
    def ask_helper_sync(text: str) -> str:
        """Ask another agent."""
        return str(inner.invoke(ask("fetch_url")))

    handler = saga.SagaCallbackHandler(base_urls=server.base_url)
    name = "ask_helper" if how == "ainvoke" else "ask_helper_sync"
    agent = make_agent(server.base_url, tools=[ask_helper, ask_helper_sync])
    await run(agent, how, name, {"callbacks": [handler], "configurable": {"thread_id": "t-1"}})

    outer = [h for h in server.hints if h.session_id == "t-1"]
    spawned = [h for h in server.hints if h.session_id != "t-1"]
    assert [(h.step, h.tool_name) for h in outer] == [(0, None), (1, name)]
    assert [(h.step, h.tool_name) for h in spawned] == [(0, None), (1, "fetch_url")]
    assert {h.parent_session_id for h in spawned} == {"t-1"}
    assert len({h.task_id for h in server.hints}) == 1


def test_an_agent_in_a_block_belongs_to_its_task(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    with saga.workflow("swe", task_id="task-1", deadline_s=60) as block:
        make_agent(server.base_url).invoke(ask("read_file"))
        make_model(server.base_url).invoke("read_file")
    agent, model = server.hints[:2], server.hints[2]
    assert {h.task_id for h in server.hints} == {"task-1"}
    assert {h.parent_session_id for h in agent} == {block.session_id}
    assert [h.step for h in agent] == [0, 1]
    assert (model.session_id, model.parent_session_id, model.step) == (block.session_id, None, 0)
    assert all(h.deadline_ms for h in server.hints)


def test_a_hand_written_loop_in_a_block_is_one_session(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    model = make_model(server.base_url)
    with saga.workflow("loop") as block:
        model.invoke("a")
        TOOLS[0].invoke({"text": "x"})
        model.invoke("b")
    assert steps_and_tools(server.hints) == THREE_STEPS[:2]
    assert {h.session_id for h in server.hints} == {block.session_id}


def test_a_named_session_of_a_block_holds_its_agents(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    agent = make_agent(server.base_url)
    with saga.workflow("swe", session_id="session-1"):
        agent.invoke(ask("read_file"))
        agent.invoke(ask("read_file"))
    assert [h.step for h in server.hints] == [0, 1, 2, 3]
    assert {h.session_id for h in server.hints} == {"session-1"}


def test_a_block_inside_a_run_begins_its_own_session(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    model = make_model(server.base_url)

    def work(text: str) -> str:
        model.invoke(text)
        with saga.workflow("inner"):
            model.invoke(text)
            model.invoke(text)
        model.invoke(text)
        return text

    RunnableLambda(work).invoke("a", {"metadata": {"thread_id": "t-2", "saga_workflow": "outer"}})
    assert [(h.workflow_id, h.step) for h in server.hints] == [
        ("outer", 0),
        ("inner", 0),
        ("inner", 1),
        ("outer", 1),
    ]
    assert [h.session_id == "t-2" for h in server.hints] == [True, False, False, True]


def test_batch_gives_each_item_its_own_task(server: ScriptedServer) -> None:
    handler = saga.SagaCallbackHandler(base_urls=server.base_url)
    make_agent(server.base_url).batch(
        [ask("read_file #1"), ask("read_file #2")], {"callbacks": [handler]}
    )
    by_input = {r.user_text: r.hints.task_id for r in server.requests}
    assert len(set(by_input.values())) == 2
    assert sorted(h.step or 0 for h in server.hints) == [0, 0, 1, 1]


def check_no_cross_talk(server: ScriptedServer, agents: int) -> None:
    by_agent: dict[str, list[Hints]] = {}
    for request in server.requests:
        by_agent.setdefault(request.user_text, []).append(request.hints)
    assert len(by_agent) == agents
    for text, hints in by_agent.items():
        assert steps_and_tools(hints) == THREE_STEPS
        assert {h.session_id for h in hints} == {f"agent-{text.partition('#')[2]}"}
        assert len({h.task_id for h in hints}) == 1
    assert len({h.task_id for h in server.hints}) == agents


def test_agents_in_threads_do_not_mix(server: ScriptedServer) -> None:
    handler = saga.SagaCallbackHandler(base_urls=server.base_url)
    agent = make_agent(server.base_url)
    together = threading.Barrier(20)

    def work(number: int) -> None:
        together.wait(30)
        metadata = {"saga_session_id": f"agent-{number}"}
        agent.invoke(ask(f"{PLAN} #{number}"), {"callbacks": [handler], "metadata": metadata})

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(work, range(20)))
    check_no_cross_talk(server, 20)


async def test_agents_in_tasks_do_not_mix(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    agent = make_agent(server.base_url)
    await asyncio.gather(
        *(
            agent.ainvoke(ask(f"{PLAN} #{n}"), {"metadata": {"saga_session_id": f"agent-{n}"}})
            for n in range(20)
        )
    )
    check_no_cross_talk(server, 20)


@pytest.mark.parametrize("how", WAYS)
async def test_a_retry_repeats_its_step(server: ScriptedServer, how: str) -> None:
    handler = saga.SagaCallbackHandler(base_urls=server.base_url)
    server.interject(Failure())
    await run(make_agent(server.base_url), how, "read_file", {"callbacks": [handler]})
    assert [(r.status, r.hints.step) for r in server.requests] == [(500, 0), (200, 0), (200, 1)]
    assert [r.get("x-stainless-retry-count") for r in server.requests] == ["0", "1", "0"]


def test_other_hosts_get_nothing(server: ScriptedServer, other_server: ScriptedServer) -> None:
    saga.instrument(other_server.base_url)
    with saga.workflow("swe"):
        make_agent(server.base_url).invoke(ask(PLAN))
    assert len(server.requests) == 3
    assert all(r.saga_headers == {} and r.get("baggage") is None for r in server.requests)


def test_a_header_that_the_user_set_wins(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    headers = {"X-Saga-Session-Id": "mine", "baggage": "k=v"}
    make_model(server.base_url, default_headers=headers).invoke("a")
    (request,) = server.requests
    assert request.hints.session_id == "mine"
    assert [n.lower() for n, _ in request.headers].count("x-saga-session-id") == 1
    assert (request.get("baggage") or "").startswith("k=v,saga.workflow_id=")


def test_both_handlers_count_a_call_once(server: ScriptedServer) -> None:
    saga.instrument(server.base_url, workflow="automatic")
    handler = saga.SagaCallbackHandler("by-hand", base_urls=server.base_url)
    make_agent(server.base_url).invoke(ask(PLAN), {"callbacks": [handler]})
    assert steps_and_tools(server.hints) == THREE_STEPS
    assert {h.workflow_id for h in server.hints} == {"by-hand"}


def test_a_handler_on_the_model_takes_over_from_the_automatic_one(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    handler = saga.SagaCallbackHandler("by-hand", base_urls=server.base_url)
    model = make_model(server.base_url, callbacks=[handler])

    def twice(text: str) -> str:
        model.invoke(text)
        model.invoke(text)
        return text

    RunnableLambda(twice).invoke("a")
    assert [(h.workflow_id, h.step) for h in server.hints] == [("by-hand", 0), ("by-hand", 1)]
    assert len({h.session_id for h in server.hints}) == 1
