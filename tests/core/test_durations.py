"""Pause lengths: the prior until there is evidence, then the window's 95th percentile."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saga_core.durations import PRIOR_P95_S, PauseDurations
from saga_core.types import ToolType

PROPERTY = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
ENOUGH, WINDOW = 8, 256
CODE = ToolType.CODE_EXEC


def p95_by_definition(samples):
    """The least sample that at least 95 % of the samples do not exceed."""
    return next(
        value
        for value in sorted(samples)
        if 100 * sum(other <= value for other in samples) >= 95 * len(samples)
    )


def observed(samples, **options):
    durations = PauseDurations(**options)
    for sample in samples:
        durations.observe("key", sample)
    return durations


@pytest.mark.parametrize("tool", list(ToolType))
def test_an_unknown_key_answers_the_prior(tool):
    assert PauseDurations().p95_s("key", tool) == PRIOR_P95_S[tool]


def test_few_samples_only_lengthen_the_prior():
    assert observed([0.1] * (ENOUGH - 1)).p95_s("key", CODE) == PRIOR_P95_S[CODE]
    assert observed([50.0, *[0.1] * (ENOUGH - 2)]).p95_s("key", CODE) == 50.0


def test_eight_samples_are_enough_to_forget_the_prior():
    assert observed([0.1] * ENOUGH).p95_s("key", ToolType.HUMAN) == 0.1


@pytest.mark.parametrize(("count", "rank"), [(8, 8), (19, 19), (20, 19), (21, 20), (100, 95)])
def test_the_nearest_rank_is_taken(count, rank):
    samples = [float(n) for n in range(1, count + 1)]
    assert observed(reversed(samples)).p95_s("key", CODE) == rank


@PROPERTY
@given(
    st.lists(st.integers(0, 30).map(float), max_size=40)
    | st.lists(st.floats(0.0, 1e6), max_size=30).map(lambda few: few * 20)
)
def test_the_answer_is_that_of_a_naive_reference(samples):
    answer = observed(samples).p95_s("key", CODE)
    recent = samples[-WINDOW:]
    if len(recent) < ENOUGH:
        assert answer == max([PRIOR_P95_S[CODE], *recent])
    else:
        assert answer == p95_by_definition(recent)


def test_only_the_last_256_samples_count():
    durations = observed([900.0] * WINDOW)
    for sample in [1.0] * (WINDOW - 13):
        durations.observe("key", sample)
    assert durations.p95_s("key", CODE) == 900.0
    durations.observe("key", 1.0)
    assert durations.p95_s("key", CODE) == 1.0


def test_keys_learn_apart():
    durations = observed([7.0] * ENOUGH)
    for _ in range(ENOUGH):
        durations.observe(("workflow", "bash"), 3.0)
    assert durations.p95_s("key", CODE) == 7.0
    assert durations.p95_s(("workflow", "bash"), CODE) == 3.0


def test_the_least_recently_updated_key_goes():
    durations = PauseDurations(max_keys=2)
    for key in ("a", "b"):
        for _ in range(ENOUGH):
            durations.observe(key, 100.0)
    durations.observe("a", 100.0)
    durations.p95_s("b", CODE)  # Reading is not updating.
    durations.observe("c", 100.0)
    answers = {key: durations.p95_s(key, CODE) for key in "abc"}
    assert answers == {"a": 100.0, "b": PRIOR_P95_S[CODE], "c": 100.0}
