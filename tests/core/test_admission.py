"""Whose turn it is when not all waiting requests can be admitted."""

from hypothesis import given, settings
from hypothesis import strategies as st

from saga_core.admission import WaitingPrompt, admission_order

MAX_S = 60.0


def order(*waiting):
    prompts = [WaitingPrompt(f"r{n}", *facts) for n, facts in enumerate(waiting)]
    return admission_order(prompts, max_overtaken_s=MAX_S)


def test_what_needs_little_prefill_goes_first():
    assert order((1.0, 4.0), (1.0, 0.1)) == [1, 0]


def test_who_has_waited_long_enough_for_its_prefill_goes_first():
    assert order((41.0, 4.0), (1.0, 0.1)) == [0, 1]


def test_equal_prefill_means_order_of_arrival():
    assert order((1.0, 2.0), (3.0, 2.0), (2.0, 2.0)) == [1, 2, 0]


def test_just_arrived_requests_keep_their_order():
    assert order((0.0, 4.0), (0.0, 0.1)) == [0, 1]


def test_nobody_is_overtaken_for_ever():
    assert order((30.0, 0.001), (60.0, 1e6), (61.0, 1e6)) == [2, 1, 0]


def test_without_overtaking_it_is_the_order_of_arrival():
    prompts = [WaitingPrompt("a", 1.0, 0.1), WaitingPrompt("b", 2.0, 9.0)]
    assert admission_order(prompts, max_overtaken_s=0.0) == [1, 0]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.0, 100.0)), max_size=20))
def test_everybody_has_one_place(waiting):
    assert sorted(order(*waiting)) == list(range(len(waiting)))
