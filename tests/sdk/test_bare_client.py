"""Hints of bare OpenAI clients in ``saga.workflow`` blocks."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import TracerProvider

import saga_sdk as saga
from saga_core.hints import Hints
from saga_sdk.context import current_workflow
from saga_sdk.testing import Failure, Request, ScriptedServer, Step
from tests.sdk.agents import make_model


def message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base_url, api_key="none") as client:
        yield client


def chat(client: openai.OpenAI, text: str = "a", **kwargs: Any) -> Any:
    return client.chat.completions.create(model="m", messages=message(text), **kwargs)


def test_calls_in_a_block_are_steps_of_its_session(
    server: ScriptedServer, client: openai.OpenAI
) -> None:
    saga.instrument(server.base_url)
    with saga.workflow("swe", task_id="task-1", session_id="session-1", deadline_s=60) as block:
        chat(client)
        list(chat(client, stream=True))
        client.chat.completions.with_raw_response.create(model="m", messages=message("a"))
        client.with_options(timeout=30).chat.completions.create(model="m", messages=message("a"))
    assert (block.workflow_id, block.task_id, block.session_id) == ("swe", "task-1", "session-1")
    assert [h.step for h in server.hints] == [0, 1, 2, 3]
    assert {(h.workflow_id, h.task_id, h.session_id) for h in server.hints} == {
        ("swe", "task-1", "session-1")
    }
    assert all(h.deadline_ms is not None and 0 < h.deadline_ms <= 60_000 for h in server.hints)


async def test_async_calls_and_an_async_block(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none") as client:
        async with saga.workflow("swe") as block:
            await client.chat.completions.create(model="m", messages=message("a"))
            stream = await client.chat.completions.create(
                model="m", messages=message("a"), stream=True
            )
            assert [chunk async for chunk in stream]
        await client.chat.completions.create(model="m", messages=message("a"))
    assert [h.step for h in server.hints] == [0, 1, None]
    assert [h.session_id for h in server.hints] == [block.session_id] * 2 + [None]


def test_a_nested_block_is_a_session_of_the_same_task(
    server: ScriptedServer, client: openai.OpenAI
) -> None:
    saga.instrument(server.base_url)
    with saga.workflow("outer", deadline_s=60) as outer:
        chat(client)
        with saga.workflow("inner") as inner:
            chat(client)
        chat(client)
    assert [(h.workflow_id, h.step) for h in server.hints] == [
        ("outer", 0),
        ("inner", 0),
        ("outer", 1),
    ]
    assert [h.parent_session_id for h in server.hints] == [None, outer.session_id, None]
    assert inner.session_id != outer.session_id
    assert {h.task_id for h in server.hints} == {outer.task_id}
    assert all(h.deadline_ms for h in server.hints)


def test_a_block_entered_again_is_a_new_task() -> None:
    block = saga.workflow("swe")
    with block as first:
        assert current_workflow() is first
    with block as second, block as third:
        assert third.outer is second
    assert first.task_id != second.task_id == third.task_id
    assert current_workflow() is None


def test_a_block_left_by_an_exception_is_left() -> None:
    error = KeyError("user's")
    with pytest.raises(KeyError) as caught, saga.workflow("swe"):
        raise error
    assert caught.value is error
    assert current_workflow() is None


def test_a_block_left_in_another_context_does_no_harm() -> None:
    def numbers() -> Iterator[int]:
        with saga.workflow("swe"):
            yield 1

    generator = numbers()
    other = contextvars.copy_context()
    assert other.run(next, generator) == 1
    generator.close()
    assert current_workflow() is None


def test_a_retry_repeats_its_step(server: ScriptedServer, client: openai.OpenAI) -> None:
    saga.instrument(server.base_url)
    server.interject(Failure(), Failure())
    with saga.workflow("swe"):
        chat(client)
        chat(client)
    assert [(r.status, r.hints.step) for r in server.requests] == [
        (500, 0),
        (500, 0),
        (200, 0),
        (200, 1),
    ]


def fail_at_first(request: Request) -> Step:
    """Fail the first attempt of each call."""
    return Failure() if request.get("x-stainless-retry-count") == "0" else "done"


async def test_retries_of_concurrent_calls_repeat_their_own_steps() -> None:
    with ScriptedServer(fail_at_first) as server:
        saga.instrument(server.base_url)
        async with (
            openai.AsyncOpenAI(base_url=server.base_url, api_key="none") as client,
            saga.workflow("swe"),
        ):
            await asyncio.gather(
                *(
                    client.chat.completions.create(model="m", messages=message(f"call {n}"))
                    for n in range(8)
                )
            )
    steps: dict[str, set[int | None]] = {}
    for request in server.requests:
        steps.setdefault(request.user_text, set()).add(request.hints.step)
    assert len(server.requests) == 16
    assert sorted(step for (step,) in steps.values() if step is not None) == list(range(8))


def test_only_llm_calls_are_steps(server: ScriptedServer, client: openai.OpenAI) -> None:
    saga.instrument(server.base_url)
    with saga.workflow("swe"):
        client.embeddings.create(model="m", input="a", encoding_format="float")
        chat(client)
    assert server.requests[0].saga_headers == {}
    assert server.hints[1].step == 0


def test_outside_a_block_there_is_at_most_the_default_workflow(
    server: ScriptedServer, client: openai.OpenAI
) -> None:
    saga.instrument(server.base_url)
    chat(client)
    saga.instrument(workflow="everything")
    chat(client)
    with saga.workflow("block"):
        chat(client)
    assert server.hints[0] == Hints()
    assert server.hints[1] == Hints(workflow_id="everything")
    assert server.hints[2].workflow_id == "block"


def test_a_header_that_the_user_set_wins(server: ScriptedServer, client: openai.OpenAI) -> None:
    saga.instrument(server.base_url)
    with saga.workflow("swe"):
        chat(client, extra_headers={"x-saga-step": "7", "baggage": "saga.task_id=mine,k=v;p=1"})
    (request,) = server.requests
    assert (request.hints.step, request.hints.workflow_id) == (7, "swe")
    assert request.get("baggage") == (
        f"saga.task_id=mine,k=v;p=1,saga.workflow_id=swe,saga.session_id={request.hints.session_id}"
    )


def test_ids_with_foreign_characters_stay_apart(
    server: ScriptedServer, client: openai.OpenAI
) -> None:
    saga.instrument(server.base_url)
    for session_id in ("会話\r\n一", "会話\r\n二", "x" * 300, "x" * 301):
        with saga.workflow("my flow", session_id=session_id):
            chat(client)
    assert len({h.session_id for h in server.hints} - {None}) == 4
    assert {h.workflow_id for h in server.hints} == {"my-flow"}


def test_a_span_sends_traceparent(server: ScriptedServer, client: openai.OpenAI) -> None:
    saga.instrument(server.base_url)
    span = TracerProvider().get_tracer("test").start_span("agent")
    token = context.attach(baggage.set_baggage("private", "1", trace.set_span_in_context(span)))
    try:
        chat(client)
        with saga.workflow("swe"):
            chat(client, extra_headers={"traceparent": "mine"})
    finally:
        context.detach(token)
    chat(client)
    sent = [request.get("traceparent") for request in server.requests]
    trace_id = f"{span.get_span_context().trace_id:032x}"
    assert (sent[0] or "").split("-")[1] == trace_id
    assert sent[1:] == ["mine", None]
    assert all("private" not in (request.get("baggage") or "") for request in server.requests)


def test_a_call_while_a_models_stream_is_open_is_the_blocks(
    server: ScriptedServer, client: openai.OpenAI
) -> None:
    saga.instrument(server.base_url)
    server.interject(Failure())
    with saga.workflow("outer") as block:
        handler = saga.SagaCallbackHandler("streamer", session_id="stream")
        for _ in make_model(server.base_url).stream("a", {"callbacks": [handler]}):
            # Its retry is the bare client's too, not the stream's.
            server.interject(Failure())
            chat(client)
    streamed, bare = server.requests[:2], server.requests[2:]
    assert {(r.hints.workflow_id, r.hints.session_id) for r in streamed} == {("streamer", "stream")}
    assert [(r.status, r.hints.step) for r in streamed] == [(500, 0), (200, 0)]
    assert {(r.hints.workflow_id, r.hints.session_id) for r in bare} == {
        ("outer", block.session_id)
    }
    assert len(bare) >= 4
    assert [(r.status, r.hints.step) for r in bare] == [
        (status, step) for step in range(len(bare) // 2) for status in (500, 200)
    ]


def test_a_call_while_a_models_stream_is_open_has_no_hint_of_it(
    server: ScriptedServer, client: openai.OpenAI
) -> None:
    saga.instrument(server.base_url)
    for _ in make_model(server.base_url).stream("a"):
        server.interject(Failure())
        chat(client)
    make_model(server.base_url).invoke("a")
    assert len(server.hints) >= 6
    alone = Hints(workflow_id="ChatOpenAI")
    assert [server.hints[0], server.hints[-1]] == [alone, alone]
    assert {h == Hints() for h in server.hints[1:-1]} == {True}


def test_a_block_that_names_its_session_goes_on_with_its_steps(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    with openai.OpenAI(base_url=server.base_url, api_key="none") as client:
        for _ in range(2):
            with saga.workflow("chat", session_id="thread-7"):
                client.chat.completions.create(model="m", messages=message("hello"))
                with saga.workflow("part", session_id="thread-7"):
                    client.chat.completions.create(model="m", messages=message("hello"))
    said = [(hints.session_id, hints.parent_session_id, hints.step) for hints in server.hints]
    assert said == [("thread-7", None, step) for step in range(4)]
