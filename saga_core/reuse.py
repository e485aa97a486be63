"""Whether a paused session comes back: learned online per kind of pause."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

_PRIOR_TOOL = (9.0, 1.0)
_PRIOR_NO_TOOL = (1.0, 2.0)


@dataclass(slots=True)
class _Counts:
    returned: float = 0.0
    ended: float = 0.0


class ReuseModel:
    """Share of pauses that ended in another step of the session, per key.

    P_reuse = P(next step) · overlap (SAGA paper, with one successor). An append-only session reads
    its whole cached prefix again, so overlap is 1 until it is measured. P(next step) is a smoothed
    share: ten pseudo-pauses of which nine return after a tool call, three of which one returns
    after an answer without one. The least recently updated key goes at ``max_keys``.
    """

    def __init__(self, max_keys: int = 10_000) -> None:
        self._max_keys = max_keys
        self._counts: OrderedDict[Hashable, _Counts] = OrderedDict()

    def observe(self, key: Hashable, *, returned: bool) -> None:
        """Add one pause whose outcome is known."""
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = _Counts()
            if len(self._counts) > self._max_keys:
                self._counts.popitem(last=False)
        self._counts.move_to_end(key)
        if returned:
            counts.returned += 1.0
        else:
            counts.ended += 1.0

    def p_reuse(self, key: Hashable, *, tool_called: bool) -> float:
        """Probability that a session in this kind of pause comes back for its prefix, 0 to 1."""
        counts = self._counts.get(key, _Counts())
        returned, ended = _PRIOR_TOOL if tool_called else _PRIOR_NO_TOOL
        returned += counts.returned
        return returned / (returned + ended + counts.ended)
