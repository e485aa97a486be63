"""Which worker serves a request, and that all gateways agree on it."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saga_core.placement import (
    Candidate,
    Placement,
    Ring,
    Route,
    WorkerLoad,
    congestion_s,
    place,
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
session_ids = st.none() | st.text(max_size=20)
fleets = st.lists(
    st.builds(WorkerLoad, ids, st.integers(0, 3), st.booleans()),
    max_size=6,
    unique_by=lambda worker: worker.worker_id,
)


def test_a_session_goes_home_whatever_the_load():
    workers = [WorkerLoad("a", 0), WorkerLoad("b", 99)]
    assert place("s", "b", workers) == Placement("b", Route.AFFINITY)


def test_a_new_session_goes_to_the_least_loaded():
    workers = [WorkerLoad("a", 2), WorkerLoad("b", 1), WorkerLoad("c", 0, available=False)]
    assert place("s", None, workers) == Placement("b", Route.NEW)


@pytest.mark.parametrize("workers", [[WorkerLoad("b", 0, available=False)], []])
def test_a_session_whose_home_is_away_fails_over(workers):
    workers = [*workers, WorkerLoad("a", 5), WorkerLoad("c", 4)]
    assert place("s", "b", workers) == Placement("c", Route.FAILOVER)


@pytest.mark.parametrize("home", [None, "a"])
def test_nothing_available_places_nothing(home):
    assert place("s", home, []) is None
    assert place("s", home, [WorkerLoad("a", 0, available=False)]) is None


def test_without_a_session_the_least_id_of_the_least_loaded_serves():
    workers = [WorkerLoad("c", 1), WorkerLoad("b", 1), WorkerLoad("a", 2)]
    assert place(None, None, workers) == Placement("b", Route.NEW)


def test_sessions_are_spread_over_workers_with_the_same_load():
    workers = [WorkerLoad(f"w{n}", 0) for n in range(4)]
    counts = dict.fromkeys((worker.worker_id for worker in workers), 0)
    for number in range(1000):
        counts[place(f"session-{number}", None, workers).worker_id] += 1
    assert all(200 < count < 300 for count in counts.values()), counts


@PROPERTY
@given(session_ids, st.none() | ids, fleets)
def test_a_placement_is_available_and_explained(session_id, home, fleet):
    placement = place(session_id, home, fleet)
    available = {worker.worker_id: worker for worker in fleet if worker.available}
    if placement is None:
        assert not available
        return
    chosen = available[placement.worker_id]
    if placement.route is Route.AFFINITY:
        assert placement.worker_id == home
    else:
        assert home not in available
        assert placement.route is (Route.NEW if home is None else Route.FAILOVER)
        assert chosen.in_flight == min(worker.in_flight for worker in available.values())


@PROPERTY
@given(session_ids, st.none() | ids, fleets, st.randoms(use_true_random=False))
def test_the_order_of_the_workers_does_not_matter(session_id, home, fleet, rng):
    shuffled = list(fleet)
    rng.shuffle(shuffled)
    assert place(session_id, home, shuffled) == place(session_id, home, fleet)


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


def test_a_worker_of_less_weight_is_given_less():
    workers = [WorkerLoad("a", 0, weight=0.1), WorkerLoad("b", 5)]
    assert place("s", None, workers) == Placement("b", Route.NEW)
    workers = [WorkerLoad("a", 0, weight=0.1), WorkerLoad("b", 10)]
    assert place("s", None, workers) == Placement("a", Route.NEW)
    assert place("s", "a", [WorkerLoad("a", 9, weight=0.1), WorkerLoad("b", 0)]) == Placement(
        "a", Route.AFFINITY
    )


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


def test_a_new_session_goes_where_load_and_missing_prefix_cost_least():
    holder = Candidate("holder", 0.5, 4.0)
    assert place_new("s", [holder, Candidate("b", 0.1, 4.0, prefill_s=2.0)]) == "holder"
    assert place_new("s", [holder, Candidate("b", 0.1, 4.0, prefill_s=1.0)]) == "b"
    full = Candidate("full", 0.0, 4.0, has_room=False)
    assert place_new("s", [full, Candidate("b", 0.9, 4.0, prefill_s=9.0)]) == "b"


@PROPERTY
@given(worker_ids, st.text(max_size=20), st.randoms(use_true_random=False))
def test_where_nothing_is_known_all_choose_as_place_does(workers, key, rng):
    shuffled = list(workers)
    rng.shuffle(shuffled)
    ring = Ring()
    for worker_id in shuffled:
        ring.add(worker_id)
    chosen = place_new(key, [Candidate(each, 0.0, 5.0) for each in ring.near(key, 8)])
    assert chosen == place(key, None, [WorkerLoad(each, 0) for each in workers]).worker_id


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
