"""The formulas of the known retention policies."""

import math
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saga_core.errors import SettingsError
from saga_core.retention import (
    POLICIES,
    PrefixLRU,
    Run,
    RunState,
    WorkflowAwareLRU,
    make_policy,
)
from saga_core.settings import RetentionSettings

PROPERTY = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
PAPER = RetentionSettings()
SHARE = st.floats(0.0, 1.0)

constants = st.builds(
    RetentionSettings, alpha=SHARE, beta=SHARE, gamma=SHARE, tau_max_s=st.floats(1.0, 1e4)
)


def runs(run_id, **changes):
    parts = {
        "state": st.sampled_from(RunState),
        "last_used_s": st.floats(0.0, 1e5),
        "size_share": SHARE,
        "p_reuse": SHARE,
        "protected_until_s": st.just(-math.inf) | st.floats(0.0, 2e5),
    }
    return st.builds(Run, st.just(run_id), **{**parts, **changes})


def p_evict(run, now_s, s):
    """The paper's score, exactly; the highest goes first."""
    recency = (Fraction(now_s) - Fraction(run.last_used_s)) / Fraction(s.tau_max_s)
    return (
        Fraction(s.alpha) * recency
        + Fraction(s.beta) * (1 - Fraction(run.p_reuse))
        + Fraction(s.gamma) * Fraction(run.size_share)
    )


@PROPERTY
@given(
    *(runs(n, state=st.just(RunState.IDLE)) for n in (1, 2)),
    constants,
    st.floats(0.0, 1e5),
)
def test_wa_lru_orders_idle_runs_as_the_paper_scores_them_at_any_time(a, b, s, wait_s):
    policy = WorkflowAwareLRU(s)
    now_s = max(a.last_used_s, b.last_used_s) + wait_s
    score_a, score_b = p_evict(a, now_s, s), p_evict(b, now_s, s)
    if abs(score_a - score_b) > 1e-9:
        a_goes_first = policy.key(a, now_s=now_s) < policy.key(b, now_s=now_s)
        assert a_goes_first == (score_a > score_b)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Run(2, RunState.IDLE, 1.0), Run(1, RunState.IDLE, 2.0)),
        (Run(2, RunState.IDLE, 5.0, p_reuse=0.1), Run(1, RunState.IDLE, 5.0, p_reuse=0.2)),
        (Run(2, RunState.IDLE, 5.0, 0.2), Run(1, RunState.IDLE, 5.0, 0.1)),
        # A run of 10 % of the pool goes as early as one that is idle for 20 s longer.
        (Run(2, RunState.IDLE, 19.9, 0.1), Run(1, RunState.IDLE, 0.0, 0.0)),
        (Run(1, RunState.IDLE, 0.0, 0.0), Run(2, RunState.IDLE, 20.1, 0.1)),
        # Half a chance of return outweighs 250 s of recency.
        (Run(2, RunState.IDLE, 249.0), Run(1, RunState.IDLE, 0.0, p_reuse=0.5)),
        (Run(1, RunState.IDLE, 0.0, p_reuse=0.5), Run(2, RunState.IDLE, 251.0)),
        (Run(1, RunState.IDLE, 5.0), Run(2, RunState.IDLE, 5.0)),
    ],
)
def test_wa_lru_with_the_papers_constants(first, second):
    policy = WorkflowAwareLRU(PAPER)
    assert policy.key(first, now_s=1e3) < policy.key(second, now_s=1e3)


@PROPERTY
@given(
    *(runs(1 + n, state=st.just(state)) for n, state in enumerate(RunState)),
    constants,
    st.floats(0.0, 2e5),
)
def test_wa_lru_lets_ended_go_first_and_resuming_last(ended, idle, paused, resuming, s, now_s):
    policy = WorkflowAwareLRU(s)
    keys = [policy.key(run, now_s=now_s) for run in (ended, idle, paused, resuming)]
    assert keys[0] < min(keys[1:])
    assert keys[3] > max(keys[:3])


@PROPERTY
@given(st.floats(1e-3, 1e6), st.floats(0.5, 1.0))
def test_wa_lru_protection_ends_exactly_with_the_ttl(until_s, p_reuse):
    policy = WorkflowAwareLRU(PAPER)
    run = Run(1, RunState.PAUSED, 0.0, p_reuse=p_reuse, protected_until_s=until_s)
    worthless = Run(2, RunState.IDLE, -1e9)
    valuable = Run(3, RunState.IDLE, 1e9, p_reuse=1.0)
    before = policy.key(run, now_s=math.nextafter(until_s, -math.inf))
    after = policy.key(run, now_s=until_s)
    assert before > policy.key(valuable, now_s=until_s)
    assert before.review_s == until_s
    assert policy.key(worthless, now_s=until_s) < after < policy.key(valuable, now_s=until_s)
    assert after.review_s == math.inf


@pytest.mark.parametrize(
    ("least", "p_reuse", "is_protected"),
    [
        (0.5, 0.5, True),
        (0.5, math.nextafter(0.5, 0.0), False),
        (0.5, 1.0, True),
        (0.0, 0.0, True),
        (1.0, math.nextafter(1.0, 0.0), False),
        (1.0, 1.0, True),
    ],
)
def test_wa_lru_protects_only_those_likely_to_return(least, p_reuse, is_protected):
    policy = WorkflowAwareLRU(RetentionSettings(protect_min_p_reuse=least))
    run = Run(1, RunState.PAUSED, 0.0, p_reuse=p_reuse, protected_until_s=10.0)
    valuable = Run(2, RunState.IDLE, 1e9, p_reuse=1.0)
    key = policy.key(run, now_s=5.0)
    assert (key > policy.key(valuable, now_s=5.0)) == is_protected
    assert key.review_s == (10.0 if is_protected else math.inf)


@pytest.mark.parametrize("state", [RunState.ENDED, RunState.IDLE, RunState.RESUMING])
def test_wa_lru_gives_a_ttl_to_paused_runs_only(state):
    policy = WorkflowAwareLRU(PAPER)
    protected = Run(1, state, 0.0, p_reuse=1.0, protected_until_s=10.0)
    plain = Run(1, state, 0.0, p_reuse=1.0)
    assert policy.key(protected, now_s=5.0) == policy.key(plain, now_s=5.0)


@PROPERTY
@given(runs(1), runs(2), st.floats(0.0, 2e5))
def test_prefix_lru_looks_at_the_last_use_only(a, b, now_s):
    policy = PrefixLRU(PAPER)
    a_goes_first = policy.key(a, now_s=now_s) < policy.key(b, now_s=now_s)
    assert a_goes_first == (a.last_used_s <= b.last_used_s)


def test_an_unknown_policy_is_named_with_those_that_exist():
    with pytest.raises(SettingsError) as caught:
        make_policy("lru", PAPER)
    message = f"unknown policy 'lru'; choose one of {', '.join(sorted(POLICIES))}"
    assert str(caught.value) == message
