"""What workers are told, and what is learned, over the wire."""

import asyncio

import pytest

CHAT = "/v1/chat/completions"


async def test_pause_after_a_tool_call(gateway, worker, eventually):
    worker.call_tools("read_file")
    await gateway.chat("s")
    await eventually(lambda: worker.notices)
    assert worker.notices == [
        {
            "kind": "pause",
            "session_id": "s",
            "p_reuse": pytest.approx(0.94, abs=0.05),
            "pause_p95_s": pytest.approx(0.32),
            "tool_name": "read_file",
        }
    ]
    await eventually(lambda: gateway.app.stats.notices_sent == 1)


async def test_pause_after_a_streamed_tool_call(gateway, worker, wire, eventually):
    pieces = [
        wire.event(wire.delta(tool_calls=[{"index": 0, "function": {"name": name}}]))
        for name in ("web_", "search")
    ]
    text = b"".join([*pieces, wire.event(wire.delta("tool_calls")), b"data: [DONE]\n\n"])

    async def script(exchange):
        await exchange.stream(text[:40], text[40:90], text[90:])

    worker.script = script
    response = await gateway.chat("s")
    assert response.content == text
    await eventually(lambda: worker.notices)
    assert worker.notices[0]["tool_name"] == "web_search"
    assert worker.notices[0]["pause_p95_s"] == pytest.approx(4.5)


async def test_pause_after_an_answer_without_tool(gateway, worker, eventually):
    await gateway.chat("s")
    await eventually(lambda: worker.notices)
    assert worker.notices[0]["tool_name"] is None
    assert worker.notices[0]["pause_p95_s"] == pytest.approx(300.0)
    assert worker.notices[0]["p_reuse"] < 0.8


async def test_final_step_gives_an_end(gateway, worker, eventually):
    await gateway.chat("s", Final="1")
    await eventually(lambda: worker.notices)
    assert worker.notices == [{"kind": "end", "session_id": "s"}]
    assert len(gateway.app.sessions) == 0


async def test_no_notice_without_a_session(gateway, worker, eventually):
    worker.call_tools("x")
    await gateway.chat()
    await gateway.chat("s")
    await eventually(lambda: worker.notices)
    assert [notice["session_id"] for notice in worker.notices] == ["s"]


async def test_learned_durations_change_the_notice(gateway, worker, eventually):
    worker.call_tools("read_file")
    for n in range(10):
        await gateway.chat("s", Workflow_ID="w")
        await eventually(lambda n=n: len(worker.notices) == n + 1)
        gateway.clock.advance(42.0)
    assert worker.notices[0]["pause_p95_s"] == pytest.approx(0.32)
    assert worker.notices[-1]["pause_p95_s"] == pytest.approx(42.0, rel=0.02)
    assert worker.notices[-1]["p_reuse"] > worker.notices[0]["p_reuse"]


async def test_next_request_finds_the_step_ended(gateway, worker, wire, eventually):
    """[DONE] ends a step, even when the worker is slow to end the response."""

    async def script(exchange):
        await exchange.stream_head()
        await exchange.chunk(wire.event(wire.delta("stop")) + b"data: [DONE]\n\n")
        await release.wait()
        await exchange.send(b"0\r\n\r\n")

    release = asyncio.Event()
    worker.script = script
    headers = {"X-SAGA-Session-ID": "s"}
    async with gateway.client.stream("POST", CHAT, json={}, headers=headers) as response:
        assert b"[DONE]" in await anext(response.aiter_raw())
        gateway.clock.advance(7.0)
        ended = await gateway.events({"event": "session_end", "session_id": "s"})
        assert ended.status_code == 202
        release.set()
    await eventually(lambda: len(worker.notices) == 2)
    assert [notice["kind"] for notice in worker.notices] == ["pause", "end"]


async def test_events(gateway, worker, eventually):
    worker.call_tools("read_file")
    await gateway.chat("s")
    response = await gateway.events(
        {"event": "task_start", "task_id": "t", "at_s": 1.5},
        {"event": "tool_start", "session_id": "s", "tool_name": "read_file"},
        {"event": "tool_end", "session_id": "s", "anything": [1]},
        {"event": "tool_end", "session_id": "not-known"},
        {"event": "session_end", "session_id": "s"},
        {"event": "session_end", "session_id": "s"},
        {"event": "task_end", "session_id": "s", "task_id": "t"},
    )
    assert response.status_code == 202
    assert response.json() == {"accepted": 7}
    await eventually(lambda: len(worker.notices) == 3)
    assert worker.notices[1:] == [
        {"kind": "resume_soon", "session_id": "s", "in_s": 0.0},
        {"kind": "end", "session_id": "s"},
    ]
    health = await gateway.client.get("/health")
    assert health.status_code == 200
    assert health.json()["stats"]["events"] == {
        "task_start": 1,
        "tool_start": 1,
        "tool_end": 2,
        "session_end": 2,
        "task_end": 1,
    }
    await gateway.chat("t")
    await eventually(lambda: len(worker.notices) == 4)
    assert worker.notices[3]["p_reuse"] < worker.notices[0]["p_reuse"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not JSON"),
        (b"{}", "must be an array"),
        (b"[1]", "[0] must be an object"),
        (b'[{"event": "task_end"}, {"event": "nap"}]', "[1].event must be one of task_start"),
        (b'[{"event": ["tool_end"]}]', "[0].event"),
        (b'[{"event": "tool_end"}]', "[0].session_id must be a text"),
        (b'[{"event": "task_end", "session_id": "a b"}]', "[0].session_id must be a text"),
        (b'[{"event": "session_end", "session_id": 5}]', "[0].session_id must be a text"),
        (b"[" + b",".join([b"{}"] * 1025) + b"]", "at most 1024"),
    ],
)
async def test_malformed_events(gateway, body, words):
    response = await gateway.client.post("/saga/v1/events", content=body)
    assert response.status_code == 422
    error = response.json()["error"]
    assert error["code"] == "malformed_events"
    assert words in error["message"]
    assert not gateway.app.stats.events


async def test_worker_without_the_protocol_gets_no_more_notices(gateway, worker, eventually):
    worker.notify_status = 404
    await gateway.chat("s")
    await eventually(lambda: gateway.app.stats.notices_dropped == 1)
    worker.notify_status = 200
    for _ in range(3):
        assert (await gateway.chat("s")).status_code == 200
    await eventually(lambda: gateway.app.stats.notices_dropped == 4)
    assert worker.notify_posts == 1
    assert worker.notices == []


async def test_failures_are_counted_and_logged_once(gateway, worker, eventually, caplog):
    worker.notify_status = 500
    for n in range(3):
        await gateway.chat("s")
        await eventually(lambda n=n: gateway.app.stats.notices_dropped == n + 1)
    assert gateway.app.stats.notice_failures == {"HTTP 500": 3}
    assert len([r for r in caplog.records if "notices to worker" in r.message]) == 1
    worker.notify_status = 200
    await gateway.chat("s")
    await eventually(lambda: len(worker.notices) == 1)


async def test_full_queue_drops_its_oldest_and_does_not_hold_requests(
    start_gateway, worker, eventually
):
    gateway = await start_gateway(worker, max_queued_notices=2)
    release, held = asyncio.Event(), asyncio.Event()
    answer = worker._answer

    async def hold_notices(exchange):
        if exchange.target.startswith("/saga/"):
            held.set()
            await release.wait()
        await answer(exchange)

    worker._answer = hold_notices
    await gateway.chat("s0")
    await held.wait()
    for n in range(1, 5):
        assert (await gateway.chat(f"s{n}")).status_code == 200
    assert gateway.app.stats.notices_dropped == 2
    release.set()
    await eventually(lambda: len(worker.notices) == 3)
    assert [notice["session_id"] for notice in worker.notices] == ["s0", "s3", "s4"]
    assert worker.notify_posts == 2
