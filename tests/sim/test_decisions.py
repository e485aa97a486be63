"""The benchmark of decisions runs for every policy and measures something."""

import pytest

from saga_core.policies import POLICIES
from saga_sim import decisions


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_costs_are_measured(policy, monkeypatch):
    monkeypatch.setattr(decisions, "_EVENTS", 40)
    assert all(cost_us > 0.0 for cost_us in decisions.costs_us(policy, 50))
