"""Tools and threads of hand-written loops."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from langchain_core.runnables import RunnableLambda

import saga_sdk as saga
from saga_core.errors import SettingsError
from saga_core.types import _NAME_WORDS, ToolType
from saga_sdk import tool_table, tools
from saga_sdk.context import current_workflow
from saga_sdk.events import sender
from saga_sdk.testing import ScriptedServer
from tests.sdk.agents import ask, make_agent, make_model

WAIT_S = 30.0


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[openai.OpenAI]:
    saga.instrument(server.base_url)
    with openai.OpenAI(base_url=server.base_url, api_key="none") as client:
        yield client


def chat(client: openai.OpenAI, text: str = "a") -> str:
    answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
    return str(answer.choices[0].message.content)


def events_of(server: ScriptedServer) -> list[tuple[str, str | None, str | None]]:
    assert sender.flush(WAIT_S)
    return [(e["event"], e.get("session_id"), e.get("tool_name")) for e in server.events]


def test_a_loop_of_calls_and_tools(server: ScriptedServer, client: openai.OpenAI) -> None:
    @saga.tool
    def read_file(path: str) -> str:
        """Read it."""
        return path.upper()

    @saga.tool(name="run tests")
    def check() -> int:
        return 3

    assert (read_file.__name__, read_file.__doc__) == ("read_file", "Read it.")
    with saga.workflow("swe") as block:
        chat(client)
        assert read_file("a") == "A"
        chat(client)
        assert check() == 3
        chat(client)
        chat(client)
    assert [(h.step, h.tool_name, h.tool) for h in server.hints] == [
        (0, None, None),
        (1, "read_file", ToolType.FILE_IO),
        (2, "run-tests", ToolType.CODE_EXEC),
        (3, None, None),
    ]
    assert events_of(server) == [
        ("tool_start", block.session_id, "read_file"),
        ("tool_start", block.session_id, "run-tests"),
        ("session_end", block.session_id, None),
        ("task_end", None, None),
    ]


def test_what_a_tool_asks_is_a_session_of_its_own(
    server: ScriptedServer, client: openai.OpenAI
) -> None:
    @saga.tool
    def inner() -> str:
        return chat(client, "inner")

    @saga.tool
    def silent() -> str:
        return inner()

    @saga.tool
    def ask_agent() -> str:
        chat(client, "mine")
        inner()
        return str(make_agent(server.base_url).invoke(ask("read_file"))["messages"][-1].content)

    with saga.workflow("swe", deadline_s=60) as block:
        chat(client)
        ask_agent()
        chat(client)
        silent()
    first, mine, inside, agent, again, last, below_silent = server.hints
    assert first.session_id == last.session_id == block.session_id
    assert (first.parent_session_id, last.step, last.tool_name) == (None, 1, "ask_agent")
    assert (mine.parent_session_id, mine.step) == (block.session_id, 0)
    assert inside.parent_session_id == mine.session_id
    assert agent.parent_session_id == again.parent_session_id == mine.session_id
    assert (agent.session_id, again.step) == (again.session_id, 1)
    # A tool that asks no model itself spawns nothing: who called it does.
    assert below_silent.parent_session_id == block.session_id
    assert len({h.session_id for h in server.hints}) == 5
    assert {h.task_id for h in server.hints} == {block.task_id}
    assert all(h.deadline_ms for h in server.hints)
    ended = [session for kind, session, _ in events_of(server) if kind == "session_end"]
    assert ended == [h.session_id for h in (inside, agent, mine, below_silent, first)]


def test_outside_of_everything_a_tool_is_its_function(
    server: ScriptedServer, client: openai.OpenAI
) -> None:
    @saga.tool
    def work() -> str:
        return chat(client)

    assert work() == "done: a"
    assert server.hints[0].session_id is None
    assert events_of(server) == []


def test_a_tool_in_a_node_is_the_agents(server: ScriptedServer, client: openai.OpenAI) -> None:
    model = make_model(server.base_url)

    @saga.tool
    def fetch_url() -> str:
        return chat(client)

    def node(text: str) -> str:
        model.invoke(text)
        fetch_url()
        return str(model.invoke(text).content)

    chain = RunnableLambda(node)
    assert chain.invoke("x", {"metadata": {"thread_id": "t"}}) == "done: x"
    with saga.workflow("swe") as block:
        chain.invoke("x")
        fetch_url()
        chat(client)
    own, inner, last = server.hints[:3]
    assert (own.session_id, own.step) == (last.session_id, 0) == ("t", 0)
    assert (last.step, last.tool_name) == (1, "fetch_url")
    assert inner.parent_session_id == "t"
    assert inner.task_id == own.task_id
    in_block, inner, after, by_block, at_last = server.hints[3:]
    assert (after.session_id, after.tool_name) == (in_block.session_id, "fetch_url")
    assert inner.parent_session_id == in_block.session_id
    # Once the chain has ended, a tool is the block's.
    assert by_block.parent_session_id == block.session_id
    assert (at_last.session_id, at_last.tool_name) == (block.session_id, "fetch_url")


async def test_async_tools_in_parallel(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none") as client:

        async def ask_model(text: str) -> None:
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": text}]
            )

        @saga.tool
        async def fetch_url(number: int) -> int:
            await ask_model(f"fetch {number}")
            await ask_model(f"fetch {number}")
            return number

        async with saga.workflow("swe") as block:
            await ask_model("first")
            assert await asyncio.gather(*map(fetch_url, range(6))) == list(range(6))
            assert current_workflow() is block
            await ask_model("last")
    by_text: dict[str, list[Any]] = {}
    for request in server.requests:
        by_text.setdefault(request.user_text, []).append(request.hints)
    spawned = [by_text[f"fetch {number}"] for number in range(6)]
    assert all([h.step for h in hints] == [0, 1] for hints in spawned)
    assert len({h.session_id for hints in spawned for h in hints}) == 6
    assert {h.parent_session_id for hints in spawned for h in hints} == {block.session_id}
    assert by_text["last"][0].tool_name == "fetch_url"


def test_a_generator_is_a_tool_from_first_to_last(
    server: ScriptedServer, client: openai.OpenAI
) -> None:
    got: list[Any] = []

    @saga.tool
    def read_lines(count: int) -> Any:
        try:
            for number in range(count):
                chat(client, "inside")
                got.append((yield number))
        except KeyError as error:
            got.append(error)
        return "returned"

    def deliver() -> Any:
        return (yield from read_lines(1))

    with saga.workflow("swe") as block:
        chat(client)
        lines = read_lines(2)
        assert next(lines) == 0
        assert current_workflow() is block
        chat(client, "outside")
        assert lines.send("sent") == 1
        error = KeyError("thrown")
        with pytest.raises(StopIteration) as stop:
            lines.throw(error)
        chat(client)
        assert (stop.value.value, got) == ("returned", ["sent", error])
        delivered = deliver()
        next(delivered)
        with pytest.raises(StopIteration):
            delivered.send(None)
        next(read_lines(1))
    inside = [r.hints for r in server.requests if r.user_text == "inside"]
    outside = [r.hints for r in server.requests if r.user_text != "inside"]
    assert {h.session_id for h in outside} == {block.session_id}
    assert [h.tool_name for h in outside] == [None, None, "read_lines"]
    assert [h.step for h in inside] == [0, 1, 0, 0]
    assert {h.parent_session_id for h in inside} == {block.session_id}


async def test_an_async_generator_is_a_tool_from_first_to_last(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    got: list[Any] = []

    @saga.tool
    async def read_lines() -> AsyncIterator[int]:
        try:
            for number in range(3):
                await asyncio.to_thread(chat_alone, server)
                got.append((yield number))
        except KeyError as error:
            got.append(error)
            yield -1
        finally:
            got.append("closed")

    async with saga.workflow("swe") as block:
        assert [number async for number in read_lines()] == [0, 1, 2]
        lines: Any = read_lines()
        assert await anext(lines) == 0
        assert current_workflow() is block
        error = KeyError("thrown")
        assert await lines.athrow(error) == -1
        await lines.aclose()
        await asyncio.to_thread(chat_alone, server)
    assert got == [None, None, None, "closed", error, "closed"]
    *inside, last = server.hints
    assert [h.step for h in inside] == [0, 1, 2, 0]
    assert {h.parent_session_id for h in inside} == {block.session_id}
    assert (last.session_id, last.tool_name) == (block.session_id, "read_lines")


def chat_alone(server: ScriptedServer) -> None:
    with openai.OpenAI(base_url=server.base_url, api_key="none") as client:
        chat(client)


@pytest.mark.parametrize("is_async", [False, True])
async def test_the_tools_exception_passes_unchanged(is_async: bool) -> None:
    error = KeyError("user's")

    @saga.tool
    def fail() -> None:
        raise error

    @saga.tool
    async def fail_async() -> None:
        raise error

    with saga.workflow("swe") as block:
        with pytest.raises(KeyError) as caught:
            await fail_async() if is_async else fail()
        assert current_workflow() is block
        assert block.session.open_tools == set()
    assert caught.value is error


def test_a_long_tools_end_is_said(
    server: ScriptedServer, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools, "MIN_TOOL_S", -1.0)

    @saga.tool
    def inner() -> None:
        return None

    @saga.tool
    def outer() -> None:
        inner()

    with saga.workflow("swe"):
        chat(client)
        outer()
    kinds = [(kind, name) for kind, _, name in events_of(server) if kind.startswith("tool")]
    # The inner one is awaited by a session that nobody has heard of.
    assert kinds == [("tool_start", "outer"), ("tool_end", "outer")]


def test_types_of_tools(server: ScriptedServer, client: openai.OpenAI) -> None:
    saga.tool_types({"deploy": "code", "sign_off": "human"})
    try:
        assert tool_table.tool_type("deploy") is ToolType.CODE_EXEC
        with pytest.raises(SettingsError, match="'other_tool' must be one of"):
            saga.tool_types({"deploy": "web", "other_tool": "nonsense"})
        assert tool_table.tool_type("deploy") is ToolType.CODE_EXEC
        assert tool_table.tool_type("frobnicate") is ToolType.OTHER

        with saga.workflow("swe"):
            saga.tool(lambda: None, name="sign_off")()
            chat(client)
        assert server.hints[0].tool is ToolType.HUMAN
    finally:
        tool_table._said.clear()


def test_the_documented_table_is_the_one_in_use() -> None:
    text = (Path(__file__).parents[2] / "docs" / "sdk.md").read_text(encoding="utf-8")
    section = text.partition("## Tool types")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([a-z ]+) \|$", section, re.MULTILINE)
    assert [kind for kind, _ in rows] == [kind.value for kind, _ in _NAME_WORDS] + ["other"]
    assert dict(rows[:-1]) == {kind.value: words for kind, words in _NAME_WORDS}


def test_wrapped_functions_run_in_the_block(server: ScriptedServer, client: openai.OpenAI) -> None:
    def work(text: str) -> str:
        with saga.workflow("nested"):
            return chat(client, text)

    together = threading.Barrier(4)

    def step(text: str) -> str:
        together.wait(WAIT_S)
        return chat(client, text)

    with ThreadPoolExecutor(4) as pool:
        with saga.workflow("swe") as block:
            wrapped = saga.wrap(step)
            assert wrapped.__name__ == "step"
            texts = [f"map {number}" for number in range(4)]
            assert list(pool.map(wrapped, texts)) == [f"done: {text}" for text in texts]
            assert pool.submit(saga.wrap(work), "submit").result(WAIT_S) == "done: submit"
            thread = threading.Thread(target=saga.wrap(chat), args=(client, "thread"))
            thread.start()
            thread.join()
            pool.submit(chat, client, "bare").result(WAIT_S)
        pool.submit(saga.wrap(chat), client, "after").result(WAIT_S)
    steps = {r.user_text: (r.hints.session_id, r.hints.step) for r in server.requests}
    assert {steps[text][0] for text in texts} == {block.session_id}
    assert sorted(steps[text][1] or 0 for text in texts) == [0, 1, 2, 3]
    assert steps["thread"] == (block.session_id, 4)
    assert steps["bare"] == steps["after"] == (None, None)
    nested = next(r.hints for r in server.requests if r.user_text == "submit")
    assert (nested.parent_session_id, nested.task_id) == (block.session_id, block.task_id)


async def test_wrapped_work_in_an_executor_and_in_another_loop(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    log: list[str] = []

    async def work(number: int) -> int:
        try:
            await asyncio.sleep(0)
            await asyncio.to_thread(chat_alone, server)
            if number:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            log.append("cancelled")
            raise
        return number

    with saga.workflow("swe") as block:
        wrapped = saga.wrap(work)
        assert asyncio.iscoroutinefunction(wrapped)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, saga.wrap(chat_alone), server)
    with ThreadPoolExecutor(1) as pool:
        assert await loop.run_in_executor(pool, lambda: asyncio.run(wrapped(0))) == 0
    assert await wrapped(0) == 0
    assert current_workflow() is None
    task = asyncio.create_task(wrapped(1))
    await asyncio.to_thread(server.wait_for_requests, 4)
    while not log and not task.done():
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log == ["cancelled"]
    assert [(h.session_id, h.step) for h in server.hints] == [
        (block.session_id, step) for step in range(4)
    ]
