from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from gpu_backend import scheduler
from gpu_backend.model_free import write_tiny_model
from gpu_backend.virtual_clock import VirtualClock
from gpu_backend.virtual_engine import VirtualEngine
from gpu_backend.virtual_shape import EngineShape
from saga_cli import simulate_cluster
from saga_core.errors import SagaError, SettingsError
from saga_sim.cluster import simulation
from saga_sim.cluster.arms import ARMS, DEFAULT_ARMS, arms_of
from saga_sim.cluster.cost import Measured
from saga_sim.cluster.counts import Answered
from saga_sim.cluster.figures import measure
from saga_sim.cluster.load import ClusterLoad, LoadOptions, make_load
from saga_sim.cluster.routers import Affinity, WorkerLoad
from saga_sim.cluster.simulation import Cluster

COST = Measured(4000.0, 0.004, 0.0005, 1e-7)
TINY = LoadOptions("swe", workers=2, tasks=9, live_tasks=8, scale=16, block_tokens=16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def load() -> ClusterLoad:
    return make_load(TINY)


def play(load: ClusterLoad, arm: str, model: Path, **options: Any) -> Cluster:
    cluster = Cluster(load, ARMS[arm], COST, model, **options)
    cluster.run()
    cluster.check_integrity()
    return cluster


def by_session(answered: Sequence[Answered]) -> list[list[Answered]]:
    found: dict[str, list[Answered]] = {}
    for one in sorted(answered, key=lambda one: (one.sent_s, one.call)):
        found.setdefault(one.session_id, []).append(one)
    return list(found.values())


@pytest.mark.parametrize("arm", ["vllm", "vllm-apc-affinity", "saga", "saga-coordinator"])
def test_every_prompt_token_is_cached_or_computed(arm: str, load: ClusterLoad, model: Path) -> None:
    cluster = play(load, arm, model)
    figures = measure(cluster)
    assert figures.requests == load.num_calls
    assert figures.prompt_tokens == sum(call.input_tokens for t in load.tasks for call in t)
    assert figures.output_tokens == sum(call.output_tokens for t in load.tasks for call in t)
    for one in cluster.answered:
        assert one.sent_s < one.first_token_s <= one.end_s
        assert 0 <= one.regret_tokens <= one.prompt_tokens - one.cached_tokens
        if not one.recomputed_tokens:
            assert one.cached_tokens + one.prefill_tokens == one.prompt_tokens
    assert (figures.hit_rate == 0) == (arm == "vllm")
    assert 0 < figures.used_share <= 1
    assert figures.busy_s <= TINY.workers * figures.elapsed_s + 1e-6


def test_calls_are_sent_when_their_pause_is_over_and_so_many_tasks_live(
    load: ClusterLoad, model: Path
) -> None:
    cluster = play(load, "vllm-apc", model)
    times = {(one.task, one.call): one for one in cluster.answered}
    for (task, place), one in times.items():
        call = load.tasks[task][place]
        if call.waits_for:
            ready_s = max(times[task, before].end_s for before in call.waits_for)
            assert one.sent_s == pytest.approx(ready_s + call.pause_s)
    spans = [
        (min(times[n, 0].sent_s, 1e9), max(times[n, i].end_s for i in range(len(task))))
        for n, task in enumerate(load.tasks)
    ]
    for start_s, _ in spans:
        assert sum(a <= start_s < b for a, b in spans) <= load.live_tasks


def test_affinity_keeps_sessions_and_round_robin_does_not(load: ClusterLoad, model: Path) -> None:
    for arm, stays in (("vllm-apc-affinity", True), ("saga-sticky", True), ("vllm-apc", False)):
        cluster = play(load, arm, model)
        sessions = by_session(cluster.answered)
        assert all(len({one.worker for one in calls}) == 1 for calls in sessions) == stays
        assert (measure(cluster).moved_share == 0) == stays
        assert {one.worker for one in cluster.answered} == {0, 1}


def test_the_workers_own_counts_are_these(model: Path) -> None:
    load = make_load(LoadOptions("web", 1, 10, 8, scale=16, block_tokens=16))
    for arm in ("saga-stock-retention", "saga-no-prefetch"):
        cluster = play(load, arm, model)
        figures = measure(cluster)
        assert figures.counters["requests"] == figures.requests
        assert figures.counters["prompt_tokens"] == figures.prompt_tokens
        assert figures.counters["cached_tokens"] == figures.cached_tokens
        assert figures.counters["regret_tokens"] == figures.regret_tokens
        assert figures.regret_tokens > 0


def test_without_pressure_nothing_is_computed_twice(model: Path) -> None:
    load = make_load(LoadOptions("swe", 1, 6, 3, pressure=0.05, scale=16, block_tokens=16))
    cluster = play(load, "vllm-apc-affinity", model)
    assert measure(cluster).regret_tokens == measure(cluster).recomputed_tokens == 0
    for calls in by_session(cluster.answered):
        for before, after in pairwise(calls):
            # All full blocks but one: the answer's last token is never computed.
            known = (before.prompt_tokens + before.output_tokens - 1) // 16 * 16
            assert after.cached_tokens == known


def test_a_request_alone_takes_what_its_steps_take(model: Path) -> None:
    cost = Measured(1000.0, 0.01, 0.002)
    load = make_load(LoadOptions("chat", 1, 1, 1, pressure=0.01, scale=16, block_tokens=16))
    cluster = Cluster(load, ARMS["vllm"], cost, model, batched_tokens=64)
    cluster.run()
    one = min(cluster.answered, key=lambda one: one.call)
    chunks = -(-one.prompt_tokens // 64)
    first_s = chunks * 0.01 + one.prompt_tokens / 1000
    assert one.first_token_s - one.sent_s == pytest.approx(first_s)
    assert one.end_s - one.first_token_s == pytest.approx((one.output_tokens - 1) * 0.012)


def test_stock_makes_no_difference_by_the_plugin_that_only_counts(
    load: ClusterLoad, model: Path
) -> None:
    plain = play(load, "vllm-apc-affinity", model)
    counted = play(load, "saga-stock-retention", model, router=Affinity())
    assert plain.answered == counted.answered


def test_any_router_can_stand_in(load: ClusterLoad, model: Path) -> None:
    class Scripted:
        def __init__(self) -> None:
            self.asked: list[tuple[str, int, float]] = []
            self.over: list[str] = []

        def place(
            self, session: str, prompt: Sequence[bytes], loads: Sequence[WorkerLoad], now_s: float
        ) -> int:
            assert [one.worker for one in loads] == [0, 1]
            self.asked.append((session, len(prompt), now_s))
            return 1

        def ended(self, session: str) -> None:
            self.over.append(session)

    scripted = Scripted()
    cluster = play(load, "saga", model, router=scripted)
    assert len(scripted.asked) == load.num_calls
    assert [now_s for _, _, now_s in scripted.asked] == sorted(
        one.sent_s for one in cluster.answered
    )
    assert sorted(scripted.over) == sorted({one.session_id for one in cluster.answered})
    assert {one.worker for one in cluster.answered} == {1}


def test_the_coordinator_holds_requests_back_until_there_is_room(
    load: ClusterLoad, model: Path
) -> None:
    cluster = play(load, "saga-coordinator", model)
    figures = measure(cluster)
    # What it gives a worker fits: nothing is preempted.
    assert figures.recomputed_tokens == 0
    assert 0 <= figures.moved_share < 0.5
    assert {one.worker for one in cluster.answered} == {0, 1}


def test_a_dispatcher_that_sends_nothing_is_said(
    load: ClusterLoad, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulation, "_MAX_VAIN_TICKS", 10)
    cluster = Cluster(load, ARMS["saga-coordinator"], COST, model)
    monkeypatch.setattr(cluster.dispatcher, "_apply", lambda event: ())
    with pytest.raises(SagaError, match="sends nothing"):
        cluster.run()


def test_notices_reach_the_worker_only_where_the_arm_tells(load: ClusterLoad, model: Path) -> None:
    told = measure(play(load, "saga-sticky", model)).counters["notices"]
    tools = sum(call.tool is not None for task in load.tasks for call in task)
    assert tools <= told <= load.num_calls
    assert measure(play(load, "saga-no-notices", model)).counters["notices"] == 0


def test_the_clock_of_the_process_is_back_after_a_run(load: ClusterLoad, model: Path) -> None:
    play(load, "saga", model)
    assert scheduler.time is time  # type: ignore[attr-defined]
    assert not [name for name in os.environ if name.startswith("SAGA_POLICY")]


def test_a_request_that_never_fits_is_said(load: ClusterLoad, model: Path) -> None:
    cluster = Cluster(load, ARMS["vllm-apc"], COST, model)
    shape = EngineShape(4, 16)
    for worker in cluster.workers:
        worker.engine = VirtualEngine(shape, shape.config(model), cluster.clock, None)
    with pytest.raises(SagaError, match="schedules nothing"):
        cluster.run()


def test_a_plugin_that_is_off_is_said(load: ClusterLoad, model: Path) -> None:
    cluster = Cluster(load, ARMS["saga"], COST, model)
    cluster.workers[0].engine.scheduler.saga.off_reason = "an event failed"
    with pytest.raises(SagaError, match="an event failed"):
        cluster.run()
    shape = EngineShape(100, 16)
    config = shape.config(model)
    with pytest.raises(SagaError, match="could not attach"):
        VirtualEngine(shape, config, VirtualClock(), {"SAGA_POLICY": "none"})


def test_arms_are_named_once() -> None:
    assert [arm.name for arm in arms_of(DEFAULT_ARMS)] == list(DEFAULT_ARMS)
    for names in ((), ("saga", "saga"), ("belady",)):
        with pytest.raises(SettingsError, match="choose, each once"):
            arms_of(names)


WORDS = "--profile web --tasks 8 --live-tasks 8 --workers 2 --scale 16 --block-tokens 16"


def run_command(words: str) -> int:
    parser = argparse.ArgumentParser()
    simulate_cluster.add_words(parser)
    return simulate_cluster.run(parser.parse_args(words.split()))


def test_the_command_gives_the_same_results_in_every_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, other = tmp_path / "one.json", tmp_path / "other.json"
    words = f"{WORDS} --arms vllm-apc-affinity,saga --seeds 2"
    assert run_command(f"{words} --json {file}") == 0
    shown = capsys.readouterr().out
    assert "vllm-apc-affinity ÷ arm" in shown
    assert "steps simulated per CPU second" in shown
    script = f"""
import argparse
from saga_cli import simulate_cluster
parser = argparse.ArgumentParser()
simulate_cluster.add_words(parser)
simulate_cluster.run(parser.parse_args({f"{words} --json {other}".split()!r}))
"""
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=60)
    one, again = (json.loads(path.read_text()) for path in (file, other))
    for summary in (one, again):
        for name in ("timing", "machine", "versions"):
            assert summary.pop(name)
    assert json.dumps(one) == json.dumps(again)
    assert one["comparisons"]["saga"]["tct_mean_s"]["mean"] > 0
    assert [each["seed"] for each in one["loads"]] == [0, 1]
