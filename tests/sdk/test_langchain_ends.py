"""How LangChain runs end: errors, streams left early, cancellation; nothing may be left."""

from __future__ import annotations

import asyncio

import openai
import pytest
from langchain_core.tools import tool

import saga_sdk as saga
from saga_sdk.context import calls
from saga_sdk.runs import tracker
from saga_sdk.testing import Failure, ScriptedServer
from tests.sdk.agents import WAYS, ask, make_agent, make_model, run

PLAN = "read_file > run_python"


class ToolFailedError(Exception):
    """The user's own error."""


@pytest.mark.parametrize("how", WAYS)
async def test_the_users_exception_passes_unchanged(server: ScriptedServer, how: str) -> None:
    error = ToolFailedError("as it was")

    @tool
    def read_file(text: str) -> str:
        """Fail."""
        raise error

    handler = saga.SagaCallbackHandler(base_urls=server.base_url)
    agent = make_agent(server.base_url, tools=[read_file])
    with pytest.raises(ToolFailedError) as caught:
        await run(agent, how, "read_file", {"callbacks": [handler]})
    assert caught.value is error
    assert (len(tracker), len(calls)) == (0, 0)


def test_the_models_exception_passes_unchanged(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    server.interject(Failure(400))
    with pytest.raises(openai.BadRequestError):
        make_agent(server.base_url).invoke(ask(PLAN))
    assert [h.step for h in server.hints] == [0]


def test_a_stream_left_early_leaves_nothing(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    stream = make_agent(server.base_url).stream(ask(PLAN), stream_mode="messages")
    next(stream)
    assert len(tracker) > 0
    stream.close()
    assert (len(tracker), len(calls)) == (0, 0)


async def test_a_cancelled_run_leaves_nothing(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    server.gate.clear()
    task = asyncio.create_task(make_agent(server.base_url).ainvoke(ask(PLAN)))
    await asyncio.to_thread(server.wait_for_requests, 1)
    assert len(calls) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    server.gate.set()
    assert (len(tracker), len(calls)) == (0, 0)


def test_a_call_after_a_run_gets_no_hint_of_it(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    make_model(server.base_url).invoke("a")
    with openai.OpenAI(base_url=server.base_url, api_key="none") as client:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "b"}])
    assert [bool(r.saga_headers) for r in server.requests] == [True, False]
