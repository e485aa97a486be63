"""Steps that are taken together: as if each had been taken alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from gpu_backend.model_free import write_tiny_model
from gpu_backend.virtual_decode import steps_without_blocks
from gpu_backend.virtual_engine import VirtualEngine
from gpu_backend.virtual_shape import EngineShape
from saga_core.notices import EndNotice, ResumeNotice
from saga_sim.cluster.arms import ARMS
from saga_sim.cluster.cost import Measured
from saga_sim.cluster.figures import measure
from saga_sim.cluster.load import LoadOptions, make_load
from saga_sim.cluster.simulation import Cluster
from tests.sim.one_worker import SIZE, Asked, OneWorker

COST = Measured(4000.0, 0.004, 0.0005, 1e-7, kv_bytes_per_token=1000, host_link_gib_per_s=2**-7)
LOADS = {
    "chat": LoadOptions(
        "chat", workers=2, tasks=16, live_tasks=16, pressure=0.8, scale=4, block_tokens=16
    ),
    "pressed": LoadOptions(
        "web", workers=2, tasks=16, live_tasks=16, pressure=3.0, scale=8, block_tokens=16
    ),
    "shared": LoadOptions("tree", workers=1, tasks=6, live_tasks=4, scale=8, block_tokens=16),
    "large blocks": LoadOptions("swe", workers=1, tasks=8, live_tasks=8, scale=8),
}
CASES = [
    *((name, arm) for name in ("chat", "pressed") for arm in ("vllm", "vllm-apc-affinity", "saga")),
    ("pressed", "saga-coordinator"),
    ("pressed", "saga-preempting"),
    ("pressed", "autellix-style"),
    ("shared", "vllm-apc-affinity"),
    ("shared", "saga"),
    ("large blocks", "saga"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


class Scheduled:
    """Counts the steps for which the scheduler was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        real = VirtualEngine.start_step

        def start_step(engine: VirtualEngine) -> Any:
            self.count += 1
            return real(engine)

        monkeypatch.setattr(VirtualEngine, "start_step", start_step)

    def during(self, act: Callable[[], object]) -> int:
        before = self.count
        act()
        return self.count - before


@pytest.mark.parametrize("host_pool_ratio", [0.0, 1.0])
@pytest.mark.parametrize(("name", "arm"), CASES)
def test_answers_times_and_counters_are_those_of_single_steps(
    name: str, arm: str, host_pool_ratio: float, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, scheduled = make_load(LOADS[name]), Scheduled(monkeypatch)
    single, several = (
        Cluster(
            load,
            ARMS[arm],
            COST,
            model,
            host_pool_ratio=host_pool_ratio,
            single_steps=single_steps,
        )
        for single_steps in (True, False)
    )
    asked_often = scheduled.during(single.run)
    asked = scheduled.during(several.run)
    assert several.answered == single.answered
    for ours, theirs in zip(several.workers, single.workers, strict=True):
        assert ours.totals == theirs.totals
        assert ours.engine.steps == theirs.engine.steps
    assert measure(several) == measure(single)
    assert asked < 0.8 * asked_often
    several.check_integrity()


def test_a_worker_that_dies_meanwhile_has_done_the_same(model: Path) -> None:
    load = make_load(replace(LOADS["chat"], lost_worker_s=5.0))
    single, several = (
        Cluster(load, ARMS["saga"], COST, model, single_steps=single_steps)
        for single_steps in (True, False)
    )
    single.run()
    several.run()
    assert several.answered == single.answered
    assert [one.totals for one in several.workers] == [one.totals for one in single.workers]


def requests_at(
    model: Path, later: list[tuple[float, float]], *, single_steps: bool, **shape: Any
) -> tuple[list[float], list[tuple[float, float]]]:
    """Ends of steps, and the times of the answers, of two requests that decode while others come:
    ``later`` says when each comes, and when that is known."""
    shape = {"num_blocks": 60, "block_tokens": SIZE, **shape}
    one = OneWorker(model, EngineShape(**shape), {"SAGA_POLICY": "saga"}, single_steps=single_steps)
    ends_s: list[float] = []
    real = one.engine.end_step

    def end_step() -> Any:
        ends_s.append(one.clock.now_s)
        return real()

    one.engine.end_step = end_step  # type: ignore[method-assign]
    one.send_at(0.0, Asked("a", 3, output_tokens=60))
    one.send_at(0.0, Asked("b", 5, output_tokens=75))
    for number, (at_s, known_s) in enumerate(later):
        asked = Asked(f"c{number}", 2, output_tokens=9)
        one.at(known_s, lambda at_s=at_s, asked=asked: one.send_at(at_s, asked))  # type: ignore[misc]
    one.run(until_s=50.0)
    times_s = [(one.answered[n].first_token_s, one.answered[n].end_s) for n in sorted(one.answered)]
    return ends_s, times_s  # type: ignore[return-value]


class FreeEngine(VirtualEngine):
    """Without slots, so that a test can look in."""


@pytest.mark.parametrize("place", [8, 11, 16, 27, 31, 43, 58])
@pytest.mark.parametrize("early", [True, False])
def test_what_comes_at_the_very_end_of_a_step_joins_the_same_step(
    model: Path, place: int, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.sim.one_worker.VirtualEngine", FreeEngine)
    ends_s, _ = requests_at(model, [], single_steps=True)
    at_s, before_s = ends_s[place], ends_s[place - 1]
    # Known before the step began, or only while it ran.
    known_s = before_s - 1e-4 if early else (before_s + at_s) / 2
    later = [(at_s, known_s)]
    _, expected = requests_at(model, later, single_steps=True)
    _, found = requests_at(model, later, single_steps=False)
    assert found == expected


def test_a_prefetch_starts_when_it_is_due(model: Path) -> None:
    """A session is expected while another one's answer is made."""

    def run(single_steps: bool) -> tuple[dict[str, float], list[float]]:
        one = OneWorker(
            model,
            EngineShape(40, SIZE, host_blocks=80, link_block_s=1e-3),
            {"SAGA_POLICY": "saga"},
            single_steps=single_steps,
        )
        for at_s, name, blocks in ((0, "a", 20), (10, "b", 30), (20, "a", 20), (30, "d", 30)):
            one.send_at(at_s, Asked(name, blocks))
        one.tell_at(35.0, EndNotice("b"))
        one.tell_at(35.0, EndNotice("d"))
        one.send_at(40.0, Asked("c", 4, output_tokens=200))
        one.tell_at(40.5, ResumeNotice("a", 1.0))
        one.send_at(44.0, Asked("a", 20))
        one.run(until_s=60.0)
        ends_s = [served.end_s or 0.0 for _, served in sorted(one.answered.items())]
        return one.engine.counters(), ends_s

    counts, ends_s = run(single_steps=False)
    assert (counts, ends_s) == run(single_steps=True)
    assert counts["prefetch_started"] > 0


@pytest.mark.parametrize(
    ("computed", "steps"), [(64, 0), (65, 62), (66, 61), (126, 1), (127, 0), (128, 0)]
)
def test_a_block_is_taken_at_its_beginning_and_filled_at_its_end(computed: int, steps: int) -> None:
    assert steps_without_blocks(computed, 64) == steps
