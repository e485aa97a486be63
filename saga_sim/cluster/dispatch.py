"""When a request goes to which worker: at once, by a router, or by the coordinator that ships."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from saga_core.coordinator import Coordinator
from saga_core.coordinator_events import (
    Admit,
    Event,
    RequestArrived,
    RequestEnded,
    SessionEnded,
    TaskEnded,
    Tick,
    WorkerUp,
)
from saga_core.coordinator_settings import CoordinatorSettings
from saga_sim.cluster.routers import Router, WorkerLoad

Key = tuple[int, int]
"""A request: the number of its task, and of its call there."""

Loads = Callable[[], Sequence[WorkerLoad]]
"""Looks at all workers, by number."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that an agent has sent.

    Attributes:
        prompt: hashes of its full blocks.
    """

    key: Key
    session_id: str
    prompt: Sequence[bytes]
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers that are dispatched to.

    Attributes:
        pool_tokens: of each. prefill_tokens_per_s: of each, in full steps.
    """

    workers: int
    pool_tokens: int
    max_running: int
    prefill_tokens_per_s: float


Sent = Sequence[tuple[Key, int]]
"""Requests that go to their workers now."""


class Dispatcher(Protocol):
    """Told what happens, says what is sent where.

    Attributes:
        tick_s: how often ``tick`` is called while requests are under way; None: never.
    """

    tick_s: float | None

    def arrived(self, arrival: Arrival, loads: Loads, now_s: float) -> Sent:
        """An agent has sent a request."""

    def answered(self, key: Key, prompt_tokens: int, output_tokens: int, now_s: float) -> Sent:
        """A request's answer is complete."""

    def session_ended(self, session_id: str, now_s: float) -> Sent:
        """The session will not come back."""

    def task_ended(self, task: int, now_s: float) -> Sent:
        """All of the task's requests are answered."""

    def tick(self, now_s: float) -> Sent:
        """Time has passed."""


class Immediate:
    """Every request goes at once where a router says."""

    tick_s: float | None = None

    def __init__(self, router: Router) -> None:
        self._router = router

    def arrived(self, arrival: Arrival, loads: Loads, now_s: float) -> Sent:
        chosen = self._router.place(arrival.session_id, arrival.prompt, loads(), now_s)
        return [(arrival.key, chosen)]

    def answered(self, key: Key, prompt_tokens: int, output_tokens: int, now_s: float) -> Sent:
        return ()

    def session_ended(self, session_id: str, now_s: float) -> Sent:
        self._router.ended(session_id)
        return ()

    def task_ended(self, task: int, now_s: float) -> Sent:
        return ()

    def tick(self, now_s: float) -> Sent:
        return ()


class Coordinated:
    """SAGA's coordinator: requests wait with it, in fair order, until a worker has room.

    What it expects of requests and tasks is the mean of those before; a step counts as one
    GPU-second. It preempts nothing, since vLLM's order of arrival knows no priorities, and is told
    of no pauses, so that it foretells none.
    """

    def __init__(self, fleet: Fleet) -> None:
        settings = CoordinatorSettings(preempt_after_s=0.0)
        self.tick_s: float | None = settings.epoch_s
        self._coordinator = Coordinator(settings)
        self._output_tokens, self._answered = 0, 0
        self._began_s: dict[int, float] = {}
        self._steps: dict[int, int] = {}
        self._done_s, self._done_steps, self._done = 0.0, 0, 0
        for number in range(fleet.workers):
            self._coordinator.apply(
                WorkerUp(
                    0.0,
                    str(number),
                    max_running=fleet.max_running,
                    capacity_tokens=fleet.pool_tokens,
                    prefill_tokens_per_s=fleet.prefill_tokens_per_s,
                )
            )

    def arrived(self, arrival: Arrival, loads: Loads, now_s: float) -> Sent:
        task, call = arrival.key
        self._began_s.setdefault(task, now_s)
        steps = self._steps.get(task, 0)
        mean_steps = self._done_steps / self._done if self._done else 1.0
        return self._apply(
            RequestArrived(
                now_s,
                f"{task}.{call}",
                session_id=arrival.session_id,
                task_id=str(task),
                prompt_tokens=arrival.prompt_tokens,
                output_tokens=self._output_tokens // max(1, self._answered),
                work_s=max(1.0, mean_steps - steps),
                task_s=self._done_s / self._done if self._done else None,
            )
        )

    def answered(self, key: Key, prompt_tokens: int, output_tokens: int, now_s: float) -> Sent:
        task, call = key
        self._answered += 1
        self._output_tokens += output_tokens
        self._steps[task] = self._steps.get(task, 0) + 1
        return self._apply(
            RequestEnded(
                now_s,
                f"{task}.{call}",
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
            )
        )

    def session_ended(self, session_id: str, now_s: float) -> Sent:
        return self._apply(SessionEnded(now_s, session_id))

    def task_ended(self, task: int, now_s: float) -> Sent:
        self._done += 1
        self._done_s += now_s - self._began_s.pop(task)
        self._done_steps += self._steps.pop(task)
        return self._apply(TaskEnded(now_s, "", str(task)))

    def tick(self, now_s: float) -> Sent:
        return self._apply(Tick(now_s))

    def _apply(self, event: Event) -> Sent:
        sent: list[tuple[Key, int]] = []
        for decision in self._coordinator.apply(event):
            if isinstance(decision, Admit):
                task, call = decision.request_id.split(".")
                sent.append(((int(task), int(call)), int(decision.worker_id)))
        return sent
