"""The bare OpenAI client, of whichever version the framework beside it needs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

import saga_sdk as saga
from saga_sdk.testing import Dropped, Failure, ScriptedServer

MESSAGES: list[Any] = [{"role": "user", "content": "a"}]


def create(client: Any, **options: Any) -> Any:
    return client.chat.completions.create(model="m", messages=MESSAGES, **options)


# Every way to ask takes the client, sync or async, and returns what the client returned.
WAYS: dict[str, Callable[[Any], Any]] = {
    "chat": create,
    "stream": lambda client: create(client, stream=True),
    "raw": lambda client: client.chat.completions.with_raw_response.create(
        model="m", messages=MESSAGES
    ),
    "options": lambda client: create(client.with_options(timeout=30)),
    "completions": lambda client: client.completions.create(model="m", prompt="a"),
    "responses": lambda client: client.responses.create(model="m", input="a"),
    "responses stream": lambda client: client.responses.create(model="m", input="a", stream=True),
}


def check_two_steps(server: ScriptedServer, block: saga.WorkflowRun) -> None:
    assert [h.step for h in server.hints] == [0, 1]
    assert {h.workflow_id for h in server.hints} == {"w"}
    assert {h.task_id for h in server.hints} == {block.task_id}
    assert {h.session_id for h in server.hints} == {block.session_id}


@pytest.mark.parametrize("way", WAYS)
def test_calls_of_a_block_are_its_steps(server: ScriptedServer, way: str) -> None:
    saga.instrument(server.base_url)
    with (
        openai.OpenAI(base_url=server.base_url, api_key="none") as client,
        saga.workflow("w") as block,
    ):
        for _ in range(2):
            answer = WAYS[way](client)
            if "stream" in way:
                assert list(answer)
    check_two_steps(server, block)


@pytest.mark.parametrize("way", WAYS)
async def test_async_calls_of_a_block_are_its_steps(server: ScriptedServer, way: str) -> None:
    saga.instrument(server.base_url)
    async with (
        openai.AsyncOpenAI(base_url=server.base_url, api_key="none") as client,
        saga.workflow("w") as block,
    ):
        for _ in range(2):
            answer = await WAYS[way](client)
            if "stream" in way:
                assert [piece async for piece in answer]
    check_two_steps(server, block)


def test_retries_repeat_the_step_whatever_failed(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    server.interject(Failure(429, retry_after_s=0.01), Dropped())
    with openai.OpenAI(base_url=server.base_url, api_key="none") as client, saga.workflow("w"):
        create(client)
        create(client)
    assert [(r.status, r.hints.step) for r in server.requests] == [
        (429, 0),
        (0, 0),
        (200, 0),
        (200, 1),
    ]


def test_other_routes_and_other_hosts_get_no_hints(server: ScriptedServer) -> None:
    with ScriptedServer() as other:
        saga.instrument(server.base_url)
        with saga.workflow("w"):
            with openai.OpenAI(base_url=server.base_url, api_key="none") as client:
                client.embeddings.create(model="e", input="a")
                client.models.list()
            with openai.OpenAI(base_url=other.base_url, api_key="none") as client:
                create(client)
        assert [r.saga_headers for r in server.requests + other.requests] == [{}, {}, {}]
        assert other.requests[0].get("baggage") is None


def check_sixty(server: ScriptedServer) -> None:
    steps: dict[str | None, list[int | None]] = {}
    for hints in server.hints:
        steps.setdefault(hints.session_id, []).append(hints.step)
    assert steps == {f"session-{number}": [0, 1, 2] for number in range(60)}


def test_sixty_threads_do_not_mix(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    together = threading.Barrier(60)
    with openai.OpenAI(base_url=server.base_url, api_key="none") as client:

        def work(number: int) -> None:
            together.wait(30)
            with saga.workflow("w", session_id=f"session-{number}"):
                create(client)
                assert list(create(client, stream=True))
                create(client)

        with ThreadPoolExecutor(60) as pool:
            list(pool.map(work, range(60)))
    check_sixty(server)


async def test_sixty_tasks_do_not_mix(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none") as client:

        async def work(number: int) -> None:
            async with saga.workflow("w", session_id=f"session-{number}"):
                await create(client)
                assert [chunk async for chunk in await create(client, stream=True)]
                await create(client)

        await asyncio.gather(*map(work, range(60)))
    check_sixty(server)


def test_switched_off_nothing_is_added(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    saga.uninstrument()
    with openai.OpenAI(base_url=server.base_url, api_key="none") as client, saga.workflow("w"):
        create(client)
    assert [r.saga_headers for r in server.requests] == [{}]
