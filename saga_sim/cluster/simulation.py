"""The event loop: agents, a router and workers on one virtual clock.

Workers are vLLM's schedulers. As in vLLM's engine, requests and notices that arrive while a step
runs reach the scheduler before its next step. Sending, dispatching and notices take no time.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gpu_backend.model_free import TOKEN
from gpu_backend.virtual_engine import EngineShape, Served, VirtualClock, VirtualEngine
from saga_core.errors import SagaError
from saga_core.notices import EndNotice, Notice, PauseNotice
from saga_core.types import Pause
from saga_sim.cluster.arms import Arm
from saga_sim.cluster.cost import StepCost
from saga_sim.cluster.counts import Answered, Totals
from saga_sim.cluster.dispatch import Arrival, Dispatcher, Fleet, Immediate, Key, Sent
from saga_sim.cluster.load import AgentCall, ClusterLoad
from saga_sim.cluster.routers import Router, WorkerLoad

_TOOL_TOKEN = TOKEN + 1
_TICK_S = (0.01, 1.0)
"""Bounds of how long an idle engine is left alone: those of the worker's own ticks."""
_MAX_EMPTY_STEPS = 1_000
_EMPTY_STEP_S = 1e-3
_MAX_VAIN_TICKS = 100_000


@dataclass(slots=True)
class _Worker:
    number: int
    engine: VirtualEngine
    totals: Totals = field(default_factory=Totals)
    inbox: list[Key] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    is_stepping: bool = False
    empty_steps: int = 0
    tick_at_s: float | None = None


@dataclass(slots=True)
class _Live:
    """A task under way: the calls that are unanswered, and what each still waits for."""

    waits: list[set[int]]
    unanswered: set[int]


class Cluster:
    """One run of an arm: every task of a load, from its first request to its last answer.

    Args:
        model: a folder with a config.json, whatever the model.
        router: stands in for what dispatches the arm's requests.
    """

    def __init__(
        self,
        load: ClusterLoad,
        arm: Arm,
        cost: StepCost,
        model: Path,
        *,
        batched_tokens: int = 2048,
        router: Router | None = None,
    ) -> None:
        self.load, self.arm, self.cost = load, arm, cost
        self.clock = VirtualClock()
        self.answered: list[Answered] = []
        shape = EngineShape(
            load.blocks_per_worker,
            load.options.block_tokens,
            batched_tokens=batched_tokens,
            max_model_len=load.max_tokens + 1,
        )
        fleet = Fleet(
            load.options.workers,
            load.blocks_per_worker * load.options.block_tokens,
            shape.max_seqs,
            batched_tokens / cost.step_s(batched_tokens, 0, 0, 0),
        )
        self.dispatcher: Dispatcher = Immediate(router) if router else arm.dispatcher(fleet)
        config = shape.config(model, prefix_caching=arm.prefix_caching)
        self.workers = [
            _Worker(number, VirtualEngine(shape, config, self.clock, arm.variables))
            for number in range(load.options.workers)
        ]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._next_task = 0
        self._live: dict[int, _Live] = {}
        self._computed: set[bytes] = set()
        self._sent_s: dict[Key, float] = {}
        self._homes: dict[str, _Worker] = {}
        self._is_ticking, self._vain_ticks = False, 0

    def run(self, on_task: Callable[[int], None] = lambda done: None) -> None:
        """Play all tasks; ``on_task`` is told how many are done.

        Raises:
            SagaError: an engine cannot go on, or the plugin switched itself off.
        """
        self._on_task = on_task
        with self.clock.stands_in():
            for _ in range(self.load.live_tasks):
                self._begin_task()
            while self._events and len(self.answered) < self.load.num_calls:
                self.clock.now_s, _, act = heapq.heappop(self._events)
                act()
        if len(self.answered) < self.load.num_calls:
            raise SagaError("the simulation came to a halt with requests unanswered")
        for worker in self.workers:
            if reason := worker.engine.off_reason():
                raise SagaError(f"worker {worker.number}: the plugin is off: {reason}")

    def _at(self, at_s: float, act: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (at_s, self._sequence, act))

    # Agents

    def _begin_task(self) -> None:
        if self._next_task == len(self.load.tasks):
            return
        number, self._next_task = self._next_task, self._next_task + 1
        calls = self.load.tasks[number]
        live = _Live([set(call.waits_for) for call in calls], set(range(len(calls))))
        self._live[number] = live
        for place, call in enumerate(calls):
            if not call.waits_for:
                self._send_later(number, place, call.pause_s)

    def _send_later(self, task: int, place: int, pause_s: float) -> None:
        self._at(self.clock.now_s + pause_s, lambda: self._send(task, place))

    def _send(self, task: int, place: int) -> None:
        call = self.load.tasks[task][place]
        key, now_s = (task, place), self.clock.now_s
        prompt = call.hashes[: call.input_tokens // self.load.options.block_tokens]
        self._sent_s[key] = now_s
        arrival = Arrival(key, call.session_id, prompt, call.input_tokens)
        self._dispatch(self.dispatcher.arrived(arrival, self._loads, now_s))
        if not self._is_ticking:
            self._tick_later()

    def _dispatch(self, sent: Sent) -> None:
        for key, chosen in sent:
            self._vain_ticks = 0
            worker, session_id = self.workers[chosen], self._call(key).session_id
            home = self._homes.get(session_id, worker)
            if home is not worker and self.arm.tells_ends:
                home.notices.append(EndNotice(session_id))  # It lives elsewhere from now on.
                self._wake(home)
            self._homes[session_id] = worker
            worker.inbox.append(key)
            self._wake(worker)

    def _tick_later(self) -> None:
        tick_s = self.dispatcher.tick_s
        self._is_ticking = tick_s is not None and bool(self._sent_s)
        if tick_s is not None and self._is_ticking:
            self._at(self.clock.now_s + tick_s, self._tick_dispatcher)

    def _tick_dispatcher(self) -> None:
        self._dispatch(self.dispatcher.tick(self.clock.now_s))
        self._vain_ticks += 1
        if self._vain_ticks > _MAX_VAIN_TICKS:
            raise SagaError("the dispatcher sends nothing though requests wait")
        self._tick_later()

    def _call(self, key: Key) -> AgentCall:
        return self.load.tasks[key[0]][key[1]]

    def _loads(self) -> list[WorkerLoad]:
        loads = []
        for worker in self.workers:
            running, waiting = worker.engine.queue
            waiting += len(worker.inbox)
            loads.append(WorkerLoad(worker.number, running, waiting, worker.engine.used_share))
        return loads

    def _take_answer(self, worker: _Worker, served: Served) -> None:
        self._vain_ticks = 0
        task, place = served.key
        call, live = self._call(served.key), self._live[task]
        assert served.first_token_s is not None
        assert served.end_s is not None
        # The answer's last token is made, but nothing has been computed from it.
        done = call.input_tokens + call.output_tokens - 1
        self._computed.update(call.hashes[: done // self.load.options.block_tokens])
        self.answered.append(
            Answered(
                task,
                place,
                worker.number,
                call.session_id,
                self._sent_s.pop(served.key),
                served.first_token_s,
                served.end_s,
                call.input_tokens,
                served.request.num_output_tokens,
                served.cached_tokens or 0,
                served.prefill_tokens,
                served.recomputed_tokens,
                max(0, served.known_tokens - (served.cached_tokens or 0)),
            )
        )
        now_s, output_tokens = self.clock.now_s, served.request.num_output_tokens
        self._dispatch(
            self.dispatcher.answered(served.key, call.input_tokens, output_tokens, now_s)
        )
        self._tell(worker, call)
        live.unanswered.discard(place)
        for later, waits in enumerate(live.waits):
            if place in waits:
                waits.discard(place)
                if not waits:
                    self._send_later(task, later, self.load.tasks[task][later].pause_s)
        if not live.unanswered:
            del self._live[task]
            self._dispatch(self.dispatcher.task_ended(task, now_s))
            self._on_task(len(self.load.tasks) - self._unfinished)
            self._begin_task()

    @property
    def _unfinished(self) -> int:
        return len(self._live) + len(self.load.tasks) - self._next_task

    def _tell(self, worker: _Worker, call: AgentCall) -> None:
        if call.is_last:
            self._dispatch(self.dispatcher.session_ended(call.session_id, self.clock.now_s))
            self._homes.pop(call.session_id, None)
            if self.arm.tells_ends:
                worker.notices.append(EndNotice(call.session_id))
        elif self.arm.tells_tools and call.tool is not None:
            # The plugin's policy takes the name and learns the rest.
            pause = Pause(p_reuse=1.0, pause_p95_s=0.0, tool_name=call.tool)
            worker.notices.append(PauseNotice(call.session_id, pause))

    # Workers

    def _wake(self, worker: _Worker) -> None:
        if not worker.is_stepping:
            self._step(worker)

    def _step(self, worker: _Worker) -> None:
        """Take in what has arrived and start a step, if there is anything to do."""
        engine = worker.engine
        for key in worker.inbox:
            self._submit(engine, key)
        worker.inbox.clear()
        if worker.notices:
            engine.notify(worker.notices)
            worker.notices.clear()
        if not engine.has_work:
            self._idle(worker)
            return
        work = engine.start_step()
        if work.prefill_tokens or work.decodes:
            worker.empty_steps = 0
            step_s = self.cost.step_s(
                work.prefill_tokens, work.prefill_attended, work.decodes, work.decode_attended
            )
            worker.totals.add(work, self.cost, step_s)
            worker.totals.used_share_s += engine.used_share * step_s
            worker.totals.cached_share_s += engine.cached_share * step_s
        else:
            step_s = _EMPTY_STEP_S
            worker.empty_steps += 1
            if worker.empty_steps > _MAX_EMPTY_STEPS:
                raise SagaError(f"worker {worker.number} schedules nothing though requests wait")
        worker.is_stepping = True
        self._at(self.clock.now_s + step_s, lambda: self._end_step(worker))

    def _submit(self, engine: VirtualEngine, key: Key) -> None:
        call = self._call(key)
        size = self.load.options.block_tokens
        # The block with the last prompt token is computed in any case.
        full = (call.input_tokens - 1) // size
        known = bisect_left(call.hashes, True, 0, full, key=lambda h: h not in self._computed)
        engine.submit(
            key,
            call.hashes,
            prompt_tokens=call.input_tokens,
            output_tokens=call.output_tokens,
            session_id=call.session_id if self.arm.policy is not None else None,
            last_token=_TOOL_TOKEN if call.tool is not None else TOKEN,
            known_tokens=known * size,
            arrival_s=self._sent_s[key],
        )

    def _end_step(self, worker: _Worker) -> None:
        for served in worker.engine.end_step():
            self._take_answer(worker, served)
        worker.is_stepping = False  # Not before: what the answers lead to starts no step.
        self._step(worker)

    def _idle(self, worker: _Worker) -> None:
        """Let the plugin act while no request is there, as the worker's own ticks do."""
        wake_in_s = worker.engine.tick()
        if worker.engine.has_work:
            self._step(worker)
        elif wake_in_s is not None:
            low, high = _TICK_S
            worker.tick_at_s = self.clock.now_s + min(max(wake_in_s, low), high)
            at_s = worker.tick_at_s
            self._at(at_s, lambda: self._tick(worker, at_s))

    def _tick(self, worker: _Worker, at_s: float) -> None:
        if worker.tick_at_s == at_s and not worker.is_stepping:
            self._step(worker)

    # After the run

    def plugin_counters(self) -> dict[str, float]:
        """The plugin's own, summed over the workers; none without it."""
        found: dict[str, float] = {}
        for worker in self.workers:
            for name, count in worker.engine.counters().items():
                found[name] = found.get(name, 0) + count
        return found

    def check_integrity(self) -> None:
        """Compare what was sent, computed and answered.

        Raises:
            SagaError: tokens are missing, or were counted twice.
        """
        for one in self.answered:
            call = self.load.tasks[one.task][one.call]
            if one.output_tokens != call.output_tokens:
                raise SagaError(f"task {one.task}, call {one.call}: the answer was cut")
            if not one.recomputed_tokens and (
                one.cached_tokens + one.prefill_tokens != one.prompt_tokens
            ):
                raise SagaError(f"task {one.task}, call {one.call}: cached + computed ≠ prompt")
        for worker in self.workers:
            mine = [one for one in self.answered if one.worker == worker.number]
            computed = sum(one.prefill_tokens + one.recomputed_tokens for one in mine)
            totals = worker.totals
            # The last answer ends the run, and may leave a prefetch behind.
            if totals.prefill_tokens != computed + totals.own_tokens:
                raise SagaError(f"worker {worker.number}: its steps computed other tokens")
            if totals.made_tokens != sum(one.output_tokens for one in mine):
                raise SagaError(f"worker {worker.number}: its steps made other tokens")
