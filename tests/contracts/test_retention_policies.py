"""What every retention policy keeps to, and the eviction order built on it.

A policy joins by standing in ``POLICIES``.
"""

import dataclasses
import itertools
import math
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from saga_core.pauses import PauseModel, View, Wait
from saga_core.policies import POLICIES, make_policy
from saga_core.retention import EvictionOrder, Run, RunState
from saga_core.settings import RetentionSettings

PROPERTY = settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
STATEFUL = settings(PROPERTY, max_examples=50, stateful_step_count=40)
SHARE = st.floats(0.0, 1.0)
every_policy = pytest.mark.parametrize("name", sorted(POLICIES))
# Few values beside the many, so that runs tie.
TIMES = st.integers(0, 20).map(float) | st.floats(0.0, 1e5)

constants = st.just(RetentionSettings()) | st.builds(
    RetentionSettings,
    alpha=SHARE,
    beta=SHARE,
    gamma=SHARE,
    tau_max_s=st.floats(1.0, 1e4),
    protect_min_p_reuse=SHARE,
)


KINDS = ["paused", "ended", "superseded", "shared", "plain"]


def run_of(run_id):
    waits = st.builds(
        lambda kind, since_s, scale: Wait(View((kind,), since_s, scale)),
        st.sampled_from(KINDS),
        TIMES,
        st.sampled_from([1.0, 0.1, 60.0]),
    )
    return st.builds(
        Run,
        run_id,
        st.sampled_from(RunState),
        TIMES,
        idle_since_s=TIMES,
        size_share=st.sampled_from([0.0, 0.1, 1.0]) | SHARE,
        uses=st.integers(1, 5),
        p_reuse=st.sampled_from([0.0, 0.5, 1.0]) | SHARE,
        pause_p95_s=st.sampled_from([0.0, 5.0, 1e4]) | TIMES,
        wait=st.none() | waits,
        reload_share=st.sampled_from([1.0, 0.1, 0.0]),
    )


def make(name, s=None):
    """A policy with a model of its own, which has seen nothing."""
    return make_policy(name, s or RetentionSettings(), PauseModel())


PRESSURE = 0.8


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
    again = make(name, s).key(dataclasses.replace(run), now_s=now_s, pressure=pressure)
    assert again == key


@every_policy
@PROPERTY
@given(st.lists(run_of(st.just(0)), max_size=8), constants, TIMES)
def test_keys_of_different_runs_have_a_total_order(name, templates, s, now_s):
    policy = make(name, s)
    runs = [dataclasses.replace(run, run_id=n) for n, run in enumerate(templates)]
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
    if end_s - now_s <= 1e-3:
        return  # Reviews are a millisecond apart at the least.
    for later_s in (now_s + share * (end_s - now_s), end_s - 1e-9 * end_s):
        if now_s <= later_s < end_s - 1e-10 * end_s:
            later = policy.key(run, now_s=later_s, pressure=pressure)
            assert place_of(later) == place_of(key)


class NaiveOrder:
    """The eviction order by looking at every run: its own policy, the same events."""

    def __init__(self, policy):
        self.policy = policy
        self.runs = {}
        self.keys = {}

    def put(self, run, now_s):
        self.runs[run.run_id] = run
        self.keys[run.run_id] = self.policy.key(run, now_s=now_s, pressure=PRESSURE)

    def discard(self, run_id):
        self.runs.pop(run_id, None)
        self.keys.pop(run_id, None)

    def first(self, now_s):
        for run_id, key in list(self.keys.items()):
            if key.review_s <= now_s:
                self.put(self.runs[run_id], now_s)
        if not self.keys:
            return None
        key = min(self.keys.values())
        self.policy.gave_up(key)
        return key.run_id


class OrderMachine(RuleBasedStateMachine):
    """Drives EvictionOrder and the naive model side by side."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.now_s = 0.0

    @initialize(s=constants)
    def start(self, s):
        self.order, self.naive = EvictionOrder(make(self.name, s)), NaiveOrder(make(self.name, s))

    @rule(run=run_of(st.integers(1, 8)))
    def put_or_replace(self, run):
        self.order.put(run, now_s=self.now_s, pressure=PRESSURE)
        self.naive.put(run, self.now_s)

    @rule(run_id=st.integers(1, 9))
    def discard(self, run_id):
        self.order.discard(run_id)
        self.naive.discard(run_id)

    @precondition(lambda self: self.naive.runs)
    @rule()
    def take_the_first(self):
        self._take_the_first()

    @rule(wait_s=st.sampled_from([0.0, 1.0, 5.0]) | st.floats(0.0, 1e4))
    def wait(self, wait_s):
        self.now_s += wait_s

    @precondition(lambda self: self.naive.runs)
    @rule(data=st.data())
    def wait_until_a_review(self, data):
        key = data.draw(st.sampled_from(list(self.naive.keys.values())))
        if key.review_s < math.inf:
            self.now_s = max(self.now_s, key.review_s)

    @invariant()
    def holds_the_same_runs(self):
        if not hasattr(self, "order"):
            return
        assert len(self.order) == len(self.naive.runs)
        assert all((n in self.order) == (n in self.naive.runs) for n in range(1, 10))

    @rule()
    def agree_on_the_first(self):
        # A rule, not an invariant: asking changes the heaps, and long stretches without are worth
        # a test too.
        assert self.order.first(now_s=self.now_s, pressure=PRESSURE) == self.naive.first(self.now_s)

    def teardown(self):
        while hasattr(self, "order") and self.naive.runs:
            self._take_the_first()

    def _take_the_first(self):
        run_id = self.order.first(now_s=self.now_s, pressure=PRESSURE)
        assert run_id == self.naive.first(self.now_s)
        self.order.discard(run_id)
        self.naive.discard(run_id)


@every_policy
def test_the_eviction_order_is_that_of_a_naive_model(name):
    run_state_machine_as_test(lambda: OrderMachine(name), settings=STATEFUL)


def take_all(order, naive, now_s):
    while naive.runs:
        run_id = order.first(now_s=now_s, pressure=PRESSURE)
        assert run_id == naive.first(now_s)
        order.discard(run_id)
        naive.discard(run_id)
    assert order.first(now_s=now_s, pressure=PRESSURE) is None


def some_run(rng, run_id, now_s):
    return Run(
        run_id,
        rng.choice([*RunState, RunState.PAUSED, RunState.PAUSED]),
        now_s - rng.choice([0.0, rng.random() * 100]),
        idle_since_s=now_s,
        size_share=rng.random(),
        uses=rng.randint(1, 4),
        p_reuse=rng.random(),
        pause_p95_s=rng.choice([0.0, rng.randint(0, 40), 1e4]),
        wait=Wait(View((rng.choice(KINDS),), now_s)),
    )


def heap_sizes(order):
    return len(order._by_key), len(order._by_review)


@every_policy
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("asks", [0.0, 0.3, 1.0])
def test_a_long_history_keeps_the_order_and_bounds_the_heaps(name, seed, asks):
    rng = random.Random(seed)
    order, naive = EvictionOrder(make(name)), NaiveOrder(make(name))
    now_s, most = 0.0, 20
    for number in range(1500):
        now_s += rng.choice([0.0, 0.25, 1.0])  # Exact, so that reviews are met to the moment.
        run_id = rng.randrange(most)
        if rng.random() < 0.3:
            order.discard(run_id)
            naive.discard(run_id)
        else:
            run = some_run(rng, run_id, now_s)
            order.put(run, now_s=now_s, pressure=PRESSURE)
            naive.put(run, now_s)
        if rng.random() < asks:
            assert order.first(now_s=now_s, pressure=PRESSURE) == naive.first(now_s)
        assert max(heap_sizes(order)) <= 2 * most + 64
        if number % 150 == 149:  # Some reviews are due at this moment; the whole order must tell.
            reviews_s = [key.review_s for key in naive.keys.values()]
            now_s = max(now_s, rng.choice([r for r in reviews_s if r < now_s + 100.0] or [now_s]))
            take_all(order, naive, now_s)


@every_policy
def test_runs_that_come_and_go_leave_nothing_behind(name):
    """A session that is put protected and taken out again, before its review, over and over."""
    order = EvictionOrder(make(name))
    for number in range(1000):
        wait = Wait(View(("paused",), 0.0))
        run = Run(number, RunState.PAUSED, 0.0, 0.0, p_reuse=1.0, pause_p95_s=1e6, wait=wait)
        order.put(run, now_s=0.0, pressure=PRESSURE)
        order.discard(number)
        assert order.first(now_s=0.0, pressure=PRESSURE) is None
        assert max(heap_sizes(order)) <= 70


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
