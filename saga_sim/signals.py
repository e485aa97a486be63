"""What a simulated worker is told about pauses, beyond what it sees."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from saga_core.errors import SettingsError
from saga_core.types import Pause
from saga_sim.workload import SimCall, Workload


@dataclass(frozen=True, slots=True)
class Signals:
    """Which signals reach the worker.

    Attributes:
        ends: the end of a session is told when it comes.
        tools: the names of the tools that answers call, where the trace has them.
        tool_ends: the end of a tool, where the trace has it.
        forecast_sigma: every pause is forecast with a log-normal error of this σ; None: no
            forecast. An *injected* forecast: it shows what better knowledge would be worth.
        false_ends: share of steps after which an end is told that is none; true ends are not told.
        random_tools: tool names are drawn at random.
    """

    ends: bool = False
    tools: bool = False
    tool_ends: bool = False
    forecast_sigma: float | None = None
    false_ends: float = 0.0
    random_tools: bool = False


SIGNALS: dict[str, Signals] = {
    "none": Signals(),
    "close": Signals(ends=True),
    "tools": Signals(tools=True),
    "tool-ends": Signals(tools=True, tool_ends=True),
    "forecast": Signals(forecast_sigma=0.5),
    "all": Signals(ends=True, tools=True, tool_ends=True, forecast_sigma=0.5),
    "adversarial": Signals(random_tools=True, false_ends=0.1),
}
"""Named sets of signals; each adds to the session id, which is always there."""


def signals_of(name: str) -> Signals:
    """Look up a set of signals.

    Raises:
        SettingsError: there is no such set; the message lists those that exist.
    """
    if name not in SIGNALS:
        raise SettingsError(f"unknown signals {name!r}; choose from {', '.join(SIGNALS)}")
    return SIGNALS[name]


_RANDOM_TOOLS = ("Bash", "Read", "Edit", "Grep", "WebFetch")


class Teller:
    """Makes up the signals of one run, from a seed of its own."""

    def __init__(self, signals: Signals, workload: Workload, seed: int) -> None:
        self._signals = signals
        self._rng = random.Random(seed)
        self._gaps_s = [
            call.next_s - call.end_s for call in workload.calls if call.next_s is not None
        ]

    def pause(self, call: SimCall) -> Pause | None:
        """What is told at the end of the call about the pause that follows."""
        tool, p50_s = None, None
        if self._signals.random_tools:
            tool = self._rng.choice(_RANDOM_TOOLS)
        elif self._signals.tools:
            tool = call.tool
        if self._signals.forecast_sigma is not None and self._gaps_s:
            # A session that does not return is forecast like any other: nothing gives it away.
            gap_s = self._rng.choice(self._gaps_s)
            if call.next_s is not None:
                gap_s = call.next_s - call.end_s
            p50_s = max(gap_s, 0.05) * math.exp(self._rng.gauss(0.0, self._signals.forecast_sigma))
        if tool is None and p50_s is None:
            return None
        return Pause(p_reuse=1.0, pause_p95_s=0.0, tool_name=tool, pause_p50_s=p50_s)

    def is_end(self, call: SimCall) -> bool:
        """Whether the worker is told at the end of the call that its session is over."""
        if self._signals.false_ends:
            return self._rng.random() < self._signals.false_ends
        return self._signals.ends and call.next_s is None

    def tool_end_s(self, call: SimCall) -> float | None:
        """When the worker is told that the tool has ended; None when it is not."""
        if not self._signals.tool_ends or call.tool_end_s is None or call.next_s is None:
            return None
        if call.next_s < call.end_s:
            return None
        return min(call.tool_end_s, call.next_s)
