from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from gpu_backend.model_free import write_tiny_model
from saga_sim.cluster.alone import alone_s
from saga_sim.cluster.arms import ARMS
from saga_sim.cluster.cost import HARDWARE, LLAMA_3_70B, Measured, Roofline, StepCost
from saga_sim.cluster.figures import measure
from saga_sim.cluster.load import AgentCall, LoadOptions, make_load
from saga_sim.cluster.simulation import Cluster

COST = Measured(1000.0, 0.01, 0.002, 1e-6)


@pytest.mark.parametrize("profile", ["swe", "web", "chat"])
@pytest.mark.parametrize("cost", [COST, Roofline(LLAMA_3_70B, HARDWARE["a100"])])
def test_a_task_by_itself_takes_what_it_takes_alone(
    profile: str, cost: StepCost, tmp_path: Path
) -> None:
    load = make_load(LoadOptions(profile, 1, 1, 1, pressure=0.02, scale=16, block_tokens=16))
    cluster = Cluster(load, ARMS["vllm-apc"], cost, write_tiny_model(tmp_path), batched_tokens=64)
    cluster.run()
    figures = measure(cluster)
    assert figures.slowdown_p50 == pytest.approx(1.0, abs=1e-9)
    assert figures.slo_share == 1.0


def call(waits_for: tuple[int, ...], pause_s: float) -> AgentCall:
    hashes = [b"%f %d" % (pause_s, block) for block in range(6)]
    return AgentCall("s", waits_for, pause_s, hashes, 100, 1, None, is_last=False)


def test_calls_that_overlap_take_the_time_of_the_longest_way() -> None:
    tasks = [call((), 5.0), call((0,), 1.0), call((0,), 3.0), call((1, 2), 0.0)]
    each_s = COST.step_s(100, 5050, 0, 0)
    found_s = alone_s(tasks, COST, batched_tokens=128, block_tokens=16)
    assert found_s == pytest.approx(3 * each_s + 3.0)
