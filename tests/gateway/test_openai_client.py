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


RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "model": "m",
    "status": "completed",
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "metadata": {},
    "output": [
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "call_1",
            "name": "read_file",
            "arguments": "{}",
            "status": "completed",
        }
    ],
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "usage": {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 9,
    },
}


async def test_responses(client, worker, eventually):
    async def respond(exchange):
        await exchange.answer(RESPONSE)

    worker.script = respond
    session = {"X-SAGA-Session-ID": "s"}
    made = await client.responses.create(model="m", input="hello", extra_headers=session)
    assert made.output[0].name == "read_file"
    await eventually(lambda: worker.notices)
    assert worker.notices[0]["tool_name"] == "read_file"
    on = await client.responses.create(model="m", input="on", previous_response_id=made.id)
    assert on.id == "resp_1"
    assert (await client.responses.retrieve("resp_1")).status == "completed"
    assert (await client.responses.cancel("resp_1")).id == "resp_1"
    assert [exchange.target for exchange in worker.chats[-2:]] == [
        "/v1/responses/resp_1",
        "/v1/responses/resp_1/cancel",
    ]


async def test_a_stream_of_responses(client, worker, wire):
    async def respond(exchange):
        started = RESPONSE | {"status": "in_progress", "output": [], "usage": None}
        created = {"type": "response.created", "sequence_number": 0, "response": started}
        done = {"type": "response.completed", "sequence_number": 1, "response": RESPONSE}
        await exchange.stream(*map(wire.event, (created, done)))

    worker.script = respond
    stream = await client.responses.create(model="m", input="hello", stream=True)
    assert [event.type async for event in stream] == ["response.created", "response.completed"]


async def test_completions_and_embeddings(client, worker):
    async def answer(exchange):
        if exchange.target == "/v1/embeddings":
            data = [{"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}]
            usage = {"prompt_tokens": 1, "total_tokens": 1}
            await exchange.answer({"object": "list", "model": "m", "data": data, "usage": usage})
        else:
            choice = {"index": 0, "text": "hi", "finish_reason": "stop", "logprobs": None}
            content = {"id": "c", "object": "text_completion", "created": 1, "model": "m"}
            await exchange.answer(content | {"choices": [choice]})

    worker.script = answer
    completed = await client.completions.create(model="m", prompt="hello")
    assert completed.choices[0].text == "hi"
    embedded = await client.embeddings.create(model="m", input="x", encoding_format="float")
    assert embedded.data[0].embedding == [0.5, 0.25]


async def test_refusals_of_a_worker_are_the_clients_own_errors(client, worker):
    async def refuse(exchange):
        error = {"message": "too long", "type": "BadRequestError", "code": 400}
        await exchange.answer({"error": error}, status=400)

    worker.script = refuse
    with pytest.raises(openai.BadRequestError, match="too long"):
        await client.chat.completions.create(model="m", messages=MESSAGES)
