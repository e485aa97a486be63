"""What the coordinator is told, and what it decides: flat values that JSON can hold.

Times are seconds of one clock. An event of a request, session or worker that is not known changes
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, get_args, get_type_hints

from saga_core.errors import SettingsError
from saga_core.fairness import check_weight
from saga_core.fields import StateError, fields_of, number
from saga_core.placement import Route

# Events


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """A worker is there, or is again, or what is known of it has changed.

    Attributes:
        max_running: requests that it serves at a time, at least 1: with so many it is full.
        limit: requests that it is given at a time, at least 0; None: ``max_running``.
        capacity_tokens: of its KV pool; 0: not known, and then only requests are counted.
        prefill_tokens_per_s: as it measures it; 0: not known.
        weight: share of what an equal worker would be given, above 0, at most 1.
    """

    now_s: float
    worker_id: str
    max_running: int = 256
    capacity_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    weight: float = 1.0
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.max_running < 1 or not 0.0 < self.weight <= 1.0 or self.capacity_tokens < 0:
            raise SettingsError(
                "a worker needs max_running >= 1, capacity_tokens >= 0 and a weight above 0, at "
                f"most 1: {self}"
            )


@dataclass(frozen=True, slots=True)
class WorkerTold:
    """A worker has told its state.

    Attributes:
        requests: that it serves and that wait at it, whoever sent them.
        free_tokens: KV that is free or evictable; None: it does not say.
        prefill_tokens_per_s: measured; 0: not known.
    """

    now_s: float
    worker_id: str
    requests: int
    free_tokens: int | None = None
    prefill_tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerDraining:
    """A worker is to go: what it serves it may finish, anything else goes elsewhere."""

    now_s: float
    worker_id: str


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """A worker is down. What it served ends, or returns, each by its own event."""

    now_s: float
    worker_id: str


@dataclass(frozen=True, slots=True)
class TenantWeight:
    """A tenant's share beside others of the same need; without it is 1."""

    now_s: float
    tenant: str
    weight: float

    def __post_init__(self) -> None:
        check_weight(self.weight)


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A request is to be served.

    Attributes:
        request_id: unique among those that wait and run.
        session_id: None: it has none.
        task_id: None: its session is the task, or the request by itself.
        prompt_tokens, output_tokens: as expected.
        prefix_id, prefix_tokens: the part of its prompt that other sessions begin with too, such
            as a system prompt and tools; "": none is known.
        step_s: GPU-seconds that it is expected to need.
        work_s: GPU-seconds that its task still needs, this request included, all sub-agents
            together; None: ``step_s``.
        deadline_s: when the task should be done; None: ``task_s`` decides.
        task_s: the time that such a task is expected to take in all; None: ``work_s``.
        only_worker: the one that alone can serve it well, while that is up; None: any can.
    """

    now_s: float
    request_id: str
    tenant: str = ""
    session_id: str | None = None
    task_id: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    prefix_id: str = ""
    prefix_tokens: int = 0
    step_s: float = 1.0
    work_s: float | None = None
    deadline_s: float | None = None
    task_s: float | None = None
    only_worker: str | None = None


@dataclass(frozen=True, slots=True)
class RequestReturned:
    """The worker that it was sent to did not take it: it waits again, for another one."""

    now_s: float
    request_id: str


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """A request is over, or has left while it waited.

    Attributes:
        is_served: it was answered: its KV is at its worker now.
        prompt_tokens, output_tokens: as counted; None: as was expected.
    """

    now_s: float
    request_id: str
    is_served: bool = True
    prompt_tokens: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class SessionTold:
    """A worker has said how much of a session it holds; 0: the session has no home any more."""

    now_s: float
    session_id: str
    worker_id: str
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class SessionPaused:
    """A session waits for a tool.

    Attributes:
        p_return: probability that it comes back, 0 to 1.
        returns_in_s: when it is expected, seconds from now.
    """

    now_s: float
    session_id: str
    p_return: float
    returns_in_s: float


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """A session will not come back, as far as anybody knows."""

    now_s: float
    session_id: str


@dataclass(frozen=True, slots=True)
class TaskEnded:
    """A task is done."""

    now_s: float
    tenant: str
    task_id: str


@dataclass(frozen=True, slots=True)
class StealAsked:
    """Somebody else, such as another gateway, wants a waiting request moved.

    What has been admitted, moved or has left meanwhile is refused.
    """

    now_s: float
    request_id: str
    from_worker: str
    to_worker: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: to be told once an epoch. Steals, preemption and prefetch come of it."""

    now_s: float


Event = (
    WorkerUp
    | WorkerTold
    | WorkerDraining
    | WorkerGone
    | TenantWeight
    | RequestArrived
    | RequestReturned
    | RequestEnded
    | SessionTold
    | SessionPaused
    | SessionEnded
    | TaskEnded
    | StealAsked
    | Tick
)

# Decisions


@dataclass(frozen=True, slots=True)
class Admit:
    """Send the request to the worker now.

    Attributes:
        priority: the engine's, lower first.
        reason: for logs and counters.
        waited_s: since it arrived.
    """

    request_id: str
    worker_id: str
    priority: int
    route: Route
    reason: str
    waited_s: float


@dataclass(frozen=True, slots=True)
class Move:
    """A request that waits is to be served elsewhere, and its session lives there from now on.

    Attributes:
        from_worker: None: that has gone.
        transfer_tokens: KV to bring along; 0: it is computed again.
    """

    request_id: str
    session_id: str | None
    from_worker: str | None
    to_worker: str
    route: Route
    transfer_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Preempt:
    """Let the running request give way to the other one, which is admitted with it.

    It goes on when the next request there ends, and does not give way again.
    """

    request_id: str
    worker_id: str
    for_request_id: str


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Tell the worker that the session is expected in so many seconds (``resume_soon``)."""

    session_id: str
    worker_id: str
    in_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """A steal that was asked for is not done; why."""

    request_id: str
    reason: str


Decision = Admit | Move | Preempt | Prefetch | Refused

_EVENTS: dict[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}


def to_dict(item: Event | Decision) -> dict[str, Any]:
    """The event or decision as a JSON object; its class is ``kind``."""
    return {"kind": type(item).__name__, **asdict(item)}


def event_from_dict(value: Any) -> Event:
    """The event of a JSON object that ``to_dict`` made.

    Raises:
        StateError: it is not one.
        SettingsError: a value is out of its range.
    """
    given = dict(fields_of(value, "event"))
    kind = _EVENTS.get(str(given.pop("kind", None)))
    if kind is None:
        raise StateError(f"event.kind: expected one of {', '.join(_EVENTS)}")
    hints = get_type_hints(kind)
    unknown = given.keys() - hints.keys()
    if unknown:
        raise StateError(f"event.{min(unknown)}: is not a field of {kind.__name__}")
    missing = [f.name for f in fields(kind) if f.default is MISSING and f.name not in given]
    if missing:
        raise StateError(f"event.{missing[0]}: is missing")
    return kind(**{name: _read(given, name, hints[name]) for name in given})


def _read(given: Mapping[str, Any], name: str, hint: Any) -> Any:
    value, where = given[name], f"event.{name}"
    kinds = get_args(hint) or (hint,)
    if value is None and type(None) in kinds:
        return None
    if float in kinds:
        return number(value, where, least=0.0)
    wanted = kinds[0]
    if type(value) is not wanted or (wanted is int and value < 0):
        raise StateError(f"{where}: expected {wanted.__name__}")
    return value
