"""Priority under load: who waits, and who gives way, in vLLM's scheduler without a model."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from gpu_backend.model_free import BLOCK_TOKENS, Engine, load_counters, make_config
from gpu_backend.preempt import GUARD_S, MAX_PREEMPTED, WaitingPreemption
from saga_core.retention import RunState

LOW, HIGH = 10, 0
ANSWER = 1000
"""The first token of every answer; the others follow it."""
BLOCKS = {2: 200, 16: 61}
"""Blocks of the pool, by the most requests at once: of slots and blocks, one runs out first."""
BOTH = pytest.mark.parametrize(
    ("base", "batches_in_flight"), [(Scheduler, 1), (AsyncScheduler, 1), (AsyncScheduler, 2)]
)


@dataclass(slots=True)
class PriorityEngine(Engine):
    """Answers with the position of each token, so that one lost or given twice is seen."""

    now_s: float = 0.0
    _rng: random.Random = field(default_factory=lambda: random.Random(0))

    @property
    def preemption(self) -> WaitingPreemption:
        rule: WaitingPreemption = self.scheduler._saga_preemption
        return rule

    @property
    def gave_way(self) -> int:
        return self.preemption.total_preempted

    def schedule(self) -> SchedulerOutput:
        output = Engine.schedule(self)
        if self.with_plugin:
            self.saga.index.check_integrity()
        return output

    def _sample(self, request: Request) -> list[int]:
        is_complete = bool(Engine._sample(self, request))
        position = request.num_computed_tokens - request.num_prompt_tokens
        return [ANSWER + position] if is_complete else []

    def put(
        self,
        blocks: int,
        priority: int = LOW,
        *,
        prompt: list[int] | None = None,
        output_tokens: int = 200,
        session_id: str | None = None,
    ) -> Request:
        """Queue a request of ``priority`` whose prompt fills ``blocks`` blocks."""
        fresh = [self._rng.randrange(300, 1000) for _ in range(blocks * BLOCK_TOKENS)]
        tokens = fresh if prompt is None else prompt
        request = self.make_request(tokens, session_id=session_id, output_tokens=output_tokens)
        request.priority, request.arrival_time = priority, float(len(self.requests))
        self.requests[request.request_id] = request
        self.scheduler.add_request(request)
        return request

    def finish(self) -> None:
        """Serve all that is there; every request must have got each of its tokens once."""
        for _ in self.steps(limit=3000):
            pass
        for request in self.requests.values():
            assert list(request.output_token_ids) == list(
                range(ANSWER, ANSWER + request.max_tokens)
            )
        assert self.pool.get_num_free_blocks() == self.num_blocks - 1
        assert not self.with_plugin or self.saga.off_reason is None


Make = Callable[..., PriorityEngine]


@pytest.fixture(scope="module")
def configs(tiny_model: Path) -> dict[int, Any]:
    """Configs with priority scheduling, by the number of requests that may run at once."""
    made = {most: make_config(tiny_model, max_seqs=most) for most in (2, 16)}
    for config in made.values():
        config.scheduler_config.policy = "priority"
    return made


@pytest.fixture
def make(configs: dict[int, Any], monkeypatch: pytest.MonkeyPatch) -> Make:
    def make(
        num_blocks: int, *, most: int = 16, on: bool = True, policy: str = "saga", **options: Any
    ) -> PriorityEngine:
        monkeypatch.setenv("SAGA_POLICY", policy)
        if on:
            monkeypatch.setenv("SAGA_PREEMPT_WAITING", "1")
        engine = PriorityEngine(configs[most], num_blocks, **options)
        if engine.with_plugin:
            engine.saga.clock = lambda: engine.now_s
        return engine

    return make


def _ids(*requests: Request) -> list[str]:
    return [request.request_id for request in requests]


def _running(engine: PriorityEngine) -> list[str]:
    return _ids(*engine.scheduler.running)


@BOTH
def test_priority_orders_what_waits(make: Make, base: type, batches_in_flight: int) -> None:
    engine = make(400, most=2, on=False, base=base, batches_in_flight=batches_in_flight)
    requests = [engine.put(1, priority, output_tokens=3) for priority in (9, 5, 7, 5, 0, 9)]
    started: list[str] = []
    for output in engine.steps():
        started += [new.req_id for new in output.scheduled_new_reqs]
    assert started == _ids(*(requests[n] for n in (4, 1, 3, 2, 0, 5)))


@BOTH
@pytest.mark.parametrize("most", [2, 16])
def test_by_default_a_low_priority_keeps_running(
    make: Make, most: int, base: type, batches_in_flight: int
) -> None:
    engine = make(BLOCKS[most], most=most, on=False, base=base, batches_in_flight=batches_in_flight)
    low = [engine.put(25, output_tokens=50) for _ in range(2)]
    engine.step()
    engine.step()
    high = engine.put(20, HIGH, output_tokens=5)
    for _ in range(20):
        engine.step()
        assert _running(engine) == _ids(*low)
    engine.finish()
    assert high.num_preemptions == low[0].num_preemptions == low[1].num_preemptions == 0


@BOTH
@pytest.mark.parametrize("most", [2, 16])
def test_one_of_low_priority_gives_way_and_ends_with_all_its_tokens(
    make: Make, most: int, base: type, batches_in_flight: int
) -> None:
    engine = make(BLOCKS[most], most=most, base=base, batches_in_flight=batches_in_flight)
    low = [engine.put(25, output_tokens=50) for _ in range(2)]
    for _ in range(10):
        engine.step()
    high = engine.put(20, HIGH, output_tokens=5)
    engine.step()
    assert _running(engine) == _ids(low[0], high)
    engine.finish()
    assert [r.num_preemptions for r in (*low, high)] == [0, 1, 0]
    assert engine.gave_way == 1


def test_it_works_on_a_stock_scheduler_as_well(make: Make) -> None:
    engine = make(61, with_plugin=False)
    low = engine.put(50, output_tokens=50)
    engine.step()
    engine.step()
    high = engine.put(20, HIGH)
    assert WaitingPreemption(engine.scheduler).preempt_for_waiting(0.0) == 1
    engine.step()
    assert _running(engine) == _ids(high)
    engine.finish()
    assert low.num_preemptions == 1


@pytest.mark.parametrize(("policy", "kept_blocks"), [("saga", 30), ("prefix-lru", 0)])
def test_what_gave_way_keeps_its_session_and_its_kv_is_the_last_to_go(
    make: Make, policy: str, kept_blocks: int
) -> None:
    engine = make(200, most=2, policy=policy)
    low = engine.put(30, session_id="agent", output_tokens=40)
    for _ in range(3):
        engine.step()
    for number in range(40):  # One after another takes the place that the low one had.
        engine.put(25, HIGH, output_tokens=9, session_id=f"urgent{number}")
    engine.step()
    while engine.scheduler.get_request_counts()[1] > 1:
        engine.step()
        assert low.status == RequestStatus.PREEMPTED
    assert low.session_id == "agent"
    assert engine.saga.index._sessions["agent"].state is RunState.RESUMING
    cached = [engine.pool.get_cached_block(h, [0]) is not None for h in low.block_hashes]
    assert sum(cached) == kept_blocks
    engine.finish()
    assert engine.saga.index._sessions["agent"].state is RunState.PAUSED
    assert load_counters(engine)["requests"] == 41
    lost_tokens = load_counters(engine)["preempted_tokens"] // BLOCK_TOKENS * BLOCK_TOKENS
    assert lost_tokens == (30 - kept_blocks) * BLOCK_TOKENS


def test_nobody_gives_way_to_an_equal_or_where_it_would_not_help(make: Make) -> None:
    engine = make(61)
    low = [engine.put(18, priority) for priority in (HIGH, LOW, LOW)]
    for _ in range(3):
        engine.step()
    equal = engine.put(15, LOW)
    engine.step()
    too_large = engine.put(
        50, HIGH, output_tokens=9
    )  # Both of low priority together have too little.
    for _ in range(5):
        engine.step()
    assert engine.gave_way == 0
    assert _running(engine) == _ids(*low)
    engine.finish()
    assert equal.num_preemptions == too_large.num_preemptions == 0


def test_a_prefix_that_runs_already_is_not_missing(make: Make) -> None:
    engine = make(61)
    low = engine.put(40, output_tokens=60)
    for _ in range(3):
        engine.step()
    prompt = [*(low.prompt_token_ids or []), *range(300, 300 + 5 * BLOCK_TOKENS)]
    high = engine.put(0, HIGH, prompt=prompt)
    engine.step()
    assert engine.gave_way == 0
    assert _running(engine) == _ids(low, high)


def test_a_prefix_that_only_the_low_one_runs_makes_no_room(make: Make) -> None:
    engine = make(61)
    shared = engine.put(30, output_tokens=90)
    other = engine.put(20, output_tokens=90)
    for _ in range(4):
        engine.step()
    prompt = [*(shared.prompt_token_ids or []), *range(300, 300 + 15 * BLOCK_TOKENS)]
    high = engine.put(0, HIGH, prompt=prompt)
    engine.step()
    assert _running(engine) == _ids(shared, high)
    assert engine.gave_way == other.num_preemptions == 1


def test_a_deferred_return_of_blocks_is_waited_for(make: Make) -> None:
    """With a connector and two batches in flight the blocks come back a batch later."""
    engine = make(61, base=AsyncScheduler, batches_in_flight=2)
    engine.scheduler.defer_block_free = True
    low = [engine.put(18, output_tokens=30) for _ in range(3)]
    for _ in range(6):
        engine.step()
    high = engine.put(20, HIGH, output_tokens=5)
    assert engine.preemption.preempt_for_waiting(0.0) == 1
    assert engine.pool.get_num_free_blocks() < 20  # Not yet, so nobody has to give way for them.
    assert engine.preemption.preempt_for_waiting(0.0) == 0
    engine.step()
    engine.step()
    assert _running(engine) == _ids(*low[:2], high)
    assert [r.num_preemptions for r in low] == [0, 0, 1]
    engine.finish()


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_nobody_gives_way_while_the_engine_is_paused(make: Make, state: PauseState) -> None:
    engine = make(200, most=2)
    low = [engine.put(5), engine.put(5)]
    engine.step()
    engine.put(5, HIGH)
    engine.scheduler.set_pause_state(state)
    engine.step()
    assert engine.gave_way == 0
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.step()
    assert engine.gave_way == 1
    assert low[1].status == RequestStatus.PREEMPTED


def test_nobody_gives_way_where_requests_have_no_priority(make: Make, configs: Any) -> None:
    configs[2].scheduler_config.policy = "fcfs"
    engine = make(200, most=2)
    configs[2].scheduler_config.policy = "priority"
    low = [engine.put(5), engine.put(5)]
    engine.step()
    engine.put(5, HIGH)
    engine.step()
    assert _running(engine) == _ids(*low)


def test_nobody_gives_way_to_one_that_could_not_start_but_to_the_next(make: Make) -> None:
    engine = make(200, most=2)
    low = [engine.put(5, output_tokens=20) for _ in range(2)]
    engine.step()
    blocked = engine.make_request([300] * 20)
    blocked.priority, blocked.status = HIGH, RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    engine.scheduler.add_request(blocked)
    engine.step()
    assert engine.gave_way == 0
    high = engine.put(5, HIGH + 1)
    engine.step()
    assert _running(engine) == _ids(low[0], high)
    engine.abort(blocked)
    engine.finish()


def test_one_that_is_resumed_at_once_is_sent_to_the_worker_anew(make: Make) -> None:
    engine = make(200, most=2)
    low = [engine.put(5, output_tokens=20) for _ in range(2)]
    engine.step()
    high = engine.put(5, HIGH)
    assert engine.preemption.preempt_for_waiting(0.0) == 1
    engine.abort(high)
    del engine.requests[high.request_id]
    output = engine.step()
    assert output.preempted_req_ids == set(_ids(low[1]))
    assert output.scheduled_cached_reqs.resumed_req_ids == set(_ids(low[1]))
    assert list(output.scheduled_cached_reqs.all_token_ids) == _ids(low[1])
    engine.finish()


def test_one_request_never_makes_more_than_so_many_give_way(make: Make) -> None:
    engine = make(200)
    low = [engine.put(12, output_tokens=20) for _ in range(MAX_PREEMPTED + 4)]
    for _ in range(10):
        engine.step()
    assert len(engine.scheduler.running) == len(low)
    engine.put(150, HIGH, output_tokens=5)
    engine.step()
    assert engine.gave_way == 0
    engine.finish()


def test_one_that_has_resumed_runs_for_a_while_before_it_gives_way_again(make: Make) -> None:
    engine = make(200, most=2)
    low = [engine.put(5, output_tokens=60) for _ in range(2)]
    engine.step()
    for _ in range(30):  # A high one after another, each much shorter than the guard time.
        engine.put(5, HIGH, output_tokens=2)
        for _ in range(3):
            engine.now_s += GUARD_S / 60
            engine.step()
    assert sum(r.num_preemptions for r in low) == engine.gave_way
    # Each gives way once at first, and then once for each time it has run for the guard time.
    most = 2 * (1 + int(engine.now_s / GUARD_S))
    assert 2 <= engine.gave_way <= most
    engine.finish()


def test_what_is_known_of_requests_is_forgotten_with_them(make: Make) -> None:
    engine = make(61)
    engine.put(50, output_tokens=5)
    engine.step()
    engine.step()
    engine.put(20, HIGH, output_tokens=5)
    engine.finish()
    assert engine.gave_way == 1
    engine.preemption.preempt_for_waiting(engine.now_s)
    assert not engine.preemption._resumed_s
    assert not engine.preemption._gave_way


def test_a_failure_of_the_rule_leaves_the_engine_as_stock(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(200, most=2)
    low = [engine.put(5, output_tokens=20) for _ in range(2)]
    engine.step()

    def fail(*_: Any) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(WaitingPreemption, "_lack", fail)
    engine.put(5, HIGH, output_tokens=5)
    for _ in engine.steps(limit=100):
        pass
    assert engine.saga.off_reason is not None
    assert [request.num_preemptions for request in low] == [0, 0]
    assert all(request.is_finished() for request in engine.requests.values())
