"""A worker's state for any number of readers, with one poll of the engine for all of them."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from gpu_backend.control import Answer, Ask, EngineSilent, Sleep

VERSION = 1
MAX_SESSIONS = 1000
MIN_INTERVAL_S = 0.1
MAX_INTERVAL_S = 60.0
POLL_S = 0.25
PATIENCE_S = 2.0

# Numbers that are no amounts: of several engines the mean is told.
_MEANS = (
    "block_bytes",
    "block_tokens",
    "load_tokens_per_s",
    "pressure",
    "prefill_tokens_per_s",
)


class StateFeed:
    """Asks the engines for their state and remembers the last one.

    Args:
        ask: sends a message to the engines.
        clock: monotonic seconds.
        sleep: waits for so many seconds.
    """

    def __init__(
        self, ask: Ask, clock: Callable[[], float] = time.monotonic, sleep: Sleep = asyncio.sleep
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._sleep = sleep
        self._poll: asyncio.Task[None] | None = None
        self._polled_s = -math.inf
        self._state: Answer | None = None
        self._error: str | None = None
        self._watched: list[tuple[int, bool]] = []

    async def now(self, sessions: int, *, steps: bool = False) -> Answer:
        """The state at this moment, with the ``sessions`` that hold most, and the latest steps.

        Raises:
            EngineSilent: the engine gives no answer.
        """
        state = merged(await self._ask({"sessions": sessions, "steps": steps}))
        return trimmed(state, sessions, steps=steps)

    async def recent(self, max_age_s: float, patience_s: float = PATIENCE_S) -> Answer:
        """A state at most so old; one that is older when the engine needs longer to answer.

        Raises:
            EngineSilent: the engine gives no answer, or has given none yet.
        """
        if self._clock() - self._polled_s >= max_age_s:
            await asyncio.wait({self._start_poll()}, timeout=patience_s)
        if self._error is not None or self._state is None:
            raise EngineSilent(self._error or f"the engine has not answered for {patience_s:g} s")
        return self._state

    async def watch(
        self,
        *,
        interval_s: float,
        sessions: int,
        stopping: Callable[[], bool],
        steps: bool = False,
    ) -> AsyncIterator[Answer]:
        """The state now, then at each change and at the latest every ``interval_s`` seconds.

        A reader that is slow misses states in between and holds nobody up. While the engine is
        busy the last state is told again. Ends when the server stops.

        Raises:
            EngineSilent: the engine gives no answer.
        """
        period_s = min(POLL_S, interval_s)
        self._watched.append((sessions, steps))
        began_s = self._clock()
        try:
            sent, sent_s = await self.now(sessions, steps=steps), self._clock()
            yield sent
            while not stopping():
                # Begun now and read when the time has come: the engine holds no reader up.
                if self._clock() - self._polled_s >= period_s:
                    self._start_poll()
                await self._sleep(period_s)
                state = sent
                if self._polled_s >= began_s:  # Else it was asked for other watchers.
                    if self._state is None:
                        raise EngineSilent(self._error)
                    state = trimmed(self._state, sessions, steps=steps)
                now_s = self._clock()
                is_due = now_s + period_s > sent_s + interval_s
                if is_due or _essence(state) != _essence(sent):
                    sent, sent_s = state, now_s
                    yield state
        finally:
            self._watched.remove((sessions, steps))

    def _start_poll(self) -> asyncio.Task[None]:
        """The poll that is under way; a new one when there is none."""
        if self._poll is None or self._poll.done():
            self._poll = asyncio.create_task(self._poll_once())
        return self._poll

    async def _poll_once(self) -> None:
        asked_s = self._clock()
        try:
            sessions = max((sessions for sessions, _ in self._watched), default=0)
            steps = any(steps for _, steps in self._watched)
            answers = await self._ask({"sessions": sessions, "steps": steps})
            self._state, self._error = merged(answers), None
        except EngineSilent as error:
            self._state, self._error = None, str(error)
        self._polled_s = asked_s


def merged(states: Sequence[Answer]) -> Answer:
    """One state for all data-parallel engines: amounts are summed, lists joined, rates averaged.

    The plugin is on when it is on everywhere; a reason why it is off is that of the first engine
    that has one.
    """
    state: Answer = {"version": VERSION, "engines": len(states)}
    state.update(_merge(states))
    state["enabled"] = all(one["enabled"] for one in states)
    return state


def trimmed(state: Answer, sessions: int, *, steps: bool) -> Answer:
    """The state with no more sessions than so many, those that hold most tokens first.

    Without ``steps`` there are none in it, whoever else asked for them.
    """
    if not steps:
        state = {name: value for name, value in state.items() if name != "last_steps"}
    listed = state.get("sessions")
    if not isinstance(listed, list):
        return state
    ranked = sorted(listed, key=lambda one: (-_tokens(one), str(one.get("session_id"))))
    return {**state, "sessions": ranked[:sessions]}


def _tokens(session: Answer) -> float:
    return sum(float(value) for name, value in session.items() if name.endswith("_tokens"))


def _essence(state: Answer) -> Answer:
    """The state without what grows by the mere passing of time."""
    counters = {**state.get("counters", {}), "pinned_block_s": None}
    return {**state, "counters": counters}


def _merge(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _merge_values(name, [p[name] for p in parts if name in p]) for name in names}


def _merge_values(name: str, values: list[Any]) -> Any:
    known = [value for value in values if value is not None]
    if not known:
        return None
    first = known[0]
    if isinstance(first, dict):
        return _merge(known)
    if isinstance(first, list):
        return [item for value in known for item in value]
    if isinstance(first, bool | str):
        return first
    return statistics.mean(known) if name in _MEANS else sum(known)
