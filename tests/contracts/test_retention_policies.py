"""What every retention policy keeps to.

A policy joins by standing in ``POLICIES``.
"""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saga_core.pauses import PauseModel, Step, View, Wait
from saga_core.policies import POLICIES, make_policy
from saga_core.retention import EvictionOrder, Run, RunState
from saga_core.settings import RetentionSettings
from saga_core.types import Pause
from tests.contracts.runs import (
    PRESSURE,
    PROPERTY,
    SHARE,
    TIMES,
    constants,
    every_policy,
    make,
    run_of,
)

# Policies whose reviews are some seconds apart at the least: until then a key may be out of date.
COARSE_S = {"saga": 1.0}


def place_of(key):
    """The part of a key that orders."""
    return key[:4]


@every_policy
def test_a_policy_bears_the_name_that_chooses_it(name):
    assert make(name).name == name


@every_policy
@PROPERTY
@given(run_of(st.integers(1, 10**6)), constants, TIMES, SHARE)
def test_the_same_run_time_and_pressure_give_the_same_key(name, run, s, now_s, pressure):
    policy = make(name, s)
    key = policy.key(run, now_s=now_s, pressure=pressure)
    assert policy.key(run, now_s=now_s, pressure=pressure) == key
    again = make(name, s).key(Run(*run), now_s=now_s, pressure=pressure)
    assert again == key


@every_policy
@PROPERTY
@given(st.lists(run_of(st.just(0)), max_size=8), constants, TIMES)
def test_keys_of_different_runs_have_a_total_order(name, templates, s, now_s):
    policy = make(name, s)
    runs = [run._replace(run_id=n) for n, run in enumerate(templates)]
    keys = [policy.key(run, now_s=now_s, pressure=0.8) for run in runs]
    for run, key in zip(runs, keys, strict=True):
        assert key.run_id == run.run_id
        assert not any(math.isnan(part) for part in key)
    ordered = sorted(keys)
    for before, after in itertools.pairwise(ordered):
        assert place_of(before) < place_of(after)


@every_policy
@PROPERTY
@given(run_of(st.just(1)), constants, TIMES, SHARE, st.sampled_from([0.0, 0.8, 1.0]))
def test_a_place_holds_unchanged_until_its_review(name, run, s, now_s, share, pressure):
    policy = make(name, s)
    key = policy.key(run, now_s=now_s, pressure=pressure)
    assert key.review_s > now_s
    end_s = min(key.review_s, now_s + 1e6)
    if end_s - now_s <= COARSE_S.get(name, 0.0) + 1e-6:
        return
    for later_s in (now_s + share * (end_s - now_s), end_s - 1e-9 * end_s):
        if now_s <= later_s < end_s - 1e-10 * end_s:
            later = policy.key(run, now_s=later_s, pressure=pressure)
            assert place_of(later) == place_of(key)


def idle(run_id, state, last_used_s, size_share, p_reuse=0.0, pause_p95_s=0.0, kind="paused"):
    return Run(
        run_id,
        state,
        last_used_s,
        idle_since_s=last_used_s,
        size_share=size_share,
        uses=run_id % 3 + 1,
        p_reuse=p_reuse,
        pause_p95_s=pause_p95_s,
        wait=Wait(View((kind,), last_used_s)),
    )


# Their order is by recency or frequency alone, whatever a run waits for.
BLIND = {"prefix-lru", "session-lru", "gdsf"}
every_aware_policy = pytest.mark.parametrize("name", sorted(set(POLICIES) - BLIND))


def test_the_blind_policies_are_those_that_exist():
    assert set(POLICIES) > BLIND


@every_aware_policy
@PROPERTY
@given(run_of(st.just(1)), constants, TIMES, SHARE)
def test_a_session_whose_request_is_queued_goes_after_its_equals(name, run, s, now_s, pressure):
    policy = make(name, s)
    resuming, *others = (
        policy.key(run._replace(run_id=run_id, state=state), now_s=now_s, pressure=pressure)
        for run_id, state in enumerate(sorted(RunState, reverse=True))
    )
    assert all(other < resuming for other in others)


@every_aware_policy
@PROPERTY
@given(run_of(st.just(1)), constants, TIMES, SHARE, st.floats(0.0, 3600.0))
def test_an_ended_session_goes_before_one_that_pauses(name, run, s, now_s, pressure, age_s):
    """Unless it was learned that ended sessions come back, see the test of ``saga`` below."""
    policy = make(name, s)
    ended, paused = (
        policy.key(
            run._replace(
                run_id=run_id,
                state=state,
                last_used_s=now_s - age_s,
                idle_since_s=now_s - age_s,
                wait=Wait(View((kind,), now_s - age_s)),
                reload_share=1.0,
            ),
            now_s=now_s,
            pressure=pressure,
        )
        for run_id, state, kind in (
            (2, RunState.ENDED, "ended"),
            (1, RunState.PAUSED, "paused"),
        )
    )
    assert ended < paused


def test_saga_stops_believing_in_ends_that_are_not():
    model = PauseModel()
    policy = make_policy("saga", RetentionSettings(), model)
    now_s, keys = 0.0, []
    for number in range(100):
        ended = model.paused("liar", Step(), now_s=now_s)
        model.ended(ended, now_s=now_s)
        paused = model.paused("other", Step(), now_s=now_s)
        keys.append(
            [
                policy.key(
                    Run(run_id, state, now_s, now_s, wait=wait), now_s=now_s, pressure=PRESSURE
                )
                for run_id, state, wait in (
                    (1, RunState.ENDED, ended),
                    (2, RunState.PAUSED, paused),
                )
            ]
        )
        model.read(ended, now_s=now_s + 3.0, session_id="liar")
        if number % 2:
            model.read(paused, now_s=now_s + 4.0, session_id="other")
        now_s += 10.0
    assert keys[0][0] < keys[0][1]
    assert keys[-1][0].loss >= keys[-1][1].loss


EXTREME_TIMES = st.sampled_from([0.0, -0.0, 5e-324, 1e-9, 7200.0, 86_400.0, 1e9, -1e9])


@every_policy
@PROPERTY
@given(
    run_of(st.just(1)), EXTREME_TIMES, EXTREME_TIMES, EXTREME_TIMES, EXTREME_TIMES, SHARE, constants
)
def test_no_time_is_too_early_or_too_late(name, run, now_s, used_s, idle_s, since_s, share, s):
    """Also when a clock went back: a run may seem to have been left in the future."""
    wait = None if run.wait is None else Wait(View(run.wait.plain.cls, since_s))
    run = run._replace(last_used_s=used_s, idle_since_s=idle_s, wait=wait)
    key = make(name, s).key(run, now_s=now_s, pressure=share)
    assert key.review_s > now_s
    assert not any(math.isnan(part) for part in key)
    order = EvictionOrder(make(name, s))
    order.put(run, now_s=now_s, pressure=share)
    assert order.first(now_s=now_s, pressure=share) == 1
    assert order.first(now_s=max(now_s, 1e9), pressure=share) == 1


def history_of(name, seed):
    """Decisions over a history of steps, hints, reads and evictions, with a model that learns."""
    rng, model = random.Random(seed), PauseModel(max_sessions=30)
    order = EvictionOrder(make_policy(name, RetentionSettings(), model))
    waits, decisions, now_s = {}, [], 0.0
    for number in range(1500):
        now_s += rng.choice([0.0, 0.25, 3.0])
        session_id = f"s{rng.randrange(20)}"
        run_id, wait = waits.pop(session_id, (0, None))
        state = RunState.PAUSED
        if wait is None or rng.random() < 0.5:
            if wait is not None:
                order.discard(run_id)
                share = rng.choice([0.0, 0.5, 1.0])
                model.read(wait, now_s=now_s, share=share, session_id=session_id)
            step = Step(rng.randrange(5000), rng.random(), rng.randrange(3))
            run_id, wait = number, model.paused(session_id, step, now_s=now_s)
        elif rng.random() < 0.4:
            model.announced(wait, now_s=now_s)
        elif rng.random() < 0.4:
            model.ended(wait, now_s=now_s)
            state = RunState.ENDED
        else:
            p50_s = rng.choice([None, 4.0])
            model.told(session_id, wait, Pause(0.5, 9.0, "bash", p50_s), now_s=now_s)
        waits[session_id] = run_id, wait
        p_reuse, p95_s = model.p_reuse(wait), model.p95_s(wait)
        run = Run(run_id, state, now_s, now_s, 0.1, 1, p_reuse, p95_s, wait)
        order.put(run, now_s=now_s, pressure=PRESSURE)
        first = order.first(now_s=now_s, pressure=PRESSURE)
        decisions.append(first)
        if rng.random() < 0.2:
            order.discard(first)
    return decisions


@every_policy
def test_the_same_events_give_the_same_decisions(name):
    decisions = history_of(name, 1)
    assert history_of(name, 1) == decisions
    assert history_of(name, 2) != decisions


GOLDEN_RUNS = {
    "ended, just now": idle(1, RunState.ENDED, 100.0, 0.01, kind="ended"),
    "plain, old": idle(2, RunState.IDLE, 10.0, 0.01, kind="plain"),
    "plain, newer and large": idle(3, RunState.IDLE, 25.0, 0.2, kind="plain"),
    "superseded, new": idle(4, RunState.IDLE, 90.0, 0.01, kind="superseded"),
    "paused, TTL over": idle(5, RunState.PAUSED, 20.0, 0.1, 0.9, 30.0),
    "paused, in its TTL": idle(6, RunState.PAUSED, 75.0, 0.1, 0.9, 80.0),
    "paused, in its TTL, unlikely": idle(7, RunState.PAUSED, 60.0, 0.1, 0.3, 60.0),
    "resuming, oldest": idle(8, RunState.RESUMING, 5.0, 0.1, 0.9),
}
GOLDEN = {
    "fixed-ttl": [
        "ended, just now",
        "plain, old",
        "paused, TTL over",
        "plain, newer and large",
        "paused, in its TTL, unlikely",
        "superseded, new",
        "paused, in its TTL",
        "resuming, oldest",
    ],
    "gdsf": [
        "plain, newer and large",
        "paused, in its TTL",
        "paused, in its TTL, unlikely",
        "superseded, new",
        "ended, just now",
        "resuming, oldest",
        "plain, old",
        "paused, TTL over",
    ],
    "prefix-lru": [
        "resuming, oldest",
        "plain, old",
        "paused, TTL over",
        "plain, newer and large",
        "paused, in its TTL, unlikely",
        "paused, in its TTL",
        "superseded, new",
        "ended, just now",
    ],
    "saga": [
        "ended, just now",
        "superseded, new",
        "plain, old",
        "paused, TTL over",
        "plain, newer and large",
        "paused, in its TTL, unlikely",
        "paused, in its TTL",
        "resuming, oldest",
    ],
    "session-lru": [
        "resuming, oldest",
        "plain, old",
        "paused, TTL over",
        "plain, newer and large",
        "paused, in its TTL, unlikely",
        "paused, in its TTL",
        "superseded, new",
        "ended, just now",
    ],
    "steps-to-execution": [
        "ended, just now",
        "plain, old",
        "plain, newer and large",
        "superseded, new",
        "paused, in its TTL, unlikely",
        "paused, TTL over",
        "paused, in its TTL",
        "resuming, oldest",
    ],
    "thresholds": [
        "ended, just now",
        "plain, old",
        "paused, TTL over",
        "plain, newer and large",
        "paused, in its TTL, unlikely",
        "paused, in its TTL",
        "superseded, new",
        "resuming, oldest",
    ],
    "wa-lru": [
        "ended, just now",
        "plain, newer and large",
        "plain, old",
        "superseded, new",
        "paused, in its TTL, unlikely",
        "paused, TTL over",
        "paused, in its TTL",
        "resuming, oldest",
    ],
    "wa-lru-ttl": [
        "ended, just now",
        "plain, newer and large",
        "plain, old",
        "superseded, new",
        "paused, in its TTL, unlikely",
        "paused, TTL over",
        "paused, in its TTL",
        "resuming, oldest",
    ],
}


@pytest.mark.parametrize("known", sorted(GOLDEN))
def test_a_known_policy_decides_as_it_always_did(known):
    order = EvictionOrder(make(known))
    for run in GOLDEN_RUNS.values():
        order.put(run, now_s=100.0, pressure=0.0)
    label_of = {run.run_id: label for label, run in GOLDEN_RUNS.items()}
    gone = []
    while (run_id := order.first(now_s=100.0, pressure=0.0)) is not None:
        gone.append(label_of[run_id])
        order.discard(run_id)
    assert gone == GOLDEN[known]
