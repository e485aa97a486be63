"""The engine loop without a model, with one batch in flight and with two."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from gpu_backend.model_free import BLOCK_TOKENS, STOP_TOKEN, TOKEN, Engine, load_counters

MakeEngine = Callable[..., Engine]
NUM_BLOCKS = 50
BOTH = pytest.mark.parametrize(
    ("base", "batches_in_flight"), [(Scheduler, 1), (AsyncScheduler, 1), (AsyncScheduler, 2)]
)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, 1000) for _ in range(count)]


@BOTH
def test_a_request_gets_its_tokens_and_ends_at_its_stop_token(
    make_engine: MakeEngine, base: type, batches_in_flight: int
) -> None:
    engine = make_engine(NUM_BLOCKS, base=base, batches_in_flight=batches_in_flight)
    prompt = _tokens(random.Random(0), 600)  # More than one batch takes.
    whole = engine.add(prompt, output_tokens=5)
    stopped = engine.add(prompt[:40], output_tokens=50, stop_after=3)
    scheduled = [output.num_scheduled_tokens for output in engine.steps()]
    assert list(whole.output_token_ids) == [TOKEN] * 5
    assert list(stopped.output_token_ids) == [TOKEN, TOKEN, STOP_TOKEN]
    # A batch that was in flight at the stop has computed a token too many.
    batches_of_stopped = sum(stopped.request_id in batch for batch in scheduled)
    assert batches_of_stopped == 3 + (batches_in_flight - 1)


def test_a_batch_is_scheduled_before_the_one_before_it_is_done(make_engine: MakeEngine) -> None:
    engine = make_engine(NUM_BLOCKS, base=AsyncScheduler, batches_in_flight=2)
    request = engine.add(_tokens(random.Random(0), 20), output_tokens=9)
    for taken in (0, 1, 2):
        assert engine.step().num_scheduled_tokens
        assert len(request.output_token_ids) == taken


def test_an_aborted_request_in_flight_takes_nothing_more(make_engine: MakeEngine) -> None:
    engine = make_engine(NUM_BLOCKS, base=AsyncScheduler, batches_in_flight=2)
    request = engine.add(_tokens(random.Random(0), 20), output_tokens=9)
    engine.step()
    engine.step()
    engine.abort(request)
    assert list(engine.steps(limit=5))
    assert list(request.output_token_ids) == [TOKEN]
    assert engine.pool.get_num_free_blocks() == NUM_BLOCKS - 1


def test_a_scheduler_that_waits_for_each_batch_has_one_in_flight(make_engine: MakeEngine) -> None:
    with pytest.raises(ValueError, match="Scheduler cannot have several batches"):
        make_engine(NUM_BLOCKS, batches_in_flight=2)


@BOTH
@pytest.mark.parametrize("policy", ["saga", "wa-lru-ttl"])
@pytest.mark.parametrize("seed", [0, 1])
def test_stops_aborts_and_preemptions_leave_the_index_whole(
    make_engine: MakeEngine, base: type, batches_in_flight: int, policy: str, seed: int
) -> None:
    engine = make_engine(NUM_BLOCKS, policy, base=base, batches_in_flight=batches_in_flight)
    rng, now_s = random.Random(seed), 0.0
    engine.saga.clock = lambda: now_s
    history: dict[str, list[int]] = {}
    for number in range(120):
        now_s += rng.choice([0.0, 0.1, 20.0])
        session_id = f"s{rng.randrange(6)}"
        prompt = history.get(session_id, [])[: 30 * BLOCK_TOKENS] + _tokens(rng, rng.randrange(80))
        request = engine.add(
            prompt or [1],
            session_id=session_id if number % 4 else None,
            output_tokens=rng.randrange(1, 90),
            stop_after=rng.choice([None, None, 5]),
        )
        history[session_id] = prompt
        for _ in range(rng.randrange(6)):
            engine.step()
            engine.saga.index.check_integrity()
        if number % 5 == 0 and not request.is_finished():
            engine.abort(request)
            engine.saga.index.check_integrity()
    for _ in engine.steps():
        engine.saga.index.check_integrity()
    assert engine.saga.off_reason is None
    assert all(request.is_finished() for request in engine.requests.values())
    assert engine.pool.get_num_free_blocks() == NUM_BLOCKS - 1
    assert load_counters(engine)["evicted_blocks"] > NUM_BLOCKS
    assert sum(request.num_preemptions for request in engine.requests.values()) > 0
