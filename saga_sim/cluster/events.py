"""What happens when, on the virtual clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from gpu_backend.virtual_clock import VirtualClock

Act = Callable[[], None]


class Events:
    """Events to come, in order of time; of those at the same time the one goes first that was
    made known first.

    Attributes:
        known_s: when the event that happens now was made known.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.known_s = 0.0
        self._heap: list[tuple[float, int, float, Act]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, at_s: float, act: Act) -> None:
        """Let something happen, not before now."""
        self._sequence += 1
        heapq.heappush(self._heap, (at_s, self._sequence, self.clock.now_s, act))

    def happen(self) -> None:
        """Set the clock to the next event and let it happen."""
        self.clock.now_s, _, self.known_s, act = heapq.heappop(self._heap)
        act()

    def knew_next(self, at_s: float) -> bool:
        """Whether the next event is of this moment, too, and was known then already."""
        if not self._heap:
            return False
        next_s, _, known_s, _ = self._heap[0]
        return next_s == self.clock.now_s and known_s <= at_s
