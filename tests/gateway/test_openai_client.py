"""OpenAI's own client works through the gateway."""

import httpx
import openai
import pytest

TOOLS = [{"type": "function", "function": {"name": "read_file", "parameters": {"type": "object"}}}]
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def client(gateway):
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1",
        api_key="k",
        max_retries=0,
        http_client=httpx.AsyncClient(trust_env=False),
    ) as client:
        yield client


async def test_chat(client, worker):
    answer = await client.chat.completions.create(model="m", messages=MESSAGES)
    assert answer.choices[0].message.content == "hi"
    assert answer.usage.prompt_tokens == 7
    assert worker.chats[0].header("authorization") == "Bearer k"


async def test_stream(client, worker, wire):
    async def script(exchange):
        deltas = [wire.delta(content="h"), wire.delta(content="i"), wire.delta("stop")]
        await exchange.stream(*map(wire.event, deltas), b"data: [DONE]\n\n")

    worker.script = script
    stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    text = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(text) == "hi"


async def test_tool_call(client, worker, eventually):
    worker.call_tools("read_file")
    answer = await client.chat.completions.create(
        model="m", messages=MESSAGES, tools=TOOLS, extra_headers={"X-SAGA-Session-ID": "s"}
    )
    assert answer.choices[0].message.tool_calls[0].function.name == "read_file"
    await eventually(lambda: worker.notices)
    assert worker.notices[0]["tool_name"] == "read_file"


async def test_errors_are_understood(client, worker, wire):
    async def break_off(exchange):
        await exchange.stream_head()
        await exchange.chunk(wire.event(wire.delta(content="h")))
        await exchange.reader.read(1)

    worker.script = break_off
    stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    chunks = aiter(stream)
    assert (await anext(chunks)).choices[0].delta.content == "h"
    worker.chats[0].cut()
    with pytest.raises(openai.APIError, match="broke off"):
        await anext(chunks)
    await worker.stop()
    with pytest.raises(openai.InternalServerError, match="no worker is available"):
        await client.chat.completions.create(model="m", messages=MESSAGES)


async def test_models(client, worker):
    worker.models = ["a", "b"]
    assert [model.id async for model in client.models.list()] == ["a", "b"]
