"""The loop of a worker's engine: takes in what has arrived, steps, answers.

As in vLLM's engine, requests and notices that arrive while a step runs reach the scheduler before
its next step. A step with nothing to compute, because KV is on its way, ends when something
arrives. Decode steps between which nothing can happen are taken together; what arrives meanwhile
cuts them off after the step that runs, so that nothing differs from single steps but the work that
the simulation has.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

from gpu_backend.virtual_decode import DecodeRun
from gpu_backend.virtual_engine import Served, VirtualEngine
from gpu_backend.virtual_link import VirtualLink
from saga_core.errors import SagaError
from saga_core.notices import Notice
from saga_sim.cluster.cost import StepCost
from saga_sim.cluster.counts import Totals
from saga_sim.cluster.dispatch import Key
from saga_sim.cluster.events import Events

_TICK_S = (0.01, 1.0)
"""Bounds of how long an idle engine is left alone: those of the worker's own ticks."""
_MAX_EMPTY_STEPS = 1_000
_EMPTY_STEP_S = 1e-3


@dataclass(slots=True)
class _Run:
    """Decode steps under way: when each ends and what it takes; the first ``steps`` of them."""

    decodes: int
    start_s: float
    ends_s: list[float]
    took_s: list[float]
    used_share: float
    cached_share: float
    steps: int

    def start_of(self, place: int) -> float:
        return self.ends_s[place - 1] if place else self.start_s


@dataclass(slots=True)
class Worker:
    """One engine with what has arrived for it.

    Args:
        take: gives a request that has arrived to the engine.
        answer: is told each request whose answer is complete.
        single_steps: take no steps together.

    Attributes:
        is_up: whether it can be sent to. was_lost: whether it has died once.
        links: to host memory, of the engines that it had.
    """

    number: int
    engine: VirtualEngine
    cost: StepCost
    events: Events
    take: Callable[[VirtualEngine, Key], None]
    answer: Callable[[Worker, Served], None]
    single_steps: bool = False
    totals: Totals = field(init=False, default_factory=Totals)
    inbox: list[Key] = field(init=False, default_factory=list)
    notices: list[Notice] = field(init=False, default_factory=list)
    is_up: bool = field(init=False, default=True)
    was_lost: bool = field(init=False, default=False)
    links: list[VirtualLink] = field(init=False, default_factory=list)
    _is_stepping: bool = field(init=False, default=False)
    _is_stalled: bool = field(init=False, default=False)
    _run: _Run | None = field(init=False, default=None)
    # An event that belongs to another step than the one under way is void.
    _step: int = field(init=False, default=0)
    _empty_steps: int = field(init=False, default=0)
    _tick_at_s: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._attach(self.engine)

    def _attach(self, engine: VirtualEngine) -> None:
        self.engine = engine
        if engine.link is not None:
            self.links.append(engine.link)

    def wake(self) -> None:
        """Something has arrived in ``inbox`` or ``notices``."""
        if not self._is_stepping:
            self._start()
        elif self._is_stalled:
            self._end_step(self._step)
        elif self._run is not None:
            self._cut(self._run)

    def die(self, engine: VirtualEngine) -> None:
        """Lose all that it holds; it comes back with another engine."""
        if self._run is not None:
            self._run.steps = bisect_left(self._run.ends_s, self.events.clock.now_s) + 1
            self._count(self._run)
        self._attach(engine)
        self.inbox.clear()
        self.notices.clear()
        self._step += 1
        self.was_lost = True
        self.is_up = self._is_stepping = self._is_stalled = False
        self._run = self._tick_at_s = None

    def _start(self) -> None:
        """Take in what has arrived and start a step, if there is anything to do."""
        engine = self.engine
        for key in self.inbox:
            self.take(engine, key)
        self.inbox.clear()
        if self.notices:
            engine.notify(self.notices)
            self.notices.clear()
        if not engine.has_work:
            self._idle()
            return
        self._is_stepping = True
        run = None if self.single_steps else engine.start_decodes()
        if run is None or not self._start_run(run):
            self._start_step()

    # One step

    def _start_step(self) -> None:
        engine, totals, now_s = self.engine, self.totals, self.events.clock.now_s
        work = engine.start_step()
        step_s = work.wait_s
        if work.computes:
            compute_s = self.cost.step_s(
                work.prefill_tokens, work.prefill_attended, work.decodes, work.decode_attended
            )
            step_s += compute_s
            totals.add(work, self.cost, compute_s)
        totals.busy_s += work.wait_s
        totals.copy_wait_s += work.wait_s
        totals.used_share_s += engine.used_share * step_s
        totals.cached_share_s += engine.cached_share * step_s
        if step_s:
            self._empty_steps = 0
            self._end_at(now_s + step_s)
        else:
            self._end_at(self._wake_s(now_s))
            self._is_stalled = engine.link is not None

    def _wake_s(self, now_s: float) -> float:
        """When to look again after a step that had nothing to do."""
        wake_s = self.engine.wake_s(_TICK_S[0])
        if wake_s is not None:
            self._empty_steps = 0
            return wake_s
        self._empty_steps += 1
        if self._empty_steps > _MAX_EMPTY_STEPS:
            raise SagaError(f"worker {self.number} schedules nothing though requests wait")
        return now_s + _EMPTY_STEP_S

    def _end_at(self, at_s: float) -> None:
        self._step += 1
        step = self._step
        self.events.at(at_s, lambda: self._end_step(step))

    def _end_step(self, step: int) -> None:
        if step != self._step:
            return
        self._step += 1
        self._is_stalled = False
        for served in self.engine.end_step():
            self.answer(self, served)
        self._is_stepping = False  # Not before: what the answers lead to starts no step.
        self._start()

    # Several decode steps

    def _start_run(self, run: DecodeRun) -> bool:
        """False: not even one of them can be taken."""
        engine, now_s, attended = self.engine, self.events.clock.now_s, run.attended
        ends_s: list[float] = []
        took_s: list[float] = []
        start_s = now_s
        for _ in range(run.steps):
            step_s = self.cost.step_s(0, 0, run.decodes, attended)
            end_s = start_s + step_s
            if end_s >= run.ends_before_s or (ends_s and start_s >= run.next_starts_before_s):
                break
            ends_s.append(end_s)
            took_s.append(step_s)
            start_s, attended = end_s, attended + run.decodes
        if not ends_s:
            return False
        self._empty_steps = 0
        self._run = _Run(
            run.decodes,
            now_s,
            ends_s,
            took_s,
            engine.used_share,
            engine.cached_share,
            len(ends_s),
        )
        self._end_run_at(ends_s[-1])
        return True

    def _cut(self, run: _Run) -> None:
        """Let the run end with the step that is under way."""
        now_s = self.events.clock.now_s
        last = bisect_left(run.ends_s, now_s, 0, run.steps - 1)
        # What happens at the very end of a step finds the next one begun if it was not known
        # before the step.
        is_over = run.ends_s[last] == now_s and self.events.known_s > run.start_of(last)
        last += is_over and last + 1 < run.steps
        if last + 1 < run.steps:
            run.steps = last + 1
            self._end_run_at(run.ends_s[last])

    def _end_run_at(self, at_s: float) -> None:
        self._step += 1
        step = self._step
        self.events.at(at_s, lambda: self._end_run(step))

    def _end_run(self, step: int) -> None:
        run = self._run
        if step != self._step or run is None:
            return
        if self.events.knew_next(run.start_of(run.steps - 1)):
            self._end_run_at(self.events.clock.now_s)  # That one goes first.
            return
        self.engine.end_decodes(run.steps)
        self._count(run)
        self._run = None
        self._is_stepping = False
        self._start()

    def _count(self, run: _Run) -> None:
        for step_s in run.took_s[: run.steps]:
            self.totals.add_decodes(run.decodes, step_s)
            self.totals.used_share_s += run.used_share * step_s
            self.totals.cached_share_s += run.cached_share * step_s

    # No step

    def _idle(self) -> None:
        """Let the plugin act while no request is there, as the worker's own ticks do."""
        wake_in_s = self.engine.tick()
        if self.engine.has_work:
            self._start()
        elif wake_in_s is not None:
            low, high = _TICK_S
            at_s = self._tick_at_s = self.events.clock.now_s + min(max(wake_in_s, low), high)
            self.events.at(at_s, lambda: self._tick(at_s))

    def _tick(self, at_s: float) -> None:
        if self._tick_at_s == at_s and not self._is_stepping:
            self._start()
