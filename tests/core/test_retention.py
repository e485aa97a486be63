"""The formulas of the known retention policies."""

import math
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saga_core.errors import SettingsError
from saga_core.pauses import PauseModel, Step, View, Wait
from saga_core.policies import POLICIES, make_policy
from saga_core.retention import Run, RunState
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
        "pause_p95_s": st.just(0.0) | st.floats(0.0, 300.0),
        "idle_since_s": st.floats(0.0, 1e5),
    }
    return st.builds(Run, st.just(run_id), **{**parts, **changes})


class Made:
    """A policy at one pressure, with a model that has seen nothing unless one is given."""

    def __init__(self, name, s=PAPER, model=None, pressure=0.0):
        self.policy, self.pressure = make_policy(name, s, model or PauseModel()), pressure

    def key(self, run, *, now_s):
        return self.policy.key(run, now_s=now_s, pressure=self.pressure)


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
    policy = Made("wa-lru", s)
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
        (Run(2, RunState.IDLE, 5.0, size_share=0.2), Run(1, RunState.IDLE, 5.0, size_share=0.1)),
        # A run of 10 % of the pool goes as early as one that is idle for 20 s longer.
        (Run(2, RunState.IDLE, 19.9, size_share=0.1), Run(1, RunState.IDLE, 0.0)),
        (Run(1, RunState.IDLE, 0.0), Run(2, RunState.IDLE, 20.1, size_share=0.1)),
        # Half a chance of return outweighs 250 s of recency.
        (Run(2, RunState.IDLE, 249.0), Run(1, RunState.IDLE, 0.0, p_reuse=0.5)),
        (Run(1, RunState.IDLE, 0.0, p_reuse=0.5), Run(2, RunState.IDLE, 251.0)),
        (Run(1, RunState.IDLE, 5.0), Run(2, RunState.IDLE, 5.0)),
    ],
)
def test_wa_lru_with_the_papers_constants(first, second):
    policy = Made("wa-lru")
    assert policy.key(first, now_s=1e3) < policy.key(second, now_s=1e3)


@PROPERTY
@given(
    *(runs(1 + n, state=st.just(state)) for n, state in enumerate(RunState)),
    constants,
    st.floats(0.0, 2e5),
)
def test_wa_lru_lets_ended_go_first_and_resuming_last(ended, idle, paused, resuming, s, now_s):
    policy = Made("wa-lru-ttl", s)
    keys = [policy.key(run, now_s=now_s) for run in (ended, idle, paused, resuming)]
    assert keys[0] < min(keys[1:])
    assert keys[3] > max(keys[:3])


@PROPERTY
@given(st.floats(1e-3, 300.0), st.floats(0.5, 1.0))
def test_wa_lru_protection_ends_exactly_with_the_ttl(until_s, p_reuse):
    policy = Made("wa-lru-ttl")
    run = Run(1, RunState.PAUSED, 0.0, p_reuse=p_reuse, idle_since_s=0.0, pause_p95_s=until_s)
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
    policy = Made("wa-lru-ttl", RetentionSettings(protect_min_p_reuse=least))
    run = Run(1, RunState.PAUSED, 0.0, p_reuse=p_reuse, idle_since_s=0.0, pause_p95_s=10.0)
    valuable = Run(2, RunState.IDLE, 1e9, p_reuse=1.0)
    key = policy.key(run, now_s=5.0)
    assert (key > policy.key(valuable, now_s=5.0)) == is_protected
    assert key.review_s == (10.0 if is_protected else math.inf)


@pytest.mark.parametrize("state", [RunState.ENDED, RunState.IDLE, RunState.RESUMING])
def test_wa_lru_gives_a_ttl_to_paused_runs_only(state):
    policy = Made("wa-lru-ttl")
    protected = Run(1, state, 0.0, p_reuse=1.0, idle_since_s=0.0, pause_p95_s=10.0)
    plain = Run(1, state, 0.0, p_reuse=1.0)
    assert policy.key(protected, now_s=5.0) == policy.key(plain, now_s=5.0)


@PROPERTY
@given(runs(1), runs(2), st.floats(0.0, 2e5))
def test_prefix_lru_looks_at_the_last_use_only(a, b, now_s):
    policy = Made("prefix-lru")
    a_goes_first = policy.key(a, now_s=now_s) < policy.key(b, now_s=now_s)
    assert a_goes_first == (a.last_used_s <= b.last_used_s)


def test_an_unknown_policy_is_named_with_those_that_exist():
    with pytest.raises(SettingsError) as caught:
        make_policy("lru", PAPER, PauseModel())
    message = f"unknown policy 'lru'; choose one of {', '.join(sorted(POLICIES))}"
    assert str(caught.value) == message


def ordered(policy, runs_by_name, now_s):
    """Names in the order in which their runs are given up."""
    return sorted(runs_by_name, key=lambda name: policy.key(runs_by_name[name], now_s=now_s))


THREE_PAUSES = {
    "overdue": Run(1, RunState.PAUSED, 50.0, 50.0, p_reuse=0.9, pause_p95_s=10.0),
    "oldest": Run(2, RunState.PAUSED, 40.0, 40.0, p_reuse=0.8, pause_p95_s=500.0),
    "unlikely": Run(3, RunState.PAUSED, 60.0, 60.0, p_reuse=0.1, pause_p95_s=500.0),
}


@pytest.mark.parametrize(
    ("pressure", "order"),
    [
        (0.7, ["oldest", "overdue", "unlikely"]),
        (0.8, ["overdue", "oldest", "unlikely"]),
        (0.95, ["unlikely", "oldest", "overdue"]),
    ],
)
def test_thresholds_change_the_rule_with_the_pressure(pressure, order):
    assert ordered(Made("thresholds", pressure=pressure), THREE_PAUSES, 100.0) == order


def test_fixed_ttl_protects_every_pause_for_the_same_time():
    policy = Made("fixed-ttl", RetentionSettings(fixed_ttl_s=45.0))
    assert ordered(policy, THREE_PAUSES, 80.0) == ["oldest", "overdue", "unlikely"]
    paused = Run(1, RunState.PAUSED, 0.0, 50.0)
    plain = Run(2, RunState.IDLE, 60.0)
    assert policy.key(paused, now_s=94.0) > policy.key(plain, now_s=94.0)
    assert policy.key(paused, now_s=95.0) < policy.key(plain, now_s=95.0)
    assert policy.key(paused, now_s=94.0).review_s == 95.0


def test_steps_to_execution_gives_up_the_farthest():
    runs_by_name = {
        **THREE_PAUSES,
        "ended": Run(4, RunState.ENDED, 99.0),
        "plain": Run(5, RunState.IDLE, 99.0),
        "queued": Run(6, RunState.RESUMING, 0.0),
    }
    order = ["ended", "plain", "unlikely", "oldest", "overdue", "queued"]
    assert ordered(Made("steps-to-execution"), runs_by_name, 100.0) == order


def test_gdsf_inflates_what_comes_later():
    policy = make_policy("gdsf", PAPER, PauseModel())
    often = policy.key(Run(1, RunState.PAUSED, 0.0, uses=5), now_s=0.0, pressure=0.0)
    policy.gave_up(often)
    once = policy.key(Run(2, RunState.PAUSED, 1.0, uses=1), now_s=1.0, pressure=0.0)
    again = policy.key(Run(3, RunState.PAUSED, 1.0, uses=5), now_s=1.0, pressure=0.0)
    assert often < once < again
    assert once.loss == 6.0


def test_session_lru_lets_a_branch_be_as_recent_as_its_session():
    branch = Run(1, RunState.IDLE, 10.0, idle_since_s=50.0)
    other = Run(2, RunState.PAUSED, 20.0, idle_since_s=20.0)
    assert Made("prefix-lru").key(branch, now_s=60.0) < Made("prefix-lru").key(other, now_s=60.0)
    assert Made("session-lru").key(branch, now_s=60.0) > Made("session-lru").key(other, now_s=60.0)


def test_saga_gives_up_what_is_least_worth_its_room():
    model = PauseModel()
    policy = Made("saga", model=model)
    quick = [model.paused(f"q{n}", Step(ending="tool"), now_s=0.0) for n in range(40)]
    slow = [model.paused(f"s{n}", Step(ending="answer"), now_s=0.0) for n in range(40)]
    for wait in quick:
        model.read(wait, now_s=5.0)
    for wait in slow:
        model.read(wait, now_s=500.0)
    # The older one is the better one here: recency alone would be wrong.
    tool = model.paused("a", Step(ending="tool"), now_s=600.0)
    answer = model.paused("b", Step(ending="answer"), now_s=601.0)
    runs_by_name = {
        "tool": Run(1, RunState.PAUSED, 600.0, wait=tool),
        "answer": Run(2, RunState.PAUSED, 601.0, wait=answer),
        "queued": Run(3, RunState.RESUMING, 0.0, wait=answer),
        "tool with a copy below": Run(4, RunState.PAUSED, 600.0, wait=tool, reload_share=1e-6),
    }
    order = ["tool with a copy below", "answer", "tool", "queued"]
    assert ordered(policy, runs_by_name, 602.0) == order


@given(st.floats(0.0, 1e5), st.sampled_from([1.0, 0.01, 100.0]))
def test_saga_reviews_within_a_minute(age_s, scale):
    wait = Wait(View(("paused",), 0.0, scale))
    key = Made("saga").key(Run(1, RunState.PAUSED, 0.0, wait=wait), now_s=age_s)
    assert age_s < key.review_s <= age_s + 60.0
