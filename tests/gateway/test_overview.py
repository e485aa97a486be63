"""The snapshot of the gateway: what it says, to whom, and what it costs."""

from __future__ import annotations

import asyncio
import time

import pytest

from saga_core.hints import Hints
from saga_gateway.dispatch import _RECENT
from saga_gateway.identity import new_key
from saga_gateway.residency import Residency
from saga_gateway.worker_state import _state

OVERVIEW = "/saga/v1/overview"
STATE = {
    "version": 1,
    "engines": 1,
    "enabled": True,
    "queue": {"running": 3, "waiting": 2},
    "max_running": 8,
    "num_blocks": 100,
    "block_tokens": 16,
    "free_blocks": 40,
    "pressure": 0.5,
    "policy": "saga",
    "prefill_tokens_per_s": 1000.0,
    "counters": {"prompt_tokens": 900, "cached_tokens": 600, "regret_tokens": 9},
    "host": {"num_blocks": 200, "held_blocks": 50, "load_tokens_per_s": None},
    "prefetch": {"started": 4, "useful": 3},
}


async def overview(gateway, query="", **named):
    """A fresh snapshot: one is kept for a second."""
    gateway.app._overview._taken = None
    response = await gateway.client.get(OVERVIEW + query, **named)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture
def key_file(tmp_path):
    keys, entries = {}, []
    for tenant, more in (("ops", "admin = true\n"), ("team-a", "weight = 3.0\n")):
        keys[tenant], entry = new_key(tenant)
        entries.append(entry + more)
    path = tmp_path / "keys.toml"
    path.write_text("\n".join(entries))
    return str(path), keys


async def test_of_a_gateway_that_has_served_nothing(gateway, worker):
    shot = await overview(gateway)
    assert [each["worker_id"] for each in shot["workers"]] == [worker.worker_id]
    assert shot["workers"][0]["status"] == "up"
    assert shot["workers"][0]["memory"] == {}
    assert shot["sessions"] == {"total": 0, "states": {}, "listed": []}
    assert shot["workflows"] == shot["tenants"] == shot["decisions"] == []
    assert shot["savings"]["workers"] is None
    assert shot["requests"] == shot["queued"] == 0


async def test_a_paused_session_says_what_it_waits_for_and_how_long(gateway, worker):
    worker.call_tools("bash")
    await gateway.chat("s", workflow_id="swe", node="coder")
    gateway.clock.advance(2.0)
    session = (await overview(gateway))["sessions"]["listed"][0]
    assert (session["session_id"], session["workflow"]) == ("s", "swe")
    assert (session["state"], session["tool"], session["agent"]) == ("paused", "bash", "coder")
    assert session["home"] == worker.worker_id
    assert session["paused_for_s"] == session["idle_s"] == 2.0
    assert session["steps"] == 1
    assert 0.0 < session["p_return"] <= 1.0
    assert session["returns_in_s"] > 0.0
    assert session["ttl_left_s"] > 0.0
    gateway.clock.advance(100_000.0)
    assert (await overview(gateway))["sessions"]["listed"][0]["ttl_left_s"] == 0.0


async def test_sessions_run_and_wait(worker, eventually, start_gateway):
    gateway = await start_gateway(worker, max_worker_requests=1)
    go_on = asyncio.Event()

    async def script(exchange):
        await go_on.wait()
        await exchange.answer({"choices": []})

    worker.script = script
    chats = [asyncio.create_task(gateway.chat(name)) for name in "ab"]
    await eventually(lambda: len(worker.chats) == 1 and len(gateway.app._dispatcher) == 1)
    shot = await overview(gateway)
    assert shot["sessions"]["states"] == {"running": 1, "waiting": 1}
    assert sorted(each["state"] for each in shot["sessions"]["listed"]) == ["running", "waiting"]
    assert (shot["workers"][0]["running"], shot["workers"][0]["waiting"]) == (1, 1)
    assert shot["queued"] == 1
    assert shot["tenants"][0]["live_tasks"] == 2
    assert (shot["tenants"][0]["running"], shot["tenants"][0]["waiting"]) == (1, 1)
    assert shot["tenants"][0]["afs"] > 0.0
    go_on.set()
    await asyncio.gather(*chats)
    gateway.clock.advance(1.5)
    latest, before = (await overview(gateway))["decisions"]
    assert latest["session_id"] != before["session_id"]
    assert latest["request"] == "r1"
    assert latest["ago_s"] == 1.5


async def test_a_worker_says_what_it_holds(gateway, worker, eventually):
    worker.steps, worker.facts = [], STATE
    await eventually(lambda: gateway.app._dispatcher.state(worker.worker_id))
    shot = await overview(gateway)
    told = shot["workers"][0]
    assert told["memory"] == {
        "gpu": {
            "capacity_tokens": 1600,
            "used_tokens": 960,
            "free_tokens": 640,
            "session_tokens": 800,
        },
        "host": {
            "capacity_tokens": 3200,
            "used_tokens": 800,
            "free_tokens": 2400,
            "session_tokens": None,
        },
    }
    assert (told["engine_running"], told["engine_waiting"], told["foreign"]) == (3, 2, 5)
    assert (told["pressure"], told["policy"]) == (0.5, "saga")
    assert told["prefetch"] == {"started": 4, "useful": 3}
    assert shot["savings"]["workers"] == {
        "prompt_tokens": 900,
        "cached_tokens": 600,
        "host_cached_tokens": 0,
        "regret_tokens": 9,
        "prefill_avoided_s": 0.6,
    }


async def test_residency_is_asked_for(gateway, worker, eventually):
    await eventually(lambda: worker.asked and gateway.app.workers[worker.worker_id].engine)
    held = [{"session_id": "s", "gpu_tokens": 30, "host_tokens": 12}]
    worker._self_portrait = lambda path: {"sessions": held}
    await gateway.chat("s")
    session = (await overview(gateway))["sessions"]["listed"][0]
    assert (session["gpu_tokens"], session["host_tokens"]) == (30, 12)


async def test_who_cannot_say_what_it_holds_does_no_harm(gateway, worker):
    async def ask(worker, path, timeout_s):
        raise OSError("gone")

    residency = Residency(gateway.app.workers, ask)
    await residency.refresh()
    assert residency.of("s", worker.worker_id) is None


@pytest.mark.parametrize("part", ["counters", "host", "prefetch", "pressure", "policy"])
@pytest.mark.parametrize("value", [None, "x", [1], {"a": "b"}, -1, True])
def test_a_part_of_another_version_is_left_out_and_the_rest_stays(part, value):
    told = _state(STATE | {part: value})
    assert told is not None
    assert (told.requests, told.capacity_tokens, told.free_tokens) == (5, 1600, 640)


async def test_prefill_avoided_as_answers_say(gateway, worker, wire):
    async def script(exchange):
        answer = wire.completion()
        answer["usage"]["prompt_tokens_details"] = {"cached_tokens": 5}
        await exchange.answer(answer)

    worker.script = script
    await gateway.chat("s")
    answers = (await overview(gateway))["savings"]["answers"]
    assert answers == {"prompt_tokens": 7, "cached_tokens": 5, "completion_tokens": 2}


async def test_a_move_says_where_from(gateway2, workers):
    first = (await gateway2.chat("s")).headers["x-saga-worker"]
    await next(worker for worker in workers if worker.worker_id == first).stop()
    await gateway2.chat("s")
    decision = (await overview(gateway2))["decisions"][0]
    assert decision["route"] == "failover"
    assert decision["moved_from"] == first
    assert decision["worker_id"] != first
    assert decision["reason"]


async def test_workflows_and_tenants(start_gateway, worker, key_file):
    path, keys = key_file
    gateway = await start_gateway(worker, keys_file=path)
    worker.call_tools("bash")
    headers = {"Authorization": f"Bearer {keys['team-a']}", "X-SAGA-Session-ID": "secret-name"}
    headers["X-SAGA-Workflow-ID"] = "swe"
    body = {"model": "m"}
    await gateway.client.post("/v1/chat/completions", json=body, headers=headers)
    shot = await overview(gateway, headers={"Authorization": f"Bearer {keys['ops']}"})
    workflow = shot["workflows"][0]
    assert (workflow["tenant"], workflow["workflow"], workflow["sessions"]) == ("team-a", "swe", 1)
    assert workflow["is_cold"] is True
    assert workflow["aeg"] == "/saga/v1/workflows/swe/aeg?tenant=team-a"
    assert [(each["tenant"], each["weight"]) for each in shot["tenants"]] == [("team-a", 3.0)]
    session = shot["sessions"]["listed"][0]
    assert session["tenant"] == "team-a"
    assert session["session_id"] != "secret-name"
    assert "secret-name" not in str(shot)


async def test_only_operators_may_see(start_gateway, worker, key_file):
    path, keys = key_file
    gateway = await start_gateway(worker, keys_file=path)
    for key, status in ((None, 401), ("wrong", 401), (keys["team-a"], 403), (keys["ops"], 200)):
        headers = {} if key is None else {"X-API-Key": key}
        assert (await gateway.client.get(OVERVIEW, headers=headers)).status_code == status


async def test_how_many_are_listed(gateway, worker):
    for number in range(5):
        await gateway.chat(f"s{number}")
    shot = await overview(gateway, "?sessions=2&decisions=3")
    assert [each["session_id"] for each in shot["sessions"]["listed"]] == ["s4", "s3"]
    assert [each["request"] for each in shot["decisions"]] == ["r4", "r3", "r2"]
    assert shot["sessions"]["total"] == 5
    # What is kept for a moment listed two; who asks for more is given more.
    more = (await gateway.client.get(OVERVIEW + "?sessions=4")).json()
    assert len(more["sessions"]["listed"]) == 4


@pytest.mark.parametrize("query", ["sessions=-1", "sessions=x", "decisions=1001", "sessions="])
async def test_a_malformed_query_is_refused(gateway, query):
    response = await gateway.client.get(f"{OVERVIEW}?{query}")
    assert response.status_code == 422
    assert query.partition("=")[0] in response.json()["error"]["message"]


async def test_it_is_read_only(gateway):
    for method in ("POST", "PUT", "DELETE"):
        assert (await gateway.client.request(method, OVERVIEW)).status_code == 405
    head = await gateway.client.head(OVERVIEW)
    assert (head.status_code, head.content) == (200, b"")


async def test_a_bounded_number_of_admissions_is_kept(gateway):
    recent = gateway.app._dispatcher.recent
    await gateway.chat("s")
    recent.extend([recent[0]] * (_RECENT - 1))
    await gateway.chat("t")
    assert len(recent) == _RECENT
    assert recent[-1].session_id == "t"


async def test_ten_thousand_sessions_take_little_time(gateway):
    table = gateway.app.sessions
    for number in range(10_000):
        table.begin(f"s{number}", Hints(workflow_id=f"w{number % 7}"), number * 1e-3)
    began = time.process_time()
    shot = await overview(gateway)
    assert time.process_time() - began < 0.5
    assert shot["sessions"]["total"] == 10_000
    assert len(shot["sessions"]["listed"]) == 50
