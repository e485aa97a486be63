"""The workers as the coordinator sees them: what they have to do, and what room they have."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from saga_core.coordinator_events import RequestArrived, WorkerTold, WorkerUp
from saga_core.coordinator_settings import CoordinatorSettings
from saga_core.fair_queue import FairQueue
from saga_core.lazy_heap import LazyHeap
from saga_core.placement import Ring, Route

# How much the newest request's time counts among those before it.
_SERVICE_SHARE = 1.0 / 16.0
_LEAST_COST_S = 1e-3
_ONE_TASK = "*"


@dataclass(slots=True, eq=False)
class Request:
    """A request that waits or runs.

    Attributes:
        task: its task, or what stands for it, in fair order; ``unit``: the same, of its tenant.
        is_under_way: of its task something runs, or waits for a tool.
        prompt_tokens: expected; of these ``prefix_tokens`` are of the shared prefix.
        own_tokens: KV that it needs at its end, without the shared prefix.
        cost_s: GPU-seconds that it is expected to need.
        arrived_s: when it came, for the first time.
        worker_id: where it waits or runs; None: there is no worker.
        is_bound: its KV is there; it is not moved for nothing.
        only_worker: the worker that alone can serve it well; None: any can.
        avoids: the worker that did not take it.
        has_failed: a worker has not taken it.
        queued_s: since when it waits there.
        admitted_s: since when it runs; infinite while it waits.
    """

    request_id: str
    tenant: str
    task: str
    unit: str
    session_id: str | None
    prompt_tokens: int
    own_tokens: int
    prefix_id: str
    prefix_tokens: int
    cost_s: float
    arrived_s: float
    worker_id: str | None = None
    is_bound: bool = False
    is_under_way: bool = False
    route: Route = Route.NEW
    reason: str = ""
    only_worker: str | None = None
    avoids: str | None = None
    has_failed: bool = False
    queued_s: float = 0.0
    admitted_s: float = math.inf

    @property
    def is_admitted(self) -> bool:
        """Whether it runs."""
        return self.admitted_s < math.inf

    @property
    def is_alone(self) -> bool:
        """Whether it is of no session and no task."""
        return self.task == f"r:{self.request_id}"

    def kv_tokens(self, prompt_tokens: int | None, output_tokens: int | None) -> int:
        """Its KV at its end, as counted; None: as was expected."""
        if prompt_tokens is None:
            prompt_tokens = self.prompt_tokens
        if output_tokens is None:
            output_tokens = self.own_tokens + self.prefix_tokens - self.prompt_tokens
        return prompt_tokens + output_tokens


def named_task(task_id: str) -> str:
    """What the requests of a task with that id count as."""
    return f"t:{task_id}"


def request_of(event: RequestArrived, now_s: float, *, fair: bool) -> Request:
    """The request that has arrived; it counts as its task, else as its session, else alone.

    Without ``fair`` all requests are of one task, which takes them in turn.
    """
    if event.task_id is not None:
        task = named_task(event.task_id)
    else:
        task = f"r:{event.request_id}" if event.session_id is None else f"s:{event.session_id}"
    prefix_tokens = min(event.prefix_tokens, event.prompt_tokens) if event.prefix_id else 0
    return Request(
        event.request_id,
        event.tenant if fair else "",
        task if fair else _ONE_TASK,
        f"{len(event.tenant)}:{event.tenant}{task}",
        event.session_id,
        event.prompt_tokens,
        event.prompt_tokens + event.output_tokens - prefix_tokens,
        event.prefix_id,
        prefix_tokens,
        max(_LEAST_COST_S, event.step_s),
        now_s,
        only_worker=event.only_worker,
    )


@dataclass(slots=True, eq=False)
class Worker:
    """One engine replica.

    KV is counted as what requests will hold at their end. What idle sessions hold there is among
    what is evictable, also the session's own: it is taken from there, and so is not counted off. A
    shared prefix is held once, however many requests that run begin with it.

    Attributes:
        life: counts how often it came up.
        service_s: time of a request, learned.
        limit: requests that it is given at a time.
        queue: what waits for it here, in fair order; ``waiting``: the same in order of coming;
            ``returned``: of these, those that are under way.
        running: what it was given, and has not ended.
        ranks: those that run, the least urgent first.
        used_tokens: KV that these need; ``prefixes``: how many of them share each prefix, and its
            tokens.
        queued_tokens: KV that those need which wait here, and of these ``new_tokens`` that have not
            begun.
        kept_tokens: KV that is kept for sessions that are expected back; ``kept``: these, the one
            that began last first.
        gave_way: those that were preempted, the first one first.
        foreign_requests, foreign_tokens: what it does besides, as it told last.
        empty_s: since when nothing waits here.
    """

    worker_id: str
    life: int
    service_s: float
    prefill_tokens_per_s: float
    max_running: int = 1
    limit: int = 1
    capacity_tokens: int = 0
    weight: float = 1.0
    is_draining: bool = False
    queue: FairQueue[Request] = field(default_factory=FairQueue)
    waiting: OrderedDict[str, Request] = field(default_factory=OrderedDict)
    returned: OrderedDict[str, Request] = field(default_factory=OrderedDict)
    running: dict[str, Request] = field(default_factory=dict)
    ranks: LazyHeap[str] = field(default_factory=LazyHeap)
    used_tokens: int = 0
    prefixes: dict[str, tuple[int, int]] = field(default_factory=dict)
    queued_tokens: int = 0
    new_tokens: int = 0
    kept_tokens: int = 0
    kept: LazyHeap[str] = field(default_factory=LazyHeap)
    gave_way: OrderedDict[str, Request] = field(default_factory=OrderedDict)
    foreign_requests: int = 0
    foreign_tokens: int = 0
    empty_s: float = 0.0

    def load(self, request: Request | None = None, *, under_way: bool = False) -> float:
        """Work in flight and queued ÷ capacity, of requests or of tokens, whichever is more.

        With ``request`` as if that waited here too. ``under_way``: only what is served before a
        request that is: neither newcomers nor what is kept for others hold that up.
        """
        requests = len(self.running) - len(self.gave_way) + self.foreign_requests
        requests += len(self.returned if under_way else self.waiting) + (request is not None)
        load = requests / self.max_running
        if self.capacity_tokens:
            tokens = self.used_tokens + self.queued_tokens + self.foreign_tokens
            tokens += -self.new_tokens if under_way else self.kept_tokens
            if request is not None:
                tokens += request.own_tokens
            load = max(load, tokens / self.capacity_tokens)
        return load / self.weight

    @property
    def has_slot(self) -> bool:
        """Whether it may run one more request."""
        if self.is_draining:
            return False
        running = len(self.running) - len(self.gave_way)
        return running + self.foreign_requests < self.limit or not self.running

    def has_room(self, request: Request, without: Request | None = None) -> bool:
        """Whether it may run the request now; one that has nothing of ours to do always may.

        ``without`` as if that one, which runs, had given way.
        """
        if without is None and not self.has_slot:
            return False
        if not self.capacity_tokens or not self.running:
            return True
        free = self.capacity_tokens - self.used_tokens - self.foreign_tokens
        if without is not None:
            free += without.own_tokens
        return self._needed(request) <= free

    def is_taken(self, request: Request, keep_share: float) -> bool:
        """Whether the request would take the KV of a session that is expected back."""
        if not self.capacity_tokens or not self.running:
            return False
        taken = self.used_tokens + self.foreign_tokens + self.kept_tokens
        return taken + self._needed(request) > keep_share * self.capacity_tokens

    @property
    def is_overgrown(self) -> bool:
        """Whether what runs and what is kept does not fit together: sessions grow."""
        return self.used_tokens + self.foreign_tokens + self.kept_tokens > self.capacity_tokens

    def begin(self, request: Request) -> None:
        """It runs the request."""
        self.running[request.request_id] = request
        self._hold(request)

    def end(self, request: Request) -> None:
        """It runs the request no more; in its place the first that gave way goes on."""
        del self.running[request.request_id]
        self.ranks.drop(request.request_id)
        if self.gave_way.pop(request.request_id, None) is None:
            self._release(request)
            if self.gave_way:
                # It is not ranked again: it gives way once.
                self._hold(self.gave_way.popitem(last=False)[1])

    def preempt(self, request: Request) -> None:
        """The request gives way; what it holds is free for another."""
        self.gave_way[request.request_id] = request
        self.ranks.drop(request.request_id)
        self._release(request)

    def add(self, request: Request, now_s: float) -> None:
        """The request waits here."""
        request.worker_id, request.queued_s = self.worker_id, now_s
        self.queue.add(request)
        self.waiting[request.request_id] = request
        self.queued_tokens += request.own_tokens
        if request.is_under_way:
            self.returned[request.request_id] = request
        else:
            self.new_tokens += request.own_tokens

    def remove(self, request: Request, now_s: float) -> None:
        """The request waits here no more."""
        self.queue.remove(request)
        self._left(request, now_s)

    def serve(self, request: Request, tenant: float, task: float, now_s: float) -> None:
        """The request is the next to run, at those shares of its tenant and task."""
        self.queue.served(request, request.cost_s, tenant, task)
        self._left(request, now_s)

    def served(self, took_s: float) -> None:
        """A request has taken so long."""
        self.service_s += _SERVICE_SHARE * (max(1e-3, took_s) - self.service_s)

    def told(self, told: WorkerTold) -> None:
        """What it says it does above what is known here is for others."""
        self.foreign_requests = max(0, told.requests - len(self.running))
        self.foreign_tokens = 0
        if told.free_tokens is not None and self.capacity_tokens:
            used = self.capacity_tokens - told.free_tokens
            self.foreign_tokens = max(0, used - self.used_tokens)
        if told.prefill_tokens_per_s > 0.0:
            self.prefill_tokens_per_s = told.prefill_tokens_per_s

    def check_integrity(self) -> None:
        """Raise AssertionError when what is counted contradicts itself."""
        held = [each for each in self.running.values() if each.request_id not in self.gave_way]
        tokens = sum(request.own_tokens for request in held)
        tokens += sum(tokens for _, tokens in self.prefixes.values())
        queued = sum(request.own_tokens for request in self.waiting.values())
        new = [each for each in self.waiting.values() if not each.is_under_way]
        counts = (
            (tokens, queued, sum(each.own_tokens for each in new)),
            (len(self.running) - len(held), len(self.waiting), len(new)),
        )
        counted = (
            (self.used_tokens, self.queued_tokens, self.new_tokens),
            (len(self.gave_way), len(self.queue), len(self.waiting) - len(self.returned)),
        )
        if counts != counted:
            raise AssertionError(f"{self.worker_id}: {counts}, counted as {counted}")

    def _needed(self, request: Request) -> int:
        shares = request.prefix_id in self.prefixes
        return request.own_tokens + (0 if shares else request.prefix_tokens)

    def _hold(self, request: Request) -> None:
        self.used_tokens += self._needed(request)
        if request.prefix_id:
            count, tokens = self.prefixes.get(request.prefix_id, (0, request.prefix_tokens))
            self.prefixes[request.prefix_id] = count + 1, tokens

    def _release(self, request: Request) -> None:
        self.used_tokens -= request.own_tokens
        if not request.prefix_id:
            return
        count, tokens = self.prefixes[request.prefix_id]
        if count > 1:
            self.prefixes[request.prefix_id] = count - 1, tokens
        else:
            del self.prefixes[request.prefix_id]
            self.used_tokens -= tokens

    def _left(self, request: Request, now_s: float) -> None:
        del self.waiting[request.request_id]
        self.queued_tokens -= request.own_tokens
        if self.returned.pop(request.request_id, None) is None:
            self.new_tokens -= request.own_tokens
        if not self.waiting and request.queued_s < now_s:
            self.empty_s = now_s  # What came and went at once has not been in anybody's way.


class Fleet:
    """The workers that are up, by id and by load."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        self._workers: dict[str, Worker] = {}
        self._lives = 0
        self._expiring: LazyHeap[str] = LazyHeap()
        self.ring = Ring()
        self.least: LazyHeap[str] = LazyHeap()
        self.most: LazyHeap[str] = LazyHeap()

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __getitem__(self, worker_id: str) -> Worker:
        return self._workers[worker_id]

    def get(self, worker_id: str | None) -> Worker | None:
        """The worker, while it is up or draining."""
        return None if worker_id is None else self._workers.get(worker_id)

    def open(self, worker_id: str | None, life: int | None = None) -> Worker | None:
        """The worker if it takes requests, and lives the life that was asked for."""
        worker = self.get(worker_id)
        if worker is None or worker.is_draining or life not in (None, worker.life):
            return None
        return worker

    def up(self, event: WorkerUp) -> Worker:
        """The worker is there; what it has to do stays as it is."""
        worker = self._workers.get(event.worker_id)
        if worker is None:
            self._lives += 1
            worker = self._workers[event.worker_id] = Worker(
                event.worker_id,
                self._lives,
                self._settings.service_s,
                self._settings.prefill_tokens_per_s,
                empty_s=event.now_s,
            )
        worker.max_running, worker.weight = event.max_running, event.weight
        worker.limit = event.max_running if event.limit is None else event.limit
        worker.capacity_tokens = event.capacity_tokens
        if event.prefill_tokens_per_s > 0.0:
            worker.prefill_tokens_per_s = event.prefill_tokens_per_s
        worker.is_draining = False
        self.ring.add(worker.worker_id)
        self.changed(worker)
        return worker

    def close(self, worker: Worker, *, gone: bool) -> None:
        """The worker takes no more requests; if it is gone it is forgotten."""
        worker.is_draining = True
        self.ring.remove(worker.worker_id)
        self.changed(worker)
        if gone:
            self._expiring.drop(worker.worker_id)
            del self._workers[worker.worker_id]

    def changed(self, worker: Worker) -> None:
        """What the worker has to do is different."""
        if worker.is_draining:
            self.least.drop(worker.worker_id)
            self.most.drop(worker.worker_id)
            return
        load = worker.load()
        self.least.set(worker.worker_id, load)
        if worker.waiting:
            self.most.set(worker.worker_id, -load)
        else:
            self.most.drop(worker.worker_id)

    def told(self, worker: Worker, event: WorkerTold) -> None:
        """The worker has told its state, which holds for a while."""
        if self._settings.state_age_s:
            worker.told(event)
            self._expiring.set(worker.worker_id, event.now_s + self._settings.state_age_s)
            self.changed(worker)

    def expire(self, now_s: float, limit: int) -> list[Worker]:
        """Forget what workers told too long ago; returns up to ``limit`` of whom that changes."""
        workers = [self._workers[key] for key in self._expiring.due(now_s, limit)]
        for worker in workers:
            worker.foreign_requests = worker.foreign_tokens = 0
            self.changed(worker)
        return workers
