"""When a request goes to which worker: at once, by a router, or by the coordinator that ships."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from saga_core.coordinator import Coordinator
from saga_core.coordinator_events import (
    Admit,
    Event,
    RequestArrived,
    RequestEnded,
    RequestReturned,
    SessionEnded,
    TaskEnded,
    Tick,
    WorkerGone,
    WorkerUp,
)
from saga_core.coordinator_settings import CoordinatorSettings
from saga_sim.cluster.estimates import Estimates
from saga_sim.cluster.routers import Router, WorkerLoad

Key = tuple[int, int]
"""A request: the number of its task, and of its call there."""

Loads = Callable[[], Sequence[WorkerLoad]]
"""Looks at all workers that are up, by number."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that an agent has sent.

    Attributes:
        prompt: hashes of its full blocks.
        tenant: whose it is.
        deadline_s: when its task should be done, as the agent says.
    """

    key: Key
    session_id: str
    prompt: Sequence[bytes]
    prompt_tokens: int
    tenant: str = ""
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """A request whose answer is complete.

    Attributes:
        cached_tokens: of the prompt, as its usage says.
    """

    key: Key
    session_id: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    first_token_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers that are dispatched to.

    Attributes:
        pool_tokens: of each. prefill_tokens_per_s: of each, in full steps.
    """

    workers: int
    pool_tokens: int
    block_tokens: int
    max_running: int
    prefill_tokens_per_s: float


class Placed(NamedTuple):
    """A request that goes to its worker now; priority: of vLLM's queue, lower first."""

    key: Key
    worker: int
    priority: int = 0


Sent = Sequence[Placed]


class Dispatcher(Protocol):
    """Told what happens, says what is sent where.

    Attributes:
        tick_s: how often ``tick`` is called while requests are under way; None: never.
    """

    tick_s: float | None

    def arrived(self, arrival: Arrival, loads: Loads, now_s: float) -> Sent:
        """An agent has sent a request."""

    def answered(self, done: Done, now_s: float) -> Sent:
        """A request's answer is complete."""

    def session_ended(self, session_id: str, now_s: float) -> Sent:
        """The session will not come back, it is said."""

    def task_ended(self, task: int, now_s: float) -> Sent:
        """All of the task's requests are answered."""

    def lost(self, worker: int, requests: Sequence[Arrival], loads: Loads, now_s: float) -> Sent:
        """A worker is down; these requests had been sent to it."""

    def back(self, worker: int, now_s: float) -> Sent:
        """The worker is up again, and empty."""

    def tick(self, now_s: float) -> Sent:
        """Time has passed."""


class Immediate:
    """Every request goes at once where a router says."""

    tick_s: float | None = None

    def __init__(self, router: Router) -> None:
        self._router = router

    def arrived(self, arrival: Arrival, loads: Loads, now_s: float) -> Sent:
        chosen = self._router.place(arrival.session_id, arrival.prompt, loads(), now_s)
        return [Placed(arrival.key, chosen, self.priority(arrival))]

    def priority(self, arrival: Arrival) -> int:
        """Of vLLM's queue, where that knows any."""
        return 0

    def answered(self, done: Done, now_s: float) -> Sent:
        return ()

    def session_ended(self, session_id: str, now_s: float) -> Sent:
        self._router.ended(session_id)
        return ()

    def task_ended(self, task: int, now_s: float) -> Sent:
        return ()

    def lost(self, worker: int, requests: Sequence[Arrival], loads: Loads, now_s: float) -> Sent:
        return [placed for each in requests for placed in self.arrived(each, loads, now_s)]

    def back(self, worker: int, now_s: float) -> Sent:
        return ()

    def tick(self, now_s: float) -> Sent:
        return ()


class FirstTaskFirst(Immediate):
    """The request goes first whose task came first."""

    def __init__(self, router: Router) -> None:
        super().__init__(router)
        self._place: dict[int, int] = {}

    def priority(self, arrival: Arrival) -> int:
        return self._place.setdefault(arrival.key[0], len(self._place))


class LeastAttained(Immediate):
    """The request goes first whose task has had the least service so far, in doublings of 1 s."""

    def __init__(self, router: Router, fleet: Fleet) -> None:
        super().__init__(router)
        self._estimates = Estimates(fleet.prefill_tokens_per_s)
        self._attained_s: dict[int, float] = {}

    def priority(self, arrival: Arrival) -> int:
        return int(math.log2(1.0 + self._attained_s.get(arrival.key[0], 0.0)))

    def answered(self, done: Done, now_s: float) -> Sent:
        task = done.key[0]
        service_s = self._estimates.service_s(
            done.prompt_tokens - done.cached_tokens, done.end_s - done.first_token_s
        )
        self._attained_s[task] = self._attained_s.get(task, 0.0) + service_s
        return ()

    def task_ended(self, task: int, now_s: float) -> Sent:
        self._attained_s.pop(task, None)
        return ()


class Coordinated:
    """SAGA's coordinator: requests wait with it, in fair order, until a worker has room.

    It is told whose a request is and when its task should be done, and what ``Estimates`` expects
    of it; of no pauses, so that it foretells none. Where it lets requests give way, that is done
    by the priorities that go with them.

    Args:
        knows_deadlines: else it expects tasks to take as long as those before.
    """

    def __init__(
        self,
        fleet: Fleet,
        settings: CoordinatorSettings | None = None,
        *,
        knows_deadlines: bool = True,
    ) -> None:
        settings = settings or CoordinatorSettings(preempt_after_s=0.0)
        self._knows_deadlines = knows_deadlines
        self.tick_s: float | None = settings.epoch_s
        self._fleet = fleet
        self._coordinator = Coordinator(settings)
        self._estimates = Estimates(fleet.prefill_tokens_per_s)
        self._tenants: dict[int, str] = {}
        for number in range(fleet.workers):
            self.back(number, 0.0)

    def arrived(self, arrival: Arrival, loads: Loads, now_s: float) -> Sent:
        task, call = arrival.key
        self._tenants[task] = arrival.tenant
        expected = self._estimates.arrived(
            task, arrival.tenant, arrival.session_id, arrival.prompt_tokens, now_s
        )
        return self._apply(
            RequestArrived(
                now_s,
                f"{task}.{call}",
                tenant=arrival.tenant,
                session_id=arrival.session_id,
                task_id=str(task),
                prompt_tokens=arrival.prompt_tokens,
                output_tokens=expected.output_tokens,
                step_s=expected.step_s,
                work_s=expected.work_s,
                deadline_s=arrival.deadline_s if self._knows_deadlines else None,
                task_s=expected.task_s,
            )
        )

    def answered(self, done: Done, now_s: float) -> Sent:
        task, call = done.key
        self._estimates.answered(
            task,
            done.session_id,
            prompt_tokens=done.prompt_tokens,
            output_tokens=done.output_tokens,
            decode_s=done.end_s - done.first_token_s,
        )
        return self._apply(
            RequestEnded(
                now_s,
                f"{task}.{call}",
                prompt_tokens=done.prompt_tokens,
                output_tokens=done.output_tokens,
            )
        )

    def session_ended(self, session_id: str, now_s: float) -> Sent:
        self._estimates.session_ended(session_id)
        return self._apply(SessionEnded(now_s, session_id))

    def task_ended(self, task: int, now_s: float) -> Sent:
        self._estimates.task_ended(task, now_s)
        return self._apply(TaskEnded(now_s, self._tenants.pop(task), str(task)))

    def lost(self, worker: int, requests: Sequence[Arrival], loads: Loads, now_s: float) -> Sent:
        sent = [*self._apply(WorkerGone(now_s, str(worker)))]
        for request in requests:
            task, call = request.key
            sent += self._apply(RequestReturned(now_s, f"{task}.{call}"))
        return sent

    def back(self, worker: int, now_s: float) -> Sent:
        return self._apply(
            WorkerUp(
                now_s,
                str(worker),
                max_running=self._fleet.max_running,
                capacity_tokens=self._fleet.pool_tokens,
                prefill_tokens_per_s=self._fleet.prefill_tokens_per_s,
            )
        )

    def tick(self, now_s: float) -> Sent:
        return self._apply(Tick(now_s))

    def _apply(self, event: Event) -> Sent:
        sent: list[Placed] = []
        for decision in self._coordinator.apply(event):
            if isinstance(decision, Admit):
                task, call = decision.request_id.split(".")
                key = int(task), int(call)
                sent.append(Placed(key, int(decision.worker_id), decision.priority))
        return sent
