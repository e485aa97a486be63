"""When idle prefixes are read again: hazards by class and age, their worth, and P_reuse."""

import math
import random
import statistics

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saga_core.reuse import (
    _WIDTHS_S,
    AGE_EDGES_S,
    ReuseHazards,
    ReuseModel,
    _averaged,
    _gittins,
    age_bucket,
    bucket_end_s,
)

PROPERTY = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def observed(outcomes, **options):
    model = ReuseModel(**options)
    for returned in outcomes:
        model.observe("key", overlap=float(returned))
    return model


def test_the_prior_knows_whether_a_tool_was_called():
    assert ReuseModel().p_reuse("key", tool_called=True) == 0.9
    assert ReuseModel().p_reuse("key", tool_called=False) == pytest.approx(1 / 3)


@PROPERTY
@given(st.lists(st.booleans(), max_size=50))
def test_it_is_the_share_smoothed_by_the_prior(outcomes):
    model = observed(outcomes)
    returned, total = sum(outcomes), len(outcomes)
    with_tool = model.p_reuse("key", tool_called=True)
    without = model.p_reuse("key", tool_called=False)
    assert with_tool == pytest.approx((9 + returned) / (10 + total))
    assert without == pytest.approx((1 + returned) / (3 + total))
    assert 0.0 < without < with_tool < 1.0


def test_much_evidence_outweighs_the_prior():
    assert observed([False] * 1000).p_reuse("key", tool_called=True) < 0.01
    assert observed([True] * 1000).p_reuse("key", tool_called=False) > 0.99


def test_asking_teaches_nothing():
    model = observed([])
    assert {model.p_reuse("key", tool_called=True) for _ in range(5)} == {0.9}


def test_the_least_recently_updated_key_goes():
    model = ReuseModel(max_keys=2)
    for key in ("a", "b", "a", "c"):
        model.observe(key, overlap=0.0)
    answers = {key: model.p_reuse(key, tool_called=True) for key in "abc"}
    assert answers == {
        "a": pytest.approx(9 / 12),
        "b": 0.9,
        "c": pytest.approx(9 / 11),
    }


def test_a_share_that_was_read_counts_as_such():
    model = ReuseModel()
    model.observe("key", overlap=0.25)
    assert model.p_reuse("key", tool_called=True) == pytest.approx(9.25 / 11)


# Hazards


def test_the_age_buckets_are_thirds_of_octaves_up_to_two_hours():
    assert AGE_EDGES_S[:2] == (0.0, 2**-8)
    assert AGE_EDGES_S[4] == pytest.approx(2**-7)
    assert 5000.0 < AGE_EDGES_S[-1] < 7200.0
    assert list(AGE_EDGES_S) == sorted(set(AGE_EDGES_S))


@PROPERTY
@given(st.floats(0.0, 1e6))
def test_an_age_lies_in_its_bucket(age_s):
    bucket = age_bucket(age_s)
    assert AGE_EDGES_S[bucket] <= age_s < bucket_end_s(age_s)


@pytest.mark.parametrize("bucket", [0, 1, 2, 20, len(AGE_EDGES_S) - 1])
def test_a_bucket_begins_at_its_edge_and_ends_at_the_next(bucket):
    edge_s = AGE_EDGES_S[bucket]
    assert age_bucket(edge_s) == bucket
    if bucket:
        assert age_bucket(math.nextafter(edge_s, 0.0)) == bucket - 1
        assert bucket_end_s(math.nextafter(edge_s, 0.0)) == edge_s
    is_last = bucket == len(AGE_EDGES_S) - 1
    assert bucket_end_s(edge_s) == (math.inf if is_last else AGE_EDGES_S[bucket + 1])


@PROPERTY
@given(st.floats(0.0, 1e5), st.floats(0.0, 1e5))
def test_an_older_prefix_is_in_no_earlier_bucket(a, b):
    young_s, old_s = sorted((a, b))
    assert age_bucket(young_s) <= age_bucket(old_s)
    assert bucket_end_s(young_s) <= bucket_end_s(old_s)


def taught(classes, **options):
    hazards = ReuseHazards(**options)
    for cls, ages_s in classes.items():
        for age_s in ages_s:
            hazards.at_risk(cls, 0.0, age_s, now_s=0.0)
            hazards.read(cls, age_s, now_s=0.0)
    hazards.refresh()
    return hazards


def test_a_hazard_is_reads_over_seconds_at_risk():
    hazards = taught({("paused", "x"): [1.5] * 1000, ("paused", "y"): [100.0] * 1000}, strength=0.7)
    bucket = age_bucket(1.5)
    # In the last bucket each was at risk from its lower edge on.
    risk_s = 1000 * (1.5 - AGE_EDGES_S[bucket])
    parent = hazards.hazard(("paused",), 1.5)
    expected = (1000 + 0.7) / (risk_s + 0.7 / parent)
    assert hazards.hazard(("paused", "x"), 1.5) == pytest.approx(expected)
    assert hazards.hazard(("paused", "x"), 1.0) < 0.05


def log_marginal(reads, risk_s, k, parent):
    """Of ``reads`` in ``risk_s`` when the hazard is drawn from Gamma(k, k / parent)."""
    rate = k / parent
    return (
        math.lgamma(k + reads)
        - math.lgamma(k)
        + k * math.log(rate)
        - (k + reads) * math.log(rate + risk_s)
    )


@PROPERTY
@given(
    st.lists(
        st.tuples(
            st.integers(0, 40) | st.floats(0.0, 3.0), st.floats(0.0, 500.0), st.floats(1e-6, 5.0)
        ),
        min_size=1,
        max_size=9,
    ),
    st.sampled_from([0.2, 0.7, 2.0]),
)
def test_two_models_are_averaged_by_their_evidence(rows, k):
    reads, risk_s, parents = map(list, zip(*rows, strict=True))
    evidence = sum(
        log_marginal(r, s, k, p) - (r * math.log(p) - p * s)
        for r, s, p in zip(reads, risk_s, parents, strict=True)
    )
    own = 1.0 / (1.0 + math.exp(-max(-700.0, evidence)))
    expected = [
        own * (r + k) / (s + k / p) + (1.0 - own) * p
        for r, s, p in zip(reads, risk_s, parents, strict=True)
    ]
    assert _averaged(reads, risk_s, parents, k) == pytest.approx(expected, rel=1e-6)


def test_a_class_that_is_like_its_parent_is_not_told_apart():
    rng = random.Random(5)
    ages_s = [rng.expovariate(0.1) for _ in range(1500)]
    hazards = taught({("paused", n % 50): ages_s[n::50] for n in range(50)})
    for age_s in (1.0, 3.0, 10.0):
        parent = hazards.hazard(("paused",), age_s)
        apart = [hazards.hazard(("paused", n), age_s) / parent for n in range(50)]
        # Of thirty pauses a bucket saw one to five: by itself it would be off by a half.
        assert statistics.median(abs(ratio - 1.0) for ratio in apart) < 0.3


def test_evidence_in_one_band_of_ages_leaves_the_others_alone():
    hazards = taught({("paused", "x"): [1.5] * 200, ("paused", "y"): [1000.0] * 200})
    parent = hazards.hazard(("paused",), 2000.0)
    assert hazards.hazard(("paused", "x"), 2000.0) == pytest.approx(parent, rel=1e-3)
    assert hazards.hazard(("paused", "x"), 1.5) > 1.5 * hazards.hazard(("paused",), 1.5)


def test_an_unseen_class_is_like_its_parent():
    hazards = taught({("paused", "x"): [2.0] * 50})
    assert hazards.hazard(("paused", "y"), 2.0) == hazards.hazard(("paused",), 2.0)
    assert hazards.hazard(("paused", "y", 3), 2.0) == hazards.hazard(("paused",), 2.0)


def test_a_parent_knows_what_all_its_children_saw():
    hazards = taught({("paused", "x", 1): [2.0] * 3, ("paused", "x", 2): [2.0], ("paused",): [2.0]})
    bucket = age_bucket(2.0)
    reads = {cls: table.reads[bucket] for cls, table in hazards._tables.items()}
    assert reads == {
        ("paused", "x", 1): 3.0,
        ("paused", "x", 2): 1.0,
        ("paused", "x"): 4.0,
        ("paused",): 5.0,
    }


def test_a_child_leans_on_its_parent_and_that_on_its_own():
    hazards = taught({("plain", "x"): [3.0] * 200, ("plain", "y"): [0.5] * 500}, strength=2.0)
    bucket = age_bucket(3.0)
    lower_s, width_s = AGE_EDGES_S[bucket], _WIDTHS_S[bucket]
    risk_s = 200 * (3.0 - lower_s)
    prior = 0.3 / (lower_s + 0.5 * width_s + 5.0)
    kind = (200 + 0.2) / (risk_s + 0.2 / prior)
    assert hazards.hazard(("plain",), 3.0) == pytest.approx(kind)
    # Both saw the same: the child's own estimate is near its parent's, whichever of them holds.
    child = (200 + 2.0) / (risk_s + 2.0 / kind)
    assert hazards.hazard(("plain", "x"), 3.0) == pytest.approx(child, rel=0.06)
    # Without evidence of its own the other child says what its parent says.
    assert hazards.hazard(("plain", "y"), 3.0) == pytest.approx(kind, rel=1e-6)


def test_a_part_that_was_read_counts_as_such():
    whole, half = ReuseHazards(), ReuseHazards()
    for _ in range(10):
        whole.read(("paused",), 2.0, now_s=0.0)
    for _ in range(20):
        half.read(("paused",), 2.0, now_s=0.0, share=0.5)
    for hazards in (whole, half):
        hazards.refresh()
    assert half.hazard(("paused",), 2.0) == pytest.approx(whole.hazard(("paused",), 2.0))


def test_idle_time_is_parted_at_the_edges():
    hazards = ReuseHazards()
    hazards.at_risk(("paused", "x"), 0.003, 0.0045, now_s=0.0)
    hazards.at_risk(("paused", "x"), 0.0, 2**-8, now_s=0.0)
    hazards.at_risk(("paused", "x"), 20_000.0, 30_000.0, now_s=0.0)
    for cls in (("paused",), ("paused", "x")):
        risk_s = hazards._tables[cls].risk_s
        assert risk_s[:3] == pytest.approx([2**-8 - 0.003 + 2**-8, 0.0045 - 2**-8, 0.0])
        assert risk_s[-1] == 10_000.0


def test_asking_makes_no_classes():
    hazards = taught({("paused", "x"): [2.0]})
    before = set(hazards._tables)
    for number in range(100):
        hazards.worth(("paused", "x", number), 1.0)
        hazards.hazard(("paused", number), 1.0)
    assert set(hazards._tables) == before


def test_kinds_start_with_priors_of_their_own():
    hazards = ReuseHazards()
    for age_s in (0.0, 10.0, 1000.0):
        ended, superseded, plain = (
            hazards.hazard((kind,), age_s) for kind in ("ended", "superseded", "plain")
        )
        assert ended == pytest.approx(0.01 * plain)
        assert superseded == pytest.approx(0.05 * plain)


def test_a_kind_that_is_read_after_all_loses_its_prior():
    hazards = taught({("superseded",): [3.0] * 30})
    prior = ReuseHazards().hazard(("superseded",), 3.0)
    assert hazards.hazard(("superseded",), 3.0) > 100 * prior


def test_nothing_changes_before_the_next_epoch():
    hazards = ReuseHazards()
    before = hazards.hazard(("paused",), 1.0)
    hazards.read(("paused",), 1.0, now_s=0.0)
    assert hazards.hazard(("paused",), 1.0) == before
    hazards.refresh()
    assert hazards.hazard(("paused",), 1.0) > before


def test_evidence_halves_with_its_age():
    hazards = ReuseHazards(half_life_s=100.0)
    hazards.at_risk(("paused",), 0.0, 50.0, now_s=0.0)
    for _ in range(100):
        hazards.read(("paused",), 1.0, now_s=0.0)
    for now_s in (100.0, 200.0, 200.0):
        hazards.read(("paused",), 1.0, now_s=now_s, share=0.0)
    hazards.refresh()
    bucket = age_bucket(1.0)
    width_s = _WIDTHS_S[bucket]
    prior = 0.3 / (AGE_EDGES_S[bucket] + 0.5 * width_s + 5.0)
    expected = (25.0 + 0.2) / (width_s / 4 + 0.2 / prior)
    assert hazards.hazard(("paused",), 1.0) == pytest.approx(expected)


def test_without_a_half_life_nothing_fades():
    hazards = ReuseHazards()
    for now_s in (0.0, 1e9):
        hazards.read(("paused",), 1.0, now_s=now_s)
    assert sum(hazards._tables["paused",].reads) == 2.0


def test_the_least_recently_updated_class_goes_and_its_parent_stays():
    hazards = ReuseHazards(max_classes=4)
    for number in (1, 2, 3, 1, 4, 5):
        hazards.read(("paused", number), 1.0, now_s=0.0)
    assert set(hazards._tables) == {("paused",), ("paused", 1), ("paused", 4), ("paused", 5)}
    hazards.refresh()
    # A class that went is like its parent again.
    assert hazards.hazard(("paused", 3), 1.0) == hazards.hazard(("paused",), 1.0)


def test_classes_are_bounded():
    hazards = ReuseHazards(max_classes=50)
    for number in range(1000):
        hazards.read(("paused", number), 1.0, now_s=0.0)
    assert len(hazards._tables) <= 50


@PROPERTY
@given(
    st.lists(
        st.tuples(st.floats(0.0, 9e3), st.floats(0.0, 9e3)).map(sorted), min_size=1, max_size=30
    )
)
def test_every_second_at_risk_is_counted_once(spans):
    hazards = ReuseHazards()
    for from_s, to_s in spans:
        hazards.at_risk(("paused",), from_s, to_s, now_s=0.0)
    total_s = sum(to_s - from_s for from_s, to_s in spans)
    assert sum(hazards._tables["paused",].risk_s) == pytest.approx(total_s)


def best_stop(hazards, first):
    """The Gittins index by trying every stop."""
    reads, held_s, survive, best = 0.0, 0.0, 1.0, 0.0
    for hazard, width_s in list(zip(hazards, _WIDTHS_S, strict=True))[first:]:
        passed = math.exp(-hazard * width_s)
        reads += survive * (1.0 - passed)
        held_s += survive * (1.0 - passed) / hazard
        survive *= passed
        best = max(best, reads / held_s)
    return best


HAZARDS = st.lists(st.floats(1e-5, 50.0), min_size=len(AGE_EDGES_S), max_size=len(AGE_EDGES_S))


@PROPERTY
@given(HAZARDS)
def test_worth_is_that_of_the_best_stop(hazards):
    worths = _gittins(hazards)
    for bucket in range(0, len(hazards), 7):
        assert worths[bucket] == pytest.approx(best_stop(hazards, bucket), rel=1e-6)


def test_worth_is_the_hazard_where_that_falls():
    falling = [1.0 / (1 + number) for number in range(len(AGE_EDGES_S))]
    assert _gittins(falling) == pytest.approx(falling)


@PROPERTY
@given(HAZARDS)
def test_worth_is_the_hazard_wherever_that_never_rises_again(hazards):
    falling = sorted(hazards, reverse=True)
    assert _gittins(falling) == pytest.approx(falling)
    assert all(
        worth >= hazard * (1.0 - 1e-9)
        for worth, hazard in zip(_gittins(hazards), hazards, strict=True)
    )


@PROPERTY
@given(HAZARDS)
def test_worth_is_no_more_than_the_best_moment_ahead(hazards):
    worths = _gittins(hazards)
    for bucket in range(0, len(hazards), 5):
        assert worths[bucket] <= max(hazards[bucket:]) * (1.0 + 1e-9)


@PROPERTY
@given(st.floats(0.0, 1e5), st.floats(0.0, 1.0))
def test_nothing_changes_within_an_age_bucket(age_s, part):
    hazards = taught({("paused",): [1.0, 3.0, 100.0, 100.0, 5000.0] * 10})
    until_s = min(bucket_end_s(age_s), 2e5)
    later_s = age_s + part * (math.nextafter(until_s, 0.0) - age_s)
    if age_bucket(later_s) == age_bucket(age_s):  # Rounding may reach the edge.
        assert hazards.worth(("paused",), later_s) == hazards.worth(("paused",), age_s)
        assert hazards.hazard(("paused",), later_s) == hazards.hazard(("paused",), age_s)


def test_worth_sees_a_return_that_is_about_to_come():
    hazards = taught({("paused",): [100.0] * 200})
    assert hazards.worth(("paused",), 60.0) > 3 * hazards.hazard(("paused",), 60.0)
    assert hazards.worth(("paused",), 90.0) > hazards.worth(("paused",), 10.0)


def test_the_likelihood_is_that_of_the_hazards():
    hazards = taught({("paused",): [2.0] * 20})
    cls = ("paused",)
    step = 1e-4
    survived = sum(hazards.hazard(cls, 0.5 + step * n) * step for n in range(10_000))
    log_survival = hazards.log_likelihood(cls, 0.5, 1.5, was_read=False)
    assert log_survival == pytest.approx(-survived, rel=1e-3)
    density = hazards.log_likelihood(cls, 0.5, 1.5, was_read=True)
    assert density == pytest.approx(log_survival + math.log(hazards.hazard(cls, 1.5)))


def test_reads_to_come_add_up_to_what_survival_says():
    hazards, cls = ReuseHazards(), ("paused",)
    for age_s in (0.0, 3.0, 40.0, 7000.0):
        chance = math.exp(hazards.log_likelihood(cls, age_s, 7200.0, was_read=False))
        assert hazards.p_read(cls, age_s) == pytest.approx(1.0 - chance)


@pytest.mark.parametrize("age_s", [0.0, 0.5, 30.0, 5000.0, 7200.0, 20_000.0])
def test_the_share_of_reads_to_come_is_reached_at_its_age(age_s):
    hazards, cls = ReuseHazards(), ("paused",)
    p_read = hazards.p_read(cls, age_s)
    previous = age_s
    for share in (0.0, 0.1, 0.5, 0.9):
        reached_s = hazards.read_age_s(cls, age_s, share)
        assert reached_s >= previous
        until = 1.0 - math.exp(hazards.log_likelihood(cls, age_s, reached_s, was_read=False))
        assert until == pytest.approx(share * p_read, abs=1e-9)
        previous = reached_s


def test_an_announced_read_is_expected_within_seconds():
    hazards = ReuseHazards()
    assert hazards.read_age_s(("announced",), 0.0, 0.5) < 3.0
    assert hazards.read_age_s(("paused",), 0.0, 0.5) > 10.0
