"""Urgency is bounded, shares are kept, and nobody starves."""

import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saga_core.errors import SettingsError
from saga_core.fair_queue import FairOrder, FairQueue
from saga_core.fairness import MAX_AFS, MIN_AFS, Shares, priority_of, task_afs

PROPERTY = settings(max_examples=100, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Waiting:
    request_id: str
    tenant: str
    task: str


# Urgency


@PROPERTY
@given(st.floats(0.0, 1e12), st.floats(-1e12, 1e12), st.floats(-1e12, 1e12))
def test_urgency_is_finite_and_bounded_at_and_past_any_deadline(work_s, left_s, budget_s):
    assert MIN_AFS <= task_afs(work_s, left_s, budget_s) <= MAX_AFS


@PROPERTY
@given(st.floats(0.1, 1e4), st.floats(1.0, 1e5), st.lists(st.floats(-3.0, 1.0), min_size=2))
def test_urgency_never_falls_while_time_passes(work_s, budget_s, lefts):
    lefts.sort(reverse=True)
    urgencies = [task_afs(work_s, left * budget_s, budget_s) for left in lefts]
    assert urgencies == sorted(urgencies)


def test_urgency_is_the_work_over_the_time_and_then_ages():
    assert task_afs(20.0, 30.0, 30.0) == pytest.approx(2 / 3)
    assert task_afs(20.0, 10.0, 30.0) == pytest.approx(2.0)
    at_deadline = task_afs(20.0, 0.0, 30.0)
    assert at_deadline == pytest.approx(20.0 / 3.0)  # A tenth of the budget, not 1 ÷ 0.
    assert task_afs(20.0, -15.0, 30.0) == pytest.approx(1.5 * at_deadline)
    assert task_afs(20.0, -1e9, 30.0) == pytest.approx(2.0 * at_deadline)


def test_the_engine_priority_is_lower_for_more_urgent_tasks():
    assert [priority_of(share) for share in (0.5, 1.0, 1.05, 2.0, 16.0)] == [4, 0, 0, -4, -16]


# Shares


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf, 1e7])
def test_a_weight_that_is_none_is_refused(weight):
    shares = Shares(epoch_s=0.1, max_tasks=10)
    with pytest.raises(SettingsError, match="weight"):
        shares.set_weight("a", weight)


def arrive(shares, tenant, task, now_s=0.0, work_s=20.0, budget_s=30.0, deadline_s=None):
    shares.arrived(
        (tenant, task), work_s=work_s, deadline_s=deadline_s, budget_s=budget_s, now_s=now_s
    )


def test_a_tenant_counts_its_tasks_and_a_fan_out_counts_as_one():
    shares = Shares(epoch_s=0.1, max_tasks=10)
    for _ in range(8):
        arrive(shares, "a", "fan-out")
    assert shares.afs("a") == pytest.approx(2 / 3)
    arrive(shares, "a", "other")
    assert shares.afs("a") == pytest.approx(4 / 3)
    shares.set_weight("a", 3.0)
    tenant, task = shares.shares(("a", "other"), 0.0)
    assert (tenant, task) == (pytest.approx(4.0), pytest.approx(2.0))
    shares.check_integrity()


def test_an_afs_holds_for_an_epoch():
    shares = Shares(epoch_s=0.1, max_tasks=10)
    arrive(shares, "a", "t")
    assert shares.shares(("a", "t"), 0.09)[1] == pytest.approx(2 / 3)
    assert shares.shares(("a", "t"), 10.0)[1] == pytest.approx(1.0)


def test_refreshing_reaches_every_task_in_turn():
    shares = Shares(epoch_s=0.1, max_tasks=100)
    for number in range(10):
        arrive(shares, "a", f"t{number}")
    for turn in range(5):
        shares.refresh(15.0, 2)
        assert shares.afs("a") == pytest.approx((10 + 2 * (turn + 1)) * 2 / 3)


def test_a_tenant_may_be_capped():
    shares = Shares(epoch_s=0.1, max_tasks=100)
    shares.max_tenant_afs = 1.0
    for number in range(10):
        arrive(shares, "a", f"t{number}")
    assert shares.shares(("a", "t0"), 0.0)[0] == pytest.approx(1.0)


@PROPERTY
@given(
    st.lists(
        st.tuples(st.booleans(), st.sampled_from("ab"), st.sampled_from("xyz"), st.floats(0, 9)),
        max_size=60,
    )
)
def test_sums_stay_sums_and_the_table_keeps_its_bound(steps):
    shares, live, now_s = Shares(epoch_s=0.1, max_tasks=3), {}, 0.0
    for comes, tenant, task, wait_s in steps:
        now_s += wait_s
        key = tenant, task
        if comes:
            arrive(shares, *key, now_s=now_s)
            live[key] = live.get(key, 0) + 1
        elif live.get(key):
            live[key] -= 1
            shares.ended(key, 1.0)
        shares.refresh(now_s, 2)
        shares.check_integrity()
        assert len(shares) <= max(3, sum(1 for count in live.values() if count))


# Order


def serve(order, counts, shares, costs=None, times=1):
    for _ in range(times):
        (flow,) = order.firsts(1)
        cost = 1.0 if costs is None else costs()
        order.served(flow, cost, shares[flow])
        counts[flow] = counts.get(flow, 0.0) + cost


def test_two_that_always_wait_are_served_by_their_shares():
    order, counts, shares = FairOrder(), {}, {"a": 1.0, "b": 3.0}
    for flow in shares:
        order.wait(flow)
    serve(order, counts, shares, times=4000)
    assert counts["b"] / counts["a"] == pytest.approx(3.0, rel=0.01)


@settings(PROPERTY, max_examples=40)
@given(
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0.05, 20.0), min_size=2),
    st.randoms(use_true_random=False),
)
def test_the_lag_behind_the_fluid_share_is_bounded_at_every_moment(shares, rng):
    """Any two flows that wait all the time differ by one request of each at most, ÷ its share."""
    order, counts, most = FairOrder(), dict.fromkeys(shares, 0.0), 2.0
    for flow in shares:
        order.wait(flow)
    for _ in range(300):
        serve(order, counts, shares, costs=lambda: rng.uniform(0.1, most))
        for one, share in shares.items():
            for other, its in shares.items():
                lag = counts[one] / share - counts[other] / its
                assert lag <= most / share + most / its + 1e-6


@pytest.mark.parametrize("others", [1, 10, 40])
def test_flows_that_never_came_before_do_not_overtake_for_ever(others):
    """A flow of the least share waits among newcomers of the greatest, each served once."""
    order = FairOrder()
    order.wait("slow")
    order.served("slow", 1.0, MIN_AFS)
    for number in range(others):
        order.wait(f"n{number}")
    for served in range(50_000):
        (flow,) = order.firsts(1)
        if flow == "slow":
            break
        order.served(flow, 1.0, MAX_AFS)
        order.leave(flow)
        order.wait(f"n{others + served}")
    # The fluid share of 1 + others flows, and no more.
    assert served <= (MAX_AFS / MIN_AFS) * (others + 1) + 1


def test_who_becomes_urgent_while_it_waits_is_ranked_anew():
    queue, shares = FairQueue(), {"late": MIN_AFS, "other": 1.0}
    for number in range(100):
        queue.add(Waiting(f"l{number}", "a", "late"))
        queue.add(Waiting(f"o{number}", "a", "other"))
    served = []
    for number in range(60):
        if number == 10:
            shares["late"] = 10.0
        (request,) = queue.firsts(1)
        queue.served(request, 1.0, 1.0, shares[request.task])
        queue.renew(1, lambda key: (1.0, shares[key[1]]))
        served.append(request.task)
    assert served[:10].count("late") <= 2
    assert served[10:].count("late") > 40


def test_a_flow_is_owed_nothing_for_its_absence():
    order, counts, shares = FairOrder(), {}, {"a": 1.0, "b": 1.0}
    order.wait("a")
    serve(order, counts, shares, times=100)
    order.wait("b")
    counts.clear()
    serve(order, counts, shares, times=10)
    assert counts == {"a": 5.0, "b": 5.0}


@PROPERTY
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xyz")), max_size=40),
    st.randoms(use_true_random=False),
)
def test_every_request_leaves_once_each_task_in_its_order(arrivals, rng):
    queue, waiting, number = FairQueue(), {}, 0
    left = []
    while arrivals or waiting:
        if arrivals and rng.random() < 0.5:
            tenant, task = arrivals.pop()
            request = Waiting(f"r{number:03}", tenant, task)
            queue.add(request)
            waiting[request.request_id] = request
            number += 1
        elif waiting and rng.random() < 0.2:
            request = waiting.pop(rng.choice(sorted(waiting)))
            queue.remove(request)
        elif waiting:
            (request,) = queue.firsts(1)
            own = [
                r.request_id
                for r in waiting.values()
                if r.task == request.task and r.tenant == request.tenant
            ]
            assert request.request_id == min(own)
            del waiting[request.request_id]
            queue.served(request, 1.0, 1.0, 1.0)
            left.append(request.request_id)
        assert len(queue) == len(waiting)
        heads = {(r.tenant, r.task) for r in waiting.values()}
        assert len(queue.firsts(100)) == len(heads)
    assert len(left) == len(set(left))


def test_a_fan_out_gets_the_share_of_one_task():
    queue, served = FairQueue(), {"fan-out": 0, "single": 0}
    rng = random.Random(1)
    for number in range(2000):
        task = "single" if number % 10 == 0 else "fan-out"
        queue.add(Waiting(f"r{number}", "a", task))
    for _ in range(300):
        (request,) = queue.firsts(1)
        queue.served(request, rng.uniform(0.5, 1.5), 1.0, 1.0)
        served[request.task] += 1
    assert served["single"] == pytest.approx(150, abs=12)
