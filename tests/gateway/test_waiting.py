"""Requests that wait for a worker with room."""

import asyncio

import pytest

from saga_gateway.waiting import RoomFullError, WaitingRoom
from saga_gateway.workers import Outcome


class Places:
    """Places that are chosen, by name, and given back."""

    def __init__(self, *free):
        self.free = list(free)
        self.room = WaitingRoom(3, self.give_back)

    def take(self, *wanted):
        for name in self.free:
            if not wanted or name in wanted:
                self.free.remove(name)
                return name
        return None

    def give_back(self, name):
        self.free.append(name)
        self.room.wake()

    def wait(self, *wanted, timeout_s=5.0):
        return asyncio.create_task(self.room.wait(lambda: self.take(*wanted), timeout_s))


async def settle(room, waiting):
    while len(room) != waiting:  # noqa: ASYNC110 - tasks have to begin
        await asyncio.sleep(0)


async def test_what_is_free_is_taken_at_once():
    places = Places("a", "b")
    assert [await places.wait(), await places.wait("b")] == ["a", "b"]
    assert len(places.room) == 0


async def test_first_come_first_served_among_those_whom_it_can_serve():
    places = Places()
    only_b, anything, also = places.wait("b"), places.wait(), places.wait()
    await settle(places.room, 3)
    places.give_back("a")
    assert await anything == "a"
    places.give_back("c")
    assert await also == "c"
    places.give_back("b")
    assert await only_b == "b"
    assert len(places.room) == 0


async def test_no_more_wait_than_may():
    places = Places()
    waiting = [places.wait() for _ in range(3)]
    await settle(places.room, 3)
    with pytest.raises(RoomFullError):
        await places.wait()
    for task in waiting:
        task.cancel()
    await settle(places.room, 0)


async def test_nobody_waits_for_ever():
    places = Places()
    assert await places.wait(timeout_s=0.01) is None
    assert len(places.room) == 0


async def test_a_place_that_comes_too_late_is_given_on():
    """Its waiter is cancelled in the very moment in which it gets one."""
    places = Places()
    first, second = places.wait(), places.wait()
    await settle(places.room, 2)
    places.give_back("a")
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await second == "a"


async def test_an_error_of_a_choice_is_its_waiters():
    places = Places()
    is_broken = False

    def choose():
        if is_broken:
            raise ValueError("broken")
        return places.take("never")

    broken = asyncio.create_task(places.room.wait(choose, 5.0))
    other = places.wait()
    await settle(places.room, 2)
    is_broken = True
    places.give_back("a")
    with pytest.raises(ValueError, match="broken"):
        await broken
    assert await other == "a"


# In the gateway


@pytest.fixture
async def crowded(start_gateway, workers):
    """Two workers that take two requests at a time, and answer when they may."""
    gateway = await start_gateway(*workers, max_worker_requests=2, max_queued=2, queue_wait_s=20.0)
    gateway.go_on = asyncio.Event()

    async def answer(exchange):
        await gateway.go_on.wait()
        await exchange.answer({})

    for worker in workers:
        worker.script = answer
    return gateway


def queued(gateway):
    return len(gateway.app._proxy._room)


async def test_no_worker_gets_more_than_it_may_have(crowded, workers, eventually):
    asked = [asyncio.create_task(crowded.chat(f"s{number}")) for number in range(6)]
    await eventually(lambda: queued(crowded) == 2)
    await eventually(lambda: [len(worker.chats) for worker in workers] == [2, 2])
    refused = await crowded.chat("s7")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["code"] == "workers_busy"
    text = (await crowded.client.get("/metrics")).text
    assert "saga_gateway_queued 2.0" in text
    crowded.go_on.set()
    assert {(await task).status_code for task in asked} == {200}
    assert [worker.in_flight for worker in crowded.app.workers] == [0, 0]


async def test_a_session_waits_for_its_home(crowded, eventually):
    crowded.go_on.set()
    home = (await crowded.chat("s")).headers["x-saga-worker"]
    busy = crowded.app.workers[home]
    for _ in range(2):
        busy.begin()
    waiting = asyncio.create_task(crowded.chat("s"))
    await eventually(lambda: queued(crowded) == 1)
    other = (await crowded.chat("new")).headers["x-saga-worker"]  # There is room elsewhere.
    assert other != home
    assert queued(crowded) == 1
    for _ in range(2):
        busy.end(Outcome.SERVED, 0.0)
    crowded.app._proxy.workers_changed()
    answer = await waiting
    assert (answer.headers["x-saga-worker"], answer.headers["x-saga-route"]) == (home, "affinity")


async def test_who_leaves_while_it_waits_takes_no_place(crowded, workers, eventually):
    asked = [asyncio.create_task(crowded.chat(f"s{number}")) for number in range(4)]
    await eventually(lambda: sum(len(worker.chats) for worker in workers) == 4)
    gone = asyncio.create_task(crowded.chat("gone"))
    await eventually(lambda: queued(crowded) == 1)
    gone.cancel()
    await eventually(lambda: queued(crowded) == 0)
    crowded.go_on.set()
    await asyncio.gather(*asked)
    assert sum(len(worker.chats) for worker in workers) == 4


async def test_who_waits_is_served_elsewhere_when_its_home_goes(crowded, workers, eventually):
    asked = [asyncio.create_task(crowded.chat(f"s{number}")) for number in range(4)]
    await eventually(lambda: sum(len(worker.chats) for worker in workers) == 4)
    waiting = asyncio.create_task(crowded.chat("late"))
    await eventually(lambda: queued(crowded) == 1)
    for worker in workers:
        await crowded.client.post(f"/saga/v1/workers/{worker.worker_id}:drain")
    assert (await waiting).status_code == 502
    crowded.go_on.set()
    await asyncio.gather(*asked)


async def test_a_wait_that_is_too_long_is_refused(start_gateway, worker, eventually):
    gateway = await start_gateway(worker, max_worker_requests=1, queue_wait_s=0.05)
    go_on = asyncio.Event()

    async def answer(exchange):
        await go_on.wait()
        await exchange.answer({})

    worker.script = answer
    first = asyncio.create_task(gateway.chat("a"))
    await eventually(lambda: worker.chats)
    assert (await gateway.chat("b")).status_code == 429
    go_on.set()
    assert (await first).status_code == 200
