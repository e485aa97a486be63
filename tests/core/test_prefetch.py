"""When a paused session's KV is brought back, and when it is left where it is."""

import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saga_core.prefetch import PrefetchCandidate, PrefetchVerdict, TierSpeed, plan_prefetch

PROPERTY = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
FAST = TierSpeed(prefill_tokens_per_s=5_000.0, load_tokens_per_s=50_000.0)
# 2 s to load, 20 s to compute; the tool may end at 110 s and is expected to at 120 s.
AGENT = PrefetchCandidate(
    p_next=0.9, p_soon=0.8, tokens=100_000, early_end_s=110.0, expected_end_s=120.0
)
FULL = replace(AGENT, displaced_tokens=100_000, displaced_worth=1e-3)


def plan(candidate, now_s, speed=FAST, pressure=0.5):
    return plan_prefetch(candidate, speed, now_s=now_s, pressure=pressure, pressure_high=0.9)


def test_it_waits_until_loading_ends_when_the_tool_may_end():
    action = plan(AGENT, 50.0)
    assert (action.verdict, action.at_s) == (PrefetchVerdict.WAIT, 108.0)


@pytest.mark.parametrize("now_s", [108.0, 115.0, 118.5])
def test_it_starts_at_once_when_that_moment_has_come(now_s):
    assert plan(AGENT, now_s).verdict is PrefetchVerdict.START
    assert plan(AGENT, now_s).at_s == now_s


@pytest.mark.parametrize("now_s", [120.0, 500.0])
def test_it_is_too_late_when_nothing_would_be_saved(now_s):
    assert plan(AGENT, now_s).reason == "too late"
    assert plan(AGENT, now_s).at_s == math.inf


def test_a_tier_as_slow_as_prefill_is_left_alone():
    slow = TierSpeed(5_000.0, 5_000.0)
    assert plan(AGENT, 115.0, slow).reason == "prefill is as fast"


def test_high_pressure_cancels():
    assert plan(AGENT, 115.0, pressure=0.9).verdict is PrefetchVerdict.START
    assert plan(AGENT, 115.0, pressure=0.91).reason == "pressure is high"


def test_room_has_its_price():
    # Started at 108 s: saves 0.9 · 2 s; what gives way is read 0.012 times in 12 s, 20 s each.
    assert plan(FULL, 108.0).verdict is PrefetchVerdict.START
    dearest = replace(FULL, displaced_worth=0.05)
    assert plan(dearest, 108.0).reason == "the room is worth more"
    assert plan(replace(dearest, displaced_tokens=0), 108.0).verdict is PrefetchVerdict.START


def test_dear_room_is_taken_as_soon_as_it_pays():
    # 0.2 s are lost a second: 0.9 · 2 s pay for the 9 s before the end.
    dear = replace(FULL, displaced_worth=0.01)
    action = plan(dear, 50.0)
    assert action.verdict is PrefetchVerdict.WAIT
    assert action.at_s == pytest.approx(111.0)
    assert plan(dear, 110.9).at_s == action.at_s
    assert plan(dear, 111.1).verdict is PrefetchVerdict.START


def test_a_session_that_will_not_go_on_is_left():
    assert plan(replace(AGENT, p_next=0.0), 115.0).verdict is PrefetchVerdict.LEAVE


@pytest.mark.parametrize("p_soon", [0.0, 0.5, 0.51, 1.0])
def test_only_a_sure_forecast_is_computed_for(p_soon):
    computed = replace(AGENT, is_computed=True, p_soon=p_soon)
    is_sure = p_soon > 0.5
    assert (plan(computed, 115.0).verdict is PrefetchVerdict.START) is is_sure
    assert is_sure or plan(computed, 115.0).reason == "nobody knows when it comes"
    # What a slower tier holds costs the engine nothing.
    assert plan(replace(AGENT, p_soon=p_soon), 115.0).verdict is PrefetchVerdict.START


candidates = st.builds(
    lambda p, tokens, early, more, displaced, worth: PrefetchCandidate(
        p, 0.0, tokens, early, early + more, displaced, worth
    ),
    st.floats(0.0, 1.0),
    st.integers(1, 200_000),
    st.floats(0.0, 300.0),
    st.floats(0.0, 300.0),
    st.integers(0, 200_000),
    st.floats(0.0, 0.05) | st.floats(0.0, 1.0),
)


PLAN_TIMES = st.floats(0.0, 600.0)


def load_s(candidate):
    return candidate.tokens / FAST.load_tokens_per_s


def gain_s(candidate, start_s):
    """What a start at this time saves less what it costs, in seconds."""
    held_s = candidate.expected_end_s - start_s
    lost_s = candidate.displaced_tokens / FAST.prefill_tokens_per_s * candidate.displaced_worth
    return candidate.p_next * min(load_s(candidate), held_s) - lost_s * held_s


@PROPERTY
@given(candidates, PLAN_TIMES, st.floats(0.0, 1.0))
def test_a_likelier_return_is_never_loaded_later(candidate, now_s, p):
    low, high = sorted((candidate.p_next, p))
    less = plan(replace(candidate, p_next=low), now_s)
    more = plan(replace(candidate, p_next=high), now_s)
    assert more.at_s <= less.at_s


@PROPERTY
@given(candidates, PLAN_TIMES, st.integers(0, 200_000), st.floats(0.0, 1.0))
def test_dearer_room_is_never_taken_earlier(candidate, now_s, tokens, worth):
    dearer = replace(
        candidate,
        displaced_tokens=candidate.displaced_tokens + tokens,
        displaced_worth=candidate.displaced_worth + worth,
    )
    assert plan(dearer, now_s).at_s >= plan(candidate, now_s).at_s


@PROPERTY
@given(candidates, PLAN_TIMES)
def test_it_never_starts_in_the_past_nor_ends_after_the_expected_end(candidate, now_s):
    action = plan(candidate, now_s)
    end_s = candidate.expected_end_s
    if action.verdict is PrefetchVerdict.WAIT:
        assert now_s < action.at_s < end_s
        # Waiting never costs a part of the saving: loading is done by the expected end.
        assert action.at_s + load_s(candidate) <= end_s + 1e-6
        assert action.at_s + load_s(candidate) >= candidate.early_end_s - 1e-6
    elif action.verdict is PrefetchVerdict.START:
        assert action.at_s == now_s
        assert now_s < end_s
        assert now_s + load_s(candidate) >= candidate.early_end_s - 1e-6
    else:
        assert action.at_s == math.inf


@PROPERTY
@given(candidates, PLAN_TIMES)
def test_it_starts_when_and_only_when_that_pays(candidate, now_s):
    is_due = now_s >= candidate.early_end_s - load_s(candidate)
    gain = gain_s(candidate, now_s)
    if is_due and now_s < candidate.expected_end_s and abs(gain) > 1e-6:
        action = plan(candidate, now_s)
        assert (action.verdict is PrefetchVerdict.START) == (gain > 0.0)


@PROPERTY
@given(candidates, PLAN_TIMES, st.floats(0.0, 1.0))
def test_asking_again_meanwhile_changes_nothing(candidate, now_s, part):
    action = plan(candidate, now_s)
    if action.verdict is PrefetchVerdict.WAIT:
        assert plan(candidate, now_s + part * (action.at_s - now_s)).at_s == action.at_s
        assert plan(candidate, action.at_s).verdict is PrefetchVerdict.START
    elif action.verdict is PrefetchVerdict.LEAVE:
        later_s = now_s + part * 600.0
        assert plan(candidate, later_s).verdict is PrefetchVerdict.LEAVE
    else:
        later_s = now_s + part * (candidate.expected_end_s - now_s)
        if later_s < candidate.expected_end_s:
            assert plan(candidate, later_s).verdict is PrefetchVerdict.START


@PROPERTY
@given(candidates, PLAN_TIMES, st.floats(1.0, 5_000.0))
def test_a_tier_that_is_no_faster_is_never_used(candidate, now_s, load_rate):
    action = plan(candidate, now_s, TierSpeed(5_000.0, load_rate))
    assert action.reason == "prefill is as fast"


@PROPERTY
@given(candidates, PLAN_TIMES, st.floats(0.0, 1.0))
def test_pressure_only_cancels(candidate, now_s, pressure):
    action = plan(candidate, now_s, pressure=pressure)
    if pressure > 0.9:
        assert action.verdict is PrefetchVerdict.LEAVE
    else:
        assert action == plan(candidate, now_s, pressure=0.0)


def test_what_no_tier_holds_is_computed_in_the_time_that_takes():
    nowhere = replace(AGENT, is_computed=True)
    slow = TierSpeed(prefill_tokens_per_s=5_000.0, load_tokens_per_s=5_000.0)
    action = plan(nowhere, 50.0, slow)
    assert (action.verdict, action.at_s) == (PrefetchVerdict.WAIT, 90.0)
    assert plan(nowhere, 91.0, slow).verdict is PrefetchVerdict.START
    assert plan(nowhere, 91.0, slow, pressure=0.95).reason == "pressure is high"
