"""What other gateways got wrong in public, and the other test files do not show yet."""

import asyncio
import json

import pytest

from saga_gateway.routes import SINGLE, STEPS

CHAT = "/v1/chat/completions"
STREAMS = 1000


async def connect(gateway, path=CHAT, body=b"{}", *headers):
    """Send a request over a socket of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    lines = [f"POST {path} HTTP/1.1", "Host: g", f"Content-Length: {len(body)}", *headers]
    writer.write("\r\n".join([*lines, "", ""]).encode() + body)
    return reader, writer


@pytest.mark.parametrize("path", [*STEPS, *SINGLE])
@pytest.mark.parametrize("phase", ["before the head", "after the head", "in mid-stream"])
async def test_a_client_that_leaves_frees_the_worker_within_a_moment_on_every_route(
    gateway, worker, eventually, path, phase
):
    async def script(exchange):
        if phase != "before the head":
            await exchange.stream_head()
        if phase == "in mid-stream":
            await exchange.chunk(b"data: {}\n\n")
        await exchange.gone()

    worker.script = script
    reader, writer = await connect(gateway, path)
    await eventually(lambda: worker.chats)
    if phase != "before the head":
        await reader.readuntil(b"\r\n\r\n")
    if phase == "in mid-stream":
        await reader.readuntil(b"{}\n\n")
    writer.close()
    await asyncio.wait_for(worker.chats[0].closed.wait(), 1)


async def test_a_thousand_cancelled_streams_leave_room_for_the_next(
    gateway, worker, wire, eventually
):
    async def script(exchange):
        await exchange.stream_head()
        await exchange.chunk(wire.event(wire.delta(content="a")))
        await exchange.gone()

    worker.script, answer = script, worker.script

    async def cancel(number):
        reader, writer = await connect(gateway, CHAT, b"{}", f"X-Session-ID: s{number}")
        await reader.readuntil(b"\n\n")
        writer.close()

    for start in range(0, 1000, 50):
        await asyncio.gather(*(cancel(number) for number in range(start, start + 50)))
    (upstream,) = gateway.app.workers
    await eventually(lambda: upstream.in_flight == 0)
    await eventually(lambda: all(exchange.closed.is_set() for exchange in worker.chats))
    worker.script = answer
    assert (await gateway.chat("s1")).status_code == 200
    assert gateway.app.stats.clients_gone == 1000


async def test_text_of_many_bytes_a_character_survives_any_cut(gateway, worker, wire):
    text = b"".join(wire.event(wire.delta(content="é€😀漢" * 50)) for _ in range(300))
    assert len(text) > 2 * 65536

    async def script(exchange):
        await exchange.stream_head()
        for start in range(0, len(text), 65_537):
            await exchange.chunk(text[start : start + 65_537])
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.send(b"0\r\n\r\n")

    worker.script = script
    assert (await gateway.client.post(CHAT, json={})).content == text + b"data: [DONE]\n\n"


async def test_nothing_is_added_to_a_stream_or_taken_from_it(gateway, worker):
    """No usage that nobody asked for, no nulls, no field that the gateway does not know."""
    text = (
        b'data: {"choices":[{"index":0,"delta":{"reasoning":"r","reasoning_content":null,"x":1}}]}'
        b'\n\ndata: {"choices":[],"usage":{"prompt_tokens":1}}\n\ndata: [DONE]\n\n'
    )

    async def script(exchange):
        await exchange.stream(text)

    worker.script = script
    body = b'{"stream":true,"stream_options":{"include_usage":true},"top_k":1,"n":null}'
    answer = await gateway.client.post(CHAT, content=body)
    assert answer.content == text
    assert worker.chats[0].body == body


async def test_the_first_token_does_not_wait_for_the_second(gateway, worker, wire):
    go_on = asyncio.Event()

    async def script(exchange):
        await exchange.stream_head()
        await exchange.chunk(b"data: 1\n\n")
        await go_on.wait()
        await exchange.send(b"0\r\n\r\n")

    worker.script = script
    async with gateway.client.stream("POST", CHAT, json={}) as response:
        assert await asyncio.wait_for(anext(response.aiter_raw()), 5) == b"data: 1\n\n"
        go_on.set()


async def test_a_hung_worker_stalls_its_own_requests_only(gateway2, workers, eventually):
    hung, well = workers

    async def hang(exchange):
        await exchange.gone()

    hung.script = hang
    stuck = [asyncio.create_task(gateway2.chat(f"s{number}")) for number in range(8)]
    await eventually(lambda: len(hung.chats) + len(well.chats) >= 8)
    answers = [await asyncio.wait_for(gateway2.chat(f"n{number}"), 5) for number in range(8)]
    assert {answer.headers["x-saga-worker"] for answer in answers} == {well.worker_id}
    for task in stuck:
        task.cancel()


async def test_a_thousand_streams_at_a_time_lose_nothing(gateway, worker, wire, eventually):
    go_on = asyncio.Event()

    async def script(exchange):
        await exchange.stream_head()
        await exchange.chunk(wire.event(wire.delta(content="a")))
        await go_on.wait()
        await exchange.chunk(wire.event(wire.delta("stop")) + b"data: [DONE]\n\n")
        await exchange.send(b"0\r\n\r\n")

    worker.script = script
    opened = []
    for start in range(0, STREAMS, 100):
        opened += await asyncio.gather(
            *(
                connect(gateway, CHAT, b"{}", f"X-Session-ID: s{number}", "Connection: close")
                for number in range(start, start + 100)
            )
        )
    await eventually(lambda: len(worker.chats) == STREAMS, timeout_s=60)
    assert (await gateway.client.get("/health")).json()["workers"][0]["in_flight"] == STREAMS
    go_on.set()
    texts = await asyncio.gather(*(reader.read() for reader, _ in opened))
    assert all(b"data: [DONE]\n\n" in text for text in texts)
    for _, writer in opened:
        writer.close()
    assert gateway.app.stats.answers_broken == 0


async def test_nothing_is_sent_again_once_the_client_has_seen_a_part(gateway2, workers, wire):
    async def break_off(exchange):
        await exchange.stream_head()
        await exchange.chunk(wire.event(wire.delta(content="once")))
        exchange.cut()

    for worker in workers:
        worker.script = break_off
    text = (await gateway2.chat("s")).text
    assert text.count("once") == 1
    assert sum(len(worker.chats) for worker in workers) == 1


@pytest.mark.parametrize("say", [b"", b": ping\n\n"])
async def test_a_stream_that_fails_before_its_first_event_is_no_empty_success(gateway, worker, say):
    async def fail(exchange):
        await exchange.stream_head()
        if say:
            await exchange.chunk(say)
        exchange.cut()

    worker.script = fail
    text = (await gateway.chat("s")).text
    assert "worker_failed" in text
    assert "[DONE]" not in text


async def test_an_error_in_a_stream_is_the_workers_own_words(gateway, worker, wire):
    error = wire.event({"error": {"message": "out of memory", "code": 500}})

    async def script(exchange):
        await exchange.stream(error, b"data: [DONE]\n\n")

    worker.script = script
    assert (await gateway.chat("s")).content == error + b"data: [DONE]\n\n"
    assert worker.notices == []


async def test_the_session_goes_along_when_another_worker_takes_over(gateway2, workers):
    async def die(exchange):
        exchange.cut()

    first = await gateway2.chat("s")
    home = next(w for w in workers if w.worker_id == first.headers["x-saga-worker"])
    other = next(w for w in workers if w is not home)
    home.script = die
    answer = await gateway2.chat("s", workflow_id="swe")
    assert answer.headers["x-saga-route"] == "failover"
    assert other.chats[-1].header("x-session-id") == "s"
    assert other.chats[-1].header("x-saga-workflow-id") == "swe"
    assert other.chats[-1].body == home.chats[-1].body


async def test_ids_that_nobody_knows_do_not_fill_the_memory(start_gateway, worker):
    gateway = await start_gateway(worker, max_sessions=100)
    for start in range(0, 2000, 50):
        answers = await asyncio.gather(
            *(gateway.chat(f"stranger-{number}") for number in range(start, start + 50))
        )
        assert {answer.status_code for answer in answers} == {200}
    assert len(gateway.app.sessions) == 100


async def test_ids_that_begin_alike_are_different_sessions(gateway, worker):
    await gateway.chat("session-1")
    await gateway.chat("session-12")
    end = [{"event": "session_end", "session_id": "session-1"}]
    await gateway.client.post("/saga/v1/events", json=end)
    assert gateway.app.sessions.get("session-1") is None
    assert gateway.app.sessions.get("session-12") is not None
    assert (await gateway.chat("session-12")).headers["x-saga-route"] == "affinity"


async def test_a_system_prompt_that_all_share_sends_nobody_to_one_worker(gateway2, workers):
    body = {"messages": [{"role": "system", "content": "You are helpful." * 200}]}
    for number in range(40):
        await gateway2.chat(f"s{number}", body=body)
    # By rendezvous: 20 each, give or take 3.2, and the ports change from run to run.
    assert min(len(worker.chats) for worker in workers) >= 5


async def test_an_image_of_six_megabytes_is_no_problem(gateway, worker):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 6 * 2**20}}
    body = json.dumps({"messages": [{"role": "user", "content": [image]}]}).encode()
    assert (await gateway.client.post(CHAT, content=body)).status_code == 200
    assert worker.chats[0].body == body


async def test_no_address_of_a_clients_is_ever_dialled(gateway, worker, workers):
    evil = workers[1]
    body = {"api_base": evil.url, "base_url": evil.url, "user_config": {"api_base": evil.url}}
    headers = {"X-Forwarded-Host": evil.worker_id, "Host": evil.worker_id, "X-Api-Base": evil.url}
    await gateway.client.post(CHAT, json=body, headers=headers)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(
        f"POST {evil.url}{CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        "Content-Length: 2\r\n\r\n{}".encode()
    )
    await reader.read()
    writer.close()
    assert evil.connections == 0


async def test_a_client_that_leaves_right_after_done_has_got_everything(
    gateway, worker, wire, eventually
):
    async def script(exchange):
        await exchange.stream_head()
        await exchange.chunk(wire.event(wire.delta("stop")) + b"data: [DONE]\n\n")
        await exchange.gone()

    worker.script = script
    reader, writer = await connect(gateway, CHAT, b"{}", "X-Session-ID: s")
    await reader.readuntil(b"[DONE]\n\n")
    writer.close()
    (upstream,) = gateway.app.workers
    await eventually(lambda: upstream.in_flight == 0)
    await eventually(lambda: worker.notices)
    stats = gateway.app.stats
    assert (stats.clients_gone, stats.answers_broken) == (0, 0)
