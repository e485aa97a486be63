"""Anthropic's own client works through the gateway."""

import json

import anthropic
import httpx2
import pytest

ASK = {"model": "m", "max_tokens": 10, "messages": [{"role": "user", "content": "hello"}]}
USAGE = {"input_tokens": 7, "output_tokens": 2}
MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [{"type": "tool_use", "id": "toolu_1", "name": "bash", "input": {"command": "ls"}}],
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "usage": USAGE,
}


def event(kind, **content):
    return f"event: {kind}\ndata: {json.dumps({'type': kind} | content)}\n\n".encode()


STREAM = (
    event("message_start", message=MESSAGE | {"content": [], "stop_reason": None}),
    event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
    event("content_block_delta", index=0, delta={"type": "text_delta", "text": "hé"}),
    event("content_block_stop", index=0),
    event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 2}),
    event("message_stop"),
)


@pytest.fixture
async def client(gateway):
    async with anthropic.AsyncAnthropic(
        base_url=gateway.url,
        api_key="k",
        max_retries=0,
        http_client=httpx2.AsyncClient(trust_env=False),
    ) as client:
        yield client


async def test_a_message_that_calls_a_tool(client, worker, eventually):
    async def answer(exchange):
        await exchange.answer(MESSAGE)

    worker.script = answer
    message = await client.messages.create(**ASK, extra_headers={"X-SAGA-Session-ID": "s"})
    assert message.content[0].name == "bash"
    sent = worker.chats[0]
    # The key's header changed between versions of the client.
    assert sent.header("authorization") == "Bearer k" or sent.header("x-api-key") == "k"
    assert worker.chats[0].header("anthropic-version")
    await eventually(lambda: worker.notices)
    assert worker.notices[0]["tool_name"] == "bash"


async def test_a_stream(client, worker):
    async def answer(exchange):
        text = b"".join(STREAM)
        await exchange.stream(*(text[at : at + 11] for at in range(0, len(text), 11)))

    worker.script = answer
    async with client.messages.stream(**ASK) as stream:
        assert "".join([text async for text in stream.text_stream]) == "hé"
        assert (await stream.get_final_message()).stop_reason == "end_turn"


async def test_tokens_are_counted(client, worker):
    async def answer(exchange):
        await exchange.answer({"input_tokens": 7})

    worker.script = answer
    counted = await client.messages.count_tokens(model="m", messages=ASK["messages"])
    assert counted.input_tokens == 7
    assert worker.chats[0].target.startswith("/v1/messages/count_tokens")


async def test_errors_are_understood(client, worker):
    async def break_off(exchange):
        await exchange.stream_head()
        for piece in STREAM[:3]:
            await exchange.chunk(piece)
        exchange.cut()

    worker.script = break_off
    with pytest.raises(anthropic.APIStatusError, match="broke off"):
        async with client.messages.stream(**ASK) as stream:
            await stream.get_final_message()
    await worker.stop()
    with pytest.raises(anthropic.InternalServerError, match="no worker is available"):
        await client.messages.create(**ASK)
