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
AGENT = PrefetchCandidate(p_next=0.9, tokens=100_000, early_end_s=110.0, expected_end_s=120.0)
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


def test_it_is_too_late_when_nothing_would_be_saved():
    assert plan(AGENT, 120.0).verdict is PrefetchVerdict.LEAVE


def test_a_tier_as_slow_as_prefill_is_left_alone():
    slow = TierSpeed(5_000.0, 5_000.0)
    assert plan(AGENT, 115.0, slow).reason == "prefill is as fast"


def test_high_pressure_cancels():
    assert plan(AGENT, 115.0, pressure=0.9).verdict is PrefetchVerdict.START
    assert plan(AGENT, 115.0, pressure=0.91).reason == "pressure is high"


def test_room_has_its_price():
    # Started at 108 s: saves 0.9 · 2 s; what gives way is read 0.012 times in 12 s, 20 s each.
    assert plan(FULL, 108.0).verdict is PrefetchVerdict.START
    dear = replace(FULL, displaced_worth=0.01)
    assert plan(dear, 108.0).reason == "the room is worth more"
    assert plan(replace(dear, displaced_tokens=0), 108.0).verdict is PrefetchVerdict.START


def test_a_session_that_will_not_go_on_is_left():
    assert plan(replace(AGENT, p_next=0.0), 115.0).verdict is PrefetchVerdict.LEAVE


candidates = st.builds(
    lambda p, tokens, early, more, displaced, worth: PrefetchCandidate(
        p, tokens, early, early + more, displaced, worth
    ),
    st.floats(0.0, 1.0),
    st.integers(1, 200_000),
    st.floats(0.0, 300.0),
    st.floats(0.0, 300.0),
    st.integers(0, 200_000),
    st.floats(0.0, 1.0),
)


@PROPERTY
@given(candidates, st.floats(0.0, 600.0), st.floats(0.0, 1.0))
def test_a_likelier_return_is_never_left_where_a_less_likely_one_is_not(candidate, now_s, p):
    low, high = sorted((candidate.p_next, p))
    less = plan(replace(candidate, p_next=low), now_s)
    more = plan(replace(candidate, p_next=high), now_s)
    if less.verdict is not PrefetchVerdict.LEAVE:
        assert more == less


@PROPERTY
@given(candidates, st.floats(0.0, 600.0))
def test_it_never_starts_in_the_past_nor_waits_beyond_the_early_end(candidate, now_s):
    action = plan(candidate, now_s)
    if action.verdict is PrefetchVerdict.WAIT:
        assert now_s < action.at_s < candidate.early_end_s
        load_s = candidate.tokens / FAST.load_tokens_per_s
        assert action.at_s + load_s == pytest.approx(candidate.early_end_s)
        assert plan(candidate, action.at_s).verdict is PrefetchVerdict.START
    elif action.verdict is PrefetchVerdict.START:
        assert action.at_s == now_s
        assert now_s < candidate.expected_end_s
    else:
        assert action.at_s == math.inf
