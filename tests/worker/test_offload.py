"""The host tier under vLLM's own scheduler, with a record of what every block holds."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from gpu_backend.config import POLICY_VARIABLE
from gpu_backend.model_free import TOKEN, load_counters, make_config
from gpu_backend.offload import MemcpyWorker
from tests.worker.contents import ContentEngine, with_host_tier

NUM_BLOCKS = 120
MakeEngine = Callable[..., ContentEngine]


@pytest.fixture
def make_engine(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    config = make_config(tiny_model)

    def make(host_blocks: int, policy: str = "saga", **options: Any) -> ContentEngine:
        monkeypatch.setenv(POLICY_VARIABLE, policy)
        config.kv_transfer_config = None
        if host_blocks:
            with_host_tier(config, host_blocks, policy)
        return ContentEngine(config, NUM_BLOCKS, **options)

    return make


def _serve(engine: ContentEngine, requests: int, seed: int = 1) -> dict[str, int]:
    """Eight sessions that grow, one request at a time; returns the counters."""
    rng = random.Random(seed)
    history: dict[str, list[int]] = {}
    for _ in range(requests):
        session_id = f"s{rng.randrange(8)}"
        prompt = history.get(session_id, [])
        if len(prompt) > 800:
            prompt = prompt[: rng.choice([0, 320])]
        prompt = prompt + [rng.randrange(1000) for _ in range(rng.randrange(20, 120))]
        output_tokens = rng.randrange(1, 20)
        history[session_id] = prompt + [TOKEN] * output_tokens
        engine.run(prompt, session_id=session_id, output_tokens=output_tokens)
        _check(engine)
    return load_counters(engine)


def _check(engine: ContentEngine) -> None:
    assert engine.saga.off_reason is None
    if engine.saga.index is not None:
        engine.saga.index.check_integrity()
    host = engine.saga.host
    if host is not None:
        host.check_integrity()
        policy = engine.scheduler.connector.scheduler.manager._policy
        assert set(policy.chunks) == set(host._owner)
        assert len(host) <= host.num_blocks


@pytest.mark.parametrize("policy", ["saga", "prefix-lru", "wa-lru-ttl"])
def test_the_two_tiers_hold_what_one_pool_of_both_sizes_would(
    make_engine: MakeEngine, policy: str
) -> None:
    alone = _serve(make_engine(0, policy), 150)
    both = _serve(make_engine(240, policy), 150)
    assert alone["regret_tokens"] > 0.2 * alone["prompt_tokens"]
    assert both["regret_tokens"] < 0.05 * alone["regret_tokens"]
    assert both["host_cached_tokens"] > 0
    assert both["cached_tokens"] + both["computed_tokens"] == both["prompt_tokens"]


def test_it_keeps_more_than_copies_of_all_that_is_computed(make_engine: MakeEngine) -> None:
    """vLLM's own policy on the same connector: its host memory holds what the GPU holds."""
    vllm, saga = make_engine(120, "vllm"), make_engine(120, "saga")
    theirs = _serve(vllm, 150)
    ours = _serve(saga, 150)
    assert vllm.loads > 0, "vLLM's own offloading works with the plugin counting only"
    assert ours["regret_tokens"] < 0.6 * theirs["regret_tokens"]


@pytest.mark.parametrize(("base", "batches"), [(Scheduler, 1), (AsyncScheduler, 2)])
@pytest.mark.parametrize("seed", [1, 2])
def test_no_request_reads_a_wrong_block(
    make_engine: MakeEngine, base: type, batches: int, seed: int
) -> None:
    """Overlapping requests, preemptions, aborts, stop tokens and ends; the engine itself checks."""
    engine = make_engine(100, base=base, batches_in_flight=batches)
    rng = random.Random(seed)
    history: dict[str, list[int]] = {}
    now_s = 10.0
    engine.saga.clock = lambda: now_s
    engine.saga.prefill_rate.observe(5000, 1.0)
    for _ in range(120):
        now_s += rng.choice([0.0, 0.2, 2.0])
        session_id = f"s{rng.randrange(8)}"
        prompt = history.get(session_id, [])
        if len(prompt) > 700:
            prompt = prompt[: rng.choice([0, 320])]
        prompt = prompt + [rng.randrange(1000) for _ in range(rng.randrange(20, 120))]
        output_tokens = rng.randrange(1, 60)
        history[session_id] = prompt + [TOKEN] * (output_tokens - 1)
        request = engine.add(
            prompt,
            session_id=rng.choice([session_id, session_id, None]),
            output_tokens=output_tokens,
            stop_after=output_tokens,
        )
        kind = rng.choice(["resume_soon", "end", None, None])
        if kind is not None:
            notice = {"kind": kind, "session_id": f"s{rng.randrange(8)}"}
            engine.scheduler.saga_control({"notify": {"version": 1, "notices": [notice]}})
        engine.scheduler.saga_control({"tick": True})
        for _ in range(rng.randrange(8)):
            if engine.scheduler.has_unfinished_requests():
                engine.step()
                _check(engine)
        if rng.random() < 0.1 and not request.is_finished():
            engine.abort(request)
    for _ in engine.steps():
        _check(engine)
    assert engine.loads > 0
    assert engine.stores > 0


def test_a_reset_of_the_prefix_cache_keeps_what_host_memory_holds(make_engine: MakeEngine) -> None:
    engine = make_engine(200)
    _serve(engine, 60)
    held = len(engine.saga.host)
    assert held
    assert engine.scheduler.reset_prefix_cache()
    assert len(engine.saga.host) == held
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert len(engine.saga.host) == 0
    _serve(engine, 60)


def test_plain_copies_move_blocks_there_and_back() -> None:
    kv = torch.arange(6 * 4, dtype=torch.int8).reshape(6, 4)
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(kv, 4)], [[CanonicalKVCacheRef(0, 4)]])
    worker = MemcpyWorker(caches, num_chunks=3, blocks_per_chunk=1)
    before = kv[[4, 1]].clone()
    blocks = GPULoadStoreSpec([4, 1], group_sizes=[2], block_indices=[0])
    assert worker.submit_store(1, blocks, CPULoadStoreSpec([2, 0]))
    kv.zero_()
    back = GPULoadStoreSpec([3, 5], group_sizes=[2], block_indices=[0])
    assert worker.submit_load(2, CPULoadStoreSpec([2, 0]), back)
    assert torch.equal(kv[[3, 5]], before)
    assert not kv[[0, 1, 2, 4]].any()
    done = worker.get_finished()
    assert [(result.job_id, result.success, result.transfer_size) for result in done] == [
        (1, True, 8),
        (2, True, 8),
    ]
    assert worker.get_finished() == []


def test_plain_copies_refuse_chunks_of_several_blocks() -> None:
    with pytest.raises(ValueError, match="blocks_per_chunk"):
        MemcpyWorker(CanonicalKVCaches([], []), num_chunks=3, blocks_per_chunk=2)
