"""The benchmark of decisions runs for every policy and measures something."""

import pytest

from saga_core.policies import POLICIES
from saga_sim import decisions


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_costs_are_measured(policy, monkeypatch):
    monkeypatch.setattr(decisions, "_EVENTS", 40)
    found = decisions.costs(policy, 50)
    assert min(found.pause_us, found.victim_us, found.reviews) > 0.0
