"""Which worker serves a request, and that all gateways agree on it."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saga_core.placement import (
    Candidate,
    Ring,
    congestion_s,
    place_again,
    place_new,
    rendezvous,
)

PROPERTY = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
ids = st.text("abcdefgh0123456789.:-", min_size=1, max_size=12)
worker_ids = st.lists(ids, min_size=1, max_size=6, unique=True)


@pytest.mark.parametrize(
    ("key", "worker_id"),
    [
        ("", "w1"),
        ("a", "w2"),
        ("session-1", "w1"),
        ("swe:42", "w3"),
        ("日本語", "w0"),
        ("x" * 256, "w0"),
    ],
)
def test_every_process_and_version_chooses_the_same_worker(key, worker_id):
    assert rendezvous(key, ["w0", "w1", "w2", "w3"]) == worker_id


@PROPERTY
@given(worker_ids, st.lists(st.text(max_size=20), max_size=20), st.data())
def test_a_worker_that_leaves_moves_only_its_own_keys(workers, keys, data):
    gone = data.draw(st.sampled_from(workers))
    rest = [worker for worker in workers if worker != gone]
    for key in keys:
        chosen = rendezvous(key, workers)
        if rest and chosen != gone:
            assert rendezvous(key, rest) == chosen


# What the coordinator chooses by


def test_a_load_up_to_theta_is_no_congestion():
    assert congestion_s(0.8, 0.8, 5.0) == 0.0
    assert congestion_s(1.8, 0.8, 5.0) == pytest.approx(5.0)


def test_a_session_leaves_a_congested_home_when_that_saves_more_than_it_costs():
    home = Candidate("home", 1.8, 5.0)
    assert place_again("s", home, [Candidate("b", 0.1, 5.0, prefill_s=5.5)], 0.8) == "home"
    assert place_again("s", home, [Candidate("b", 0.1, 5.0, prefill_s=4.5)], 0.8) == "b"
    assert place_again("s", home, [Candidate("b", 1.8, 5.0)], 0.8) == "home"
    calm = Candidate("home", 0.8, 5.0)
    assert place_again("s", calm, [Candidate("b", 0.0, 5.0)], 0.8) == "home"
    assert place_again("s", home, [], 0.8) == "home"


def test_sessions_are_spread_over_workers_with_the_same_load():
    workers = [Candidate(f"w{n}", 0.25, 4.0 + n) for n in range(4)]  # However fast these were.
    counts = Counter(place_new(f"session-{number}", workers) for number in range(1000))
    assert all(200 < counts[each.worker_id] < 300 for each in workers), counts


def test_a_new_session_goes_where_load_and_missing_prefix_cost_least():
    holder = Candidate("holder", 0.5, 4.0)
    assert place_new("s", [holder, Candidate("b", 0.1, 4.0, prefill_s=2.0)]) == "holder"
    assert place_new("s", [holder, Candidate("b", 0.1, 4.0, prefill_s=1.0)]) == "b"
    full = Candidate("full", 0.0, 4.0, has_room=False)
    assert place_new("s", [full, Candidate("b", 0.9, 4.0, prefill_s=9.0)]) == "b"


@PROPERTY
@given(worker_ids, st.text(max_size=20), st.randoms(use_true_random=False))
def test_where_nothing_is_known_all_choose_by_rendezvous(workers, key, rng):
    shuffled = list(workers)
    rng.shuffle(shuffled)
    ring = Ring()
    for worker_id in shuffled:
        ring.add(worker_id)
    chosen = place_new(key, [Candidate(each, 0.0, 5.0) for each in ring.near(key, 8)])
    assert chosen == rendezvous(key, workers)


def test_a_ring_of_many_gives_each_key_some_and_spreads_the_keys():
    ring, ids = Ring(), [f"w{number}" for number in range(100)]
    for worker_id in ids:
        ring.add(worker_id)
    counts = dict.fromkeys(ids, 0)
    for number in range(10_000):
        near = ring.near(f"s{number}", 8)
        assert len(set(near)) == 8
        counts[rendezvous(f"s{number}", near)] += 1
    assert max(counts.values()) < 250, counts
    assert min(counts.values()) > 25, counts


@PROPERTY
@given(st.lists(ids, min_size=10, max_size=20, unique=True), st.text(max_size=20), st.data())
def test_a_worker_that_leaves_a_ring_changes_only_its_own_neighbourhoods(workers, key, data):
    ring, other = Ring(), Ring()
    for worker_id in workers:
        ring.add(worker_id)
    for worker_id in reversed(workers):
        other.add(worker_id)
    before = ring.near(key, 4)
    assert before == other.near(key, 4)  # Whoever came first.
    gone = data.draw(st.sampled_from(workers))
    ring.remove(gone)
    assert len(ring) == len(workers) - 1
    after = ring.near(key, 4)
    assert [each for each in before if each != gone] == after[: 4 - (gone in before)]
