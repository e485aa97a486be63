"""What workers and dispatcher are told of a session when a call of it is answered."""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from saga_core.notices import EndNotice, Notice, PauseNotice, ResumeNotice
from saga_core.tool_durations import ToolDurations
from saga_core.types import Pause
from saga_sim.cluster.load import AgentCall, ClusterLoad

_SOON_S = 1.0
_MOST_S = 600.0


class Hints(StrEnum):
    """How true hints are."""

    TRUE = "true"
    RANDOM = "random"
    ADVERSARIAL = "adversarial"


class Told(NamedTuple):
    """What is told of a session: to its worker, and to the dispatcher that it is over."""

    notices: Sequence[Notice]
    is_over: bool


class Teller:
    """Makes the notices of an arm.

    True hints name the tool that an answer calls, with the P95 of its pauses so far as the gateway
    learns it, and the end of a session. Random ones name any tool of the load, with any
    probability of a return and any pause, and ends as often as there are, of any session.
    Adversarial ones say the contrary: of a session that goes on the end, or that it will not
    return from another tool; of one that is over that it returns at once.

    Args:
        tells_tools, tells_ends: whether workers are told tools, and ends, at all.
        keeps_homes: the dispatcher takes no hint for an end.
    """

    def __init__(
        self,
        load: ClusterLoad,
        hints: Hints,
        *,
        tells_tools: bool,
        tells_ends: bool,
        keeps_homes: bool = False,
    ) -> None:
        self._keeps_homes = keeps_homes
        self._hints, self._tells_tools, self._tells_ends = hints, tells_tools, tells_ends
        calls = [call for task in load.tasks for call in task]
        self._tools = sorted({call.tool for call in calls if call.tool is not None})
        self._p_end = sum(call.is_last for call in calls) / len(calls)
        self._rng = random.Random(load.options.seed)
        self._durations = ToolDurations()
        self._paused: dict[str, tuple[str, float]] = {}

    def returned(self, session_id: str, now_s: float) -> None:
        """The session's next call is sent."""
        paused = self._paused.pop(session_id, None)
        if paused is not None:
            tool, since_s = paused
            self._durations.observe("", tool, now_s - since_s)

    def answered(self, call: AgentCall, now_s: float) -> Told:
        """What is told once the call is answered.

        A dispatcher learns of an end from the hint where hints are wrong, unless it keeps homes;
        else of every end, so that it can forget, whether or not the worker is told.
        """
        if call.tool is not None and not call.is_last:
            self._paused[call.session_id] = call.tool, now_s
        if self._hints is Hints.TRUE:
            return Told(self._true(call), call.is_last)
        is_random = self._hints is Hints.RANDOM
        notices = self._random(call) if is_random else self._adversarial(call)
        if self._keeps_homes:
            return Told(notices, call.is_last)
        return Told(notices, any(isinstance(notice, EndNotice) for notice in notices))

    def _true(self, call: AgentCall) -> Sequence[Notice]:
        if call.is_last:
            return self._end(call)
        if call.tool is None:
            return ()
        p95_s = self._durations.quantile_s("", call.tool, 0.95)
        return self._pause(call, call.tool, 1.0, p95_s)

    def _random(self, call: AgentCall) -> Sequence[Notice]:
        if self._rng.random() < self._p_end:
            return self._end(call)
        if not self._tools:
            return ()
        tool, p95_s = self._rng.choice(self._tools), _MOST_S * self._rng.random()
        return self._pause(call, tool, self._rng.random(), p95_s)

    def _adversarial(self, call: AgentCall) -> Sequence[Notice]:
        if call.is_last:
            paused = self._pause(call, call.tool, 1.0, _MOST_S)
            return [*paused, ResumeNotice(call.session_id, _SOON_S)] if paused else ()
        if self._rng.random() < 0.5:
            return self._end(call)
        others = [tool for tool in self._tools if tool != call.tool]
        return self._pause(call, self._rng.choice(others) if others else None, 0.0)

    def _end(self, call: AgentCall) -> Sequence[Notice]:
        return [EndNotice(call.session_id)] if self._tells_ends else ()

    def _pause(
        self, call: AgentCall, tool: str | None, p_reuse: float, p95_s: float = 0.0
    ) -> Sequence[Notice]:
        if not self._tells_tools:
            return ()
        return [PauseNotice(call.session_id, Pause(p_reuse, p95_s, tool))]
