"""Which worker serves which request when: events in, decisions out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

from saga_core.coordinator_events import (
    Admit,
    Decision,
    Event,
    Preempt,
    Refused,
    RequestArrived,
    RequestEnded,
    RequestReturned,
    SessionEnded,
    SessionPaused,
    SessionTold,
    StealAsked,
    TaskEnded,
    TenantWeight,
    Tick,
    WorkerDraining,
    WorkerGone,
    WorkerTold,
    WorkerUp,
)
from saga_core.coordinator_settings import CoordinatorSettings
from saga_core.fairness import Shares, TaskKey, priority_of
from saga_core.fleet import Fleet, Request, Worker, named_task, request_of
from saga_core.lazy_heap import LazyHeap
from saga_core.placement import Route
from saga_core.returns import Returns
from saga_core.router import Router
from saga_core.stealing import Theft, examine, find_theft
from saga_core.working_set import WorkingSet

# So many requests are looked at when the next one in turn does not fit.
_LOOK_AHEAD = 8
# So many tasks that wait at a worker are ranked anew whenever it is given a request.
_RENEWED = 4
# What falls due at one tick beyond these falls due at the next: the cost of a tick is bounded.
_SLICE = 64
_THEFTS = 16
_PREEMPTIONS = 16
# A session that is less likely than this to come back is not waited for.
_LIKELY = 0.5
# A request makes another one give way when its task is twice as urgent: less is not worth it.
_MORE_URGENT = 2.0


class Coordinator:
    """The state of a fleet, its sessions, tasks and tenants; see ``apply``.

    A request waits at one worker, in fair order. One whose session has its KV there waits for that
    worker, until it is stolen; any other is given to whichever worker has room first. The same
    events in the same order give the same decisions, in every process.

    Attributes:
        fleet: the workers, what they have to do and what room they have.
        router: where sessions and prefixes are.
        shares: tasks and tenants, and how urgent they are.
    """

    def __init__(self, settings: CoordinatorSettings | None = None) -> None:
        self.settings = CoordinatorSettings() if settings is None else settings
        self.fleet = Fleet(self.settings)
        self.router = Router(self.fleet, self.settings)
        self.shares = Shares(epoch_s=self.settings.epoch_s, max_tasks=self.settings.max_tasks)
        self._requests: dict[str, Request] = {}
        self._unbound: LazyHeap[str] = LazyHeap()
        self._blocked: LazyHeap[str] = LazyHeap()
        self._working_set = WorkingSet()
        # Newcomers that wait, and when they do not have to wait for paused sessions any more.
        self._patience: LazyHeap[str] = LazyHeap()
        self._returns = Returns(self.fleet, self.router.sessions, self.settings)
        self._now_s = 0.0
        self._made: list[Decision] = []
        self._relieved: list[Worker] = []
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            WorkerUp: self._worker_up,
            WorkerTold: self._worker_told,
            WorkerDraining: self._worker_leaves,
            WorkerGone: self._worker_leaves,
            TenantWeight: self._tenant_weight,
            RequestArrived: self._request_arrived,
            RequestReturned: self._request_returned,
            RequestEnded: self._request_ended,
            SessionTold: self._session_told,
            SessionPaused: self._session_paused,
            SessionEnded: self._session_ended,
            TaskEnded: self._task_ended,
            StealAsked: self._steal_asked,
            Tick: self._tick,
        }

    def __len__(self) -> int:
        """Requests that wait or run."""
        return len(self._requests)

    def is_waiting(self, request_id: str) -> bool:
        """Whether the request waits."""
        request = self._requests.get(request_id)
        return request is not None and not request.is_admitted

    def apply(self, event: Event) -> list[Decision]:
        """Take in an event, and say what is to be done now.

        A time before that of the event before counts as that one's.
        """
        self._now_s = max(self._now_s, event.now_s)
        self._handlers[type(event)](event)
        while self._relieved:
            self._serve(self._relieved.pop())
        self._fill_idle()
        made, self._made = self._made, []
        return made

    def check_integrity(self) -> None:
        """Raise AssertionError when what is counted contradicts itself, or a slot is wasted."""
        self.shares.check_integrity()
        running = [each for each in self._requests.values() if each.is_admitted]
        self._working_set.check_integrity(dict(Counter(each.unit for each in running)))
        known = dict(self._requests)
        for worker in self.fleet:
            worker.check_integrity()
            for request_id, request in (worker.waiting | worker.running).items():
                if known.pop(request_id, None) is not request:
                    raise AssertionError(f"{request_id} at {worker.worker_id} is not known")
        if any(request.worker_id is not None for request in known.values()):
            raise AssertionError("a request is at a worker that does not know it")
        idle = self.fleet.get(self.fleet.least.first())
        if idle is not None and not idle.waiting and self._unbound_for(idle) is not None:
            raise AssertionError(f"{idle.worker_id} has room for what waits elsewhere")

    # Workers

    def _worker_up(self, event: WorkerUp) -> None:
        worker = self.fleet.up(event)
        self._cap_tenants()
        self._serve(worker)

    def _worker_told(self, event: WorkerTold) -> None:
        worker = self.fleet.get(event.worker_id)
        if worker is not None:
            self.fleet.told(worker, event)
            self._serve(worker)

    def _worker_leaves(self, event: WorkerDraining | WorkerGone) -> None:
        worker = self.fleet.get(event.worker_id)
        if worker is None:
            return
        is_gone = isinstance(event, WorkerGone)
        self.fleet.close(worker, gone=is_gone)
        self._cap_tenants()
        if is_gone:
            self._working_set.left(worker)
            for request in worker.running.values():
                request.worker_id = None
        for request in list(worker.waiting.values()):
            worker.remove(request, self._now_s)
            request.worker_id = None
            self._put(request)

    def _cap_tenants(self) -> None:
        fleets = self.settings.max_tenant_fleets
        self.shares.max_tenant_afs = fleets * max(1, len(self.fleet.ring)) if fleets else math.inf

    # Requests

    def _request_arrived(self, event: RequestArrived) -> None:
        if event.request_id in self._requests:
            return
        work_s = event.step_s if event.work_s is None else event.work_s
        task_s = work_s if event.task_s is None else event.task_s
        request = request_of(event, self._now_s, fair=self.settings.fair_share)
        self._requests[event.request_id] = request
        self.shares.arrived(
            (request.tenant, request.task),
            work_s=work_s,
            deadline_s=event.deadline_s,
            budget_s=self.settings.deadline_factor * task_s,
            now_s=self._now_s,
        )
        request.is_under_way = self._working_set.is_under_way(request)
        if event.session_id is not None:
            self._returns.over(event.session_id)
            self._working_set.waits(event.session_id)
        self._put(request)

    def _request_returned(self, event: RequestReturned) -> None:
        request = self._requests.get(event.request_id)
        if request is None or not request.is_admitted:
            return
        worker = self.fleet.get(request.worker_id)
        if worker is not None:
            worker.end(request)
        self._working_set.ended(request)
        request.is_under_way = self._working_set.is_under_way(request)
        request.avoids, request.worker_id = request.worker_id, None
        request.has_failed = True
        request.admitted_s = math.inf
        self._put(request)
        if worker is not None:
            self._serve(worker)

    def _request_ended(self, event: RequestEnded) -> None:
        request = self._requests.pop(event.request_id, None)
        if request is None:
            return
        key = request.tenant, request.task
        self.shares.ended(key, request.cost_s if event.is_served else 0.0)
        if request.is_alone:
            self.shares.forget(key)
        worker = self.fleet.get(request.worker_id)
        if not request.is_admitted:
            self._waits_no_more(request)
            self._release(request.session_id)
            if worker is not None:
                worker.remove(request, self._now_s)
        else:
            self._working_set.ended(request)
            if worker is not None:
                worker.end(request)
                if event.is_served:
                    self._served(request, worker, event)
        if worker is not None:
            self._serve(worker)

    def _served(self, request: Request, worker: Worker, event: RequestEnded) -> None:
        worker.served(self._now_s - request.admitted_s)
        tokens = request.kv_tokens(event.prompt_tokens, event.output_tokens)
        self.router.ended(request, worker, tokens)
        if self.settings.keep_s and worker.capacity_tokens and request.session_id is not None:
            session = self.router.sessions.use(request.session_id)
            until_s = self._now_s + self.settings.keep_s
            self._working_set.keep(request, worker, tokens, until_s, session.began_s)

    def _waits_no_more(self, request: Request) -> None:
        for heap in (self._unbound, self._blocked, self._patience):
            heap.drop(request.request_id)

    def _release(self, session_id: str | None) -> None:
        """The session's KV is not kept any more: there may be room for another one."""
        worker = self._working_set.release(session_id)
        if worker is not None:
            self._serve(worker)

    # Sessions, tasks and tenants

    def _tenant_weight(self, event: TenantWeight) -> None:
        self.shares.set_weight(event.tenant, event.weight)

    def _session_told(self, event: SessionTold) -> None:
        worker = self.fleet.open(event.worker_id)
        if worker is not None:
            self.router.told(event.session_id, worker, event.cached_tokens)

    def _session_paused(self, event: SessionPaused) -> None:
        self._returns.paused(event, self._now_s)
        if event.p_return < _LIKELY or event.returns_in_s > self.settings.keep_s:
            self._release(event.session_id)

    def _session_ended(self, event: SessionEnded) -> None:
        # Where it was is remembered: what is said of its end may be wrong.
        self._returns.over(event.session_id)
        self._release(event.session_id)

    def _task_ended(self, event: TaskEnded) -> None:
        self.shares.forget((event.tenant, named_task(event.task_id)))

    # Placing and admitting

    def _put(self, request: Request) -> None:
        """Let the request wait at the worker that is best for it, or run there at once."""
        worker, move = self.router.place(request, self._now_s)
        if move is not None:
            self._made.append(move)
            request.is_under_way = False  # What is under way elsewhere has no place there.
            self._release(request.session_id)
        if worker is not None and not worker.waiting and self._fits(request, worker):
            # Nobody waits whom it could pass: it takes no turn, and owes none.
            request.worker_id = worker.worker_id
            self._waits_no_more(request)
            self._begin(request, worker, self._shares_of((request.tenant, request.task))[1])
            self.fleet.changed(worker)
            return
        if not request.is_bound:
            self._unbound.set(request.request_id, request.arrived_s)
        if worker is None:
            return
        worker.add(request, self._now_s)
        if not request.is_under_way:
            self._patience.set(request.request_id, request.arrived_s + self.settings.patience_s)
        if self.settings.preempt_after_s:
            self._blocked.set(request.request_id, self._now_s + self.settings.preempt_after_s)
        self._serve(worker)

    def _serve(self, worker: Worker) -> None:
        """Let the worker begin with what waits and fits, in turn."""
        while (request := self._next(worker)) is not None:
            self._admit(request, worker)
        self.fleet.changed(worker)

    def _next(self, worker: Worker) -> Request | None:
        if not worker.has_slot:
            return None
        for head in worker.queue.firsts(1):
            if self._fits(head, worker):
                return head
            is_late = self._now_s - head.queued_s >= self.settings.max_overtaken_s
            if is_late and not worker.has_room(head) and not self._is_kept_out(head, worker):
                return None
            for request in worker.queue.firsts(_LOOK_AHEAD):
                if self._fits(request, worker):
                    return request
        for request in islice(worker.returned.values(), _LOOK_AHEAD):
            if worker.has_room(request):
                return request
        free = self._unbound_for(worker)
        if free is not None:
            self._take(free, worker)
        return free

    def _fits(self, request: Request, worker: Worker) -> bool:
        """Whether the worker may begin with the request now."""
        return worker.has_room(request) and not self._is_kept_out(request, worker)

    def _is_kept_out(self, request: Request, worker: Worker) -> bool:
        """Whether it waits for sessions that are expected back, and has patience for that."""
        if request.is_under_way or request.session_id is None:
            return False
        is_taken = worker.is_taken(request, self.settings.keep_share)
        return is_taken and self._now_s - request.arrived_s < self.settings.patience_s

    def _unbound_for(self, worker: Worker) -> Request | None:
        """The oldest request that nothing binds elsewhere, and that fits here."""
        for request_id in self._unbound.firsts(_LOOK_AHEAD):
            request = self._requests[request_id]
            is_avoided = request.avoids == worker.worker_id and len(self.fleet.ring) > 1
            if not is_avoided and self._fits(request, worker):
                return request
        return None

    def _fill_idle(self) -> None:
        """Let the least loaded worker have what nothing binds elsewhere."""
        while len(self._unbound):
            worker = self.fleet.get(self.fleet.least.first())
            before = len(self._made)
            if worker is not None and worker.has_slot:
                self._serve(worker)
            if len(self._made) == before:
                return

    def _take(self, request: Request, worker: Worker) -> None:
        """A request that nothing binds waits at this worker now."""
        before = self.fleet.get(request.worker_id)
        if before is worker:
            return
        if before is not None:
            before.remove(request, self._now_s)
            self._relieved.append(before)  # What it held up there may fit.
        worker.add(request, self._now_s)
        if request.session_id is not None:
            self.router.sessions.use(request.session_id).settle(worker.worker_id, worker.life)

    def _admit(self, request: Request, worker: Worker) -> None:
        """The request, which waits at the worker, begins there."""
        tenant, task = self._shares_of((request.tenant, request.task))
        worker.serve(request, tenant, task, self._now_s)
        worker.queue.renew(_RENEWED, self._shares_of)
        self._waits_no_more(request)
        self._begin(request, worker, task)

    def _begin(self, request: Request, worker: Worker, share: float) -> None:
        now_s = request.admitted_s = self._now_s
        kept_at = self._working_set.began(request)
        if kept_at not in (None, worker):
            self._relieved.append(kept_at)
        worker.begin(request)
        if self.settings.preempt_after_s:
            worker.ranks.set(request.request_id, share, -now_s)
        self.router.admitted(request, worker, now_s)
        self._made.append(
            Admit(
                request.request_id,
                worker.worker_id,
                priority_of(share),
                request.route,
                request.reason,
                now_s - request.arrived_s,
            )
        )

    def _shares_of(self, key: TaskKey) -> tuple[float, float]:
        return self.shares.shares(key, self._now_s)

    # Time

    def _tick(self, event: Tick) -> None:
        for worker in self.fleet.expire(self._now_s, _SLICE):
            self._serve(worker)
        self.shares.refresh(self._now_s, _SLICE)
        for worker in self._working_set.due(self._now_s, _SLICE):
            self._serve(worker)
        for request_id in self._patience.due(self._now_s, _SLICE):
            waited_at = self.fleet.get(self._requests[request_id].worker_id)
            if waited_at is not None:
                self._serve(waited_at)
        for _ in range(_THEFTS):
            theft = find_theft(self.fleet, self.router.sessions, self.settings, self._now_s)
            if theft is None:
                break
            self._steal(theft)
        for request_id in self._blocked.due(self._now_s, _PREEMPTIONS):
            self._unblock(self._requests[request_id])
        self._made += self._returns.due(self._now_s, _SLICE)

    def _steal(self, theft: Theft) -> None:
        """The thief runs the request, and its session lives there."""
        request, victim, thief = theft.request, theft.victim, theft.thief
        victim.remove(request, self._now_s)
        session = self.router.sessions.use(request.session_id or "")
        self._made.append(self.router.move(request, session, thief, Route.STEAL, self._now_s))
        request.reason = "the thief is idle"
        thief.add(request, self._now_s)
        self._admit(request, thief)
        self._serve(thief)
        self._serve(victim)

    def _steal_asked(self, event: StealAsked) -> None:
        request = self._requests.get(event.request_id)
        session_id = None if request is None else request.session_id
        found = examine(
            request,
            None if session_id is None else self.router.sessions.get(session_id),
            self.fleet.get(event.from_worker),
            self.fleet.open(event.to_worker),
            self.settings,
            self._now_s,
        )
        if isinstance(found, Theft):
            self._steal(found)
        else:
            self._made.append(Refused(event.request_id, found))

    def _unblock(self, request: Request) -> None:
        """Let a running request give way to one that is more urgent and has waited too long."""
        worker = self.fleet.open(request.worker_id)
        if worker is None or request.is_admitted:
            return
        given = self._least_urgent(worker, request)
        if given is None or worker.queue.firsts(1) != [request]:
            self._blocked.set(request.request_id, self._now_s + self.settings.preempt_after_s)
            return
        self._made.append(Preempt(given.request_id, worker.worker_id, request.request_id))
        worker.preempt(given)
        self._admit(request, worker)
        self._serve(worker)

    def _least_urgent(self, worker: Worker, request: Request) -> Request | None:
        """The running request that makes room; None where that would not help."""
        running_id = worker.ranks.first()
        if running_id is None:
            return None
        running = worker.running[running_id]
        if not worker.has_room(request, without=running):
            return None
        _, low = self._shares_of((running.tenant, running.task))
        _, high = self._shares_of((request.tenant, request.task))
        return running if high >= _MORE_URGENT * low else None
