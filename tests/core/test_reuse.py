"""P(next step): a prior, and the share of pauses that ended in one."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saga_core.reuse import ReuseModel

PROPERTY = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def observed(outcomes, **options):
    model = ReuseModel(**options)
    for returned in outcomes:
        model.observe("key", returned=returned)
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
        model.observe(key, returned=False)
    answers = {key: model.p_reuse(key, tool_called=True) for key in "abc"}
    assert answers == {
        "a": pytest.approx(9 / 12),
        "b": 0.9,
        "c": pytest.approx(9 / 11),
    }
