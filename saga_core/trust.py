"""How far hints are believed: learned from how often they were right."""

from __future__ import annotations

from collections.abc import Hashable

_FIRST_SCORE = 5.0
_MAX_SCORE = 50.0
_MAX_GAIN = 3.0
_FADE = 0.998


class HintTrust:
    """Per kind of hint, how much better it foretold outcomes than no hint.

    The score adds up log-likelihood ratios, hinted ÷ plain, of what came true, and fades with
    every new one. A kind is trusted while its score is positive; it starts with a little credit.
    One outcome counts at most e³ to 1, so that a single surprise decides nothing.
    """

    def __init__(self) -> None:
        self._scores: dict[Hashable, float] = {}

    def is_trusted(self, kind: Hashable) -> bool:
        """Whether hints of the kind are followed."""
        return self._scores.get(kind, _FIRST_SCORE) > 0.0

    def judge(self, kind: Hashable, gain: float) -> None:
        """Add one outcome: the log-likelihood ratio of hinted to plain."""
        gain = max(-_MAX_GAIN, min(_MAX_GAIN, gain))
        score = _FADE * self._scores.get(kind, _FIRST_SCORE) + gain
        self._scores[kind] = max(-_MAX_SCORE, min(_MAX_SCORE, score))
