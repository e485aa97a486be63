"""Which worker serves a request, and that all gateways agree on it."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saga_core.placement import Placement, Route, WorkerLoad, place, rendezvous

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
