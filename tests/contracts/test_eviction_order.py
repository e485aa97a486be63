"""The eviction order under every policy: as a naive model has it, in bounded heaps, cheaply."""

import heapq
import math
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from saga_core import retention
from saga_core.pauses import View, Wait
from saga_core.retention import EvictionOrder, Run, RunState
from tests.contracts.runs import KINDS, PRESSURE, PROPERTY, constants, every_policy, make, run_of

STATEFUL = settings(PROPERTY, max_examples=50, stateful_step_count=40)


class NaiveOrder:
    """The eviction order by looking at every run: its own policy, the same events.

    Of the runs whose review is due, those that are longest overdue are ranked anew, and whichever
    comes first in the order.
    """

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
        if not self.keys:
            return None
        due = sorted((key.review_s, id_) for id_, key in self.keys.items() if key.review_s <= now_s)
        for _, run_id in due[: retention.REVIEWS_PER_CALL]:
            self.put(self.runs[run_id], now_s)
        while (key := min(self.keys.values())).review_s <= now_s:
            self.put(self.runs[key.run_id], now_s)
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
        assert max(heap_sizes(order)) <= 4 * most + 64
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


class CountingHeap:
    """heapq, with the entries that each call touches at the top counted."""

    def __init__(self):
        self.entries = 0

    def heappush(self, heap, item):
        self.entries += 1
        heapq.heappush(heap, item)

    def heappop(self, heap):
        self.entries += 1
        return heapq.heappop(heap)

    def heapify(self, heap):
        self.entries += len(heap)
        heapq.heapify(heap)


@every_policy
@pytest.mark.parametrize("most", [10, 3000])
def test_an_event_costs_a_few_heap_entries_however_many_runs_there_are(name, most, monkeypatch):
    heap, rng = CountingHeap(), random.Random(3)
    monkeypatch.setattr(retention, "heapq", heap)
    order = EvictionOrder(make(name))
    for run_id in range(most):
        order.put(some_run(rng, run_id, 0.0), now_s=0.0, pressure=PRESSURE)
    heap.entries, events = 0, 9000
    for number in range(events):
        run_id, what = rng.randrange(most), number % 3
        if what == 0:
            order.put(some_run(rng, run_id, 0.0), now_s=0.0, pressure=PRESSURE)
        elif what == 1:
            order.discard(run_id)
        else:
            order.first(now_s=0.0, pressure=PRESSURE)
    assert heap.entries <= 3 * events
    first = order.first(now_s=0.0, pressure=PRESSURE)
    heap.entries = 0
    for _ in range(100):
        assert order.first(now_s=0.0, pressure=PRESSURE) == first
    assert heap.entries == 0


@every_policy
def test_the_first_run_is_never_an_overdue_one(name):
    rng = random.Random(5)
    order = EvictionOrder(make(name))
    for run_id in range(500):
        order.put(some_run(rng, run_id, 0.0), now_s=0.0, pressure=PRESSURE)
    for now_s in (70.0, 200.0, 1e5):
        for _ in range(20):
            key = order.peek(now_s=now_s, pressure=PRESSURE)
            assert key is not None
            assert key.review_s > now_s
            order.discard(key.run_id)


@every_policy
def test_calls_bring_an_order_that_is_overdue_up_to_date(name):
    """However many reviews fall due at once: the order is then that of the policy, now."""
    rng = random.Random(7)
    order, policy = EvictionOrder(make(name)), make(name)
    runs = {run_id: some_run(rng, run_id, 0.0) for run_id in range(200)}
    for run in runs.values():
        order.put(run, now_s=0.0, pressure=PRESSURE)
    for _ in range(len(runs)):
        order.first(now_s=90.0, pressure=PRESSURE)
    keys = {n: policy.key(run, now_s=90.0, pressure=PRESSURE) for n, run in runs.items()}
    for run_id in sorted(keys, key=lambda n: keys[n]):
        assert order.peek(now_s=90.0, pressure=PRESSURE).run_id == run_id
        order.discard(run_id)


@every_policy
def test_a_session_that_is_to_be_read_may_be_deferred(name):
    """Its request is queued: it goes no sooner, so the order is as if it had been put."""
    rng = random.Random(9)
    put, deferred = EvictionOrder(make(name)), EvictionOrder(make(name))
    for run_id in range(100):
        run = some_run(rng, run_id, 0.0)
        for order in (put, deferred):
            order.put(run, now_s=0.0, pressure=PRESSURE)
        if run_id % 3 == 0:
            queued = run._replace(state=RunState.RESUMING)
            put.put(queued, now_s=1.0, pressure=PRESSURE)
            deferred.defer(queued, now_s=1.0, pressure=PRESSURE)
            assert deferred.run(run_id) is queued
    deferred.defer(some_run(rng, 100, 1.0), now_s=1.0, pressure=PRESSURE)  # Not there yet: put.
    put.put(deferred.run(100), now_s=1.0, pressure=PRESSURE)
    while (key := put.peek(now_s=2.0, pressure=PRESSURE)) is not None:
        assert deferred.peek(now_s=2.0, pressure=PRESSURE)[:4] == key[:4]  # Ranked later.
        put.discard(key.run_id)
        deferred.discard(key.run_id)
    assert len(deferred) == 0
