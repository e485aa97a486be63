from __future__ import annotations

import json
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from gpu_backend.config import POLICY_VARIABLE
from gpu_backend.model_free import TOKEN
from saga_core.errors import SagaError, SettingsError
from saga_sim.scheduler_bench import (
    ARMS,
    SAGA,
    STOCK,
    SUBCLASS,
    Arm,
    BenchOptions,
    LoadResult,
    Median,
    Totals,
    measure,
    summarise,
)
from saga_sim.scheduler_load import LOADS, Load, Traffic

TINY = BenchOptions(sessions=20, blocks=600, pairs=2, steps=30)
LOAD = Load("any", running=6, new_tokens=30, output_tokens=3, step_s=0.1)


@pytest.mark.parametrize(
    ("count", "low", "high"), [(1, 0, 0), (5, 0, 4), (6, 0, 5), (9, 1, 7), (20, 5, 14)]
)
def test_the_interval_of_a_median_is_that_of_the_sign_test(count: int, low: int, high: int) -> None:
    values = [float(value) for value in reversed(range(count))]
    assert Median.of(values) == Median((count - 1) / 2, low, high)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"policy": "belady"}, "belady"),
        ({"sessions": 1}, "sessions=1"),
        ({"pairs": 0}, "pairs=0"),
        ({"steps": 0}, "steps=0"),
        ({"blocks": 100, "sessions": 2}, "blocks=100"),
        ({"sessions": 21, "blocks": 200}, "10 for each session"),
    ],
)
def test_options_that_cannot_be_are_refused(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        BenchOptions(**wrong)


def test_traffic_is_of_sessions_that_grow_one_request_at_a_time() -> None:
    traffic = Traffic(LOAD, sessions=40, blocks=40_000, seed=0)
    last = {f"s{number}": [*traffic.first(number).prompt, TOKEN] for number in range(40)}
    busy_until: dict[str, int] = {}
    grown = count = 0
    for step in range(300):
        for arrival in traffic.step():
            assert busy_until.get(arrival.session_id, 0) <= step
            busy_until[arrival.session_id] = step + LOAD.output_tokens
            before = last[arrival.session_id]
            if arrival.prompt[: len(before)] == before:
                assert len(arrival.prompt) == len(before) + LOAD.new_tokens
                grown += 1
            last[arrival.session_id] = arrival.prompt + [TOKEN] * LOAD.output_tokens
            count += 1
    assert count == 300 * LOAD.running / LOAD.output_tokens
    assert 0.3 < grown / count < 0.8


def test_traffic_is_the_same_for_the_same_seed_only() -> None:
    def steps(seed: int) -> list[Any]:
        traffic = Traffic(LOAD, sessions=40, blocks=400, seed=seed)
        return [traffic.first(0), *(traffic.step() for _ in range(10))]

    assert steps(1) == steps(1)
    assert steps(1) != steps(2)


def _result(stock_s: Sequence[float], saga_s: Sequence[float], evicted: int) -> LoadResult:
    rounds = [
        {
            STOCK: Totals(cpu_s=one, steps=10),
            SUBCLASS: Totals(cpu_s=one, steps=10),
            SAGA: Totals(cpu_s=other, steps=10, evicted_blocks=evicted),
        }
        for one, other in zip(stock_s, saga_s, strict=True)
    ]
    return LoadResult(LOAD, rounds)


def test_figures_are_medians_of_what_pairs_show() -> None:
    result = _result([1.0, 2.0, 4.0], [1.1, 2.4, 4.4], evicted=100)
    assert result.cpu_ms_per_step(STOCK) == Median(200.0, 100.0, 400.0)
    assert result.ratio(SUBCLASS) == Median(1.0, 1.0, 1.0)
    assert result.ratio(SAGA).median == pytest.approx(1.1)
    assert result.ratio(SAGA).high == pytest.approx(1.2)
    assert result.added_ms_per_step().median == pytest.approx(40.0)
    per_block = result.added_us_per_evicted_block()
    assert per_block is not None
    assert per_block.median == pytest.approx(4000.0)
    assert result.per_step(SAGA, "evicted_blocks") == 10.0


def test_without_evictions_there_is_no_cost_of_one() -> None:
    assert _result([1.0], [2.0], evicted=0).added_us_per_evicted_block() is None


def test_a_plugin_that_switched_itself_off_is_not_measured() -> None:
    state = {"off_reason": "an event failed", "held": {}, "ghost_blocks": 0}
    engine: Any = SimpleNamespace(with_plugin=True, saga=SimpleNamespace(state=lambda: state))
    with pytest.raises(SagaError, match="an event failed"):
        Arm(SAGA, engine).sizes()


def test_every_arm_serves_the_same_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POLICY_VARIABLE, "prefix-lru")
    said: list[str] = []
    results = measure(TINY, said.append)
    assert os.environ[POLICY_VARIABLE] == "prefix-lru"
    assert [result.load for result in results] == list(LOADS)
    assert len(said) == len(LOADS) * (1 + TINY.pairs)
    for result in results:
        assert len(result.rounds) == TINY.pairs
        for one in result.rounds:
            assert list(one) == list(ARMS)
            assert {totals.steps for totals in one.values()} == {TINY.steps}
            assert len({(totals.requests, totals.prompt_tokens) for totals in one.values()}) == 1
            assert all(totals.cpu_s > 0 for totals in one.values())
        assert result.peak["sessions"] == TINY.sessions
        assert 0 < result.peak["session_blocks"] <= TINY.blocks
    prefill = results[-1]
    assert prefill.per_step(SAGA, "evicted_blocks") > 0
    assert prefill.per_step(STOCK, "evicted_blocks") == 0  # Only the plugin counts them.
    summary = json.loads(json.dumps(summarise(TINY, results), allow_nan=False))
    assert summary["options"]["policy"] == "saga"
    assert [load["load"]["name"] for load in summary["loads"]] == [load.name for load in LOADS]
    assert set(summary["loads"][0]["arms"]) == set(ARMS)
