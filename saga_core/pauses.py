"""What each session waits for, and what its past pauses say about this one."""

from __future__ import annotations

import math
from bisect import bisect
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from saga_core.durations import PauseDurations, Quantiles
from saga_core.reuse import GHOST_S, ReuseClass, ReuseHazards, ReuseModel
from saga_core.trust import HintTrust
from saga_core.types import Pause, ToolType, tool_type_of

_FIRST_REFRESH_S, _REFRESH_GROWTH, _REFRESH_S = 0.5, 1.5, 30.0
_COUNT_AFTER_S = tuple(2.0**n for n in range(11))
_COUNTS_PER_AGE = 8.0
_COUNTS_PER_EVENT, _WAITS_PER_COUNT = 64, 256
_MIN_GAP_S = 0.05
_HABIT_RATE = 0.3
_HABIT_CUTS = (-0.7, 0.0, 0.7)
_HABIT_FROM = 2
_USUAL_WINDOW = 256
_MAX_ENDINGS = 512
_COMMON_SHARE = 0.03
_ENDED: ReuseClass = ("ended",)
_ANNOUNCED: ReuseClass = ("announced",)
_EARLY_SHARE = 0.1
_SOON_S = 1.0
_FORECAST_UNIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Step:
    """A finished LLM call as the worker saw it.

    Attributes:
        input_tokens: length of its prompt.
        run_s: seconds from its arrival to its end.
        ending: anything that tells kinds of answers apart, as the last tokens do for an answer
            that calls a tool; None when not known.
    """

    input_tokens: int = 0
    run_s: float = 0.0
    ending: Hashable = None


@dataclass(slots=True)
class View:
    """One way to see a wait: as a member of a class, at an age.

    Attributes:
        cls: what kind of wait it is.
        since_s: when it began.
        scale: ages are multiplied by it before the class's table is read; 1 without a forecast.
        counted_s: age up to which its idle time is in the tables.
    """

    cls: ReuseClass
    since_s: float
    scale: float = 1.0
    counted_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is expected of a wait.

    Attributes:
        p_next: probability that the prefix is read again, 0 to 1.
        p_soon: that it is before the wait is twice as old: how sure its moment is.
        early_s: when it may well have been: one in ten of those that are read are by then.
        expected_s: when half of those that are read are, not before ``early_s``.
    """

    p_next: float
    p_soon: float
    early_s: float
    expected_s: float


@dataclass(slots=True)
class Wait:
    """An idle prefix whose next read is awaited.

    Attributes:
        plain: what the worker sees by itself.
        hint: what somebody said: the latest word counts; its class names who said it.
        is_over: it has been read, or is no longer watched.
    """

    plain: View
    hint: View | None = None
    is_over: bool = False


@dataclass(slots=True)
class _Habit:
    """Past pauses of one session: how many, and how much longer than usual (log, smoothed)."""

    pauses: int = 0
    residual: float = 0.0
    cls: ReuseClass = ("paused", None)


class PauseModel:
    """Learns from every pause when an idle prefix is read again.

    The class of a session's pause: how the answer ended, the session's habit (its past pauses
    against the usual ones), how long the step ran and how long its prompt was (quantiles of this
    traffic). Hints have classes of their own beside it: the tool's name, an announced next step,
    an end, or a forecast, whose table counts ages in units of the forecast. Both learn from every
    pause. A kind of hint is followed while it has foretold reads better than the plain class
    (:class:`~saga_core.trust.HintTrust`), so wrong hints cost little.

    Waits are watched for two hours, also when their blocks have been evicted; one that is not read
    until then counts as never read. Everything is bounded by ``max_sessions``.

    Args:
        max_sessions: sessions whose habit is remembered; waits watched are bounded by twice that.
        strength, half_life_s: of :class:`~saga_core.reuse.ReuseHazards`.
    """

    def __init__(
        self,
        *,
        max_sessions: int = 100_000,
        strength: float = 0.7,
        half_life_s: float = math.inf,
    ) -> None:
        self._hazards = ReuseHazards(strength=strength, half_life_s=half_life_s)
        self._trust = HintTrust()
        self._max_sessions = max_sessions
        self._habits: OrderedDict[str, _Habit] = OrderedDict()
        self._usual: dict[ReuseClass, tuple[int, float]] = {}
        self._run_s, self._input_tokens = Quantiles(), Quantiles()
        self._run_cuts: tuple[float, ...] = ()
        self._input_cuts: tuple[float, ...] = ()
        self._endings: Counter[Hashable] = Counter()
        self._steps = 0
        self._durations, self._reuse = PauseDurations(), ReuseModel()
        self._p95_s: dict[ReuseClass, float] = {}
        # By how long they are left uncounted; in each, the longest overdue come first.
        self._uncounted = tuple(deque[tuple[float, Wait]]() for _ in _COUNT_AFTER_S)
        # What is new is a large part of what is known at first: tables are made anew sooner then.
        self._refreshed_s, self._refresh_after_s = -math.inf, _FIRST_REFRESH_S

    # Events

    def paused(
        self, session_id: str, step: Step, *, now_s: float, pause: Pause | None = None
    ) -> Wait:
        """A step of the session has ended; ``pause`` is what somebody says about the pause."""
        self._run_s.add(step.run_s)
        self._input_tokens.add(step.input_tokens)
        habit = self._habit(session_id)
        usual = "new" if habit.pauses < _HABIT_FROM else str(bisect(_HABIT_CUTS, habit.residual))
        habit.cls = (
            "paused",
            self._common(step.ending),
            usual,
            bisect(self._run_cuts, step.run_s),
            bisect(self._input_cuts, step.input_tokens),
        )
        wait = self._watch(habit.cls, now_s)
        if pause is not None:
            self.told(session_id, wait, pause, now_s=now_s)
        return wait

    def told(self, session_id: str, wait: Wait, pause: Pause, *, now_s: float) -> None:
        """Somebody says what the session waits for; the pause began when it began."""
        cls: ReuseClass
        if pause.pause_p50_s is not None:
            cls, scale = ("forecast",), _FORECAST_UNIT_S / max(_MIN_GAP_S, pause.pause_p50_s)
        elif pause.tool_name is not None:
            _, ending, *rest = self._habit(session_id).cls
            cls, scale = ("tool", ending, pause.tool_name, *rest), 1.0
        else:
            return
        self._hint(wait, View(cls, wait.plain.since_s, scale), now_s)

    def announced(self, wait: Wait, *, now_s: float) -> None:
        """The tool has ended: the next step is about to come.

        For the hint before, this is as good as the read that it announces.
        """
        if wait.is_over or (wait.hint is not None and wait.hint.cls == _ANNOUNCED):
            return
        if wait.hint is not None:
            self._count(wait.hint, now_s)
            self._read(wait.hint, 1.0, now_s)
        self._hint(wait, View(_ANNOUNCED, now_s), now_s)

    def ended(self, wait: Wait, *, now_s: float) -> None:
        """The session is said to be over."""
        if not wait.is_over:
            self._missed(wait)
        self._hint(wait, View(_ENDED, now_s), now_s)

    def left(self, kind: str, *, now_s: float) -> Wait:
        """A prefix that no session waits for lies idle: "superseded", "shared" or "plain"."""
        return self._watch((kind,), now_s)

    def read(
        self, wait: Wait, *, now_s: float, share: float = 1.0, session_id: str | None = None
    ) -> None:
        """The prefix was read again, ``share`` of its blocks (0 to 1); the wait is over."""
        if wait.is_over:
            return
        wait.is_over = True
        for view in (wait.plain, wait.hint):
            if view is not None:
                self._count(view, now_s)
        self._judge(wait, now_s=now_s, was_read=True)
        for view in (wait.plain, wait.hint):
            if view is not None:
                self._read(view, share, now_s)
        gap_s = max(_MIN_GAP_S, now_s - wait.plain.since_s)
        for key in _keys(wait):
            self._durations.observe(key, gap_s)
            self._reuse.observe(key, overlap=share)
        if session_id is not None:
            self._learn_habit(self._habit(session_id), wait.plain.cls[:2], gap_s)

    # Answers

    def view(self, wait: Wait) -> View:
        """The hint while hints of its kind are trusted, else what the worker sees itself."""
        hint = wait.hint
        return hint if hint is not None and self._trust.is_trusted(hint.cls[0]) else wait.plain

    def worth(self, wait: Wait, *, now_s: float) -> float:
        """Expected reads per block-second of keeping the prefix; see ``ReuseHazards.worth``."""
        return self.worth_and_until_s(wait, now_s=now_s)[0]

    def worth_until_s(self, wait: Wait, *, now_s: float) -> float:
        """Until when ``worth`` stays as it is, unless tables are refreshed meanwhile."""
        return self.worth_and_until_s(wait, now_s=now_s)[1]

    def worth_and_until_s(self, wait: Wait, *, now_s: float) -> tuple[float, float]:
        """``worth`` and ``worth_until_s`` at the price of one."""
        view = wait.plain if wait.hint is None else self.view(wait)
        worth, end = self._hazards.worth_and_end_s(view.cls, _age(view, now_s))
        return view.scale * worth, view.since_s + end / view.scale

    def outlook(self, wait: Wait, *, now_s: float) -> Outlook:
        """Whether and when the prefix will be read, given that it was not until ``now_s``."""
        view = self.view(wait)
        age = _age(view, now_s)
        early_s, expected_s = (
            view.since_s + self._hazards.read_age_s(view.cls, age, share) / view.scale
            for share in (_EARLY_SHARE, 0.5)
        )
        p_next = self._hazards.p_read(view.cls, age)
        p_soon = self._hazards.p_read(view.cls, age, max(2.0 * age, age + _SOON_S * view.scale))
        return Outlook(p_next, p_soon, early_s, expected_s)

    def p_reuse(self, wait: Wait) -> float:
        """P_reuse of the SAGA paper for such waits, whatever their age."""
        key = _keys(wait)[-1]
        return self._reuse.p_reuse(key, tool_called=key[0] in ("paused", "tool"))

    def p95_s(self, wait: Wait) -> float:
        """95th percentile of such waits' lengths, seconds."""
        key = _keys(wait)[-1]
        if key not in self._p95_s:
            prior = tool_type_of(str(key[1])) if key[0] == "tool" else ToolType.OTHER
            self._p95_s[key] = self._durations.p95_s(key, prior)
        return self._p95_s[key]

    def waits(self) -> Iterator[Wait]:
        """Every wait that is watched, and some that were lately read."""
        return (wait for queue in self._uncounted for _, wait in queue)

    # Internals

    def _habit(self, session_id: str) -> _Habit:
        habit = self._habits.get(session_id)
        if habit is None:
            habit = self._habits[session_id] = _Habit()
            if len(self._habits) > self._max_sessions:
                self._habits.popitem(last=False)
        self._habits.move_to_end(session_id)
        return habit

    def _common(self, ending: Hashable) -> Hashable:
        """The ending when it is a frequent one: rare ones have too few pauses to learn from."""
        counts = self._endings
        counts[ending] += 1
        self._steps += 1
        if len(counts) > _MAX_ENDINGS:
            # Halving lets old evidence fade and bounds what rare endings hold.
            self._endings = counts = Counter({e: n // 2 for e, n in counts.items() if n > 1})
            self._steps = counts.total()
        return ending if counts[ending] >= _COMMON_SHARE * self._steps else "rare"

    def _learn_habit(self, habit: _Habit, usual: ReuseClass, gap_s: float) -> None:
        count, mean = self._usual.get(usual, (0, math.log(gap_s)))
        count = min(count + 1, _USUAL_WINDOW)
        deviation = math.log(gap_s) - mean
        self._usual[usual] = (count, mean + deviation / count)
        if len(self._usual) > _MAX_ENDINGS:
            del self._usual[next(iter(self._usual))]
        habit.pauses += 1
        habit.residual += _HABIT_RATE * (deviation - habit.residual)

    def _watch(self, cls: ReuseClass, now_s: float) -> Wait:
        wait = Wait(View(cls, now_s))
        self._count_later(wait, now_s)
        self._count_some(now_s)
        return wait

    def _count_later(self, wait: Wait, now_s: float) -> None:
        """Count the wait's idle time again after a fourth to an eighth of its age.

        Reads count at once; what lags behind them far makes long waits look better than they are.
        """
        place = int((now_s - wait.plain.since_s) / _COUNTS_PER_AGE).bit_length()
        place = min(place, len(_COUNT_AFTER_S) - 1)
        self._uncounted[place].append((now_s + _COUNT_AFTER_S[place], wait))

    def _hint(self, wait: Wait, view: View, now_s: float) -> None:
        """Take the latest word; what was said before has not been put to the test."""
        if wait.is_over:
            return
        before = wait.hint
        if before is not None and (before.cls, before.scale) == (view.cls, view.scale):
            return
        if before is not None:
            self._count(before, now_s)
        view.counted_s = max(0.0, now_s - view.since_s)
        wait.hint = view

    def _count_some(self, now_s: float) -> None:
        """Put idle time of some waits into the tables; every now and then make the tables anew."""
        left = _COUNTS_PER_EVENT + sum(map(len, self._uncounted)) // _WAITS_PER_COUNT
        for queue in self._uncounted:
            while left and queue and queue[0][0] <= now_s:
                left -= 1
                self._count_wait(queue.popleft()[1], now_s)
        excess = sum(map(len, self._uncounted)) - 2 * self._max_sessions
        for queue in reversed(self._uncounted):
            while queue and excess > 0:
                queue.popleft()[1].is_over = True  # Too many to watch: what it teaches is lost.
                excess -= 1
        if now_s - self._refreshed_s >= self._refresh_after_s:
            self._refreshed_s = now_s
            self._refresh_after_s = min(_REFRESH_S, _REFRESH_GROWTH * self._refresh_after_s)
            self._run_cuts, self._input_cuts = self._run_s.cuts(3), self._input_tokens.cuts(4)
            self._p95_s.clear()
            self._hazards.refresh()

    def _count_wait(self, wait: Wait, now_s: float) -> None:
        if wait.is_over:
            return
        for view in (wait.plain, wait.hint):
            if view is not None:
                self._count(view, now_s)
        if wait.plain.counted_s < GHOST_S:
            self._count_later(wait, now_s)
        else:
            wait.is_over = True
            self._judge(wait, now_s=now_s, was_read=False)
            if wait.hint is None or wait.hint.cls != _ENDED:
                self._missed(wait)

    def _missed(self, wait: Wait) -> None:
        """The paper's P_reuse learns that this pause is not followed by a step."""
        for key in _keys(wait):
            self._reuse.observe(key, overlap=0.0)

    def _count(self, view: View, now_s: float) -> None:
        age_s = max(view.counted_s, now_s - view.since_s)
        s = view.scale
        # Seconds of risk are stretched like the ages: the table is in units of the forecast.
        self._hazards.at_risk(view.cls, s * view.counted_s, s * age_s, now_s=now_s)
        view.counted_s = age_s

    def _read(self, view: View, share: float, now_s: float) -> None:
        self._hazards.read(view.cls, _age(view, now_s), now_s=now_s, share=share)

    def _judge(self, wait: Wait, *, now_s: float, was_read: bool) -> None:
        """Did the hint foretell the outcome better than what the worker saw itself?"""
        if wait.hint is None:
            return
        from_s = max(view.since_s for view in (wait.plain, wait.hint))
        plain, hinted = (
            self._hazards.log_likelihood(
                view.cls,
                view.scale * (from_s - view.since_s),
                _age(view, now_s),
                was_read=was_read,
            )
            + (math.log(view.scale) if was_read else 0.0)
            for view in (wait.plain, wait.hint)
        )
        self._trust.judge(wait.hint.cls[0], hinted - plain)


def _age(view: View, now_s: float) -> float:
    return view.scale * max(0.0, now_s - view.since_s)


def _keys(wait: Wait) -> list[ReuseClass]:
    """What P_reuse and P95 are kept by: how the answer ended, and the tool when it is named."""
    keys = [wait.plain.cls[:2]]
    if wait.hint is not None and wait.hint.cls[0] == "tool":
        keys.append(("tool", wait.hint.cls[2]))
    return keys
