"""The control API of a worker, without an engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from gpu_backend.control import keep_ticking
from saga_core.notices import EndNotice, ResumeNotice, encode_notices
from tests.worker.fake_engine import STATE, FakeWorker, Watcher, settle

NOTIFY = "/saga/v1/sessions:notify"
Start = Callable[..., Awaitable[FakeWorker]]


@pytest.fixture
async def start(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Starts a worker's app; its tasks end with the test."""
    monkeypatch.setenv("SAGA_PREFETCH", "0")
    workers: list[FakeWorker] = []

    async def run(api_key: str | None = None, **options: Any) -> FakeWorker:
        workers.append(FakeWorker(monkeypatch, api_key))
        return await workers[-1].start(**options)

    yield run
    for worker in workers:
        await worker.stop()


# Notices


async def test_notices_reach_the_engine_and_are_answered_with_the_state(start: Start) -> None:
    worker = await start()
    body = encode_notices([EndNotice("a"), ResumeNotice("b", 2.0)])
    async with worker.client() as client:
        answer = await client.post(NOTIFY, json=body)
    assert answer.status_code == 200
    assert worker.engine.messages == [{"notify": body}]
    assert answer.json() == {**STATE, "version": 1, "engines": 1}


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"9" * 10_000, "not JSON"),
        (b"[]", "version"),
        (b'{"version": 9, "notices": []}', "version"),
        (b'{"version": 1}', "notices"),
        (b'{"version": 1, "notices": [{"kind": "end"}]}', "notices[0].session_id"),
        (b'{"version": 1, "notices": [{"kind": "rest", "session_id": "a"}]}', "kind"),
        (
            b'{"version": 1, "notices": [{"kind": "resume_soon", "session_id": "a", "in_s": NaN}]}',
            "notices[0].in_s must be a number from 0 to 86400",
        ),
    ],
)
async def test_a_malformed_body_is_refused_with_its_fault_and_changes_nothing(
    body: bytes, word: str, start: Start
) -> None:
    worker = await start()
    async with worker.client() as client:
        answer = await client.post(NOTIFY, content=body)
    assert answer.status_code == 422
    assert answer.json()["error"]["code"] == 422
    assert word in answer.json()["error"]["message"]
    assert worker.engine.messages == []


async def test_a_body_that_is_too_large_is_not_read(start: Start) -> None:
    worker = await start()
    async with worker.client() as client:
        answer = await client.post(NOTIFY, content=b" " * (2 * 2**20 + 1))
    assert answer.status_code == 413
    assert worker.engine.messages == []


# State


async def test_the_state_is_that_of_the_engine_with_as_many_sessions_as_asked_for(
    start: Start,
) -> None:
    worker = await start()
    worker.engine.state["sessions"] = [
        {"session_id": "b", "gpu_tokens": 10, "host_tokens": 0},
        {"session_id": "c", "gpu_tokens": 5, "host_tokens": 20},
        {"session_id": "a", "gpu_tokens": 10, "host_tokens": 0},
        {"session_id": "\udcff", "gpu_tokens": 1, "host_tokens": 0},
    ]
    async with worker.client() as client:
        for query, names in (("", ""), ("?sessions=2", "ca"), ("?sessions=9", "cab\udcff")):
            answer = await client.get(f"/saga/v1/state{query}")
            assert answer.status_code == 200
            listed = json.loads(answer.text).get("sessions", [])
            assert "".join(one["session_id"] for one in listed) == names
    assert [message["sessions"] for message in worker.engine.messages] == [0, 2, 9]


async def test_several_engines_are_told_as_one(start: Start) -> None:
    worker = await start()
    second = json.loads(json.dumps(STATE))
    second.update(enabled=False, off_reason="an event failed", pressure=0.75)
    second["queue"] = {"running": 1, "waiting": 2}
    second["sessions"] = [{"session_id": "z", "gpu_tokens": 3}]
    worker.engine.states.append(second)
    async with worker.client() as client:
        state = (await client.get("/saga/v1/state?sessions=5")).json()
    assert (state["engines"], state["enabled"]) == (2, False)
    assert state["off_reason"] == "an event failed"
    assert (state["pressure"], state["block_tokens"], state["num_blocks"]) == (0.5, 16, 200)
    assert state["counters"]["prompt_tokens"] == 2000
    assert state["held"]["sessions"] == 6
    assert state["queue"] == {"running": 1, "waiting": 2}
    assert state["sessions"] == second["sessions"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("state?sessions=-1", "sessions must be a whole number from 0 to 1000"),
        ("state?sessions=1.5", "sessions must be a whole number"),
        ("state:watch?sessions=many", "sessions must be a whole number"),
        ("state:watch?interval_s=0", "interval_s must be a number from 0.1 to 60"),
        ("state:watch?interval_s=nan", "interval_s must be a number"),
        ("state:watch?interval_s=61", "interval_s must be a number"),
    ],
)
async def test_a_query_that_is_out_of_range_is_refused_with_the_range(
    path: str, words: str, start: Start
) -> None:
    worker = await start()
    async with worker.client() as client:
        answer = await client.get(f"/saga/v1/{path}")
    assert answer.status_code == 422
    assert words in answer.json()["error"]["message"]
    assert worker.engine.messages == []


# Who may ask, and what there is


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", NOTIFY), ("GET", "/saga/v1/state"), ("GET", "/saga/v1/state:watch")],
)
async def test_where_vllm_asks_for_a_key_so_does_the_control_api(
    method: str, path: str, start: Start
) -> None:
    worker = await start("secret")
    async with worker.client() as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            answer = await client.request(method, path, headers=headers)
            assert answer.status_code == 401
            assert "API key" in answer.json()["error"]["message"]
        assert worker.engine.messages == []
        right = {"Authorization": "Bearer secret"}
        answer = await client.get("/saga/v1/state", headers=right)
        assert answer.status_code == 200
        answer = await client.get("/metrics")  # As vLLM's own: not under /v1.
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", NOTIFY, 405),
        ("DELETE", "/saga/v1/state", 405),
        ("POST", "/saga/v1/state:watch", 405),
        ("GET", "/saga/v1/states", 404),
        ("GET", "/saga/v2/state", 404),
    ],
)
async def test_other_methods_and_paths_do_not_exist(
    method: str, path: str, status: int, start: Start
) -> None:
    worker = await start()
    async with worker.client() as client:
        assert (await client.request(method, path)).status_code == status


async def test_an_engine_that_does_not_answer_is_a_503_that_says_so(start: Start) -> None:
    worker = await start()
    worker.engine.error = RuntimeError("EngineCore died")
    async with worker.client() as client:
        for method, path in (("POST", NOTIFY), ("GET", "/saga/v1/state")):
            answer = await client.request(method, path, json=encode_notices([]))
            assert answer.status_code == 503
            assert "EngineCore died" in answer.json()["error"]["message"]
        assert (await client.get("/saga/v1/state:watch")).status_code == 503


async def test_a_server_without_an_engine_says_so(start: Start) -> None:
    worker = await start(with_engine=False)
    async with worker.client() as client:
        answer = await client.get("/saga/v1/state")
    assert answer.status_code == 503
    assert "no engine" in answer.json()["error"]["message"]


# The stream


async def test_a_watcher_gets_the_state_each_change_and_a_sign_of_life(start: Start) -> None:
    worker = await start()
    watcher = Watcher(worker, "interval_s=10")
    await settle()
    assert watcher.status == 200
    assert watcher.states == [{**STATE, "version": 1, "engines": 1}]
    await worker.clock.advance(5.0)
    worker.engine.state["counters"]["pinned_block_s"] += 3  # Time alone is no change.
    await worker.clock.advance(2.0)
    assert len(watcher.events) == 1
    worker.engine.state["counters"]["regret_tokens"] = 51
    await worker.clock.advance(1.0)
    assert [state["counters"]["regret_tokens"] for state in watcher.states] == [50, 51]
    await worker.clock.advance(9.0)
    assert len(watcher.events) == 2
    await worker.clock.advance(1.5)
    assert len(watcher.events) == 3
    assert watcher.states[2]["counters"]["pinned_block_s"] == 15.5


@pytest.mark.parametrize("interval_s", [0.1, 0.25, 1.0, 60.0])
async def test_no_two_events_are_further_apart_than_asked_for(
    interval_s: float, start: Start
) -> None:
    worker = await start()
    watcher = Watcher(worker, f"interval_s={interval_s}")
    await worker.clock.advance(10 * interval_s)
    assert 10 <= len(watcher.events) <= 14


async def test_one_poll_serves_all_watchers_and_each_gets_its_number_of_sessions(
    start: Start,
) -> None:
    worker = await start()
    sessions = [{"session_id": name, "gpu_tokens": 1} for name in "abc"]
    worker.engine.state["sessions"] = sessions
    watchers = [Watcher(worker, f"sessions={n}&interval_s=1") for n in (0, 2, 9) for _ in range(9)]
    await settle()
    first = len(worker.engine.messages)
    await worker.clock.advance(5.0)
    polls = worker.engine.messages[first:]
    assert len(polls) <= 5 / 0.25 + 1
    assert {message["sessions"] for message in polls} == {9}
    for n, watcher in zip((0, 2, 9), watchers[::9], strict=True):
        assert all(state.get("sessions", []) == sessions[:n] for state in watcher.states)
        assert len(watcher.states) >= 5


async def test_what_was_asked_for_others_before_a_watcher_came_is_not_told_to_it(
    start: Start,
) -> None:
    worker = await start()
    worker.engine.state["sessions"] = [{"session_id": "a", "gpu_tokens": 1}]
    Watcher(worker, "interval_s=60")
    await worker.clock.advance(0.1)
    worker.engine.gate.clear()
    await worker.clock.advance(0.2)  # A poll is under way that asks for no sessions.
    late = Watcher(worker, "interval_s=60&sessions=1")
    await settle()
    worker.engine.gate.set()
    await settle()
    worker.engine.gate.clear()
    await worker.clock.advance(2.0)
    worker.engine.gate.set()
    await worker.clock.advance(2.0)
    assert [state["sessions"] for state in late.states] == [worker.engine.state["sessions"]]


async def test_a_slow_watcher_holds_nobody_and_then_gets_the_latest(start: Start) -> None:
    worker = await start()
    slow, quick = Watcher(worker), Watcher(worker)
    await settle()
    slow.is_reading.clear()
    for tokens in range(60, 65):
        worker.engine.state["counters"]["regret_tokens"] = tokens
        await worker.clock.advance(1.0)
    assert quick.states[-1]["counters"]["regret_tokens"] == 64
    assert len(slow.states) == 1
    slow.is_reading.set()
    await worker.clock.advance(1.0)
    assert slow.states[-1]["counters"]["regret_tokens"] == 64
    assert len(slow.states) < len(quick.states)


async def test_a_busy_engine_is_asked_once_and_the_last_state_is_told_meanwhile(
    start: Start,
) -> None:
    worker = await start()
    watcher = Watcher(worker, "interval_s=1")
    await worker.clock.advance(1.0)
    worker.engine.gate.clear()
    asked, told = len(worker.engine.messages), len(watcher.events)
    await worker.clock.advance(10.0)
    assert len(worker.engine.messages) <= asked + 1
    assert len(watcher.events) >= told + 10
    worker.engine.state["pressure"] = 0.5
    worker.engine.gate.set()
    await worker.clock.advance(0.5)
    assert watcher.states[-1]["pressure"] == 0.5


async def test_when_nobody_watches_nobody_asks(start: Start) -> None:
    worker = await start()
    watcher = Watcher(worker, "sessions=5")
    await worker.clock.advance(1.0)
    watcher.leave()
    await worker.clock.advance(0.5)
    assert watcher.task.done()
    asked = len(worker.engine.messages)
    await worker.clock.advance(10.0)
    assert len(worker.engine.messages) == asked
    async with worker.client() as client:  # Its number of sessions is forgotten too.
        await client.get("/metrics")
    assert worker.engine.messages[-1] == {"sessions": 0, "steps": False}


async def test_a_watcher_that_leaves_while_it_does_not_read_is_let_go(start: Start) -> None:
    worker = await start()
    watcher = Watcher(worker)
    await settle()
    watcher.is_reading.clear()
    worker.engine.state["pressure"] = 0.5
    await worker.clock.advance(1.0)
    watcher.leave()
    await settle()
    assert watcher.task.done()


async def test_streams_end_when_the_server_stops_and_say_why_when_the_engine_dies(
    start: Start,
) -> None:
    worker = await start()
    watcher = Watcher(worker)
    await settle()
    worker.server.should_exit = True
    await worker.clock.advance(0.5)
    assert watcher.task.done()
    assert [kind for kind, _ in watcher.events] == ["state"]

    worker.server.should_exit = False
    watcher = Watcher(worker)
    await settle()
    worker.engine.error = RuntimeError("EngineCore died")
    await worker.clock.advance(1.0)
    assert watcher.task.done()
    kind, data = watcher.events[-1]
    assert kind == "error"
    assert "EngineCore died" in data["error"]["message"]


# Ticks


@pytest.mark.parametrize(
    ("answers", "seconds"),
    [
        ([{"wake_in_s": None}], 1.0),
        ([{"wake_in_s": 30.0}], 1.0),
        ([{"wake_in_s": 0.0}], 0.01),
        ([{"wake_in_s": -3.0}], 0.01),
        ([{"wake_in_s": 0.4}, {"wake_in_s": 0.2}, {"enabled": False}], 0.2),
    ],
)
async def test_the_next_tick_comes_when_an_engine_has_something_due(
    answers: list[dict[str, Any]], seconds: float
) -> None:
    slept: list[float] = []

    async def ask(message: dict[str, Any]) -> list[dict[str, Any]]:
        assert message == {"tick": True}
        return answers

    async def sleep(duration_s: float) -> None:
        slept.append(duration_s)

    await keep_ticking(ask, lambda: len(slept) == 3, sleep)
    assert slept == [seconds] * 3


@pytest.mark.parametrize(("prefetch", "ticks"), [("1", True), ("0", False)])
async def test_an_idle_engine_is_ticked_only_where_it_may_prefetch(
    prefetch: str, ticks: bool, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAGA_PREFETCH", prefetch)
    worker = await start()
    await worker.clock.advance(3.0)
    assert len(worker.engine.asked("tick")) == (4 if ticks else 0)


async def test_ticking_ends_with_the_server_with_the_plugin_and_with_the_engine(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAGA_PREFETCH", "1")

    def stop(worker: FakeWorker) -> None:
        worker.server.should_exit = True

    def switch_off(worker: FakeWorker) -> None:
        worker.engine.ticks = [{"enabled": False}]

    def die(worker: FakeWorker) -> None:
        worker.engine.error = RuntimeError("EngineCore died")

    for end in (stop, switch_off, die):
        worker = await start()
        await worker.clock.advance(1.5)
        end(worker)
        await worker.clock.advance(1.0)
        asked = len(worker.engine.asked("tick"))
        await worker.clock.advance(10.0)
        assert len(worker.engine.asked("tick")) == asked > 1


async def test_settings_that_cannot_be_leave_the_server_up_and_unticked(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAGA_POLICY", "best")
    monkeypatch.setenv("SAGA_PREFETCH", "1")
    worker = await start()
    await worker.clock.advance(3.0)
    assert worker.engine.messages == []


# Steps


async def test_steps_are_told_to_those_who_ask(start: Start) -> None:
    worker = await start()
    step = {"engine": "e", "number": 0, "session_id": "s", "prompt_tokens": 7}
    worker.engine.states[0]["last_steps"] = [step]
    async with worker.client() as client:
        told = (await client.get("/saga/v1/state?steps=1")).json()
        silent = (await client.get("/saga/v1/state")).json()
        wrong = await client.get("/saga/v1/state?steps=2")
    assert told["last_steps"] == [step]
    assert "last_steps" not in silent
    assert (wrong.status_code, "steps" in wrong.text) == (422, True)
    assert [message["steps"] for message in worker.engine.messages] == [True, False]
