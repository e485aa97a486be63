"""Hints are followed while they foretell better than no hint."""

from saga_core.trust import HintTrust


def test_a_kind_starts_with_a_little_credit():
    trust = HintTrust()
    assert trust.is_trusted("tool")
    for _ in range(3):
        trust.judge("tool", -2.0)
    assert not trust.is_trusted("tool")
    assert trust.is_trusted("ended")


def test_one_surprise_decides_nothing():
    trust = HintTrust()
    trust.judge("ended", -1e9)
    assert trust.is_trusted("ended")


def test_trust_is_won_back_by_being_right():
    trust = HintTrust()
    for _ in range(1000):
        trust.judge("tool", -3.0)
    for _ in range(100):
        trust.judge("tool", 1.0)
    assert trust.is_trusted("tool")


def test_worthless_hints_fade_to_no_trust_or_stay_harmless():
    trust = HintTrust()
    for _ in range(20_000):
        trust.judge("tool", -1e-3)
    assert not trust.is_trusted("tool")
