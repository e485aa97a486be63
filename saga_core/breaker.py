"""When a worker is given no more requests for a while."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from saga_core.errors import SettingsError


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When a breaker opens, and when it closes again.

    Attributes:
        failures: failures within ``window_s`` that open it, at least 1; 0: it never opens.
        window_s: seconds over which failures are counted, above 0.
        open_s: seconds that it stays open, not negative.
        probes: successes after that which close it, at least 1; so many requests at a time are let
            through until then.
    """

    failures: int = 10
    window_s: float = 120.0
    open_s: float = 5.0
    probes: int = 3

    def __post_init__(self) -> None:
        if self.failures < 0 or self.probes < 1 or self.window_s <= 0.0 or self.open_s < 0.0:
            raise SettingsError(
                f"a breaker needs failures >= 0, window_s > 0, open_s >= 0 and probes >= 1: {self}"
            )


@dataclass(slots=True)
class Breaker:
    """Closed: all requests pass. Open: none. Half open: a few, to see.

    It is told of every request that it let pass how it went: a failure is one of the worker, such
    as no connection, silence or a gateway's 5xx, never one of the request, such as a 4xx.

    Attributes:
        settings: when it opens and closes.
    """

    settings: BreakerSettings
    _failed_s: deque[float] = field(default_factory=deque)
    _open_until_s: float = -math.inf
    _probes_left: int = 0
    _probing: int = 0

    @property
    def probes(self) -> int:
        """How many requests may try the worker at a time; 0: it is not in doubt."""
        return self.settings.probes if self._probes_left else 0

    def allows(self, now_s: float) -> bool:
        """Whether one more request may pass now."""
        if now_s < self._open_until_s:
            return False
        return self._probes_left == 0 or self._probing < self.settings.probes

    def began(self) -> None:
        """A request passes."""
        if self._probes_left:
            self._probing += 1

    def succeeded(self) -> bool:
        """A request that had passed was served, or failed by its own fault.

        Returns whether that has closed the breaker.
        """
        self._probing = max(0, self._probing - 1)
        if not self._probes_left:
            return False
        self._probes_left -= 1
        if self._probes_left:
            return False
        self.reset()
        return True

    def gave_up(self) -> None:
        """A request that had passed came to no end that tells anything: its client has left."""
        self._probing = max(0, self._probing - 1)

    def failed(self, now_s: float) -> None:
        """A request that had passed failed by the worker's fault."""
        self._probing = max(0, self._probing - 1)
        if not self.settings.failures:
            return
        failed_s = self._failed_s
        failed_s.append(now_s)
        while failed_s[0] < now_s - self.settings.window_s:
            failed_s.popleft()
        if self._probes_left or len(failed_s) >= self.settings.failures:
            self.open(now_s)

    def open(self, now_s: float) -> None:
        """Let nothing pass for ``open_s``: it is known that the worker is down."""
        self._failed_s.clear()
        self._probing = 0
        self._probes_left = self.settings.probes
        self._open_until_s = max(self._open_until_s, now_s + self.settings.open_s)

    def reset(self) -> None:
        """Close: the worker is known to be well."""
        self._failed_s.clear()
        self._open_until_s = -math.inf
        self._probes_left = self._probing = 0
