"""Which worker a request goes to."""

import asyncio

CHAT = "/v1/chat/completions"


async def test_session_stays_with_its_worker(gateway2, workers):
    served_by = {}
    for turn in range(4):
        for session in (f"s{n}" for n in range(24)):
            response = await gateway2.chat(session)
            assert response.headers["x-saga-session-id"] == session
            assert response.headers["x-saga-route"] == ("affinity" if turn else "new")
            assert (
                served_by.setdefault(session, response.headers["x-saga-worker"])
                == (response.headers["x-saga-worker"])
            )
    assert set(served_by.values()) == {worker.worker_id for worker in workers}


async def test_new_session_goes_to_the_least_loaded(gateway2, workers, eventually):
    release = asyncio.Event()
    calls = 0

    async def stall_first(exchange):
        nonlocal calls
        calls += 1
        if calls == 1:
            await release.wait()
        await exchange.answer({})

    for worker in workers:
        worker.script = stall_first
    first = asyncio.create_task(gateway2.chat("busy"))
    await eventually(lambda: calls == 1)
    busy = next(worker for worker in workers if worker.chats)
    for n in range(6):
        response = await gateway2.chat(f"n{n}")
        assert response.headers["x-saga-worker"] != busy.worker_id
    release.set()
    assert (await first).headers["x-saga-worker"] == busy.worker_id
    assert [worker.in_flight for worker in gateway2.app.workers] == [0, 0]


async def test_session_id_sources(gateway, worker):
    async def ask(**headers):
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        response = await gateway.client.post(CHAT, json={}, headers=headers)
        return response.headers.get("x-saga-session-id"), worker.chats[-1].header("x-session-id")

    assert await ask(x_saga_session_id="a", x_session_id="b") == ("a", "a")
    assert await ask(X_Session_Id="b") == ("b", "b")
    assert await ask(baggage="saga.session_id=c") == ("c", "c")
    assert await ask() == (None, None)
    assert gateway.app.stats.hints_dropped == 0


async def test_bad_hints_are_dropped_and_counted(gateway, worker):
    response = await gateway.client.post(
        CHAT,
        json={},
        headers={
            "X-SAGA-Session-ID": "no spaces",
            "X-SAGA-Step": "-1",
            "X-SAGA-Workflow-ID": "w" * 257,
            "X-Session-ID": "also bad",
        },
    )
    assert response.status_code == 200
    assert "x-saga-session-id" not in response.headers
    assert gateway.app.stats.hints_dropped == 4
    assert worker.chats[0].header("x-saga-step") == "-1"
