"""A breaker opens on a worker's failures, and closes when it serves again."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saga_core.breaker import Breaker, BreakerSettings
from saga_core.errors import SettingsError

SETTINGS = BreakerSettings(failures=3, window_s=10.0, open_s=5.0, probes=2)


def fail(breaker, *times_s):
    for now_s in times_s:
        assert breaker.allows(now_s)
        breaker.began()
        breaker.failed(now_s)


def serve(breaker, now_s):
    assert breaker.allows(now_s)
    breaker.began()
    breaker.succeeded()


def test_it_opens_when_enough_requests_fail_within_the_window():
    breaker = Breaker(SETTINGS)
    fail(breaker, 0.0, 4.0)
    serve(breaker, 5.0)
    fail(breaker, 11.0)  # The first one is out of the window.
    assert breaker.allows(11.0)
    fail(breaker, 12.0)
    assert not breaker.allows(12.0)
    assert not breaker.allows(16.9)


def test_after_a_while_a_few_requests_pass_and_their_success_closes_it():
    breaker = Breaker(SETTINGS)
    fail(breaker, 0.0, 0.0, 0.0)
    for _ in range(2):
        assert breaker.allows(5.0)
        breaker.began()
    assert not breaker.allows(5.0)
    breaker.succeeded()
    assert breaker.allows(5.0)
    breaker.succeeded()
    for _ in range(20):
        assert breaker.allows(5.0)
        breaker.began()


def test_a_failed_probe_opens_it_again():
    breaker = Breaker(SETTINGS)
    fail(breaker, 0.0, 0.0, 0.0)
    serve(breaker, 5.0)
    fail(breaker, 6.0)
    assert not breaker.allows(10.9)
    serve(breaker, 11.0)
    serve(breaker, 11.0)
    fail(breaker, 12.0, 12.0)
    assert breaker.allows(12.0)


def test_a_client_that_leaves_proves_nothing_and_takes_no_place():
    breaker = Breaker(SETTINGS)
    fail(breaker, 0.0, 0.0, 0.0)
    for _ in range(9):
        assert breaker.allows(5.0)
        breaker.began()
        breaker.gave_up()
    serve(breaker, 5.0)
    assert breaker.allows(5.0)


def test_it_can_be_opened_and_closed_by_those_who_know():
    breaker = Breaker(SETTINGS)
    breaker.open(0.0)
    assert not breaker.allows(4.9)
    breaker.reset()
    assert breaker.allows(0.0)
    fail(breaker, 0.0, 0.0)
    assert breaker.allows(0.0)


def test_with_zero_failures_it_never_opens():
    breaker = Breaker(BreakerSettings(failures=0))
    fail(breaker, *[0.0] * 1000)


@pytest.mark.parametrize(
    "wrong", [{"failures": -1}, {"window_s": 0.0}, {"open_s": -1.0}, {"probes": 0}]
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(SettingsError, match="breaker"):
        BreakerSettings(**wrong)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from("bsfgw"), st.floats(0.0, 8.0)), max_size=60))
def test_whatever_happens_a_worker_is_tried_again(events):
    """No history leaves it shut for longer than ``open_s``, once nothing is under way."""
    breaker, now_s, under_way = Breaker(SETTINGS), 0.0, 0
    for what, wait_s in events:
        if what == "w":
            now_s += wait_s
        elif what == "b" and breaker.allows(now_s):
            breaker.began()
            under_way += 1
        elif what in "sfg" and under_way:
            under_way -= 1
            if what == "f":
                breaker.failed(now_s)
            else:
                breaker.succeeded() if what == "s" else breaker.gave_up()
    for _ in range(under_way):
        breaker.gave_up()
    assert breaker.allows(now_s + SETTINGS.open_s)
