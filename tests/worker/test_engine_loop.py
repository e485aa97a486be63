"""Many sessions at once through vLLM's scheduler and block pool."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from gpu_backend.model_free import BLOCK_TOKENS, TOKEN, Engine, load_counters

MakeEngine = Callable[..., Engine]
NUM_BLOCKS = 120


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000) for _ in range(count)]


def _requests(seed: int, count: int) -> Iterator[tuple[str, list[int], int]]:
    """Session, prompt and output length of each request.

    Sessions grow over one of two system prompts; some are cut back, as compaction does, some begin
    anew.
    """
    rng = random.Random(seed)
    roots = [_tokens(rng, blocks * BLOCK_TOKENS) for blocks in (2, 5)]
    history: dict[str, list[int]] = {}
    for _ in range(count):
        session_id, output_tokens = f"s{rng.randrange(8)}", rng.randrange(1, 20)
        prompt = history.get(session_id, [])
        if not prompt or len(prompt) > 60 * BLOCK_TOKENS or rng.random() < 0.1:
            prompt = rng.choice(roots)
        elif rng.random() < 0.1:
            prompt = prompt[: len(prompt) // 2]
        prompt = prompt + _tokens(rng, rng.randrange(1, 80))
        history[session_id] = prompt + [TOKEN] * output_tokens
        yield session_id, prompt, output_tokens


def _hits(engine: Engine, seed: int, most_steps: int, *, with_ids: bool) -> list[tuple[str, int]]:
    """Cached tokens that each request finds; one request of a session at a time."""
    rng, hits = random.Random(seed), []
    busy: dict[str, object] = {}

    def step() -> None:
        hits.extend(
            (new.req_id, new.num_computed_tokens) for new in engine.step().scheduled_new_reqs
        )
        if engine.with_plugin:
            engine.saga.index.check_integrity()

    for session_id, prompt, output_tokens in _requests(seed, 80):
        while session_id in busy and not busy[session_id].is_finished():  # type: ignore[attr-defined]
            step()
        busy[session_id] = engine.add(
            prompt, session_id=session_id if with_ids else None, output_tokens=output_tokens
        )
        for _ in range(rng.randint(0, most_steps)):
            if engine.scheduler.has_unfinished_requests():
                step()
    while engine.scheduler.has_unfinished_requests():
        step()
    return hits


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize(("seed", "most_steps"), [(0, 0), (1, 3), (2, 10)])
@pytest.mark.parametrize(("base", "batches_in_flight"), [(Scheduler, 1), (AsyncScheduler, 2)])
def test_prefix_lru_hits_what_stock_vllm_hits(
    make_engine: MakeEngine,
    seed: int,
    most_steps: int,
    with_ids: bool,
    base: type,
    batches_in_flight: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SAGA_ORDER_WAITING", "0")
    options = {"base": base, "batches_in_flight": batches_in_flight}
    stock = make_engine(NUM_BLOCKS, None, **options)
    ours = make_engine(NUM_BLOCKS, "prefix-lru", **options)
    expected = _hits(stock, seed, most_steps, with_ids=with_ids)
    assert _hits(ours, seed, most_steps, with_ids=with_ids) == expected
    assert load_counters(ours)["evicted_blocks"] > NUM_BLOCKS
    assert ours.saga.off_reason is None


def test_saga_learns_who_comes_back_and_keeps_it(make_engine: MakeEngine) -> None:
    """Agents return within seconds, visitors never do; without a hint, LRU cannot tell."""

    def cached_tokens(policy: str) -> int:
        engine, rng, now_s = make_engine(NUM_BLOCKS, policy), random.Random(1), 0.0
        engine.saga.clock = lambda: now_s
        agents = {f"agent{n}": _tokens(rng, 10 * BLOCK_TOKENS) for n in range(4)}
        for number in range(400):
            now_s += 1.0
            if number % 2:
                engine.run(_tokens(rng, 24 * BLOCK_TOKENS), session_id=f"visitor{number}")
                continue
            session_id = f"agent{number // 2 % 4}"
            agents[session_id] = [*agents[session_id][: 10 * BLOCK_TOKENS], *_tokens(rng, 16)]
            engine.run(agents[session_id], session_id=session_id)
        assert engine.saga.off_reason is None
        return int(load_counters(engine)["cached_tokens"])

    assert cached_tokens("saga") > 4 * cached_tokens("prefix-lru")
