"""Requests given to workers as the coordinator decides: queues, limits, moves, its log."""

from __future__ import annotations

import asyncio
import json

import pytest

from saga_core.coordinator import Coordinator
from saga_core.coordinator_events import event_from_dict, to_dict
from saga_core.errors import SettingsError
from saga_gateway.identity import new_key
from saga_sim.cluster.dispatch import Coordinated, Fleet

LONG = {"model": "m", "prompt": "word " * 40_000}
"""200 KB: by the fleet's guess 50,000 tokens, ten seconds of prefill."""


@pytest.fixture
def hold(workers):
    """Workers answer when they may."""

    class Hold:
        def __init__(self):
            self.go_on = asyncio.Event()

        async def answer(self, exchange):
            await self.go_on.wait()
            await exchange.answer({})

    held = Hold()
    for worker in workers:
        worker.script = held.answer
    return held


@pytest.fixture
async def crowded(start_gateway, workers, hold):
    """Two workers that are given two requests at a time."""
    return await start_gateway(*workers, max_worker_requests=2, max_queued=2, queue_wait_s=20.0)


def queued(gateway):
    return len(gateway.app._dispatcher)


def coordinator(gateway):
    return gateway.app._dispatcher.coordinator


def ask(gateway, session=None, body=None, **headers):
    return asyncio.create_task(gateway.chat(session, body, **headers))


async def fill(gateway, workers, eventually, each=2):
    """So many requests at each worker, which are not answered yet."""
    number = each * len(workers)
    asked = [ask(gateway, f"fill{n}") for n in range(number)]
    await eventually(lambda: [len(worker.chats) for worker in workers] == [each] * len(workers))
    return asked


# Queues and limits


async def test_no_worker_is_given_more_than_it_may_have(crowded, workers, hold, eventually):
    asked = await fill(crowded, workers, eventually)
    asked += [ask(crowded, f"s{number}") for number in range(2)]
    await eventually(lambda: queued(crowded) == 2)
    refused = await crowded.chat("s7")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["code"] == "workers_busy"
    text = (await crowded.client.get("/metrics")).text
    assert "saga_gateway_queued 2.0" in text
    coordinator(crowded).check_integrity()
    hold.go_on.set()
    assert {(await task).status_code for task in asked} == {200}
    assert [worker.in_flight for worker in crowded.app.workers] == [0, 0]
    await eventually(lambda: len(coordinator(crowded)) == 0)


async def test_a_session_waits_for_its_home_when_to_leave_costs_more(
    crowded, workers, hold, eventually
):
    hold.go_on.set()
    home = (await crowded.chat("s", LONG)).headers["x-saga-worker"]
    hold.go_on.clear()
    for worker in workers:
        worker.chats.clear()
    busy = next(worker for worker in workers if worker.worker_id == home)
    other = next(worker for worker in workers if worker is not busy)
    asked = await fill(crowded, workers, eventually)
    waiting = ask(crowded, "s", LONG)
    await eventually(lambda: queued(crowded) == 1)
    hold.go_on.set()
    answer = await waiting
    assert (answer.headers["x-saga-worker"], answer.headers["x-saga-route"]) == (home, "affinity")
    assert len(other.chats) == 2
    await asyncio.gather(*asked)


async def test_a_session_leaves_a_crowded_home_when_that_pays(crowded, workers, hold, eventually):
    """Its prompt is short; the old home is told that what it has there is of no more use."""
    hold.go_on.set()
    home = (await crowded.chat("s")).headers["x-saga-worker"]
    hold.go_on.clear()
    busy = next(worker for worker in workers if worker.worker_id == home)
    crowded.tell(busy, requests=8)
    busy.notices.clear()
    moved = ask(crowded, "s")
    await eventually(lambda: {"kind": "end", "session_id": "s"} in busy.notices)
    hold.go_on.set()
    answer = await moved
    assert answer.headers["x-saga-route"] == "rebalance"
    assert answer.headers["x-saga-worker"] != home
    assert (await crowded.chat("s")).headers["x-saga-route"] == "affinity"


async def test_an_idle_worker_steals_what_waits_at_a_crowded_one(
    start_gateway, workers, hold, eventually
):
    gateway = await start_gateway(*workers, max_worker_requests=1)
    hold.go_on.set()
    home = (await gateway.chat("s", LONG)).headers["x-saga-worker"]
    hold.go_on.clear()
    busy = next(worker for worker in workers if worker.worker_id == home)
    other = next(worker for worker in workers if worker is not busy)
    for worker in workers:
        worker.chats.clear()
    soon = asyncio.Event()

    async def answer_sooner(exchange):
        await soon.wait()
        await exchange.answer({})

    other.script = answer_sooner
    asked = await fill(gateway, workers, eventually, each=1)
    # Both are full, and to leave would cost ten seconds of prefill.
    waiting = ask(gateway, "s", LONG)
    await eventually(lambda: queued(gateway) == 1)
    soon.set()
    await eventually(lambda: coordinator(gateway).fleet[other.worker_id].load() == 0.0)
    assert queued(gateway) == 1
    gateway.tell(busy, requests=6)  # That crowd takes longer.
    gateway.clock.advance(1.0)
    answer = await waiting
    assert answer.headers["x-saga-route"] == "steal"
    assert answer.headers["x-saga-worker"] == other.worker_id
    await eventually(lambda: {"kind": "end", "session_id": "s"} in busy.notices)
    hold.go_on.set()
    await asyncio.gather(*asked)
    text = (await gateway.client.get("/metrics")).text
    assert 'saga_gateway_routes_total{reason="steal"} 1.0' in text


async def test_who_leaves_while_it_waits_takes_no_place(crowded, workers, hold, eventually):
    asked = await fill(crowded, workers, eventually)
    gone = ask(crowded, "gone")
    await eventually(lambda: queued(crowded) == 1)
    gone.cancel()
    await eventually(lambda: queued(crowded) == 0)
    assert len(coordinator(crowded)) == 4
    hold.go_on.set()
    await asyncio.gather(*asked)
    assert sum(len(worker.chats) for worker in workers) == 4


async def test_who_waits_is_refused_when_the_last_worker_goes(crowded, workers, hold, eventually):
    asked = await fill(crowded, workers, eventually)
    waiting = ask(crowded, "late")
    await eventually(lambda: queued(crowded) == 1)
    for worker in workers:
        await crowded.client.post(f"/saga/v1/workers/{worker.worker_id}:drain")
    assert (await waiting).status_code == 502
    hold.go_on.set()
    await asyncio.gather(*asked)
    assert len(coordinator(crowded)) == 0


async def test_who_waits_at_a_worker_that_goes_is_served_by_another(
    crowded, workers, hold, eventually
):
    asked = await fill(crowded, workers, eventually)
    waiting = ask(crowded, "late")
    await eventually(lambda: queued(crowded) == 1)
    await crowded.client.post(f"/saga/v1/workers/{workers[0].worker_id}:drain")
    hold.go_on.set()
    assert (await waiting).headers["x-saga-worker"] == workers[1].worker_id
    await asyncio.gather(*asked)


async def test_a_wait_that_is_too_long_is_refused(start_gateway, worker, hold, eventually):
    gateway = await start_gateway(worker, max_worker_requests=1, queue_wait_s=0.05)
    first = ask(gateway, "a")
    await eventually(lambda: worker.chats)
    assert (await gateway.chat("b")).status_code == 429
    assert len(coordinator(gateway)) == 1
    hold.go_on.set()
    assert (await first).status_code == 200


# What workers say of themselves


async def test_a_worker_is_given_as_many_as_it_says_that_it_runs(
    start_gateway, worker, hold, eventually
):
    gateway = await start_gateway(worker)
    asked = [ask(gateway, f"s{number}") for number in range(4)]
    await eventually(lambda: len(worker.chats) == 4)  # Nothing is known of it yet.
    worker.steps = []
    worker.facts = {"queue": {"running": 4, "waiting": 0}, "max_running": 4, "num_blocks": 100}
    worker.facts |= {"block_tokens": 16, "free_blocks": 40}
    await eventually(lambda: coordinator(gateway).fleet[worker.worker_id].max_running == 4)
    assert coordinator(gateway).fleet[worker.worker_id].capacity_tokens == 1600
    asked.append(ask(gateway, "s4"))
    await eventually(lambda: queued(gateway) == 1)
    hold.go_on.set()
    assert {(await task).status_code for task in asked} == {200}


async def test_a_state_in_other_words_changes_nothing(start_gateway, worker, eventually):
    gateway = await start_gateway(worker)
    worker.steps = []
    for facts in ({"queue": 3}, {"queue": {"running": "x", "waiting": None}}, {"queue": []}):
        worker.facts = facts
        watched = worker.watchers
        await eventually(lambda watched=watched: worker.watchers >= max(1, watched))
        assert (await gateway.chat("s")).status_code == 200


# Tenants


async def test_a_crowd_of_one_tenant_does_not_hold_up_another(
    start_gateway, worker, hold, eventually, tmp_path
):
    """Twenty of one and three of another wait for one place: these are not the last."""
    keys, entries = zip(*(new_key(name) for name in ("crowd", "few")), strict=True)
    path = tmp_path / "keys.toml"
    path.write_text("".join(entries))
    gateway = await start_gateway(worker, keys_file=str(path), max_worker_requests=1)
    served = []

    async def post(key, name):
        headers = {"Authorization": f"Bearer {key}", "X-SAGA-Session-ID": name}
        answer = await gateway.client.post("/v1/chat/completions", json={}, headers=headers)
        assert answer.status_code == 200
        served.append(name)

    asked = [asyncio.create_task(post(keys[0], f"crowd{n}")) for n in range(20)]
    await eventually(lambda: queued(gateway) == 19)
    asked += [asyncio.create_task(post(keys[1], f"few{n}")) for n in range(3)]
    await eventually(lambda: queued(gateway) == 22)
    hold.go_on.set()
    await asyncio.gather(*asked)
    last = max(place for place, name in enumerate(served) if name.startswith("few"))
    assert last < 12


# The log


async def test_the_log_of_a_gateway_gives_the_same_decisions_when_it_is_played_again(
    start_gateway, workers, hold, eventually, tmp_path
):
    path = tmp_path / "events.jsonl"
    gateway = await start_gateway(*workers, max_worker_requests=2, event_log=str(path))
    asked = await fill(gateway, workers, eventually)
    asked += [ask(gateway, f"s{n % 3}", task_id=f"t{n % 2}") for n in range(6)]
    await eventually(lambda: queued(gateway) == 6)
    gateway.clock.advance(1.0)
    hold.go_on.set()
    await asyncio.gather(*asked)
    await gateway.client.post(f"/saga/v1/workers/{workers[0].worker_id}:drain")
    await gateway.chat("s1")
    gateway.app._dispatcher.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = {line["event"]["kind"] for line in lines}
    assert kinds >= {"WorkerUp", "RequestArrived", "RequestEnded", "WorkerDraining"}
    # In the simulator's coordinator as in that of another gateway.
    settings = gateway.app.settings.coordinator()
    simulated = Coordinated(Fleet(0, 0, 16, 256, 5000.0), settings)
    other = await start_gateway(*workers, max_worker_requests=2)
    for again in (simulated._coordinator, Coordinator(coordinator(other).settings)):
        for line in lines:
            made = [to_dict(decision) for decision in again.apply(event_from_dict(line["event"]))]
            assert json.loads(json.dumps(made)) == line["decisions"]
    assert sum(len(line["decisions"]) for line in lines) >= 11


async def test_a_log_that_cannot_be_written_is_said_at_the_start(start_gateway, worker, tmp_path):
    with pytest.raises(SettingsError, match="event_log: cannot write"):
        await start_gateway(worker, event_log=str(tmp_path / "no" / "such" / "folder"))


async def test_a_log_that_cannot_be_written_any_more_ends_and_fails_no_request(
    start_gateway, worker, caplog
):
    gateway = await start_gateway(worker, event_log="/dev/full")
    for number in range(40):  # More than the file's buffer takes.
        assert (await gateway.chat(f"s{number}")).status_code == 200
    assert caplog.text.count("the event log ends here") == 1


async def test_a_tick_that_fails_is_not_the_last_one(start_gateway, worker, eventually, caplog):
    gateway = await start_gateway(worker)
    apply = coordinator(gateway).apply
    failed = []

    def fail(event):
        failed.append(event)
        coordinator(gateway).apply = apply
        raise RuntimeError("at this one")

    coordinator(gateway).apply = fail
    await eventually(lambda: failed)
    assert "a tick of the coordinator failed" in caplog.text
    assert (await gateway.chat("s")).status_code == 200
