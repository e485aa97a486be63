"""Pause lengths: the prior until there is evidence, then the quantiles of the latest ones."""

import math
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saga_core.durations import PRIOR_P50_S, PRIOR_P95_S, PauseDurations, Quantiles
from saga_core.types import ToolType

PROPERTY = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
ENOUGH = 8
CODE = ToolType.CODE_EXEC
SAMPLES = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=400)


def observed(samples, **options):
    durations = PauseDurations(**options)
    for sample in samples:
        durations.observe("key", sample)
    return durations


def sketch(samples):
    quantiles = Quantiles()
    for sample in samples:
        quantiles.add(sample)
    return quantiles


def about(value):
    return pytest.approx(value, rel=0.021)


def within_two_percent(quantiles, samples):
    """Whether each quantile lies between the samples of its rank, 2 % either way."""
    ordered = sorted(samples)
    for q in (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0):
        rank = q * (len(ordered) - 1)
        low, high = ordered[math.floor(rank)], ordered[math.ceil(rank)]
        if not 0.979 * low <= quantiles.quantile(q) <= 1.021 * high:
            return False
    return True


@pytest.mark.parametrize("tool", list(ToolType))
def test_an_unknown_key_answers_the_prior(tool):
    assert PauseDurations().p95_s("key", tool) == PRIOR_P95_S[tool]
    assert PauseDurations().p50_s("key", tool) == PRIOR_P50_S[tool]


def test_few_samples_only_lengthen_the_prior():
    assert observed([0.1] * (ENOUGH - 1)).p95_s("key", CODE) == PRIOR_P95_S[CODE]
    assert observed([50.0] * (ENOUGH - 1)).p95_s("key", CODE) == about(50.0)
    assert observed([0.1] * (ENOUGH - 1)).p50_s("key", CODE) == PRIOR_P50_S[CODE]
    assert observed([50.0] * (ENOUGH - 1)).p50_s("key", CODE) == about(50.0)


def test_eight_samples_are_enough_to_forget_the_prior():
    assert observed([0.1] * ENOUGH).p95_s("key", ToolType.HUMAN) == about(0.1)


@PROPERTY
@given(SAMPLES)
def test_a_quantile_is_within_two_percent_of_a_sample_of_that_rank(samples):
    assert within_two_percent(sketch(samples), samples)


@PROPERTY
@given(SAMPLES, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_greater_share_has_no_smaller_quantile(samples, a, b):
    low, high = sorted((a, b))
    assert sketch(samples).quantile(low) <= sketch(samples).quantile(high)


def test_numbers_that_are_zero_count():
    quantiles = sketch([0.0] * 9 + [5.0])
    assert quantiles.quantile(0.5) == 0.0
    assert quantiles.quantile(1.0) == about(5.0)
    assert sketch([]).quantile(0.5) is None


def test_old_samples_are_forgotten():
    quantiles = sketch([1000.0] * 512 + [1.0] * 512 + [1.0])
    assert quantiles.quantile(1.0) == about(1.0)
    assert len(quantiles) == 513


def test_what_came_before_still_counts_in_part():
    quantiles = sketch([1000.0] * 512 + [1.0] * 100)
    assert quantiles.quantile(0.95) == about(1000.0)


@pytest.mark.parametrize("added", [1, 511, 512, 513, 1024, 1025, 3000])
def test_between_the_last_512_and_1024_samples_count(added):
    rng = random.Random(added)
    samples = [rng.lognormvariate(1.0, 2.0) for _ in range(added)]
    quantiles = sketch(samples)
    assert len(quantiles) == added if added <= 1024 else 512 <= len(quantiles) <= 1024
    assert within_two_percent(quantiles, samples[-len(quantiles) :])


@PROPERTY
@given(SAMPLES, SAMPLES)
def test_merged_sketches_know_what_both_knew(some, others):
    merged, before = sketch(some), sketch(others)
    merged.merge(before)
    assert len(merged) == len(some) + len(others)
    assert len(before) == len(others)
    assert within_two_percent(merged, [*some, *others])
    assert within_two_percent(before, others)


@pytest.mark.parametrize(("mine", "theirs"), [(0, 700), (700, 0), (600, 1000), (100, 100)])
def test_merging_takes_both_generations(mine, theirs):
    rng = random.Random(5)
    some, others = ([rng.expovariate(0.1) for _ in range(n)] for n in (mine, theirs))
    merged = sketch(some)
    merged.merge(sketch(others))
    assert len(merged) == mine + theirs
    assert within_two_percent(merged, [*some, *others])


def test_what_was_merged_is_forgotten_as_one_generation():
    merged = sketch([1.0] * 100)
    merged.merge(sketch([1000.0] * 1000))
    for _ in range(513):
        merged.add(1.0)
    assert len(merged) == 513
    assert merged.quantile(1.0) == about(1.0)


def test_cuts_part_the_numbers_into_equally_many():
    cuts = sketch(range(1, 401)).cuts(3)
    assert cuts == (about(100.0), about(200.0), about(300.0))
    assert sketch([1.0] * 7).cuts(3) == ()
    assert sketch([1.0] * 8).cuts(2) == (about(1.0), about(1.0))
    assert sketch(range(1, 401)).cuts(1) == (about(200.0),)


def test_the_time_left_is_that_of_the_pauses_that_lasted_so_long():
    rng = random.Random(4)
    samples = [rng.lognormvariate(2.0, 1.0) for _ in range(500)]
    for age_s in (1.0, 5.0, 20.0):
        left = sorted(sample - age_s for sample in samples if sample > age_s)
        for q in (0.25, 0.5, 0.75):
            exact = left[int(q * (len(left) - 1))]
            # The age and the value are found within 2 % each, and a rank apart counts too.
            error_s = 0.08 * (age_s + exact) + 0.1
            assert sketch(samples).remaining_s(age_s, q) == pytest.approx(exact, abs=error_s)


@PROPERTY
@given(SAMPLES, st.floats(0.0, 1e5), st.floats(0.0, 1.0))
def test_the_pause_that_is_foretold_is_one_that_lasted_longer(samples, age_s, q):
    left_s = sketch(samples).remaining_s(age_s, q)
    longer = [sample for sample in samples if sample > 1.03 * age_s]
    if left_s is None:
        assert not longer
    elif longer:
        lasted_s = age_s + left_s
        assert left_s >= 0.0
        assert 0.97 * min(s for s in samples if s > 0.96 * age_s) <= lasted_s
        assert lasted_s <= 1.03 * max(longer)


@PROPERTY
@given(SAMPLES, st.floats(0.0, 1e5), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_greater_share_has_no_less_time_left(samples, age_s, a, b):
    low, high = sorted((a, b))
    quantiles = sketch(samples)
    less_s, more_s = quantiles.remaining_s(age_s, low), quantiles.remaining_s(age_s, high)
    assert (less_s is None) == (more_s is None)
    assert less_s is None or less_s <= more_s


def test_the_time_left_follows_the_prior_before_eight_samples():
    durations = observed([0.01] * (ENOUGH - 1))
    assert durations.remaining_s("key", 0.1, CODE) == pytest.approx(PRIOR_P50_S[CODE] - 0.1)
    assert observed([0.5] * ENOUGH).remaining_s("key", 0.1, CODE) == pytest.approx(0.4, abs=0.02)


def test_past_everything_seen_as_long_again_is_left():
    durations = observed([1.0] * 20)
    assert durations.remaining_s("key", 0.5, CODE) == pytest.approx(0.5, abs=0.03)
    assert durations.remaining_s("key", 3.0, CODE) == 3.0
    assert durations.remaining_s("unknown", 0.08, CODE) == pytest.approx(PRIOR_P50_S[CODE] - 0.08)
    assert durations.remaining_s("unknown", 9.0, CODE) == 9.0
    assert sketch([]).remaining_s(0.0) is None


def test_keys_learn_apart():
    durations = PauseDurations()
    for _ in range(ENOUGH):
        durations.observe("a", 1.0)
        durations.observe(("b", None), 2.0)
    assert durations.p95_s("a", CODE) == about(1.0)
    assert durations.p50_s(("b", None), CODE) == about(2.0)


def test_the_least_recently_updated_key_goes():
    durations = PauseDurations(max_keys=2)
    for key in ("a", "b", "a", "c"):
        for _ in range(ENOUGH):
            durations.observe(key, 100.0)
    answers = {key: durations.p95_s(key, CODE) for key in "abc"}
    assert answers == {"a": about(100.0), "b": PRIOR_P95_S[CODE], "c": about(100.0)}
