"""The clock of a simulation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from gpu_backend import scheduler as plugin

_TIME = "time"


@dataclass(slots=True)
class VirtualClock:
    """The time of a simulation; ``now_s`` is set by who runs it."""

    now_s: float = 0.0

    @contextmanager
    def stands_in(self) -> Iterator[None]:
        """Let the plugin's scheduler read this clock where it reads the wall clock for run times.

        For all schedulers of the process: simulations do not run beside each other.
        """
        real: Any = getattr(plugin, _TIME)
        read = SimpleNamespace(
            time=lambda: self.now_s, monotonic=lambda: self.now_s, thread_time=real.thread_time
        )
        setattr(plugin, _TIME, read)
        try:
            yield
        finally:
            setattr(plugin, _TIME, real)
