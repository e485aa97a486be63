"""Any sequence of requests, notices, ticks, evictions and aborts, in vLLM's own scheduler and pool.

After each step nothing is lost and nothing is withheld, and no request reads what is not its own.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from gpu_backend.config import policy_names
from gpu_backend.model_free import BLOCK_TOKENS, STOP_TOKEN, TOKEN, Engine, make_config
from tests.worker.contents import ContentEngine, with_host_tier

NUM_BLOCKS = 25
MAX_PROMPT_TOKENS = 16 * BLOCK_TOKENS
SESSIONS = ("a", "b", "c")

_session = st.sampled_from(SESSIONS)
_arrive = st.tuples(
    st.just("arrive"),
    st.sampled_from([None, *SESSIONS]),
    st.sampled_from([0, 3, 99, 99]),  # blocks kept of what the session has said
    st.sampled_from([1, 15, 17, 60, 100, 200]),  # new tokens
    st.sampled_from([1, 5, 17, 60, 90]),  # output tokens
    st.sampled_from([None, None, 1, 20]),  # the token that stops it
    st.integers(0, 2),  # priority
)
_notice = st.tuples(
    st.just("notice"),
    _session,
    st.sampled_from(["pause", "resume_soon", "end"]),
    st.floats(0, 1),
    st.floats(0, 60),
)
_steps = st.tuples(st.just("steps"), st.sampled_from([1, 2, 5, 20]))
_rare = st.one_of(
    st.tuples(st.just("tick"), st.sampled_from([0.05, 1.0, 30.0, 900.0])),
    st.tuples(st.just("abort"), st.integers(0, 9)),
    st.tuples(st.just("evict"), st.sets(st.integers(1, NUM_BLOCKS - 1), min_size=1, max_size=2)),
    st.tuples(st.just("reset")),
)
_operation = st.one_of(_arrive, _arrive, _arrive, _steps, _steps, _notice, _rare)


class Run:
    """Applies drawn operations to one engine, and checks it after each step."""

    def __init__(self, engine: ContentEngine) -> None:
        self.engine = engine
        self._now_s = 0.0
        self._rng = random.Random(0)
        self._history: dict[str, list[int]] = {}
        self._expected: dict[str, list[int]] = {}
        engine.saga.clock = lambda: self._now_s

    def apply(self, operation: tuple[Any, ...]) -> None:
        name, *arguments = operation
        getattr(self, name)(*arguments)
        self.check()

    def arrive(
        self,
        session_id: str | None,
        kept_blocks: int,
        new_tokens: int,
        output_tokens: int,
        stop_after: int | None,
        priority: int,
    ) -> None:
        kept = self._history.get(session_id or "", [])[: kept_blocks * BLOCK_TOKENS]
        prompt = [
            *kept[: MAX_PROMPT_TOKENS - new_tokens],
            *(self._rng.randrange(10, 1000) for _ in range(new_tokens)),
        ]
        request = self.engine.make_request(
            prompt, session_id=session_id, output_tokens=output_tokens, stop_after=stop_after
        )
        request.priority = priority
        answer = [TOKEN] * output_tokens
        if stop_after is not None and stop_after <= output_tokens:
            answer[stop_after - 1 :] = [STOP_TOKEN]
        self._expected[request.request_id] = answer
        self.engine.requests[request.request_id] = request
        self.engine.scheduler.add_request(request)
        if session_id is not None:
            self._history[session_id] = [*prompt, *answer]

    def steps(self, count: int) -> None:
        for _ in range(count):
            self._now_s += 0.01
            self.engine.step()
            self.check()

    def notice(self, session_id: str, kind: str, p_reuse: float, pause_p95_s: float) -> None:
        notice: dict[str, object] = {"kind": kind, "session_id": session_id}
        if kind == "pause":
            notice |= {"p_reuse": p_reuse, "pause_p95_s": pause_p95_s}
        self.engine.scheduler.saga_control({"notify": {"version": 1, "notices": [notice]}})

    def tick(self, seconds: float) -> None:
        self._now_s += seconds

    def abort(self, number: int) -> None:
        active = [r for r in self.engine.requests.values() if not r.is_finished()]
        if active:
            request = active[number % len(active)]
            self.engine.abort(request)
            del self._expected[request.request_id]

    def evict(self, block_ids: set[int]) -> None:
        # What is still to be returned is recorded with its content, of when its request ended.
        pending = {b.block_id for _, blocks in self.engine.scheduler.deferred_frees for b in blocks}
        self.engine.pool.evict_blocks(block_ids - pending)

    def reset(self) -> None:
        self.engine.scheduler.reset_prefix_cache()

    def finish(self) -> None:
        """Serve what is left: all get their tokens, all blocks are free, all that is held goes."""
        for _ in range(3000):
            if not self.engine.scheduler.has_requests() and not self.engine._in_flight:
                break
            self.steps(1)
        for request_id, answer in self._expected.items():
            assert list(self.engine.requests[request_id].output_token_ids) == answer
        assert self.engine.pool.get_num_free_blocks() == NUM_BLOCKS - 1
        if self.engine.saga.index is not None:
            index, now_s = self.engine.saga.index, self._now_s
            index.victims(NUM_BLOCKS, now_s=now_s, is_idle=lambda block: True)
            assert index.counts().session_blocks == 0

    def check(self) -> None:
        _check_pool(self.engine)
        assert self.engine.saga.off_reason is None
        if self.engine.saga.index is not None:
            self.engine.saga.index.check_integrity()
            _check_held(self.engine)


def _check_pool(engine: Engine) -> None:
    """The queue of free blocks, the reference counts and the hash table agree with who uses what.

    So as many blocks are free as stock vLLM would have.
    """
    pool, scheduler = engine.pool, engine.scheduler
    (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
    uses = Counter(b.block_id for blocks in manager.req_to_blocks.values() for b in blocks)
    uses.update(block.block_id for _, blocks in scheduler.deferred_frees for block in blocks)
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    assert len(free) == len(set(free)) == pool.get_num_free_blocks()
    assert sorted([*free, *uses.keys()]) == list(range(1, NUM_BLOCKS))
    table = pool.cached_block_hash_to_block
    hashed = 0
    for block in pool.blocks[1:]:
        assert block.ref_cnt == uses[block.block_id]
        if block.block_hash is not None:
            hashed += 1
            assert table.contain(block.block_hash, block.block_id)
    entries = table._cache.values()
    assert hashed == sum(len(e) if isinstance(e, dict) else 1 for e in entries)


def _check_held(engine: Engine) -> None:
    """A block that a run holds has its content; a cached block that is free has a holder."""
    index, pool = engine.saga.index, engine.pool
    for held in {id(h): h for h in (*index._held.values(), *index._sessions.values())}.values():
        for block_id in index._holders.live(held):
            assert pool.blocks[block_id].block_hash is not None
    for block in pool.free_block_queue.get_all_free_blocks():
        assert block.block_hash is None or index.is_held(block.block_id)


MakeRun = Callable[[str, str], Run]
KINDS = ("plain", "priority", "async", "host tier", "async priority host tier")
"""With "priority", running requests are also preempted for waiting ones."""


@pytest.fixture(scope="module")
def make_run(tiny_model: Path) -> MakeRun:
    config = make_config(tiny_model, max_batched_tokens=256, max_seqs=6)

    def make(kind: str, policy: str) -> Run:
        made = copy.copy(config)
        made.scheduler_config = copy.copy(config.scheduler_config)
        made.scheduler_config.policy = "priority" if "priority" in kind else "fcfs"
        if "host" in kind:
            with_host_tier(made, 40, policy)
        is_async = "async" in kind
        engine = ContentEngine(
            made,
            NUM_BLOCKS,
            base=AsyncScheduler if is_async else Scheduler,
            batches_in_flight=2 if is_async else 1,
        )
        return Run(engine)

    return make


@pytest.mark.parametrize("kind", KINDS)
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    operations=st.lists(_operation, min_size=20, max_size=60),
    policy=st.sampled_from(policy_names()),
)
def test_nothing_is_lost_or_withheld_whatever_happens(
    make_run: MakeRun,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    operations: list[tuple[Any, ...]],
    policy: str,
) -> None:
    monkeypatch.setenv("SAGA_POLICY", policy)
    monkeypatch.setenv("SAGA_PREEMPT_WAITING", str(int("priority" in kind)))
    run = make_run(kind, policy)
    for operation in operations:
        run.apply(operation)
    run.finish()


def _operations(rng: random.Random, count: int) -> Iterator[tuple[Any, ...]]:
    """Long and dense: several requests at a time, more KV than there is room."""
    for _ in range(count):
        session_id = rng.choice([None, *SESSIONS])
        kept, new, output = rng.choice([0, 99, 99]), rng.randrange(1, 160), rng.randrange(1, 90)
        stop_after = rng.choice([None, None, rng.randrange(1, 40)])
        yield "arrive", session_id, kept, new, output, stop_after, rng.randrange(3)
        yield "steps", rng.choice([0, 1, 5, 20])
        kind = rng.choice(["pause", "pause", "resume_soon", "end"])
        yield "notice", rng.choice(SESSIONS), kind, rng.random(), 60 * rng.random()
        yield "tick", rng.choice([0.0, 0.05, 1.0, 30.0])
        if rng.random() < 0.15:
            yield "abort", rng.randrange(10)
        if rng.random() < 0.1:
            yield "evict", {rng.randrange(1, NUM_BLOCKS)}
        if rng.random() < 0.05:
            yield ("reset",)


@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_or_withheld_under_load(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, kind: str, policy: str
) -> None:
    monkeypatch.setenv("SAGA_POLICY", policy)
    monkeypatch.setenv("SAGA_PREEMPT_WAITING", str(int("priority" in kind)))
    run = make_run(kind, policy)
    for operation in _operations(random.Random(f"{kind} {policy}"), 60):
        run.apply(operation)
    run.finish()
    counters = run.engine.saga.counters
    assert counters.evicted_blocks > 4 * NUM_BLOCKS
    assert counters.cached_tokens > 10 * BLOCK_TOKENS
    assert sum(request.num_preemptions for request in run.engine.requests.values()) > 0
    assert (run.engine.loads > 0) is ("host" in kind)
    if "priority" in kind:
        assert run.engine.scheduler._saga_preemption.total_preempted > 0
