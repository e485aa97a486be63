"""Workers that fail, and clients that leave."""

import asyncio
import json

import httpx
import pytest

CHAT = "/v1/chat/completions"


async def test_session_fails_over_and_stays_there(gateway2, workers):
    first = await gateway2.chat("s")
    home = next(w for w in workers if w.worker_id == first.headers["x-saga-worker"])
    other = next(w for w in workers if w is not home)
    await home.stop()
    response = await gateway2.chat("s")
    assert response.status_code == 200
    assert response.headers["x-saga-route"] == "failover"
    assert response.headers["x-saga-worker"] == other.worker_id
    await home.start()
    response = await gateway2.chat("s")
    assert response.headers["x-saga-route"] == "affinity"
    assert response.headers["x-saga-worker"] == other.worker_id


async def test_requests_without_session_fail_over(gateway2, workers):
    down, up = workers
    await down.stop()
    answers = [await gateway2.chat() for _ in range(20)]
    assert {answer.headers["x-saga-worker"] for answer in answers} == {up.worker_id}
    routes = [answer.headers["x-saga-route"] for answer in answers]
    assert routes.count("failover") == 1  # It is not tried again.


async def test_worker_that_dies_before_its_answer(gateway2, workers):
    async def die_first(exchange):
        if sum(len(worker.chats) for worker in workers) == 1:
            exchange.cut()
        else:
            await exchange.answer({})

    for worker in workers:
        worker.script = die_first
    response = await gateway2.chat()
    assert response.status_code == 200
    assert response.headers["x-saga-route"] == "failover"
    assert [len(worker.chats) for worker in workers] == [1, 1]


async def test_502_when_all_are_down(gateway2, workers):
    for worker in workers:
        await worker.stop()
    response = await gateway2.chat("s")
    assert response.status_code == 502
    assert response.headers["retry-after"]
    error = response.json()["error"]
    assert error["type"] == "server_error"
    assert error["code"] == "worker_unavailable"
    assert all(worker.worker_id in error["message"] for worker in workers)
    assert (await gateway2.client.get("/health")).status_code == 503


async def test_refused_worker_is_tried_again_after_the_back_off(start_gateway, worker):
    gateway = await start_gateway(worker, worker_backoff_s=5.0)
    await worker.stop()
    assert (await gateway.chat()).status_code == 502
    await worker.start()
    gateway.clock.advance(4.9)
    response = await gateway.chat()
    assert response.status_code == 502
    assert "back-off" in response.json()["error"]["message"]
    gateway.clock.advance(0.2)
    assert (await gateway.chat()).status_code == 200


async def test_stale_pooled_connection_is_retried_once(gateway, worker):
    async def drop_reused(exchange):
        if exchange.number > 1:
            exchange.cut()
        else:
            await exchange.answer({})

    worker.script = drop_reused
    assert (await gateway.chat("s")).status_code == 200
    response = await gateway.chat("s")
    assert response.status_code == 200
    assert response.headers["x-saga-route"] == "affinity"
    assert gateway.app.stats.stale_retries == 1
    assert [exchange.number for exchange in worker.chats] == [1, 2, 1]


async def test_fresh_connection_is_not_retried_on_the_same_worker(gateway, worker):
    async def die(exchange):
        exchange.cut()

    worker.script = die
    response = await gateway.chat()
    assert response.status_code == 502
    assert len(worker.chats) == 1


async def test_answer_that_is_not_http(gateway, worker):
    async def garbage(exchange):
        await exchange.send(b"what?\r\n\r\n")
        exchange.writer.close()

    worker.script = garbage
    response = await gateway.chat()
    assert response.status_code == 502
    assert response.json()["error"]["code"] in ("worker_bad_answer", "worker_unavailable")


async def test_silent_worker_gives_504(start_gateway, workers):
    gateway = await start_gateway(*workers, idle_timeout_s=0.05)

    async def hang(exchange):
        await exchange.gone()

    for worker in workers:
        worker.script = hang
    response = await gateway.chat("s")
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "worker_timeout"
    assert sum(len(worker.chats) for worker in workers) == 1


async def test_the_first_byte_has_a_limit_of_its_own(start_gateway, worker, wire, eventually):
    gateway = await start_gateway(worker, first_byte_timeout_s=0.05, idle_timeout_s=30.0)

    async def hang(exchange):
        await exchange.gone()

    worker.script = hang
    response = await gateway.chat("s")
    assert response.status_code == 504
    assert "0.05 s (first_byte_timeout_s)" in response.json()["error"]["message"]
    await eventually(lambda: worker.chats[0].closed.is_set())

    async def slow_stream(exchange):
        await exchange.stream_head()
        await exchange.chunk(wire.event(wire.delta(content="a")))
        await asyncio.sleep(0.2)  # Longer than the limit, which is over.
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.send(b"0\r\n\r\n")

    worker.script = slow_stream
    response = await gateway.chat("s")
    assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("cut", [False, True])
async def test_a_head_without_end_is_refused(start_gateway, worker, cut):
    gateway = await start_gateway(worker, max_head_bytes=4096)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    try:
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
        filler = b"x" * 5000 if cut else b"X-A: b\r\n" * 1000
        writer.write((b"X-Long: " if cut else b"") + filler)
        answer = await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"4096 bytes (max_head_bytes)" in answer
    assert worker.chats == []
    large = await gateway.client.post(CHAT, json={"x": "y" * 20_000}, headers={"X-A": "b" * 3000})
    assert large.status_code == 200


async def test_broken_stream_ends_in_an_error_event(gateway, worker, wire):
    async def break_off(exchange):
        await exchange.stream_head()
        await exchange.chunk(wire.event(wire.delta(content="hi")))
        await asyncio.wait_for(seen.wait(), 10)
        exchange.cut()

    seen = asyncio.Event()
    worker.script = break_off
    async with gateway.client.stream(
        "POST", CHAT, json={}, headers={"X-SAGA-Session-ID": "s"}
    ) as response:
        lines = []
        async for line in response.aiter_lines():
            lines.append(line)
            seen.set()
    events = [line.removeprefix("data: ") for line in lines if line]
    assert json.loads(events[0])["choices"][0]["delta"] == {"content": "hi"}
    error = json.loads(events[1])["error"]
    assert error["code"] == "worker_failed"
    assert worker.worker_id in error["message"]
    assert len(events) == 2
    assert gateway.app.stats.answers_broken == 1
    worker.call_tools("x")
    await gateway.chat("s")


async def test_stream_whose_chunks_lose_their_framing_is_given_up(start_gateway, worker, wire):
    gateway = await start_gateway(worker, idle_timeout_s=0.3)

    async def break_framing(exchange):
        await exchange.stream_head()
        await exchange.chunk(wire.event(wire.delta(content="hi")))
        await asyncio.wait_for(seen.wait(), 10)
        await exchange.send(b"not a length\r\n")
        await exchange.gone()

    seen = asyncio.Event()
    worker.script = break_framing
    text = b""
    async with (
        asyncio.timeout(20),
        gateway.client.stream("POST", CHAT, json={}, headers={"X-SAGA-Session-ID": "s"}) as answer,
    ):
        async for piece in answer.aiter_raw():
            text += piece
            seen.set()
    assert b"worker_failed" in text
    assert [load.in_flight for load in gateway.app.workers.loads(0.0)] == [0]


async def test_stream_that_breaks_after_done_is_complete(gateway, worker, wire):
    async def break_late(exchange):
        await exchange.stream_head()
        await exchange.chunk(wire.event(wire.delta(finish_reason="stop")) + b"data: [DONE]\n\n")
        await asyncio.wait_for(seen.wait(), 10)
        exchange.cut()

    seen = asyncio.Event()
    worker.script = break_late
    async with gateway.client.stream("POST", CHAT, json={}) as response:
        text = b""
        async for piece in response.aiter_raw():
            text += piece
            seen.set()
    assert text.endswith(b"data: [DONE]\n\n")
    assert gateway.app.stats.answers_broken == 0


async def test_broken_json_answer_is_not_made_whole(gateway, worker):
    async def break_off(exchange):
        await exchange.head(content_type="application/json", content_length=100)
        await exchange.send(b'{"choices": [')
        await asyncio.wait_for(seen.wait(), 10)
        exchange.cut()

    seen = asyncio.Event()
    worker.script = break_off
    async with gateway.client.stream("POST", CHAT, json={}) as response:
        received = response.aiter_raw()
        assert await anext(received) == b'{"choices": ['
        seen.set()
        with pytest.raises(httpx.RemoteProtocolError):
            await anext(received)
    assert gateway.app.stats.answers_broken == 1


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("phase", ["before_headers", "before_first_byte", "after_first_byte"])
async def test_client_gone_closes_the_upstream(gateway, worker, eventually, phase, streamed):
    kind = "text/event-stream" if streamed else "application/json"

    async def script(exchange):
        if phase != "before_headers":
            await exchange.head(content_type=kind, transfer_encoding="chunked")
        if phase == "after_first_byte":
            await exchange.chunk(b"data: {}\n\n")
        await exchange.gone()

    worker.script = script
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: g\r\nX-SAGA-Session-ID: s\r\n".encode())
    writer.write(b"Content-Length: 2\r\n\r\n{}")
    await eventually(lambda: worker.chats)
    if phase != "before_headers":
        await reader.readuntil(b"\r\n\r\n")
    if phase == "after_first_byte":
        await reader.readuntil(b"{}\n\n")
    writer.close()
    await writer.wait_closed()
    await asyncio.wait_for(worker.chats[0].closed.wait(), 2)
    await eventually(lambda: gateway.app.stats.clients_gone == 1)
    assert [w.in_flight for w in gateway.app.workers] == [0]
    gateway.app.sessions.check_integrity()
    assert worker.notices == []


async def test_client_gone_while_it_sends_its_body(gateway, worker, eventually):
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: g\r\nContent-Length: 9\r\n\r\n{{".encode())
    writer.close()
    await writer.wait_closed()
    await eventually(lambda: gateway.app.stats.clients_gone == 1)
    assert worker.chats == []


async def test_open_stream_is_finished_at_a_shutdown(gateway, worker):
    async def slow(exchange):
        await exchange.stream_head()
        await exchange.chunk(b"data: 1\n\n")
        await release.wait()
        await exchange.chunk(b"data: 2\n\n")
        await exchange.send(b"0\r\n\r\n")

    release = asyncio.Event()
    worker.script = slow
    async with gateway.client.stream("POST", CHAT, json={}) as response:
        received = response.aiter_raw()
        assert await anext(received) == b"data: 1\n\n"
        gateway.server.should_exit = True
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            except ConnectionError:
                break
            writer.close()
        release.set()
        assert await anext(received) == b"data: 2\n\n"
        assert [rest async for rest in received] == []
