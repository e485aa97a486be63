"""Pause lengths: the prior until there is evidence, then the quantiles of the latest ones."""

import json
import math
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saga_core.durations import (
    PRIOR_P50_S,
    PRIOR_P95_S,
    ZERO_BIN,
    PauseDurations,
    Quantiles,
    bin_of,
    bin_value,
)
from saga_core.fields import StateError
from saga_core.tool_durations import ToolDurations
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


def test_an_answer_follows_what_counts_however_many_have_come():
    quantiles = sketch([1.0] * 30_000)
    assert quantiles.quantile(0.5) == about(1.0)
    for _ in range(1100):
        quantiles.add(1000.0)
    assert quantiles.quantile(0.5) == about(1000.0)


@pytest.mark.parametrize("added", [0, 1, 5, 600, 1500])
def test_a_saved_sketch_answers_the_same_and_goes_on(added):
    rng = random.Random(added)
    saved = sketch(rng.choice([0.0, rng.lognormvariate(0.0, 3.0)]) for _ in range(added))
    restored = Quantiles.from_state(json.loads(json.dumps(saved.state())))
    for each in (saved, restored):
        each.add(7.0)
        each.add(0.0)
    assert (len(restored), restored.total) == (len(saved), saved.total)
    assert restored.bins() == saved.bins()
    levels = [level / 20 for level in range(21)]
    assert [restored.quantile(q) for q in levels] == [saved.quantile(q) for q in levels]


@PROPERTY
@given(st.floats(1e-9, 1e12))
def test_a_bin_holds_its_own_value_and_what_is_within_two_percent(value):
    assert bin_of(bin_value(bin_of(value))) == bin_of(value)
    assert bin_value(bin_of(value)) == about(value)
    assert bin_value(bin_of(0.0)) == 0.0
    assert bin_of(value) > ZERO_BIN


def broken(**changed):
    recent = {**sketch([1.0, 2.0]).state()["recent"], **changed}
    return {"recent": recent, "before": None, "total": 2}


@pytest.mark.parametrize(
    ("state", "named"),
    [
        (3, "quantiles"),
        ({}, "recent"),
        (broken(counts=[1.0, -1.0]), r"recent.counts\[1\]"),
        (broken(bins=[1]), "recent.bins"),
        (broken(bins=[1, 10**9]), "recent.bins"),
        (broken(sum=math.inf), "recent.sum"),
        ({**broken(), "total": 1}, "total"),
    ],
)
def test_a_state_that_is_no_sketch_is_refused_by_its_field(state, named):
    with pytest.raises(StateError, match=named):
        Quantiles.from_state(state)


def paused(workflow="w", tool="bash", pauses=(), durations=None):
    durations = ToolDurations() if durations is None else durations
    for pause_s in pauses:
        durations.observe(workflow, tool, pause_s)
    return durations


def test_a_workflows_own_pauses_outweigh_the_others():
    durations = paused("slow", "bash", [100.0] * 300)
    paused("quick", "bash", [1.0] * 300, durations)
    assert durations.p50_p95_s("quick", "bash") == (about(1.0), about(1.0))
    assert durations.p50_p95_s("slow", "bash") == (about(100.0), about(100.0))


def test_what_is_not_known_falls_back_on_the_tool_then_its_type_then_the_prior():
    durations = paused("a", "run_tests", [40.0] * 30)
    assert durations.quantile_s("b", "run_tests", 0.5) == about(40.0)
    assert durations.quantile_s("b", "python", 0.5) == about(40.0)
    assert durations.p50_p95_s("b", "read_file") == (
        PRIOR_P50_S[ToolType.FILE_IO],
        PRIOR_P95_S[ToolType.FILE_IO],
    )
    assert durations.quantile_s("b", "read_file", 0.95) == about(PRIOR_P95_S[ToolType.FILE_IO])


def test_a_few_pauses_move_the_quantiles_part_of_the_way():
    others = paused("a", "bash", [1.0] * 200)
    few = paused("b", "bash", [10.0] * 3, others)
    assert few.quantile_s("b", "bash", 0.5) == about(1.0)
    assert few.quantile_s("b", "bash", 0.95) == about(10.0)


def test_a_person_is_waited_for_apart_from_tools():
    durations = paused("w", None, [600.0] * 50, paused("w", "bash", [1.0] * 50))
    assert durations.quantile_s("w", None, 0.5) == about(600.0)
    assert durations.quantile_s("new", None, 0.5) == about(600.0)
    assert ToolDurations().quantile_s("w", None, 0.5) == about(PRIOR_P50_S[ToolType.HUMAN])


@pytest.mark.parametrize("seed", range(3))
def test_a_share_of_the_next_pauses_keeps_within_the_quantile(seed):
    rng = random.Random(seed)
    durations = paused("w", "bash", [rng.lognormvariate(1.0, 1.5) for _ in range(2000)])
    p95_s = durations.p50_p95_s("w", "bash")[1]
    later = [rng.lognormvariate(1.0, 1.5) for _ in range(4000)]
    assert sum(pause_s <= p95_s for pause_s in later) / 4000 == pytest.approx(0.95, abs=0.015)


def test_the_time_left_of_a_tool_is_that_of_the_pauses_that_lasted_so_long():
    durations = paused("w", "bash", [1.0] * 90 + [50.0] * 60)
    assert durations.remaining_s("w", "bash", 0.0) == about(1.0)
    assert durations.remaining_s("w", "bash", 5.0) == pytest.approx(45.0, rel=0.05)
    assert durations.remaining_s("w", "bash", 1e6) == 1e6


def saved(durations):
    """Its state, made in one go."""
    steps = durations.state()
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return done.value


def test_tool_durations_are_saved_and_merged():
    one = paused("a", "bash", [1.0] * 40, paused(("t", None), None, [9.0] * 40))
    other = paused("b", "bash", [20.0] * 40)
    restored = ToolDurations.from_state(json.loads(json.dumps(saved(one))))
    assert restored.p50_p95_s("a", "bash") == one.p50_p95_s("a", "bash")
    assert restored.p50_p95_s(("t", None), None) == one.p50_p95_s(("t", None), None)
    restored.merge(other)
    other.merge(one)
    for workflow in ("a", "b", "c"):
        assert restored.p50_p95_s(workflow, "bash") == other.p50_p95_s(workflow, "bash")


def test_the_least_recently_used_tool_goes():
    durations = ToolDurations(max_keys=6)
    for tool in ("bash", "read_file", "fetch_url"):
        paused("w", tool, [0.5] * 5, durations)
    assert len(durations) == 6
    assert durations.pauses("w", "bash") == 0
    assert durations.pauses("w", "fetch_url") == 5
