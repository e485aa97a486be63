"""Workers that are added, drained and taken away while the gateway runs."""

import asyncio

import pytest

from saga_core.errors import SettingsError
from saga_gateway.settings import GatewaySettings
from saga_gateway.workers import Workers

CHAT = "/v1/chat/completions"


@pytest.fixture
async def listed(start_gateway, workers, tmp_path):
    """A gateway whose workers stand in a file, one of them at first."""
    path = tmp_path / "workers.txt"
    path.write_text(f"# the fleet\n{workers[0].url}  # first\n\n")
    gateway = await start_gateway(
        workers_file=str(path), reload_s=0.01, health_interval_s=0.01, slow_start_s=0.0
    )
    return gateway, path


def ids(gateway):
    return {worker.worker_id for worker in gateway.app.workers}


async def test_workers_of_the_file_come_and_go(listed, workers, eventually):
    gateway, path = listed
    first, second = workers
    assert ids(gateway) == {first.worker_id}
    for number in range(4):
        await gateway.chat(f"s{number}")
    path.write_text(f"{first.url}\n{second.url}\n")
    await eventually(lambda: len(ids(gateway)) == 2)
    await eventually(lambda: second.health_checks > 0)
    for number in range(12):
        await gateway.chat(f"n{number}")
    assert second.chats
    served = len(first.chats)
    path.write_text(f"{second.url}\n")
    await eventually(lambda: ids(gateway) == {second.worker_id})
    for number in range(4):
        answer = await gateway.chat(f"s{number}")
        assert answer.status_code == 200
        assert answer.headers["x-saga-route"] == "failover"
    assert len(first.chats) == served
    checks = first.health_checks
    second_checks = second.health_checks
    await eventually(lambda: second.health_checks > second_checks + 3)
    assert first.health_checks == checks
    assert (await gateway.client.get("/v1/models")).json()["data"][0]["by"] == second.worker_id


async def test_a_worker_that_is_taken_away_finishes_its_answers(listed, workers, wire, eventually):
    gateway, path = listed
    release = asyncio.Event()

    async def stream(exchange):
        await exchange.stream_head()
        await exchange.chunk(wire.event(wire.delta(content="a")))
        await release.wait()
        await exchange.chunk(wire.event(wire.delta("stop")) + b"data: [DONE]\n\n")
        await exchange.send(b"0\r\n\r\n")

    workers[0].script = stream
    async with gateway.client.stream(
        "POST", CHAT, json={}, headers={"X-SAGA-Session-ID": "s"}
    ) as answer:
        pieces = answer.aiter_text()
        text = await anext(pieces)
        path.write_text(f"{workers[1].url}\n")
        await eventually(lambda: ids(gateway) == {workers[1].worker_id})
        release.set()
        async for piece in pieces:
            text += piece
    assert text.endswith("data: [DONE]\n\n")
    # What would be told to it has nobody to go to; the session goes on elsewhere.
    assert gateway.app.stats.notices_dropped == 1
    assert (await gateway.chat("s")).headers["x-saga-worker"] == workers[1].worker_id


async def test_a_file_that_goes_wrong_changes_nothing_and_is_said_once(
    listed, workers, eventually, caplog
):
    gateway, path = listed
    path.write_text("http://host:1/with/a/path\n")
    await eventually(lambda: "stay as they were" in caplog.text)
    path.write_bytes(b"\xff\xfe")
    await eventually(lambda: caplog.text.count("stay as they were") == 2)
    path.unlink()
    await eventually(lambda: caplog.text.count("stay as they were") == 3)
    assert ids(gateway) == {workers[0].worker_id}
    assert (await gateway.chat()).status_code == 200
    path.write_text(f"{workers[1].url}\n")
    await eventually(lambda: ids(gateway) == {workers[1].worker_id})
    assert caplog.text.count("stay as they were") == 3


def test_a_file_that_cannot_be_read_at_the_start_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="cannot read"):
        Workers(GatewaySettings(workers_file=str(tmp_path / "none")))


# Drain


async def test_a_draining_worker_finishes_and_gets_nothing_new(gateway2, workers, eventually):
    first = await gateway2.chat("s")
    home = first.headers["x-saga-worker"]
    other = next(worker.worker_id for worker in workers if worker.worker_id != home)
    drained = await gateway2.client.post(f"/saga/v1/workers/{home}:drain")
    assert drained.json()["draining"] is True
    assert drained.json()["available"] is False
    moved = await gateway2.chat("s")
    assert (moved.headers["x-saga-worker"], moved.headers["x-saga-route"]) == (other, "failover")
    for number in range(4):
        assert (await gateway2.chat(f"n{number}")).headers["x-saga-worker"] == other
    listed = (await gateway2.client.get("/saga/v1/workers")).json()["workers"]
    assert {worker["worker_id"]: worker["draining"] for worker in listed} == {
        home: True,
        other: False,
    }
    back = await gateway2.client.post(f"/saga/v1/workers/{home}:undrain")
    assert back.json()["available"] is True


@pytest.mark.parametrize("path", ["nobody:1:drain", "{}:stop", "{}", ":drain"])
async def test_what_is_no_worker_or_no_verb_is_refused(gateway, worker, path):
    answer = await gateway.client.post(f"/saga/v1/workers/{path.format(worker.worker_id)}")
    assert answer.status_code == 404
    assert ":drain" in answer.json()["error"]["message"]


async def test_only_operators_may_drain(start_gateway, worker, tmp_path):
    from saga_gateway.identity import new_key

    path = tmp_path / "keys.toml"
    user, entry = new_key("red")
    ops, admin = new_key("ops")
    path.write_text(f"{entry}\n{admin}admin = true\n")
    gateway = await start_gateway(worker, keys_file=str(path))
    for key, status in (("wrong", 401), (user, 403), (ops, 200)):
        headers = {"X-API-Key": key}
        drain = f"/saga/v1/workers/{worker.worker_id}:drain"
        assert (await gateway.client.post(drain, headers=headers)).status_code == status
        listed = await gateway.client.get("/saga/v1/workers", headers=headers)
        assert listed.status_code == status
