"""Signals: their names, how wrong forecasts are, and what gives a session's end away."""

import math
import random
from collections import Counter
from dataclasses import replace
from statistics import fmean, pstdev

import pytest

from saga_core.errors import SettingsError
from saga_sim.signals import SIGNALS, Signals, Teller, signals_of
from saga_sim.workload import ROOT, Nodes, SimCall, Workload
from tests.sim.conftest import call, random_calls, workload_of

MANY = 5_000
RETURNING = SimCall(0.0, 2.0, "a", ROOT, 8, 8, 2, "tool_use", "Grep", 5.0, 62.0)
"""Pauses for 60 s, 3 s of them for a tool."""
LAST = replace(RETURNING, next_s=None)


def workload_with(*calls):
    return Workload("script", 4, Nodes(), list(calls), 0.0, 1.0)


def teller_of(signals, *calls, seed=0):
    return Teller(signals, workload_with(*(calls or (RETURNING, LAST))), seed)


def forecasts(signals, told, *calls):
    teller = teller_of(signals, *calls)
    return [teller.pause(told).pause_p50_s for _ in range(MANY)]


# Names


def test_every_name_is_a_set_of_signals():
    assert list(SIGNALS) == [
        "none",
        "close",
        "tools",
        "tool-ends",
        "forecast",
        "all",
        "adversarial",
    ]
    assert all(signals_of(name) is signals for name, signals in SIGNALS.items())
    assert len(set(SIGNALS.values())) == len(SIGNALS)
    assert signals_of("none") == Signals()


def test_an_unknown_name_is_told_which_exist():
    known = "none, close, tools, tool-ends, forecast, all, adversarial"
    with pytest.raises(SettingsError, match=f"^unknown signals 'cloze'; choose from {known}$"):
        signals_of("cloze")


def test_nothing_is_told_without_signals():
    for name, told in [("none", RETURNING), ("close", RETURNING), ("none", LAST)]:
        teller = teller_of(signals_of(name))
        assert teller.pause(told) is None
        assert teller.is_end(told) is False
        assert teller.tool_end_s(told) is None


def test_a_tool_is_named_where_the_trace_names_one():
    teller = teller_of(signals_of("tools"))
    assert teller.pause(RETURNING).tool_name == "Grep"
    assert teller.pause(RETURNING).pause_p50_s is None
    assert teller.pause(replace(RETURNING, tool=None)) is None
    assert teller.tool_end_s(RETURNING) is None


# Forecasts


def test_a_forecast_is_off_by_the_stated_sigma():
    logs = [math.log(p50_s / 60.0) for p50_s in forecasts(signals_of("forecast"), RETURNING)]
    assert fmean(logs) == pytest.approx(0.0, abs=0.03)
    assert pstdev(logs) == pytest.approx(0.5, abs=0.02)
    within = sum(abs(log) < 0.5 for log in logs) / MANY
    assert within == pytest.approx(0.683, abs=0.025)  # It is normal.


def test_without_error_the_pause_itself_is_told():
    assert set(forecasts(Signals(forecast_sigma=0.0), RETURNING)) == {60.0}


def pauses_of(*gaps_s):
    return [replace(RETURNING, next_s=RETURNING.end_s + gap_s) for gap_s in gaps_s]


def test_a_session_that_never_returns_is_forecast_like_any_other():
    calls = [*pauses_of(*[10.0] * 7, *[1000.0] * 3), LAST]
    exact = Counter(forecasts(Signals(forecast_sigma=0.0), LAST, *calls))
    assert exact.keys() == {10.0, 1000.0}
    assert exact[10.0] / MANY == pytest.approx(0.7, abs=0.025)
    logs = [math.log(p50_s) for p50_s in forecasts(Signals(forecast_sigma=0.5), LAST, *calls)]
    spread = math.hypot(0.5, math.log(100.0) * math.sqrt(0.7 * 0.3))
    assert fmean(logs) == pytest.approx(0.7 * math.log(10) + 0.3 * math.log(1000), abs=0.1)
    assert pstdev(logs) == pytest.approx(spread, rel=0.03)


def test_a_forecast_gives_an_end_away_only_if_ends_are_told():
    forecast, told = teller_of(signals_of("forecast")), teller_of(signals_of("all"))
    assert (forecast.is_end(LAST), forecast.is_end(RETURNING)) == (False, False)
    assert (told.is_end(LAST), told.is_end(RETURNING)) == (True, False)
    assert told.pause(LAST).p_reuse == told.pause(RETURNING).p_reuse


def test_forecasts_are_of_some_length_even_if_the_next_call_is_there_already():
    overlapping = replace(RETURNING, next_s=RETURNING.end_s - 1.0)
    assert min(forecasts(Signals(forecast_sigma=0.0), overlapping)) > 0.0


def test_with_no_pause_to_learn_from_nothing_is_forecast():
    assert teller_of(signals_of("forecast"), LAST).pause(LAST) is None


def test_a_seed_decides_what_is_told():
    def told(seed):
        teller = teller_of(signals_of("all"), seed=seed)
        return [teller.pause(RETURNING) for _ in range(20)]

    assert told(1) == told(1)
    assert told(1) != told(2)


# Wrong signals


def test_adversarial_ends_are_told_after_a_tenth_of_steps_whatever_comes():
    for step in (RETURNING, LAST):
        teller = teller_of(signals_of("adversarial"))
        share = sum(teller.is_end(step) for _ in range(MANY)) / MANY
        assert share == pytest.approx(0.1, abs=0.015)


def test_true_ends_are_not_told_beside_false_ones():
    teller = teller_of(Signals(ends=True, false_ends=1e-9))
    assert not any(teller.is_end(LAST) for _ in range(100))


def test_adversarial_tools_are_drawn_whatever_runs():
    for step in (RETURNING, replace(RETURNING, tool=None)):
        teller = teller_of(signals_of("adversarial"))
        names = Counter(teller.pause(step).tool_name for _ in range(MANY))
        assert len(names) == 5
        assert max(names.values()) < 1.15 * min(names.values())


# Ends of tools


def test_the_end_of_a_tool_is_told_when_it_comes():
    teller = teller_of(signals_of("tool-ends"))
    assert teller.tool_end_s(RETURNING) == 5.0
    assert teller.tool_end_s(LAST) is None
    assert teller.tool_end_s(replace(RETURNING, tool_end_s=None)) is None


def test_a_tool_that_outlasts_its_pause_ends_with_it():
    teller = teller_of(signals_of("tool-ends"))
    assert teller.tool_end_s(replace(RETURNING, tool_end_s=99.0)) == 62.0


def test_no_end_of_a_tool_is_told_after_the_next_arrival():
    told = 0
    for seed in range(10):
        workload = workload_of(random_calls(random.Random(seed), sessions=10))
        teller = Teller(signals_of("tool-ends"), workload, 0)
        for each in workload.calls:
            end_s = teller.tool_end_s(each)
            if end_s is not None:
                told += 1
                assert end_s <= each.next_s
    assert told > 50


def test_no_end_of_a_tool_is_told_before_the_call_that_calls_it_has_ended():
    workload = workload_of(
        [
            call("a", 0.0, range(4), 9.0, tool="Bash", tool_s=1.0),
            call("a", 2.0, range(5), 1.0),
        ]
    )
    told_s = Teller(signals_of("tool-ends"), workload, 0).tool_end_s(workload.calls[0])
    assert told_s is None or told_s >= 9.0
