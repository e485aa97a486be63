"""What the gateway serves besides chat, and how it answers what it does not serve."""

import asyncio
import json

import pytest

from saga_gateway.routes import SINGLE, STEPS

RESPONSE = {"id": "resp_1", "object": "response", "status": "completed", "output": []}


async def echo(exchange):
    await exchange.answer({"at": exchange.target, "got": exchange.body.decode()})


@pytest.mark.parametrize("path", [*STEPS, *SINGLE])
async def test_every_relayed_path_reaches_a_worker_as_it_is(gateway, worker, path):
    worker.script = echo
    body = b'{"model": "m",  "unknown": [1e3, null]}'
    answer = await gateway.client.post(f"{path}?a=%2F&b", content=body)
    assert answer.status_code == 200
    assert answer.json() == {"at": f"{path}?a=%2F&b", "got": body.decode()}
    assert answer.headers["x-saga-worker"] == worker.worker_id


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "/v1/embeddings//"])
async def test_a_trailing_slash_is_no_other_path(gateway, worker, path):
    worker.script = echo
    answer = await gateway.client.post(path, json={})
    assert answer.json()["at"] == path.rstrip("/")


@pytest.mark.parametrize("path", STEPS)
async def test_every_step_belongs_to_its_session(gateway2, workers, path):
    for _ in range(4):
        answer = await gateway2.client.post(path, json={}, headers={"X-SAGA-Session-ID": "s"})
        assert answer.headers["x-saga-session-id"] == "s"
    assert sorted(len(worker.chats) for worker in workers) == [0, 4]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/tokenize"])
async def test_what_is_no_step_leaves_the_session_alone(gateway, worker, path):
    answer = await gateway.client.post(path, json={}, headers={"X-SAGA-Session-ID": "s"})
    assert "x-saga-session-id" not in answer.headers
    assert len(gateway.app.sessions) == 0
    assert worker.notices == []


# The responses API keeps its state in the worker that made a response


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_continued_on_the_worker_that_made_it(
    gateway2, workers, wire, stream, eventually
):
    numbers = iter(range(100))

    async def respond(exchange):
        made = RESPONSE | {"id": f"resp_{next(numbers)}"}
        if stream:
            await exchange.stream(wire.event({"type": "response.completed", "response": made}))
        else:
            await exchange.answer(made)

    for worker in workers:
        worker.script = respond
    homes = {}
    for number in range(6):
        answer = await gateway2.client.post("/v1/responses", json={"input": "x"})
        homes[f"resp_{number}"] = answer.headers["x-saga-worker"]
    for name, home in homes.items():
        gateway2.tell(gateway2.app.workers[home], requests=5)  # Anything new goes elsewhere.
        fresh = await gateway2.client.post("/v1/responses", json={"input": "x"})
        assert fresh.headers["x-saga-worker"] != home
        continued = {"input": "y", "previous_response_id": name}
        answer = await gateway2.client.post("/v1/responses", json=continued)
        assert answer.headers["x-saga-worker"] == home
        assert answer.headers["x-saga-route"] == "affinity"
        gateway2.tell(gateway2.app.workers[home], requests=0)
    home = homes["resp_3"]
    for method, path in (("GET", "/v1/responses/resp_3"), ("POST", "/v1/responses/resp_3/cancel")):
        answer = await gateway2.client.request(method, path)
        assert answer.status_code == 200
        assert answer.headers["x-saga-worker"] == home
    exchange = next(worker for worker in workers if worker.worker_id == home).chats[-1]
    assert (exchange.method, exchange.target) == ("POST", "/v1/responses/resp_3/cancel")


async def test_a_response_that_is_not_known_is_the_workers_to_refuse(gateway, worker):
    async def refuse(exchange):
        await exchange.answer({"error": {"message": "no such response"}}, status=404)

    worker.script = refuse
    for body in ({"previous_response_id": "resp_9"}, {"previous_response_id": 9}, [1]):
        assert (await gateway.client.post("/v1/responses", json=body)).status_code == 404
    broken = await gateway.client.post("/v1/responses", content=b'{"previous_response_id": ')
    assert broken.status_code == 404
    assert (await gateway.client.get("/v1/responses/resp_9")).status_code == 404


# Errors in the dialect of the client


async def test_an_error_has_the_shape_that_the_client_reads(gateway, start_gateway, worker):
    small = await start_gateway(worker, max_body_bytes=10)
    body = {"model": "far too long"}
    openai = await small.client.post("/v1/responses", json=body)
    assert openai.status_code == 413
    assert openai.json()["error"]["code"] == "body_too_large"
    anthropic = await small.client.post("/v1/messages", json=body)
    assert anthropic.status_code == 413
    assert anthropic.json()["type"] == "error"
    assert anthropic.json()["error"]["type"] == "invalid_request_error"
    await worker.stop()
    down = await gateway.client.post("/v1/messages", json=body)
    assert down.status_code == 502
    assert down.json()["error"]["type"] == "api_error"
    assert "retry-after" in down.headers


@pytest.mark.parametrize(
    ("path", "head", "where"),
    [
        ("/v1/chat/completions", "", ("error", "message")),
        ("/v1/responses", "event: error\n", ("message",)),
        ("/v1/messages", "event: error\n", ("error", "message")),
    ],
)
async def test_a_broken_stream_ends_in_an_error_of_its_dialect(gateway, worker, path, head, where):
    async def break_off(exchange):
        await exchange.stream_head()
        await exchange.chunk(b'event: x\ndata: {"type": "response.created"}\n\n')
        exchange.cut()

    worker.script = break_off
    text = (await gateway.client.post(path, json={})).text
    last = text.rstrip("\n").rpartition("\n\n")[2].lstrip("\n")
    assert last.startswith(head + "data: ")
    content = json.loads(last.removeprefix(head + "data: "))
    for name in where:
        content = content[name]
    assert "broke off" in content


# The rest


async def test_head_and_options_are_answered(gateway):
    head = await gateway.client.head("/health")
    assert (head.status_code, head.content) == (200, b"")
    assert int(head.headers["content-length"]) > 0
    options = await gateway.client.options("/v1/chat/completions")
    assert options.status_code == 204
    assert options.headers["allow"] == "POST, OPTIONS"
    wrong = await gateway.client.get("/v1/chat/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST, OPTIONS")
    assert (await gateway.client.get("/v1/nothing")).status_code == 404


async def test_pages_of_named_origins_may_call(start_gateway, worker):
    gateway = await start_gateway(worker, cors_origins=("https://app.example",))
    asks = {
        "Origin": "https://app.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
    }
    allowed = await gateway.client.options("/v1/chat/completions", headers=asks)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    assert "x-stainless-os" in allowed.headers["access-control-allow-headers"].lower()
    refused = await gateway.client.options(
        "/v1/chat/completions", headers=asks | {"Origin": "https://evil.example"}
    )
    assert "access-control-allow-origin" not in refused.headers
    answer = await gateway.client.post(
        "/v1/chat/completions", json={}, headers={"Origin": "https://app.example"}
    )
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert "X-SAGA-Worker" in answer.headers["access-control-expose-headers"]


async def test_only_listed_paths_of_the_worker_are_passed(start_gateway, worker):
    gateway = await start_gateway(worker, pass_paths=("/invocations",))
    worker.script = echo
    assert (await gateway.client.post("/invocations", content=b"x")).json()["got"] == "x"
    assert (await gateway.client.get("/invocations?q=1")).json()["at"] == "/invocations?q=1"
    assert worker.chats[-1].method == "GET"
    assert worker.chats[-1].header("content-length") is None
    assert (await gateway.client.post("/sleep", content=b"x")).status_code == 404


async def test_ready_and_version(gateway, worker):
    assert (await gateway.client.get("/ready")).json() == {"ready": True}
    assert (await gateway.client.get("/version")).json()["version"].count(".") == 2
    await worker.stop()
    await gateway.chat()
    unready = await gateway.client.get("/ready")
    assert (unready.status_code, unready.json()) == (503, {"ready": False})


@pytest.mark.parametrize(
    "head",
    [
        "POST /v1/chat/completions HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}",
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        "Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n",
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        "Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
    ],
    ids=["HTTP/1.0", "chunked", "expect"],
)
async def test_old_and_chunked_and_cautious_clients_are_served(gateway, worker, head):
    worker.script = echo
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(head.encode())
    raw = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    text = raw.decode().removeprefix("HTTP/1.1 100 Continue\r\n\r\n")
    assert " 200 " in text.splitlines()[0]
    assert '"got": "{}"' in text
    assert worker.chats[-1].header("expect") is None
