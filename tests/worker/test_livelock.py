"""Hard pins can stop an engine without an error; retention as an order cannot."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from gpu_backend.model_free import BLOCK_TOKENS, TOKEN, Engine, make_config
from saga_core.policies import POLICIES

MakeEngine = Callable[..., Engine]
NUM_BLOCKS = 101
EVERY_POLICY = pytest.mark.parametrize("policy", sorted(POLICIES))

_arrival = st.tuples(
    st.sampled_from([None, None, "a", "b", "c"]),  # session; None: a plain request
    st.integers(1, 50),  # blocks of the prompt, of a session: those it has grown by
    st.integers(1, 80),  # output tokens
    st.integers(0, 6),  # engine steps before the next request arrives
)


class HardPinScheduler(Scheduler):
    """Retains by a pin: the blocks of a paused session are not free until it comes back."""

    def _free_request_blocks(self, request: Request) -> None:
        if request.session_id is not None:
            (blocks,) = self.kv_cache_manager.get_blocks(request.request_id).blocks
            self.kv_cache_manager.block_pool.touch(blocks)
        super()._free_request_blocks(request)


def _tokens(rng: random.Random, blocks: int) -> list[int]:
    return [rng.randrange(1000) for _ in range(blocks * BLOCK_TOKENS)]


def _pause_four_sessions(engine: Engine, rng: random.Random) -> None:
    for number in range(4):
        engine.run(_tokens(rng, 24), session_id=f"agent{number}")


def test_hard_pins_livelock_without_an_error(make_engine: MakeEngine) -> None:
    engine, rng = make_engine(NUM_BLOCKS, None, base=HardPinScheduler), random.Random(0)
    _pause_four_sessions(engine, rng)
    engine.add(_tokens(rng, 30))
    for _ in range(3000):
        assert not engine.step().num_scheduled_tokens
        assert engine.scheduler.get_request_counts() == (0, 1)


@EVERY_POLICY
@pytest.mark.parametrize("session_id", [None, "agent0", "newcomer"])
@pytest.mark.parametrize("blocks", [30, NUM_BLOCKS - 2])
def test_under_the_same_load_retention_lets_the_head_in_at_once(
    make_engine: MakeEngine, policy: str, session_id: str | None, blocks: int
) -> None:
    engine, rng = make_engine(NUM_BLOCKS, policy), random.Random(0)
    _pause_four_sessions(engine, rng)
    assert engine.saga.index.counts().session_blocks == 4 * 24
    for session in range(4):  # A head whose session is to be kept, as every other one is.
        engine.saga.index.resume(f"agent{session}", now_s=engine.saga.clock())
    head = engine.add(_tokens(rng, blocks), session_id=session_id)
    assert head.request_id in engine.step().num_scheduled_tokens
    for _ in engine.steps(limit=10):
        engine.saga.index.check_integrity()
    assert head.is_finished()


@pytest.fixture(scope="module")
def wide_config(tiny_model: Path) -> Any:
    """A batch takes every prompt whole: what is found cached then moves no admission."""
    return make_config(tiny_model, max_batched_tokens=2 * NUM_BLOCKS * BLOCK_TOKENS)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    arrivals=st.lists(_arrival, min_size=4, max_size=25),
    policy=st.sampled_from(sorted(POLICIES)),
    seed=st.integers(0, 3),
)
def test_every_request_is_admitted_in_the_very_step_of_stock_vllm(
    wide_config: Any,
    monkeypatch: pytest.MonkeyPatch,
    arrivals: list[tuple[str | None, int, int, int]],
    policy: str,
    seed: int,
) -> None:
    """Whatever sessions hold: as many blocks are free in each step, and the queue moves alike."""
    monkeypatch.setenv("SAGA_POLICY", policy)
    monkeypatch.setenv("SAGA_ORDER_WAITING", "0")
    engines = [Engine(wide_config, NUM_BLOCKS, with_plugin=on) for on in (True, False)]
    rng, history = random.Random(seed), dict[str, list[int]]()
    active: dict[str, Request] = {}

    def step() -> None:
        ours, stock = (engine.step() for engine in engines)
        assert list(ours.num_scheduled_tokens) == list(stock.num_scheduled_tokens)
        free, free_in_stock = (engine.pool.get_num_free_blocks() for engine in engines)
        assert free == free_in_stock

    def is_idle() -> bool:
        return not engines[0].scheduler.has_unfinished_requests()

    for session_id, blocks, output_tokens, steps in arrivals:
        prompt = _tokens(rng, blocks)
        if session_id is not None:
            while session_id in active and not active[session_id].is_finished():
                step()
            prompt = [*history.get(session_id, []), *prompt]
            if len(prompt) > 80 * BLOCK_TOKENS:
                prompt = _tokens(rng, blocks)
            history[session_id] = [*prompt, *[TOKEN] * output_tokens]
        requests = [
            engine.add(prompt, session_id=session_id, output_tokens=output_tokens)
            for engine in engines
        ]
        if session_id is not None:
            active[session_id] = requests[0]
        for _ in range(steps):
            if not is_idle():
                step()
    for _ in range(5000):
        if is_idle():
            break
        step()
    assert is_idle()
    assert engines[0].saga.off_reason is None
