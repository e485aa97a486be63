"""Sixty hand-written loops at once, in threads, tasks and streams; and a hundred thousand runs."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

import openai
import pytest

import saga_sdk as saga
from saga_core.hints import Hints
from saga_sdk.context import current_call, current_workflow, enter_call
from saga_sdk.runs import RunKind, RunStart, RunTracker, Source
from saga_sdk.sessions import CallMap, NamedSessions, named_sessions
from saga_sdk.testing import ScriptedServer

LOOPS = 60
WAIT_S = 60.0


@saga.tool
def read_file(client: openai.OpenAI, text: str) -> None:
    ask(client, f"inside {text}")


@saga.tool(name="read_file")
async def read_file_async(client: openai.AsyncOpenAI, text: str) -> None:
    await ask_async(client, f"inside {text}")


def ask(client: openai.OpenAI, text: str) -> None:
    messages = [{"role": "user", "content": text}]
    assert list(client.chat.completions.create(model="m", messages=messages, stream=True))


async def ask_async(client: openai.AsyncOpenAI, text: str, *, stream: bool = False) -> None:
    messages = [{"role": "user", "content": text}]
    if not stream:
        await client.chat.completions.create(model="m", messages=messages)
        return
    answer = await client.chat.completions.create(model="m", messages=messages, stream=True)
    assert [chunk async for chunk in answer]


def check(server: ScriptedServer) -> None:
    loops: dict[str, list[Hints]] = {}
    for request in server.requests:
        loops.setdefault(request.user_text, []).append(request.hints)
    own = {text: hints for text, hints in loops.items() if not text.startswith("inside ")}
    assert len(own) == LOOPS
    for text, hints in own.items():
        (inside,) = loops[f"inside {text}"]
        assert [(h.step, h.tool_name) for h in hints] == [(0, None), (1, "read_file"), (2, None)]
        assert {(h.task_id, h.session_id, h.workflow_id) for h in hints} == {
            (text, f"s-{text}", "w")
        }
        assert (inside.task_id, inside.parent_session_id, inside.step) == (text, f"s-{text}", 0)
    assert current_workflow() is None
    assert current_call(is_retry=False) is None


def test_loops_in_threads_do_not_mix(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    together = threading.Barrier(LOOPS)
    with openai.OpenAI(base_url=server.base_url, api_key="none") as client:

        def loop(number: int) -> None:
            together.wait(WAIT_S)
            with saga.workflow("w", task_id=f"t{number}", session_id=f"s-t{number}"):
                ask(client, f"t{number}")
                read_file(client, f"t{number}")
                ask(client, f"t{number}")
                ask(client, f"t{number}")

        with ThreadPoolExecutor(LOOPS) as pool:
            list(pool.map(loop, range(LOOPS)))
    check(server)


@pytest.mark.parametrize("stream", [False, True])
async def test_loops_in_tasks_do_not_mix(server: ScriptedServer, stream: bool) -> None:
    saga.instrument(server.base_url)
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none") as client:

        async def loop(text: str) -> None:
            async with saga.workflow("w", task_id=text, session_id=f"s-{text}"):
                await ask_async(client, text, stream=stream)
                await read_file_async(client, text)
                await ask_async(client, text, stream=stream)
                await ask_async(client, text, stream=stream)

        await asyncio.gather(*(loop(f"t{number}") for number in range(LOOPS)))
    check(server)


def run_agents(runs: RunTracker, first: int, count: int) -> None:
    """Agents whose runs end, but for calls that are abandoned below their root."""
    source = Source()
    for number in range(first, first + count):
        root, call, tool = (UUID(int=3 * number + n) for n in range(3))
        metadata = {"thread_id": f"thread {number}"} if number % 2 else {}
        runs.start(RunStart(RunKind.CHAIN, root, None, f"agent {number}", metadata), source)
        runs.start(RunStart(RunKind.CALL, call, root, "model", metadata), source)
        enter_call(call)
        with saga.workflow(f"workflow {number}", session_id=f"session {number}"):
            pass
        if number % 10:
            runs.end(call)
        runs.start(RunStart(RunKind.TOOL, tool, root, f"tool {number}", metadata), source)
        runs.end(tool)
        runs.end(root)


def test_memory_is_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_sessions, "max_sessions", 100)  # Those of blocks.
    call_map, sessions = CallMap(), NamedSessions(100)
    runs = RunTracker(call_map, sessions=sessions)
    tracemalloc.start()
    try:
        # These fill what is bounded.
        run_agents(runs, 0, 5_000)
        before, _ = tracemalloc.get_traced_memory()
        run_agents(runs, 5_000, 10_000)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (len(runs), len(call_map), len(sessions)) == (0, 0, 100)
    assert after - before < 50_000
