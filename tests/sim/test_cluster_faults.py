from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from gpu_backend.model_free import write_tiny_model
from saga_core.errors import SettingsError
from saga_sim.cluster.arms import ARMS
from saga_sim.cluster.cost import Measured
from saga_sim.cluster.dispatch import Arrival, Immediate, Loads, Placed, Sent
from saga_sim.cluster.families import TenantKind
from saga_sim.cluster.figures import measure
from saga_sim.cluster.load import LoadOptions, make_load
from saga_sim.cluster.routers import Affinity
from saga_sim.cluster.simulation import Cluster

COST = Measured(4000.0, 0.004, 0.0005, 1e-7)
TINY = LoadOptions("web", 2, 14, 8, scale=16, block_tokens=16)
KINDS = (TenantKind("heavy", 1, 30), TenantKind("light", 2, 8))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def play(options: LoadOptions, arm: str, model: Path, **more: Any) -> Cluster:
    cluster = Cluster(make_load(options), ARMS[arm], COST, model, **more)
    cluster.run()
    cluster.check_integrity()
    return cluster


LOSS_ARMS = (
    "vllm-apc",
    "prefix-aware",
    "vllm-apc-affinity",
    "thunderagent-style",
    "saga",
    "saga-coordinator",
)


@pytest.mark.parametrize("arm", LOSS_ARMS)
def test_all_is_answered_though_a_worker_dies(arm: str, model: Path) -> None:
    down_s = 4.0
    cluster = play(replace(TINY, lost_worker_s=down_s), arm, model)
    assert len(cluster.answered) == cluster.load.num_calls
    lost_s = sorted(one.end_s for one in cluster.answered)[-(-cluster.load.num_calls // 2) - 1]
    for one in cluster.answered:
        if one.worker == 0:
            assert one.end_s <= lost_s or one.first_token_s > lost_s + down_s
    assert any(one.worker == 0 and one.end_s > lost_s for one in cluster.answered)
    whole = play(TINY, arm, model)
    assert measure(cluster).elapsed_s > measure(whole).elapsed_s


def test_what_a_worker_held_is_lost_with_it(model: Path) -> None:
    roomy = replace(TINY, pressure=0.1)
    assert measure(play(roomy, "vllm-apc-affinity", model)).regret_tokens == 0
    lost = play(replace(roomy, lost_worker_s=4.0), "vllm-apc-affinity", model)
    assert measure(lost).regret_tokens > 0


def test_a_worker_that_dies_needs_another_one() -> None:
    with pytest.raises(SettingsError, match="needs another one"):
        replace(TINY, workers=1, lost_worker_s=1.0)


def test_tasks_begin_when_they_come(model: Path) -> None:
    options = replace(TINY, arrivals="poisson")
    cluster = play(options, "vllm-apc", model)
    first_s = {one.task: one.sent_s for one in reversed(cluster.answered) if not one.call}
    for number, start_s in enumerate(cluster.load.starts_s):
        assert first_s[number] == pytest.approx(start_s + cluster.load.tasks[number][0].pause_s)


@pytest.mark.parametrize("arm", ["autellix-style", "continuum-style", "saga-preempting"])
def test_tenants_are_told_apart(arm: str, model: Path) -> None:
    options = replace(TINY, tasks=12, tenants=KINDS, arrivals="poisson")
    figures = measure(play(options, arm, model))
    assert list(figures.slo) == ["heavy", "light"]
    assert figures.slowdown_p50 >= 1.0
    counts = [options.tasks, figures.tasks]
    assert max(counts) - min(counts) <= 3
    late = replace(options, deadline_factor=1e6)
    assert measure(play(late, arm, model)).slo_share == 1.0


def test_the_engine_runs_first_what_has_priority(model: Path) -> None:
    class Reversed(Immediate):
        """The later a task, the sooner it runs."""

        def arrived(self, arrival: Arrival, loads: Loads, now_s: float) -> Sent:
            return [
                Placed(placed.key, 0, -placed.key[0])
                for placed in super().arrived(arrival, loads, now_s)
            ]

    def first_tokens(arm: str) -> Sequence[float]:
        cluster = Cluster(make_load(TINY), ARMS[arm], COST, model, batched_tokens=64)
        cluster.dispatcher = Reversed(Affinity())
        cluster.run()
        first = {one.task: one.first_token_s for one in cluster.answered if not one.call}
        return [first[number] for number in range(8)]

    _, *by_priority = first_tokens("autellix-style")  # The first one finds nobody there.
    assert by_priority == sorted(by_priority, reverse=True)
    _, *by_arrival = first_tokens("vllm-apc")
    assert by_arrival == sorted(by_arrival)
    assert by_arrival[-1] > by_priority[-1]


def test_hints_that_are_wrong_change_no_answer(model: Path) -> None:
    for arm in ("saga-random-hints", "saga-adversarial-hints"):
        cluster = play(TINY, arm, model)
        assert len(cluster.answered) == cluster.load.num_calls
        again = play(TINY, arm, model)
        assert again.answered == cluster.answered
    assert measure(cluster).counters["notices"] >= cluster.load.num_calls
