"""Workers that are taken out and come back: breakers, health checks, slow start."""

import asyncio
import socket

import pytest

CHECKS = {"health_interval_s": 0.01, "health_timeout_s": 0.5}


def one(gateway, worker):
    return gateway.app.workers[worker.worker_id]


def served(gateway, *workers):
    """How many of the requests that follow each worker serves."""
    before = [len(worker.chats) for worker in workers]
    return lambda: [len(w.chats) - n for w, n in zip(workers, before, strict=True)]


# Breakers


async def test_a_worker_that_keeps_failing_is_taken_out_for_a_while(start_gateway, workers):
    gateway = await start_gateway(*workers, breaker_failures=3, worker_backoff_s=5.0)

    async def overloaded(exchange):
        await exchange.answer({"error": "overloaded"}, status=503)

    bad = min(workers, key=lambda worker: worker.worker_id)
    good = next(worker for worker in workers if worker is not bad)
    bad.script = overloaded
    statuses = [(await gateway.chat()).status_code for _ in range(20)]
    assert statuses.count(503) == 3
    bad.script = good.script
    gateway.clock.advance(4.9)
    counts = served(gateway, bad, good)
    for _ in range(4):
        await gateway.chat()
    assert counts() == [0, 4]
    gateway.clock.advance(0.2)
    for _ in range(8):
        await gateway.chat()
    assert counts()[0] > 0


@pytest.mark.parametrize("status", [400, 404, 413, 422, 429, 500])
async def test_no_request_can_open_a_breaker_by_its_own_fault(start_gateway, worker, status):
    gateway = await start_gateway(worker, breaker_failures=2)

    async def refuse(exchange):
        await exchange.answer({"error": {"message": "too long"}}, status=status)

    worker.script = refuse
    for _ in range(10):
        assert (await gateway.chat()).status_code == status
    assert len(worker.chats) == 10


async def test_clients_that_leave_do_not_open_a_breaker(start_gateway, worker, eventually):
    gateway = await start_gateway(worker, breaker_failures=2)

    async def hang(exchange):
        await exchange.gone()

    worker.script, answer = hang, worker.script
    for number in range(6):
        request = asyncio.create_task(gateway.chat())
        await eventually(lambda number=number: len(worker.chats) == number + 1)
        request.cancel()
        await eventually(lambda: one(gateway, worker).in_flight == 0)
    worker.script = answer
    assert (await gateway.chat()).status_code == 200


async def test_streams_that_break_off_open_a_breaker(start_gateway, worker, wire):
    gateway = await start_gateway(worker, breaker_failures=2, worker_backoff_s=60.0)

    async def break_off(exchange):
        await exchange.stream_head()
        await exchange.chunk(wire.event(wire.delta(content="x")))
        exchange.cut()

    worker.script = break_off
    statuses = [(await gateway.chat()).status_code for _ in range(3)]
    assert statuses == [200, 200, 502]


async def test_retry_after_is_passed_on(gateway, worker):
    async def busy(exchange):
        await exchange.answer({"error": {"message": "busy"}}, status=429, retry_after=7)

    worker.script = busy
    answer = await gateway.chat("s")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
    assert len(worker.chats) == 1


async def test_a_worker_that_asks_for_rest_gets_no_new_session_meanwhile(gateway2, workers):
    first = await gateway2.chat("old")
    full = next(w for w in workers if w.worker_id == first.headers["x-saga-worker"])
    other = next(w for w in workers if w is not full)

    async def busy(exchange):
        await exchange.answer({"error": {"message": "busy"}}, status=503, retry_after=7)

    async def serve(exchange):
        await exchange.answer({})

    full.script = busy
    assert (await gateway2.chat("old")).status_code == 503
    full.script = serve
    seen = {(await gateway2.chat(f"n{n}")).headers["x-saga-worker"] for n in range(6)}
    assert seen == {other.worker_id}
    # A session whose KV is there comes back when its client sees fit.
    back = await gateway2.chat("old")
    assert (back.headers["x-saga-worker"], back.status_code) == (full.worker_id, 200)
    gateway2.clock.advance(7.1)
    seen = {(await gateway2.chat(f"m{n}")).headers["x-saga-worker"] for n in range(6)}
    assert full.worker_id in seen


@pytest.mark.parametrize("said", ["soon", "-1", "1e9", "٣"])
async def test_a_rest_that_cannot_be_read_is_none(gateway2, workers, said):
    async def busy(exchange):
        await exchange.answer({}, status=503, retry_after=said)

    for worker in workers:
        worker.script = busy
    await gateway2.chat()
    assert all(worker.rests_until_s < gateway2.clock() for worker in gateway2.app.workers)


async def test_one_who_rests_is_better_than_nobody(gateway, worker):
    async def busy(exchange):
        await exchange.answer({}, status=503, retry_after=60)

    worker.script = busy
    for _ in range(2):
        assert (await gateway.chat()).status_code == 503
    assert len(worker.chats) == 2


# Health checks


async def test_a_worker_that_says_it_is_ill_gets_nothing_until_it_is_well(
    start_gateway, workers, eventually
):
    gateway = await start_gateway(*workers, **CHECKS)
    ill, well = workers
    ill.health_status = 503
    await eventually(lambda: not one(gateway, ill).healthy)
    counts = served(gateway, ill, well)
    for number in range(6):
        assert (await gateway.chat(f"s{number}")).status_code == 200
    assert counts() == [0, 6]
    ill.health_status = 200
    await eventually(lambda: one(gateway, ill).healthy)
    gateway.clock.advance(60.0)
    for number in range(20):
        await gateway.chat(f"t{number}")
    assert counts()[0] > 0


async def test_one_failed_check_is_no_reason(start_gateway, worker, eventually):
    gateway = await start_gateway(worker, **CHECKS)
    seen = set()
    for _ in range(5):
        worker.health_status = 503
        checks = worker.health_checks
        await eventually(lambda checks=checks: worker.health_checks == checks + 1)
        worker.health_status = 200
        await eventually(lambda checks=checks: worker.health_checks >= checks + 2)
        seen.add(one(gateway, worker).healthy)
    assert seen == {True}


async def test_a_worker_that_was_restarted_is_used_again_without_a_request_to_find_out(
    start_gateway, workers, eventually
):
    """The back-off would last for ever: a check ends it."""
    gateway = await start_gateway(*workers, **CHECKS, worker_backoff_s=3600.0)
    for number in range(8):
        await gateway.chat(f"s{number}")
    down = workers[0]
    await down.stop()
    for number in range(8):
        assert (await gateway.chat(f"s{number}")).status_code == 200
    await eventually(lambda: not one(gateway, down).load(gateway.clock()).available)
    await down.start()
    await eventually(lambda: one(gateway, down).load(gateway.clock()).available)
    gateway.clock.advance(60.0)
    counts = served(gateway, *workers)
    for number in range(20):
        await gateway.chat(f"t{number}")
    assert min(counts()) > 0


async def test_a_worker_that_hangs_does_not_hold_up_the_checks_of_others(
    start_gateway, workers, eventually
):
    gateway = await start_gateway(*workers, health_interval_s=0.01, health_timeout_s=30.0)
    hung, other = workers
    await hung.stop()
    with socket.create_server(("127.0.0.1", hung.port)):  # Takes connections, says nothing.
        other.health_status = 503
        await eventually(lambda: not one(gateway, other).healthy)
        other.health_status = 200
        await eventually(lambda: one(gateway, other).healthy)


# Slow start


async def test_a_worker_that_comes_back_is_given_more_and_more(start_gateway, workers, eventually):
    gateway = await start_gateway(*workers, **CHECKS, slow_start_s=10.0)
    back, other = workers
    back.health_status = 503
    await eventually(lambda: not one(gateway, back).healthy)
    back.health_status = 200
    await eventually(lambda: one(gateway, back).healthy)
    gateway.tell(other, requests=4)
    assert (await gateway.chat("a")).headers["x-saga-worker"] == other.worker_id
    gateway.clock.advance(3.0)
    assert (await gateway.chat("b")).headers["x-saga-worker"] == back.worker_id
    weights = []
    for _ in range(4):
        weights.append(one(gateway, back).load(gateway.clock()).weight)
        gateway.clock.advance(3.0)
    assert weights == pytest.approx([0.3, 0.6, 0.9, 1.0])
    gateway.tell(other, requests=0)
