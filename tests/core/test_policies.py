"""Each policy's order on a few runs worked out by hand, and when it looks again."""

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saga_core.pauses import PauseModel, Step, View, Wait
from saga_core.policies import DEFAULT_POLICY, POLICIES, make_policy
from saga_core.policies.saga import Saga
from saga_core.retention import EvictionKey, Run, RunState
from saga_core.settings import RetentionSettings

PROPERTY = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
PAPER = RetentionSettings()
ENDED, IDLE, PAUSED, RESUMING = RunState
KINDS = ["paused", "ended", "superseded", "shared", "plain"]


def key(name, run, *, now_s=100.0, pressure=0.0, s=PAPER, model=None):
    return make_policy(name, s, model or PauseModel()).key(run, now_s=now_s, pressure=pressure)


def order(name, runs, **context):
    """Ids of the runs in the order in which they are given up."""
    return [run.run_id for run in sorted(runs, key=lambda run: key(name, run, **context))]


def test_policies_are_found_by_their_names():
    assert DEFAULT_POLICY == "saga"
    assert sorted(POLICIES) == [
        "fixed-ttl",
        "gdsf",
        "prefix-lru",
        "saga",
        "session-lru",
        "steps-to-execution",
        "thresholds",
        "wa-lru",
        "wa-lru-ttl",
    ]
    for name in POLICIES:
        assert make_policy(name, PAPER, PauseModel()).name == name


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_equal_runs_go_in_the_order_of_their_ids(name):
    runs = [Run(run_id, PAUSED, 50.0, 50.0, p_reuse=0.5) for run_id in (3, 1, 2)]
    assert order(name, runs) == [1, 2, 3]


# wa-lru


@pytest.mark.parametrize(
    ("run", "loss"),
    [
        # 0.3 · used ÷ 300 - 0.5 · (1 - p) - 0.2 · size
        (Run(1, IDLE, 0.0), -0.5),
        (Run(1, IDLE, 300.0), 0.3 - 0.5),
        (Run(1, PAUSED, 150.0, p_reuse=0.8), 0.15 - 0.1),
        (Run(1, PAUSED, 150.0, p_reuse=0.8, size_share=0.25), 0.15 - 0.1 - 0.05),
        (Run(1, PAUSED, 600.0, p_reuse=1.0, size_share=1.0), 0.6 - 0.2),
    ],
)
def test_the_papers_score_by_hand(run, loss):
    for name in ("wa-lru", "wa-lru-ttl"):
        assert key(name, run, now_s=1e6).loss == pytest.approx(loss)


def test_wa_lru_lets_a_weight_of_zero_decide_nothing():
    s = RetentionSettings(alpha=0.0, gamma=0.0)
    runs = [
        Run(1, IDLE, 90.0, p_reuse=0.2, size_share=0.9),
        Run(2, IDLE, 10.0, p_reuse=0.4),
        Run(3, IDLE, 50.0, p_reuse=0.1),
    ]
    assert order("wa-lru", runs, s=s) == [3, 1, 2]


def test_a_ttl_shrinks_with_the_pressure():
    run = Run(1, PAUSED, 0.0, 0.0, p_reuse=0.9, pause_p95_s=100.0)
    for pressure, until_s in ((0.0, 100.0), (0.7, 100.0), (0.8, 75.0), (0.9, 50.0), (1.0, 50.0)):
        found = key("wa-lru-ttl", run, now_s=20.0, pressure=pressure)
        assert found.review_s == pytest.approx(until_s)
    assert key("wa-lru-ttl", run, now_s=60.0).rank == PAUSED
    assert key("wa-lru-ttl", run, now_s=60.0, pressure=0.95).rank == IDLE


def test_protected_runs_go_last_but_they_go():
    runs = [
        Run(1, PAUSED, 0.0, 0.0, p_reuse=0.9, pause_p95_s=200.0),
        Run(2, PAUSED, 0.0, 0.0, p_reuse=0.6, pause_p95_s=200.0),
        Run(3, PAUSED, 99.0, 99.0, p_reuse=0.4, pause_p95_s=200.0),
        Run(4, PAUSED, 0.0, 0.0, p_reuse=1.0, pause_p95_s=99.0),
        Run(5, IDLE, 99.0, p_reuse=1.0),
        Run(6, ENDED, 99.5),
        Run(7, RESUMING, 0.0),
    ]
    assert order("wa-lru-ttl", runs) == [6, 3, 4, 5, 2, 1, 7]
    # The announced return starts the TTL anew.
    again = Run(4, PAUSED, 0.0, 98.0, p_reuse=1.0, pause_p95_s=99.0)
    assert key("wa-lru-ttl", again).review_s == 98.0 + 99.0


# thresholds


@pytest.mark.parametrize(
    ("pressure", "ids"),
    [
        (0.0, [6, 4, 1, 2, 3, 5]),
        (0.7, [6, 4, 1, 2, 3, 5]),
        (0.75, [6, 4, 2, 1, 3, 5]),
        (0.9, [6, 4, 2, 1, 3, 5]),
        (0.91, [6, 4, 3, 2, 1, 5]),
    ],
)
def test_the_three_regimes_of_thresholds(pressure, ids):
    runs = [
        Run(1, PAUSED, 10.0, 10.0, p_reuse=0.9, pause_p95_s=300.0),
        Run(2, PAUSED, 20.0, 20.0, p_reuse=0.8, pause_p95_s=80.0),
        Run(3, PAUSED, 30.0, 30.0, p_reuse=0.3, pause_p95_s=300.0),
        Run(4, IDLE, 5.0),
        Run(5, RESUMING, 0.0),
        Run(6, ENDED, 99.0),
    ]
    assert order("thresholds", runs, pressure=pressure) == ids


def test_thresholds_look_again_after_five_seconds_or_when_a_pause_is_due():
    run = Run(1, PAUSED, 20.0, 20.0, pause_p95_s=83.0)
    assert key("thresholds", run).review_s == 105.0
    assert key("thresholds", run, pressure=0.8).review_s == 103.0
    assert key("thresholds", run, pressure=0.8, now_s=103.0).review_s == 108.0
    assert key("thresholds", run, pressure=0.95).review_s == 105.0


# Baselines


def test_prefix_lru_knows_the_last_use_only():
    runs = [Run(1, RESUMING, 5.0), Run(2, ENDED, 6.0), Run(3, PAUSED, 4.0, 90.0, p_reuse=1.0)]
    assert order("prefix-lru", runs) == [3, 1, 2]


def test_session_lru_counts_a_branch_from_when_its_session_left_it():
    runs = [
        Run(1, IDLE, 10.0, idle_since_s=60.0),  # superseded when its session went on
        Run(2, PAUSED, 40.0, 40.0),
        Run(3, PAUSED, 70.0, 70.0),
        Run(4, IDLE, 50.0),  # a plain request's
    ]
    assert order("session-lru", runs) == [2, 4, 1, 3]
    assert order("prefix-lru", runs) == [1, 2, 4, 3]


def test_a_fixed_ttl_protects_a_pause_and_one_of_zero_none():
    s = RetentionSettings(fixed_ttl_s=0.0)
    runs = [Run(1, PAUSED, 30.0, 30.0), Run(2, IDLE, 20.0), Run(3, PAUSED, 10.0, 10.0)]
    assert order("fixed-ttl", runs, s=s) == [3, 2, 1]
    assert all(key("fixed-ttl", run, s=s).review_s == math.inf for run in runs)
    assert order("fixed-ttl", runs, now_s=35.0) == [2, 3, 1]
    assert order("fixed-ttl", runs, now_s=45.0) == [3, 2, 1]


def test_steps_to_execution_counts_steps():
    runs = [
        Run(1, PAUSED, 10.0, p_reuse=1.0),
        Run(2, PAUSED, 20.0, p_reuse=0.5),
        Run(3, PAUSED, 30.0, p_reuse=0.1),
        Run(4, PAUSED, 99.0, p_reuse=0.0),
        Run(5, RESUMING, 0.0),
    ]
    losses = {run.run_id: key("steps-to-execution", run).loss for run in runs}
    assert losses == {1: -1.0, 2: -2.0, 3: -10.0, 4: -math.inf, 5: 0.0}
    assert order("steps-to-execution", runs) == [4, 3, 2, 1, 5]


def test_steps_to_execution_takes_near_steps_as_equal():
    runs = [Run(1, PAUSED, 20.0, p_reuse=0.9), Run(2, PAUSED, 10.0, p_reuse=0.9001)]
    assert order("steps-to-execution", runs) == [2, 1]


def test_gdsf_never_deflates():
    policy = make_policy("gdsf", PAPER, PauseModel())

    def value(uses):
        return policy.key(Run(1, PAUSED, 0.0, uses=uses), now_s=0.0, pressure=0.0).loss

    assert value(3) == 3.0
    policy.gave_up(EvictionKey(0, 7.0, 0.0, 1))
    assert value(3) == 10.0
    policy.gave_up(EvictionKey(0, 2.0, 0.0, 2))
    assert value(3) == 10.0
    policy.gave_up(EvictionKey(0, 7.0, 0.0, 1))
    assert value(1) == 8.0


# saga


def wait_of(kind, since_s=0.0, scale=1.0):
    return Wait(View((kind,), since_s, scale))


def test_saga_gives_up_the_lower_worth_first_and_the_queued_last():
    # The priors: ended 0.01 and superseded 0.05 of a pause; an older pause is worth less.
    runs = [
        Run(1, RESUMING, 0.0, wait=wait_of("ended")),
        Run(2, PAUSED, 99.0, wait=wait_of("paused", 99.0)),
        Run(3, PAUSED, 50.0, wait=wait_of("paused", 50.0)),
        Run(4, IDLE, 99.0, wait=wait_of("superseded", 99.0)),
        Run(5, ENDED, 99.0, wait=wait_of("ended", 99.0)),
        Run(6, IDLE, 99.9),
        Run(7, RESUMING, 1.0),
    ]
    assert order("saga", runs) == [6, 5, 4, 3, 2, 1, 7]


def test_saga_ignores_the_size_and_the_state_of_what_is_watched():
    wait = wait_of("paused")
    losses = {
        key("saga", Run(1, state, 0.0, size_share=size, p_reuse=p, uses=uses, wait=wait)).loss
        for state, size, p, uses in ((ENDED, 0.0, 0.0, 1), (IDLE, 1.0, 0.5, 2), (PAUSED, 0.5, 1, 9))
    }
    assert len(losses) == 1


@PROPERTY
@given(st.sampled_from(KINDS), st.floats(0.0, 1e4), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_copy_in_a_slower_tier_scales_the_worth(kind, age_s, share, other_share):
    model, wait = PauseModel(), wait_of(kind)
    low, high = (
        key("saga", Run(1, PAUSED, 0.0, wait=wait, reload_share=s), now_s=age_s, model=model)
        for s in sorted((share, other_share))
    )
    worth = model.worth(wait, now_s=age_s)
    assert low.loss == pytest.approx(min(share, other_share) * worth)
    assert low.loss <= high.loss <= worth


@PROPERTY
@given(st.sampled_from(KINDS), st.floats(0.0, 1e4), st.sampled_from([0.1, 1.0, 60.0]))
def test_saga_looks_again_at_the_end_of_the_age_bucket(kind, age_s, scale):
    model, wait = PauseModel(), wait_of(kind, scale=scale)
    found = key("saga", Run(1, PAUSED, 0.0, wait=wait), now_s=age_s, model=model)
    until_s = model.worth_until_s(wait, now_s=age_s)
    soonest_s, latest_s = age_s + Saga._MIN_REVIEW_S, age_s + 60.0
    assert found.review_s == min(max(soonest_s, until_s), latest_s)


def test_saga_follows_a_hint_while_it_is_trusted():
    model = PauseModel()
    told, untold = (model.paused(s, Step(), now_s=0.0) for s in "ab")
    model.ended(told, now_s=0.0)
    runs = [Run(1, PAUSED, 0.0, wait=untold), Run(2, PAUSED, 0.0, wait=told)]
    assert order("saga", runs, now_s=1.0, model=model) == [2, 1]
    for _ in range(10):
        model._trust.judge("ended", -3.0)
    assert order("saga", runs, now_s=1.0, model=model) == [1, 2]


def test_saga_needs_no_second_look_without_a_wait():
    for run in (Run(1, PAUSED, 0.0), Run(1, RESUMING, 0.0, wait=wait_of("paused"))):
        assert key("saga", run).review_s == math.inf
        assert key("saga", run).loss == 0.0
