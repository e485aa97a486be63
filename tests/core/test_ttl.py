"""The TTL of the paper, with both clamps."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saga_core.settings import RetentionSettings
from saga_core.ttl import ttl_s

PROPERTY = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
PAPER = RetentionSettings()


@pytest.mark.parametrize(
    ("p95_s", "pressure", "ttl"),
    [
        (100.0, 0.0, 100.0),
        (100.0, 0.7, 100.0),
        (100.0, 0.75, 87.5),
        (100.0, 0.8, 75.0),
        (100.0, 0.9, 50.0),
        (100.0, 1.0, 50.0),  # The upper clamp that the paper forgets.
        (100.0, 3.0, 50.0),
        (300.0, 0.0, 300.0),
        (400.0, 0.0, 300.0),
        (700.0, 0.9, 300.0),  # The pressure shrinks the pause, not the bound.
        (500.0, 0.9, 250.0),
        (0.0, 0.5, 0.0),
    ],
)
def test_the_formula_at_its_corners(p95_s, pressure, ttl):
    assert ttl_s(p95_s, pressure, PAPER) == pytest.approx(ttl)


def test_a_bound_of_zero_switches_protection_off():
    assert ttl_s(60.0, 0.0, RetentionSettings(ttl_max_s=0.0)) == 0.0


def test_the_settings_move_the_corners():
    moved = RetentionSettings(pressure_low=0.2, pressure_high=0.4, ttl_max_s=90.0)
    assert ttl_s(100.0, 0.2, moved) == 90.0
    assert ttl_s(100.0, 0.3, moved) == pytest.approx(75.0)
    assert ttl_s(100.0, 0.4, moved) == pytest.approx(50.0)


@PROPERTY
@given(
    st.floats(0.0, 1e6),
    st.floats(0.0, 2.0),
    st.floats(0.0, 2.0),
    st.builds(
        lambda low, span, most: RetentionSettings(
            pressure_low=low, pressure_high=low + (1.0 - low) * span, ttl_max_s=most
        ),
        st.floats(0.0, 0.9),
        st.floats(0.01, 1.0),
        st.floats(0.0, 1e4),
    ),
)
def test_more_pressure_never_lengthens_a_ttl_and_at_most_halves_it(p95_s, a, b, constants):
    low, high = sorted((a, b))
    calm, pressed = ttl_s(p95_s, low, constants), ttl_s(p95_s, high, constants)
    assert min(0.5 * p95_s, constants.ttl_max_s) <= pressed <= calm
    assert calm <= min(p95_s, constants.ttl_max_s)
