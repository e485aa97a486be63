"""How long pauses last: learned online, from a prior until there is evidence."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Hashable

from saga_core.types import ToolType

PRIOR_P95_S: dict[ToolType, float] = {
    ToolType.FILE_IO: 0.32,
    ToolType.CODE_EXEC: 2.4,
    ToolType.WEB_API: 4.5,
    ToolType.DB_QUERY: 0.89,
    ToolType.SUBAGENT: 60.0,
    ToolType.HUMAN: 300.0,
    ToolType.OTHER: 13.0,
}
"""P95 per type before anything was seen, seconds. The first four are the SAGA paper's; the others
are ours: a shell call of a coding agent for ``other``, minutes for a person."""

_WINDOW = 256
_ENOUGH = 8


class PauseDurations:
    """Sliding-window quantiles of pause lengths per key.

    A key with fewer than eight samples answers the larger of the prior and its largest sample: a
    TTL that is too long costs room, one that is too short costs a prefill. Of each key the last
    256 samples count; the least recently updated key goes when ``max_keys`` is reached.
    """

    def __init__(self, max_keys: int = 10_000) -> None:
        self._max_keys = max_keys
        self._windows: OrderedDict[Hashable, tuple[deque[float], list[float]]] = OrderedDict()

    def observe(self, key: Hashable, duration_s: float) -> None:
        """Add one finished pause of ``duration_s`` seconds (not negative)."""
        window = self._windows.get(key)
        if window is None:
            window = self._windows[key] = (deque(), [])
            if len(self._windows) > self._max_keys:
                self._windows.popitem(last=False)
        self._windows.move_to_end(key)
        recent, ordered = window
        if len(recent) == _WINDOW:
            del ordered[bisect_left(ordered, recent.popleft())]
        recent.append(duration_s)
        insort(ordered, duration_s)

    def p95_s(self, key: Hashable, prior: ToolType) -> float:
        """95th percentile of the key's pauses, seconds (nearest rank)."""
        window = self._windows.get(key)
        ordered = window[1] if window is not None else []
        if len(ordered) < _ENOUGH:
            return max([PRIOR_P95_S[prior], *ordered[-1:]])
        return ordered[(95 * len(ordered) - 1) // 100]
