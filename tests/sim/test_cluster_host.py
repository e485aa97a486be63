from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from gpu_backend.model_free import write_tiny_model
from gpu_backend.virtual_link import OneWay
from gpu_backend.virtual_shape import EngineShape
from saga_cli import simulate_cluster
from saga_core.errors import SettingsError
from saga_core.notices import EndNotice, ResumeNotice
from saga_sim.cluster.arms import ARMS
from saga_sim.cluster.cost import HARDWARE, LLAMA_3_70B, Measured, Roofline
from saga_sim.cluster.figures import measure
from saga_sim.cluster.load import ClusterLoad, LoadOptions, make_load
from saga_sim.cluster.simulation import Cluster
from saga_sim.cluster.study import StudyOptions
from tests.sim.one_worker import COST, SIZE, Asked, OneWorker

BLOCK_S = 0.5
SHAPE = EngineShape(20, SIZE, host_blocks=40, link_block_s=BLOCK_S)
SAGA = {"SAGA_POLICY": "saga", "SAGA_PREFETCH": "0"}
BOTH = pytest.mark.parametrize("variables", [None, SAGA], ids=["stock", "saga"])
# 1,000 bytes a token, and eight mebibytes a second.
LINKED = Measured(4000.0, 0.004, 0.0005, 1e-7, kv_bytes_per_token=1000, host_link_gib_per_s=2**-7)
TINY = LoadOptions("web", workers=2, tasks=10, live_tasks=8, scale=16, block_tokens=16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def load() -> ClusterLoad:
    return make_load(TINY)


def play(load: ClusterLoad, arm: str, model: Path, **options: Any) -> Cluster:
    cluster = Cluster(load, ARMS[arm], LINKED, model, **options)
    cluster.run()
    cluster.check_integrity()
    return cluster


def evicted(model: Path, variables: dict[str, str] | None, **shape: Any) -> OneWorker:
    """A session of ten blocks that another one has driven out, and that one is over."""
    given = {"host_blocks": 40, "link_block_s": BLOCK_S, **shape}
    one = OneWorker(model, EngineShape(20, SIZE, **given), variables)
    one.send_at(0.0, Asked("a", 10))
    one.send_at(100.0, Asked("b", 18))
    one.tell_at(150.0, EndNotice("b"))
    return one


@BOTH
def test_a_session_comes_back_after_its_bytes_by_the_bandwidth(
    model: Path, variables: dict[str, str] | None
) -> None:
    one = evicted(model, variables)
    one.send_at(200.0, Asked("a", 10))
    one.run()
    back = one.answered[2]
    assert back.loaded_tokens >= 8 * SIZE
    assert (back.cached_tokens or 0) + back.loaded_tokens == 10 * SIZE
    assert back.prefill_tokens == 4
    load_s = back.loaded_tokens / SIZE * BLOCK_S
    assert one.waited_s(2) == pytest.approx(load_s + COST.step_s(4, 0, 0, 0), abs=1e-9)
    assert one.engine.link is not None
    assert one.engine.link.loads.busy_s == pytest.approx(load_s)


@BOTH
def test_who_comes_while_another_waits_for_its_kv_is_served_at_once(
    model: Path, variables: dict[str, str] | None
) -> None:
    one = evicted(model, variables)
    one.send_at(200.0, Asked("a", 10))
    one.send_at(201.25, Asked("c", 2, output_tokens=3))
    one.run()
    assert one.waited_s(3) == pytest.approx(COST.step_s(36, 0, 0, 0))
    assert one.waited_s(2) >= 8 * BLOCK_S


def test_loads_wait_for_each_other(model: Path) -> None:
    one = OneWorker(model, EngineShape(40, SIZE, host_blocks=80, link_block_s=BLOCK_S))
    one.send_at(0.0, Asked("a", 10))
    one.send_at(50.0, Asked("b", 10))
    one.send_at(100.0, Asked("c", 38))
    one.at(200.0, lambda: [one.send(Asked(name, 10)) for name in "ab"].clear())
    one.run()
    first, second = one.answered[3], one.answered[4]
    assert first.loaded_tokens == second.loaded_tokens == 10 * SIZE
    assert one.waited_s(4) - one.waited_s(3) == pytest.approx(10 * BLOCK_S, abs=0.1)


def test_a_link_takes_one_job_after_the_other() -> None:
    link = OneWay(0.5)
    assert link.submit(1, "a", 4, now_s=10.0) == 12.0
    assert link.submit(2, "b", 2, now_s=11.0) == 13.0
    assert link.next_done_s == 12.0
    assert link.done_s({1, 2}) == 13.0
    assert [copy.job_id for copy in link.take_done(12.5)] == [1]
    assert [copy.job_id for copy in link.take_done(13.0)] == [2]
    assert link.next_done_s is None
    assert link.submit(3, "c", 1, now_s=20.0) == 20.5
    assert (link.blocks, link.busy_s) == (7, 3.5)


def test_a_step_waits_for_the_copies_of_the_blocks_that_it_takes(model: Path) -> None:
    """SAGA copies what it evicts; vLLM has copied all by then."""
    shape = EngineShape(20, SIZE, host_blocks=40, link_block_s=BLOCK_S)
    waited_s = {}
    for name, variables in (("stock", None), ("saga", SAGA)):
        one = OneWorker(model, shape, variables)
        one.send_at(0.0, Asked("a", 10))
        one.send_at(100.0, Asked("b", 18))
        one.run()
        link = one.engine.link
        assert link is not None
        waited_s[name] = one.worker.totals.copy_wait_s
        if name == "saga":
            assert waited_s[name] == pytest.approx(link.stores.busy_s)
            assert one.waited_s(1) == pytest.approx(waited_s[name] + COST.step_s(292, 0, 0, 0))
    assert waited_s["stock"] == 0.0
    assert waited_s["saga"] >= 8 * BLOCK_S


def test_what_is_expected_soon_is_loaded_before_it_is_asked_for(model: Path) -> None:
    one = evicted(model, {"SAGA_POLICY": "saga"}, link_block_s=1e-4)
    one.send_at(200.0, Asked("a", 10))  # Shows how fast the link is.
    one.send_at(300.0, Asked("c", 18))
    one.tell_at(350.0, EndNotice("c"))
    one.tell_at(360.0, ResumeNotice("a", 1.0))
    one.send_at(400.0, Asked("a", 10))
    one.run(until_s=500.0)
    assert one.answered[2].loaded_tokens >= 8 * SIZE
    counts = one.engine.counters()
    assert counts["prefetch_started"] == counts["prefetch_useful"] == 1
    assert counts["prefetch_loaded_tokens"] >= 8 * SIZE
    assert counts["prefetch_computed_tokens"] == 0
    assert one.answered[4].cached_tokens == 10 * SIZE
    assert one.answered[4].loaded_tokens == 0
    assert one.waited_s(4) == pytest.approx(COST.step_s(4, 0, 0, 0))


@pytest.mark.parametrize("arm", ["vllm-apc-affinity", "saga", "saga-stock-retention"])
def test_every_prompt_token_is_cached_loaded_or_computed(
    arm: str, load: ClusterLoad, model: Path
) -> None:
    without = measure(play(load, arm, model))
    figures = measure(cluster := play(load, arm, model, host_pool_ratio=1.0))
    for one in cluster.answered:
        if not one.recomputed_tokens:
            parts = one.cached_tokens + one.loaded_tokens + one.prefill_tokens
            assert parts == one.prompt_tokens
        assert one.loaded_tokens >= 0
        assert one.cached_tokens >= 0
    assert figures.loaded_tokens > 0
    assert figures.link_loaded_tokens >= figures.loaded_tokens
    assert figures.regret_tokens < without.regret_tokens
    assert figures.hit_rate == pytest.approx(figures.hit_rate_gpu + figures.hit_rate_host)
    assert 0 < figures.load_share < 1
    assert 0 < figures.store_share < 1
    if figures.counters:
        assert figures.counters["prompt_tokens"] == figures.prompt_tokens
        assert figures.counters["host_cached_tokens"] == figures.loaded_tokens
        assert figures.counters["cached_tokens"] == figures.cached_tokens + figures.loaded_tokens


def test_the_same_seed_gives_the_same_run(load: ClusterLoad, model: Path) -> None:
    for arm in ("vllm-apc-affinity", "saga"):
        one, other = (measure(play(load, arm, model, host_pool_ratio=1.0)) for _ in range(2))
        assert one == other


def test_hashes_of_the_process_decide_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "--profile web --tasks 8 --live-tasks 8 --workers 2 --scale 16 --block-tokens 16 "
        "--arms vllm-apc-affinity,saga --host-pool-ratio 1 --json"
    )
    script = """
import argparse, sys
from saga_cli import simulate_cluster
parser = argparse.ArgumentParser()
simulate_cluster.add_words(parser)
simulate_cluster.run(parser.parse_args(sys.argv[1:]))
"""
    here, there = tmp_path / "here.json", tmp_path / "there.json"
    parser = argparse.ArgumentParser()
    simulate_cluster.add_words(parser)
    simulate_cluster.run(parser.parse_args([*words.split(), str(here)]))
    assert "tokens loaded from host memory" in capsys.readouterr().out
    call = [sys.executable, "-c", script, *words.split(), str(there)]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    subprocess.run(call, env=environment, check=True, timeout=120, capture_output=True)
    one, other = (json.loads(file.read_text()) for file in (here, there))
    for summary in (one, other):
        for name in ("timing", "machine", "versions"):
            summary.pop(name)
    assert one == other
    assert one["options"]["host_pool_ratio"] == 1
    assert one["arms"]["saga"]["median"]["link_loaded_tokens"] > 0


def test_without_host_memory_there_is_no_connector(load: ClusterLoad, model: Path) -> None:
    cluster = Cluster(load, ARMS["saga"], LINKED, model)
    assert [worker.engine.link for worker in cluster.workers] == [None, None]
    assert cluster.workers[0].engine.scheduler.connector is None


def test_host_memory_needs_a_link(load: ClusterLoad, model: Path) -> None:
    with pytest.raises(SettingsError, match="knows the link"):
        Cluster(load, ARMS["saga"], COST, model, host_pool_ratio=1.0)
    for ratio in (-1.0, math.inf, math.nan):
        with pytest.raises(SettingsError, match="host_pool_ratio"):
            StudyOptions(host_pool_ratio=ratio)


def test_each_gpu_moves_its_part_over_its_own_link() -> None:
    a100 = Roofline(LLAMA_3_70B, HARDWARE["a100"])
    # 4 · 23 GiB/s ÷ 327,680 bytes.
    assert a100.link_tokens_per_s == pytest.approx(301_466, abs=1)
    assert Measured(1.0, 1.0, 1.0).link_tokens_per_s == 0.0
    assert LINKED.link_tokens_per_s == pytest.approx(2**23 / 1000)
