"""The settings name what is out of range."""

import dataclasses
import math

import pytest

from saga_core.errors import SagaError, SettingsError
from saga_core.settings import RetentionSettings

RANGES = {
    "alpha": (0.0, 1.0),
    "beta": (0.0, 1.0),
    "gamma": (0.0, 1.0),
    "tau_max_s": (1e-3, 1e9),
    "ttl_max_s": (0.0, 1e9),
    "protect_min_p_reuse": (0.0, 1.0),
    "fixed_ttl_s": (0.0, 1e9),
    "hazard_half_life_s": (60.0, 1e12),
    "pressure_low": (0.0, 1.0),
    "pressure_high": (0.0, 1.0),
    "max_overtaken_s": (0.0, 1e9),
    "max_sessions": (1, 10**9),
    "max_ghost_blocks": (0, 10**9),
}


def test_every_field_has_its_range_here():
    assert set(RANGES) == {field.name for field in dataclasses.fields(RetentionSettings)}


@pytest.mark.parametrize("name", sorted(RANGES))
@pytest.mark.parametrize("how", ["below", "above", "nan", "inf", "minus inf"])
def test_a_value_out_of_range_names_its_field(name, how):
    low, high = RANGES[name]
    value = {
        "below": low - 1 if isinstance(low, int) else math.nextafter(low, -math.inf),
        "above": high + 1 if isinstance(high, int) else math.nextafter(high, math.inf),
        "nan": math.nan,
        "inf": math.inf,
        "minus inf": -math.inf,
    }[how]
    with pytest.raises(SettingsError) as caught:
        RetentionSettings(**{name: value})
    assert str(caught.value) == f"{name}={value} must be from {low:g} to {high:g}"
    assert isinstance(caught.value, SagaError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("name", sorted(set(RANGES) - {"pressure_low", "pressure_high"}))
def test_the_bounds_themselves_are_legal(name):
    for value in RANGES[name]:
        assert getattr(RetentionSettings(**{name: value}), name) == value


def test_the_whole_span_of_pressure_is_legal():
    settings = RetentionSettings(pressure_low=0.0, pressure_high=1.0)
    assert (settings.pressure_low, settings.pressure_high) == (0.0, 1.0)


@pytest.mark.parametrize(("low", "high"), [(0.5, 0.5), (0.8, 0.2), (0.95, 0.9), (1.0, 1.0)])
def test_pressure_low_must_be_below_pressure_high(low, high):
    with pytest.raises(SettingsError, match=f"pressure_low={low} must be below pressure_high="):
        RetentionSettings(pressure_low=low, pressure_high=high)


def test_settings_do_not_change():
    settings = RetentionSettings()
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.alpha = 0.9


def test_the_defaults_are_the_papers():
    settings = RetentionSettings()
    assert (settings.alpha, settings.beta, settings.gamma) == (0.3, 0.5, 0.2)
    assert (settings.ttl_max_s, settings.pressure_low, settings.pressure_high) == (300.0, 0.7, 0.9)
