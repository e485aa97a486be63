"""The event loop: agents, a router and workers on one virtual clock.

Workers are vLLM's schedulers. Sending, dispatching and notices take no time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpu_backend.model_free import TOKEN
from gpu_backend.shadow import STOCK_ORDER
from gpu_backend.virtual_clock import VirtualClock
from gpu_backend.virtual_engine import Served, VirtualEngine
from gpu_backend.virtual_shape import EngineShape
from saga_core.errors import SagaError, SettingsError
from saga_core.notices import EndNotice
from saga_sim.cluster.alone import alone_s
from saga_sim.cluster.arms import Arm
from saga_sim.cluster.cost import StepCost
from saga_sim.cluster.counts import Answered
from saga_sim.cluster.dispatch import Arrival, Dispatcher, Done, Fleet, Immediate, Key, Sent
from saga_sim.cluster.events import Events
from saga_sim.cluster.hints import Teller
from saga_sim.cluster.load import AgentCall, ClusterLoad
from saga_sim.cluster.routers import Router, WorkerLoad
from saga_sim.cluster.workers import Worker

_TOOL_TOKEN = TOKEN + 1
_MAX_VAIN_TICKS = 100_000


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
        host_pool_ratio: host memory ÷ KV pool of each worker; 0: none.
        single_steps: ask the scheduler for every step, which changes nothing but the time that
            the simulation takes.

    Raises:
        SettingsError: there is to be host memory, and the cost model knows no link to it.
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
        host_pool_ratio: float = 0.0,
        single_steps: bool = False,
    ) -> None:
        self.load, self.arm, self.cost = load, arm, cost
        self.clock = VirtualClock()
        self.answered: list[Answered] = []
        shape = EngineShape(
            load.blocks_per_worker,
            load.options.block_tokens,
            batched_tokens=batched_tokens,
            max_model_len=load.max_tokens + 1,
            host_blocks=round(host_pool_ratio * load.blocks_per_worker),
            link_block_s=_link_block_s(cost, load) if host_pool_ratio else 0.0,
        )
        fleet = Fleet(
            load.options.workers,
            load.blocks_per_worker * load.options.block_tokens,
            load.options.block_tokens,
            shape.max_seqs,
            batched_tokens / cost.step_s(batched_tokens, 0, 0, 0),
        )
        self.dispatcher: Dispatcher = Immediate(router) if router else arm.dispatcher(fleet)
        config = shape.config(
            model, prefix_caching=arm.prefix_caching, policy=arm.policy or STOCK_ORDER
        )
        config.scheduler_config.policy = "priority" if arm.by_priority else "fcfs"
        self._new_engine: Callable[[], VirtualEngine] = lambda: VirtualEngine(
            shape, config, self.clock, arm.variables
        )
        self._events = Events(self.clock)
        self.workers = [
            Worker(
                number,
                self._new_engine(),
                cost,
                self._events,
                self._submit,
                self._take_answer,
                single_steps,
            )
            for number in range(load.options.workers)
        ]
        self._next_task = 0
        self._live: dict[int, _Live] = {}
        self._computed: set[bytes] = set()
        self._teller = Teller(
            load,
            arm.hints,
            tells_tools=arm.tells_tools,
            tells_ends=arm.tells_ends,
            keeps_homes=arm.keeps_homes,
        )
        self._loses_worker = load.options.lost_worker_s > 0
        self._lost_counters: dict[str, float] = {}
        self.alone_s = [
            alone_s(
                task,
                cost,
                batched_tokens=batched_tokens,
                block_tokens=load.options.block_tokens,
            )
            for task in load.tasks
        ]
        self._deadline_s: dict[int, float] = {}
        self._arrivals: dict[Key, Arrival] = {}
        self._priority: dict[Key, int] = {}
        self._sent_s: dict[Key, float] = {}
        self._homes: dict[str, Worker] = {}
        self._is_ticking, self._vain_ticks = False, 0

    def run(self, on_task: Callable[[int], None] = lambda done: None) -> None:
        """Play all tasks; ``on_task`` is told how many are done.

        Raises:
            SagaError: an engine cannot go on, or the plugin switched itself off.
        """
        self._on_task = on_task
        with self.clock.stands_in():
            for start_s in self.load.starts_s:
                self._events.at(start_s, self._begin_task)
            for _ in range(0 if self.load.starts_s else self.load.live_tasks):
                self._begin_task()
            while self._events and len(self.answered) < self.load.num_calls:
                self._events.happen()
        if len(self.answered) < self.load.num_calls:
            raise SagaError("the simulation came to a halt with requests unanswered")
        for worker in self.workers:
            if reason := worker.engine.off_reason():
                raise SagaError(f"worker {worker.number}: the plugin is off: {reason}")

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
        self._events.at(self.clock.now_s + pause_s, lambda: self._send(task, place))

    def _send(self, task: int, place: int) -> None:
        call = self.load.tasks[task][place]
        key, now_s = (task, place), self.clock.now_s
        due_s = now_s + self.load.options.deadline_factor * self.alone_s[task]
        deadline_s = self._deadline_s.setdefault(task, due_s)
        prompt = call.hashes[: call.input_tokens // self.load.options.block_tokens]
        self._sent_s[key] = now_s
        self._teller.returned(call.session_id, now_s)
        arrival = self._arrivals[key] = Arrival(
            key,
            call.session_id,
            prompt,
            call.input_tokens,
            self.load.owners[task].tenant,
            deadline_s,
        )
        self._dispatch(self.dispatcher.arrived(arrival, self._loads, now_s))
        if not self._is_ticking:
            self._tick_later()

    def _dispatch(self, sent: Sent) -> None:
        for key, chosen, self._priority[key] in sent:
            self._vain_ticks = 0
            worker, session_id = self.workers[chosen], self._call(key).session_id
            home = self._homes.get(session_id, worker)
            if home is not worker and self.arm.tells_ends:
                home.notices.append(EndNotice(session_id))  # It lives elsewhere from now on.
                home.wake()
            self._homes[session_id] = worker
            worker.inbox.append(key)
            worker.wake()

    def _tick_later(self) -> None:
        tick_s = self.dispatcher.tick_s
        self._is_ticking = tick_s is not None and bool(self._sent_s)
        if tick_s is not None and self._is_ticking:
            self._events.at(self.clock.now_s + tick_s, self._tick_dispatcher)

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
            if not worker.is_up:
                continue
            running, waiting = worker.engine.queue
            waiting += len(worker.inbox)
            loads.append(WorkerLoad(worker.number, running, waiting, worker.engine.used_share))
        return loads

    def _take_answer(self, worker: Worker, served: Served) -> None:
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
                max(0, served.known_tokens - served.hit_tokens),
                served.loaded_tokens,
            )
        )
        self._arrivals.pop(served.key)
        now_s = self.clock.now_s
        answer = Done(
            served.key,
            call.session_id,
            call.input_tokens,
            served.hit_tokens,
            served.request.num_output_tokens,
            served.first_token_s,
            now_s,
        )
        self._dispatch(self.dispatcher.answered(answer, now_s))
        self._tell(worker, call)
        if self._loses_worker and 2 * len(self.answered) >= self.load.num_calls:
            self._loses_worker = False
            self._events.at(now_s, lambda: self._lose(self.workers[0]))
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
            if not self.load.starts_s:
                self._begin_task()

    @property
    def _unfinished(self) -> int:
        return len(self._live) + len(self.load.tasks) - self._next_task

    def _tell(self, worker: Worker, call: AgentCall) -> None:
        told = self._teller.answered(call, self.clock.now_s)
        worker.notices += told.notices
        if told.is_over:
            self._dispatch(self.dispatcher.session_ended(call.session_id, self.clock.now_s))
        if call.is_last:
            self._homes.pop(call.session_id, None)

    # A worker that is lost

    def _lose(self, worker: Worker) -> None:
        """It dies with all that it holds; what was sent to it is sent anew, as a gateway does."""
        lost = [served.key for served in worker.engine.served.values()] + worker.inbox
        self._lost_counters = worker.engine.counters()
        worker.die(self._new_engine())
        self._homes = {id_: home for id_, home in self._homes.items() if home is not worker}
        now_s = self.clock.now_s
        self._events.at(now_s + self.load.options.lost_worker_s, lambda: self._come_back(worker))
        arrivals = [self._arrivals[key] for key in lost]
        self._dispatch(self.dispatcher.lost(worker.number, arrivals, self._loads, now_s))

    def _come_back(self, worker: Worker) -> None:
        worker.is_up = True
        self._dispatch(self.dispatcher.back(worker.number, self.clock.now_s))

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
            priority=self._priority.pop(key),
        )

    # After the run

    def plugin_counters(self) -> dict[str, float]:
        """The plugin's own, summed over the workers; none without it."""
        found = dict(self._lost_counters)
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
                one.hit_tokens + one.prefill_tokens != one.prompt_tokens
            ):
                raise SagaError(
                    f"task {one.task}, call {one.call}: cached + loaded + computed ≠ prompt"
                )
        for worker in self.workers:
            mine = [one for one in self.answered if one.worker == worker.number]
            computed = sum(one.prefill_tokens + one.recomputed_tokens for one in mine)
            totals = worker.totals
            if worker.was_lost:
                continue  # What it had done for those that it did not answer is nobody's.
            # The last answer ends the run, and may leave a prefetch behind.
            if totals.prefill_tokens != computed + totals.own_tokens:
                raise SagaError(f"worker {worker.number}: its steps computed other tokens")
            if totals.made_tokens != sum(one.output_tokens for one in mine):
                raise SagaError(f"worker {worker.number}: its steps made other tokens")


def _link_block_s(cost: StepCost, load: ClusterLoad) -> float:
    """Seconds that a block takes to host memory, or back."""
    if not cost.link_tokens_per_s:
        raise SettingsError("host memory needs a cost model that knows the link to it")
    return load.options.block_tokens / cost.link_tokens_per_s
