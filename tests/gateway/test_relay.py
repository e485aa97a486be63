"""What passes through the gateway passes unchanged, and as it comes."""

import asyncio
import gzip
import json

import pytest

CHAT = "/v1/chat/completions"
ODD_BODY = b'{"model":"m",  "top_k":7,"max_completion_tokens":3,\n"x":null,"s":"\xc3\xa9\\u00e9"}'


async def raw_exchange(port, data):
    """Send bytes and return all that comes until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    received = await reader.read(-1)
    writer.close()
    await writer.wait_closed()
    return received


async def test_request_arrives_byte_for_byte(gateway, worker):
    headers = {
        "Content-Type": "application/json",
        "Authorization": "Bearer k",
        "X-SAGA-Session-ID": "s:1",
        "X-SAGA-Step": "0",
        "X-Custom": "é",
        "X-Hop": "1",
        "Connection": "keep-alive, x-hop",
        "TE": "trailers",
        "Accept-Encoding": "gzip",
    }
    response = await gateway.client.post(
        f"{CHAT}?a=%2F%20b&c", content=ODD_BODY, headers={k: v.encode() for k, v in headers.items()}
    )
    assert response.status_code == 200
    got = worker.chats[0]
    assert (got.method, got.target, got.body) == ("POST", f"{CHAT}?a=%2F%20b&c", ODD_BODY)
    sent = {name.lower(): value for name, value in got.headers}
    assert sent["authorization"] == "Bearer k"
    assert sent["content-type"] == "application/json"
    assert sent["accept-encoding"] == "gzip"
    assert sent["x-saga-session-id"] == sent["x-session-id"] == "s:1"
    assert sent["x-saga-step"] == "0"
    assert sent["x-custom"] == "é"
    assert sent["host"] == worker.worker_id
    assert sent["content-length"] == str(len(ODD_BODY))
    assert not {"te", "x-hop", "connection", "transfer-encoding"} & set(sent)


async def test_no_header_is_invented(gateway, worker):
    request = (
        f"POST {CHAT} HTTP/1.1\r\nHost: g\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{{}}"
    )
    await raw_exchange(gateway.port, request.encode())
    names = sorted(name.lower() for name, _ in worker.chats[0].headers)
    assert names == ["content-length", "host"]


async def test_large_and_chunked_request_body(gateway, worker):
    body = b"x" * (3 * 2**20 + 17)

    async def pieces():
        for start in range(0, len(body), 100_000):
            yield body[start : start + 100_000]

    await gateway.client.post(CHAT, content=pieces())
    assert worker.chats[0].body == body
    assert worker.chats[0].header("content-length") == str(len(body))


async def test_json_response_is_unchanged(gateway, worker):
    body = b'{"choices": [ ],\n "unknown":{"reasoning":"\xc3\xa9"}}\n'

    async def script(exchange):
        await exchange.answer(body, status=200, X_Request_Id="r1", Connection="keep-alive, X-Hop",
                              X_Hop="1", Server="other")  # fmt: skip

    worker.script = script
    response = await gateway.chat()
    assert response.content == body
    assert response.headers["x-request-id"] == "r1"
    assert response.headers["server"] == "other"
    assert response.headers["content-length"] == str(len(body))
    assert response.headers["x-saga-worker"] == worker.worker_id
    assert response.headers["x-saga-route"] == "new"
    assert "x-saga-session-id" not in response.headers
    assert not {"x-hop", "connection", "transfer-encoding"} & set(response.headers)


async def test_stream_is_unchanged_and_comes_as_it_is_sent(gateway, worker):
    pieces = [b": ping\r\n\r\ndata:{", b'"a":"\xe2\x82', b'\xac"}\n\n', b"data: [DONE]\n\n"]
    go_on = [asyncio.Event() for _ in pieces]

    async def script(exchange):
        await exchange.stream_head()
        for piece, go in zip(pieces, go_on, strict=True):
            await exchange.chunk(piece)
            await go.wait()
        await exchange.send(b"0\r\n\r\n")

    worker.script = script
    async with gateway.client.stream("POST", CHAT, json={}) as response:
        assert response.headers["x-accel-buffering"] == "no"
        assert "content-length" not in response.headers
        received = response.aiter_raw()
        for piece, go in zip(pieces, go_on, strict=True):
            assert await anext(received) == piece
            go.set()
        assert [rest async for rest in received] == []


async def test_response_has_one_length(gateway, worker):
    async def script(exchange):
        await exchange.head(content_type="text/event-stream", transfer_encoding="chunked",
                            content_length=5)  # fmt: skip
        await exchange.chunk(b"data: x\n\n")
        await exchange.send(b"0\r\n\r\n")
        exchange.writer.close()

    worker.script = script
    request = (
        f"POST {CHAT} HTTP/1.1\r\nHost: g\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{{}}"
    )
    head = (await raw_exchange(gateway.port, request.encode())).partition(b"\r\n\r\n")[0].lower()
    assert (b"content-length" in head) + (b"transfer-encoding" in head) <= 1


async def test_compressed_response_stays_compressed(gateway, worker, wire, eventually):
    body = gzip.compress(json.dumps(wire.completion("read_file")).encode())

    async def script(exchange):
        await exchange.answer(body, content_encoding="gzip")

    worker.script = script
    async with gateway.client.stream(
        "POST", CHAT, json={}, headers={"X-SAGA-Session-ID": "s"}
    ) as response:
        assert response.headers["content-encoding"] == "gzip"
        assert b"".join([piece async for piece in response.aiter_raw()]) == body
    await eventually(lambda: worker.notices)
    assert worker.notices[0]["tool_name"] == "read_file"


@pytest.mark.parametrize("status", [400, 401, 429, 500, 503])
async def test_error_of_the_worker_passes(gateway, worker, status):
    async def script(exchange):
        await exchange.answer({"error": {"message": "no"}}, status=status, retry_after=3)

    worker.script = script
    response = await gateway.chat("s")
    assert response.status_code == status
    assert response.json() == {"error": {"message": "no"}}
    assert response.headers["retry-after"] == "3"
    assert len(worker.chats) == 1
    assert worker.notices == []


async def test_unknown_path_wrong_method_and_size(start_gateway, worker):
    gateway = await start_gateway(worker, max_body_bytes=10)
    for response, status, code in (
        (await gateway.client.get("/v1/nothing"), 404, "not_found"),
        (await gateway.client.get(CHAT), 405, "method_not_allowed"),
        (await gateway.client.post(CHAT, content=b"x" * 11), 413, "body_too_large"),
    ):
        assert response.status_code == status
        error = response.json()["error"]
        assert error["code"] == code
        assert error["type"] == "invalid_request_error"
        assert error["message"]
    assert worker.chats == []


async def test_side_reader_failure_does_not_touch_the_relay(gateway, worker, eventually):
    async def script(exchange):
        await exchange.answer(b"\xff not json")

    worker.script = script
    response = await gateway.chat("s")
    assert response.content == b"\xff not json"
    assert gateway.app.stats.answers_unread == 1
    worker.call_tools("read_file")
    await gateway.chat("s")
    await eventually(lambda: worker.notices)
    assert len(worker.notices) == 1


async def test_models_are_merged(gateway2, workers):
    workers[0].models, workers[1].models = ["a", "b"], ["b", "c"]
    content = (await gateway2.client.get("/v1/models")).json()
    assert content["object"] == "list"
    assert [(model["id"], model["by"]) for model in content["data"]] == [
        ("a", workers[0].worker_id),
        ("b", workers[0].worker_id),
        ("c", workers[1].worker_id),
    ]
    await workers[0].stop()
    content = (await gateway2.client.get("/v1/models")).json()
    assert [model["id"] for model in content["data"]] == ["b", "c"]
    await workers[1].stop()
    response = await gateway2.client.get("/v1/models")
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "worker_unavailable"


async def test_health_shows_the_workers(gateway2, workers, eventually):
    await eventually(lambda: all(worker.engine is not None for worker in gateway2.app.workers))
    engine = {"kind": "saga", "version": "0.32.0", "takes_priority": False}
    content = (await gateway2.client.get("/health")).json()
    assert content["status"] == "ok"
    assert content["workers"] == [
        {"worker_id": worker.worker_id, "in_flight": 0, "available": True, "weight": 1.0}
        | {"healthy": True, "draining": False, "engine": engine, "takes_notices": True}
        for worker in workers
    ]
