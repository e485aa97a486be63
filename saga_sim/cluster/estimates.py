"""What a gateway can expect of requests and tasks: from token counts, and from those before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Expected(NamedTuple):
    """Of a request.

    Attributes:
        output_tokens: of its answer.
        step_s: that it needs of a worker. work_s: that its task still needs, this included.
        task_s: from the first request of such a task to its end; None: none has ended.
    """

    output_tokens: int
    step_s: float
    work_s: float
    task_s: float | None


@dataclass(slots=True)
class _Mean:
    total: float = 0.0
    count: float = 0.0

    def add(self, total: float, count: float = 1.0) -> None:
        self.total += total
        self.count += count

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass(slots=True)
class _Tenant:
    """Means over its requests, and over its tasks that have ended."""

    output_tokens: _Mean = field(default_factory=_Mean)
    steps: _Mean = field(default_factory=_Mean)
    task_s: _Mean = field(default_factory=_Mean)


@dataclass(slots=True)
class _Task:
    tenant: str
    began_s: float
    steps: int = 0


class Estimates:
    """Learns, tenant by tenant, and knows nothing of what is to come.

    A request needs the prefill of what its prompt has more than its session's last one with its
    answer, and its tenant's mean answer at the mean time of a token so far. Its task needs so much
    for as many more steps as the tenant's tasks have on average beyond those it has taken; while
    none of these has ended, as many as it has taken. At least this one.
    """

    def __init__(self, prefill_tokens_per_s: float) -> None:
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._token_s = _Mean()
        self._tenants: dict[str, _Tenant] = {}
        self._tasks: dict[int, _Task] = {}
        self._held: dict[str, int] = {}

    def service_s(self, computed_tokens: int, decode_s: float) -> float:
        """Time that a request has had of its worker: its prefill, as if alone, and its decode."""
        return computed_tokens / self._prefill_tokens_per_s + decode_s

    def arrived(
        self, task: int, tenant: str, session_id: str, prompt_tokens: int, now_s: float
    ) -> Expected:
        """A request has come."""
        own = self._tasks.setdefault(task, _Task(tenant, now_s))
        means = self._tenants.setdefault(tenant, _Tenant())
        output_tokens = means.output_tokens.value
        new_tokens = max(0, prompt_tokens - self._held.get(session_id, 0))
        step_s = self.service_s(new_tokens, output_tokens * self._token_s.value)
        steps_left = means.steps.value - own.steps if means.steps.count else own.steps
        return Expected(
            int(output_tokens),
            step_s,
            step_s * max(1.0, steps_left),
            means.task_s.value if means.task_s.count else None,
        )

    def answered(
        self,
        task: int,
        session_id: str,
        *,
        prompt_tokens: int,
        output_tokens: int,
        decode_s: float,
    ) -> None:
        """The answer is complete; ``decode_s`` after its first token."""
        own = self._tasks[task]
        own.steps += 1
        self._tenants[own.tenant].output_tokens.add(output_tokens)
        self._token_s.add(decode_s, output_tokens - 1)
        self._held[session_id] = prompt_tokens + output_tokens

    def session_ended(self, session_id: str) -> None:
        """The session will not come back."""
        self._held.pop(session_id, None)

    def task_ended(self, task: int, now_s: float) -> None:
        """All requests of the task are answered."""
        own = self._tasks.pop(task)
        means = self._tenants[own.tenant]
        means.steps.add(own.steps)
        means.task_s.add(now_s - own.began_s)
