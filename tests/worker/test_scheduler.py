"""The plugin inside vLLM's real scheduler and block pool, without a model."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_backend.model_free import BLOCK_TOKENS, TOKEN, Engine, load_counters
from saga_core.errors import NoticeError
from saga_sim.oracle import InfiniteCache

MakeEngine = Callable[..., Engine]


def _tokens(rng: random.Random, blocks: int) -> list[int]:
    return [rng.randrange(1000) for _ in range(blocks * BLOCK_TOKENS)]


def _flood(engine: Engine, rng: random.Random, requests: int, blocks: int = 30) -> None:
    for _ in range(requests):
        engine.run(_tokens(rng, blocks))


def _free_ids(engine: Engine) -> list[int]:
    return [block.block_id for block in engine.pool.free_block_queue.get_all_free_blocks()]


@pytest.mark.parametrize(
    ("policy", "kept_blocks"), [("wa-lru-ttl", 40), ("prefix-lru", 0), ("vllm", 0)]
)
def test_only_workflow_aware_retention_keeps_a_paused_session_through_a_flood(
    make_engine: MakeEngine, policy: str, kept_blocks: int
) -> None:
    engine, rng = make_engine(100, policy), random.Random(1)
    prompt = _tokens(rng, 40)
    engine.run(prompt, session_id="agent")
    _flood(engine, rng, 20)
    hit = engine.run([*prompt, 1, 2, 3], session_id="agent")
    assert hit == kept_blocks * BLOCK_TOKENS
    counters = load_counters(engine)
    assert counters["regret_tokens"] == (40 - kept_blocks) * BLOCK_TOKENS
    assert counters["cached_tokens"] + counters["computed_tokens"] == counters["prompt_tokens"]


def test_counting_alone_leaves_vllms_eviction_order_as_it_is(make_engine: MakeEngine) -> None:
    orders = []
    for policy in (None, "vllm"):
        engine, rng = make_engine(60, policy), random.Random(2)
        order = []
        for number in range(60):
            engine.run(_tokens(rng, rng.randrange(1, 30)), session_id=f"s{number % 4}")
            order.append(_free_ids(engine))
        orders.append(order)
    assert orders[0] == orders[1]


def test_prefix_lru_gives_up_the_same_blocks_as_vllm(make_engine: MakeEngine) -> None:
    cached = []
    for policy in (None, "prefix-lru"):
        engine, rng = make_engine(60, policy), random.Random(3)
        seen = []
        for _ in range(60):
            engine.run(_tokens(rng, rng.randrange(1, 30)))
            blocks = engine.pool.cached_block_hash_to_block._cache
            seen.append(set(blocks))
        cached.append(seen)
    assert cached[0] == cached[1]


def test_retention_never_blocks_the_waiting_head(make_engine: MakeEngine) -> None:
    """Hard pins would livelock here: every free block belongs to a protected session."""
    engine, rng = make_engine(101), random.Random(4)
    for number in range(4):
        engine.run(_tokens(rng, 24), session_id=f"agent{number}")
    assert engine.saga.index.counts().session_blocks >= 96
    request = engine.add(_tokens(rng, 95))
    first = next(engine.steps())
    assert request.request_id in first.num_scheduled_tokens
    for _ in engine.steps(limit=50):
        engine.saga.index.check_integrity()


def test_the_end_of_a_session_gives_its_blocks_up_first(make_engine: MakeEngine) -> None:
    engine, rng = make_engine(100), random.Random(5)
    prompts = {name: _tokens(rng, 40) for name in ("over", "alive")}
    for name, prompt in prompts.items():
        engine.run(prompt, session_id=name)
    notice = {"version": 1, "notices": [{"kind": "end", "session_id": "over"}]}
    answer = engine.scheduler.saga_control({"notify": notice})
    assert answer["counters"]["notices"] == 1
    engine.run(_tokens(rng, 50))
    assert engine.run([*prompts["alive"], 1], session_id="alive") == 40 * BLOCK_TOKENS
    assert engine.run([*prompts["over"], 1], session_id="over") < 20 * BLOCK_TOKENS


def test_a_notice_about_a_session_of_another_worker_is_counted_and_changes_nothing(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(50)
    notice = {"version": 1, "notices": [{"kind": "end", "session_id": "nobody"}]}
    counters = engine.scheduler.saga_control({"notify": notice})["counters"]
    assert (counters["notices"], counters["unknown_sessions"]) == (1, 1)
    with pytest.raises(NoticeError, match="kind"):
        engine.scheduler.saga_control(
            {"notify": {"version": 1, "notices": [{"kind": "?", "session_id": "a"}]}}
        )
    assert load_counters(engine)["notices"] == 1


def test_a_preempted_request_counts_for_itself_and_not_as_regret(make_engine: MakeEngine) -> None:
    engine, rng = make_engine(41, "wa-lru-ttl"), random.Random(6)
    for number in range(3):
        engine.add(_tokens(rng, 12), session_id=f"s{number}", output_tokens=60)
    for _ in engine.steps():
        engine.saga.index.check_integrity()
    assert sum(request.num_preemptions for request in engine.requests.values()) > 0
    counters = load_counters(engine)
    assert counters["requests"] == 3
    assert counters["preempted_tokens"] > 0
    assert counters["regret_tokens"] == 0


def test_an_aborted_waiting_request_leaves_its_session_as_it_was(make_engine: MakeEngine) -> None:
    from vllm.v1.request import RequestStatus

    engine, rng = make_engine(100), random.Random(7)
    prompt = _tokens(rng, 40)
    engine.run(prompt, session_id="agent")
    request = engine.add([*prompt, 1], session_id="agent")
    engine.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    _flood(engine, rng, 10)
    assert engine.run([*prompt, 1], session_id="agent") == 40 * BLOCK_TOKENS


def test_a_reset_of_the_prefix_cache_is_nobodys_regret(make_engine: MakeEngine) -> None:
    engine, rng = make_engine(60), random.Random(8)
    prompt = _tokens(rng, 20)
    engine.run(prompt, session_id="agent")
    _flood(engine, rng, 5)
    assert engine.scheduler.reset_prefix_cache()
    assert engine.run([*prompt, 1], session_id="agent") == 0
    assert load_counters(engine)["regret_tokens"] == 0
    engine.saga.index.check_integrity()


def test_blocks_whose_return_is_deferred_are_recorded_when_they_come_back(
    make_engine: MakeEngine,
) -> None:
    """On CUDA with asynchronous scheduling a step in flight may still write a request's blocks."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.request import RequestStatus

    engine, rng = make_engine(100, base=AsyncScheduler), random.Random(10)
    scheduler = engine.scheduler
    prompt = _tokens(rng, 40)
    engine.run(prompt, session_id="agent")
    request = engine.add([*prompt, *_tokens(rng, 5)], session_id="agent", output_tokens=5)
    engine.step()
    scheduler.defer_block_free = True
    scheduler.processed_step_seq, in_flight = -1, scheduler.processed_step_seq
    held = engine.saga.index.counts().session_blocks
    scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    assert scheduler.deferred_frees
    assert engine.saga.index.counts().session_blocks == held
    scheduler.processed_step_seq = max(in_flight, scheduler.sched_step_seq)
    scheduler._drain_deferred_frees()
    assert not scheduler.deferred_frees
    assert engine.saga.index.counts().session_blocks == 45
    engine.saga.index.check_integrity()


def test_a_request_that_may_not_read_the_cache_has_no_regret(make_engine: MakeEngine) -> None:
    engine, rng = make_engine(60), random.Random(11)
    prompt = _tokens(rng, 20)
    engine.run(prompt, session_id="agent")
    _flood(engine, rng, 5)
    request = engine.add([*prompt, 1], session_id="agent")
    request.skip_reading_prefix_cache = True
    for _ in engine.steps():
        pass
    assert load_counters(engine)["regret_tokens"] == 0


def _calls(engine: Engine, monkeypatch: pytest.MonkeyPatch, method: str) -> list[dict[str, Any]]:
    """What the index is told from now on by ``method``."""
    from gpu_backend.session_index import SessionIndex

    calls, original = [], getattr(SessionIndex, method)

    def listen(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(SessionIndex, method, listen)
    return calls


@pytest.mark.parametrize(
    ("steps", "ending"), [(0, None), (1, (TOKEN,)), (3, (TOKEN, TOKEN)), (9, "length")]
)
def test_the_index_is_told_how_a_step_went(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, steps: int, ending: object
) -> None:
    from vllm.v1.request import RequestStatus

    engine = make_engine(50)
    calls = _calls(engine, monkeypatch, "record")
    request = engine.add([1] * 40, session_id="agent", output_tokens=5)
    request.arrival_time -= 3.0
    for _ in range(steps):
        if engine.scheduler.has_unfinished_requests():
            engine.step()
    if not request.is_finished():
        engine.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    (step,) = [call["step"] for call in calls]
    assert (step.input_tokens, step.ending) == (40, ending)
    assert 3.0 <= step.run_s < 60.0


@pytest.mark.parametrize("knows", [True, False])
def test_the_index_is_told_how_much_of_a_prompt_had_been_computed_before(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, knows: bool
) -> None:
    engine, rng = make_engine(60, "prefix-lru"), random.Random(12)
    calls = _calls(engine, monkeypatch, "started")
    engine.scheduler._saga_counts_regret = knows
    prompt = _tokens(rng, 20)
    engine.run(prompt, session_id="agent")
    _flood(engine, rng, 2, blocks=25)
    hit = engine.run([*prompt[: 15 * BLOCK_TOKENS], 1, 2], session_id="agent")
    assert hit < 15 * BLOCK_TOKENS
    assert [call["known_blocks"] for call in calls] == ([0, 15] if knows else [None, None])


@pytest.mark.parametrize("method", ["record", "victims", "evicted", "resume"])
def test_a_failure_of_ours_switches_the_plugin_off_and_the_engine_goes_on(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    from vllm.v1.core.block_pool import BlockPool

    from gpu_backend.session_index import SessionIndex

    engine, rng = make_engine(60), random.Random(9)
    engine.run(_tokens(rng, 20), session_id="agent")

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(SessionIndex, method, fail)
    for _ in range(6):
        assert engine.run(_tokens(rng, 30), session_id="agent") == 0
    assert engine.saga.off_reason is not None
    assert type(engine.pool) is BlockPool
    state = engine.scheduler.saga_control({})
    assert state["enabled"] is False
    assert state["off_reason"] == engine.saga.off_reason


def test_running_requests_allocate_through_vllm_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are many, and nothing is to be learned of them: only an admission passes us."""
    engine, seen = make_engine(100), []
    cls, manager = type(engine.scheduler), engine.scheduler.kv_cache_manager
    ours, stock = cls._saga_allocate, manager.allocate_slots

    def listen(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((request.request_id, request.num_computed_tokens))
        return ours(self, request, *args, **kwargs)

    monkeypatch.setattr(cls, "_saga_allocate", listen)
    first = engine.add(_tokens(random.Random(0), 4), output_tokens=20)
    for _ in range(5):
        engine.step()
        assert manager.allocate_slots == stock
    second = engine.add(_tokens(random.Random(1), 4), output_tokens=20)
    for _ in engine.steps():
        assert manager.allocate_slots == stock
    assert seen == [(first.request_id, 0), (second.request_id, 0)]
    assert load_counters(engine)["requests"] == 2


def test_an_unknown_policy_leaves_the_engine_stock(make_engine: MakeEngine) -> None:
    engine = make_engine(50, "no-such-policy")
    assert engine.saga is None
    assert engine.run(list(range(64))) == 0
    assert engine.scheduler.saga_control({}) == {"enabled": False, "scheduling_policy": "fcfs"}


def test_the_mixin_keeps_the_class_that_vllm_chose(make_engine: MakeEngine) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from gpu_backend.scheduler import saga_scheduler_class

    cls = saga_scheduler_class(AsyncScheduler)
    assert issubclass(cls, AsyncScheduler)
    assert saga_scheduler_class(AsyncScheduler) is cls


_request = st.tuples(
    st.integers(0, 3),  # session; 3 is a stranger without one
    st.integers(0, 25),  # blocks kept of the session's last prompt
    st.integers(1, 260),  # new tokens
    st.integers(1, 20),  # output tokens
    st.integers(0, 3),  # engine steps before the next request arrives
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    requests=st.lists(_request, min_size=1, max_size=30),
    policy=st.sampled_from(["saga", "wa-lru-ttl", "vllm"]),
)
def test_regret_is_what_an_infinite_cache_would_have_hit_and_this_one_did_not(
    make_engine: MakeEngine, requests: list[tuple[int, int, int, int, int]], policy: str
) -> None:
    engine, rng, oracle = make_engine(60, policy), random.Random(0), InfiniteCache()
    history: dict[int, list[int]] = {}
    expected_blocks = 0

    def step() -> None:
        nonlocal expected_blocks
        before = {id_: r.num_computed_tokens for id_, r in engine.requests.items()}
        output = engine.step()
        new = {data.req_id: data.num_computed_tokens for data in output.scheduled_new_reqs}
        # vLLM schedules running requests first and caches their blocks as it goes.
        for request_id, scheduled in output.num_scheduled_tokens.items():
            request = engine.requests[request_id]
            done = before[request_id]
            if request_id in new:
                done = new[request_id]
                usable = (request.num_prompt_tokens - 1) // BLOCK_TOKENS
                known = oracle.hit_blocks(request.block_hashes[:usable])
                expected_blocks += max(0, known - done // BLOCK_TOKENS)
            oracle.add(request.block_hashes[: (done + scheduled) // BLOCK_TOKENS])
        if engine.saga.index is not None:
            engine.saga.index.check_integrity()

    for session, kept_blocks, new_tokens, output_tokens, pause_steps in requests:
        kept = history.get(session, [])[: kept_blocks * BLOCK_TOKENS] if session < 3 else []
        prompt = [*kept, *(rng.randrange(1000) for _ in range(new_tokens))]
        history[session] = prompt
        engine.add(
            prompt, session_id=f"s{session}" if session < 3 else None, output_tokens=output_tokens
        )
        for _ in range(pause_steps):
            if engine.scheduler.has_unfinished_requests():
                step()
    while engine.scheduler.has_unfinished_requests():
        step()
    preempted = sum(request.num_preemptions for request in engine.requests.values())
    if not preempted:  # A preempted request is admitted again, which the loop above does not see.
        assert load_counters(engine)["regret_tokens"] == expected_blocks * BLOCK_TOKENS
    assert engine.saga.off_reason is None


@pytest.mark.parametrize("policy", ["saga", "vllm"])
def test_the_state_says_what_the_scheduler_costs(make_engine: MakeEngine, policy: str) -> None:
    engine, rng = make_engine(100, policy), random.Random(1)
    engine.add(_tokens(rng, 4), output_tokens=5)
    steps = sum(1 for _ in engine.steps())
    scheduler = engine.scheduler.saga_control({})["scheduler"]
    assert scheduler["steps"] == steps
    assert scheduler["cpu_s"] > 0.0


def _last_steps(engine: Engine) -> list[dict[str, Any]]:
    state = engine.scheduler.saga_control({"steps": True})
    steps: list[dict[str, Any]] = json.loads(json.dumps(state))["last_steps"]
    return steps


@pytest.mark.parametrize("policy", ["saga", "vllm"])
def test_answered_requests_of_sessions_are_told_with_their_tokens(
    make_engine: MakeEngine, policy: str
) -> None:
    engine, rng = make_engine(200, policy), random.Random(3)
    prompt = _tokens(rng, 4)
    engine.run(prompt, session_id="a", output_tokens=3)
    engine.run(_tokens(rng, 2))  # Of no session.
    engine.run([*prompt, 1, 2], session_id="a", output_tokens=5)
    gone = engine.add(_tokens(rng, 2), session_id="b", output_tokens=50)
    engine.step()
    engine.abort(gone)
    for _ in engine.steps():
        pass
    first, second = _last_steps(engine)
    assert first == {
        "engine": first["engine"],
        "number": 0,
        "session_id": "a",
        "prompt_tokens": 4 * BLOCK_TOKENS,
        "cached_tokens": 0,
        "output_tokens": 3,
    }
    expected = {"number": 1, "prompt_tokens": 4 * BLOCK_TOKENS + 2, "output_tokens": 5}
    assert second == {**first, **expected, "cached_tokens": 4 * BLOCK_TOKENS}
    assert "last_steps" not in engine.scheduler.saga_control({})
    assert not engine.saga.finished_steps._cached_tokens


def test_a_preempted_request_is_told_once_with_what_it_found_at_first(
    make_engine: MakeEngine,
) -> None:
    engine, rng = make_engine(12, "saga"), random.Random(4)
    requests = [
        engine.add(_tokens(rng, 4), session_id=f"s{n}", output_tokens=3 * BLOCK_TOKENS)
        for n in range(2)
    ]
    for _ in engine.steps():
        pass
    assert any(request.num_preemptions for request in requests)
    steps = {step["session_id"]: step for step in _last_steps(engine)}
    assert sorted(steps) == ["s0", "s1"]
    assert [step["cached_tokens"] for step in steps.values()] == [0, 0]
    assert {step["output_tokens"] for step in steps.values()} == {3 * BLOCK_TOKENS}


def test_only_the_latest_steps_are_kept(make_engine: MakeEngine) -> None:
    engine = make_engine(50, "vllm")
    for number in range(300):
        engine.run([number, 1], session_id="s")
    assert [step["number"] for step in _last_steps(engine)] == list(range(44, 300))
