"""Where the program is: the current workflow, its sessions, and the LLM call about to be sent."""

from __future__ import annotations

import hashlib
import threading
import time
import uuid
from collections import OrderedDict
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from numbers import Real
from types import TracebackType
from uuid import UUID

from saga_core.hints import Hints, clean
from saga_core.types import tool_type_of
from saga_sdk.events import Event, EventKind, sender
from saga_sdk.guard import Guard

MAX_CALLS = 10_000
MAX_EVENT_URLS = 8
# Its milliseconds fit the hint; a longer deadline could not be said.
MAX_DEADLINE_S = 1e11
_MAX_STEM_CHARS = 200


def wire_id(value: object) -> str:
    """Write any id as a legal hint value.

    A legal id stays as it is. Another one is cleaned and gets a digest of the original, so that
    ids that differ only in foreign characters stay apart.
    """
    text = str(value)
    if clean(text) == text:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:12]
    return f"{(clean(text) or 'id')[:_MAX_STEM_CHARS]}-{digest}"


def deadline_at(deadline_s: object, now_s: float) -> float | None:
    """The monotonic time at which a task that starts now should be done; None when unsaid.

    What is not a finite number of seconds, as the user may have written it, says nothing and does
    not raise. A negative one is a budget that is already spent.
    """
    if not isinstance(deadline_s, Real) or isinstance(deadline_s, bool):
        return None
    try:
        seconds = float(deadline_s)
    except OverflowError:
        return None
    return now_s + seconds if abs(seconds) <= MAX_DEADLINE_S else None


class Session:
    """One growing conversation: numbers its LLM calls and keeps the tool that ended last.

    Thread-safe.

    Attributes:
        event_urls: where the servers that its calls went to would take events; 8 at most.
    """

    __slots__ = ("_lock", "_next_step", "_tool_name", "event_urls", "id")

    def __init__(self, session_id: str) -> None:
        self.id = session_id
        self.event_urls: tuple[str, ...] = ()
        # Reentrant: the garbage collector may close a stream, and so report its end, inside.
        self._lock = threading.RLock()
        self._next_step = 0
        self._tool_name: str | None = None

    def take_step(self) -> tuple[int, str | None]:
        """Number the next LLM call, and name the tool whose result it carries, if any."""
        with self._lock:
            step, self._next_step = self._next_step, self._next_step + 1
            tool_name, self._tool_name = self._tool_name, None
            return step, tool_name

    def tool_ended(self, tool_name: str | None) -> None:
        """Note the tool that ended last; None forgets it."""
        with self._lock:
            self._tool_name = tool_name

    def sent_to(self, events_url: str) -> None:
        """Note the server that a call with this session's id goes to."""
        with self._lock:
            if events_url not in self.event_urls and len(self.event_urls) < MAX_EVENT_URLS:
                self.event_urls = (*self.event_urls, events_url)


@dataclass(frozen=True, slots=True)
class Call:
    """One LLM call: its hints, the same for every attempt, and its task's deadline.

    Attributes:
        deadline_at_s: on the monotonic clock.
        session: the session whose step it is.
    """

    hints: Hints
    deadline_at_s: float | None = None
    session: Session | None = None

    def hints_at(self, now_s: float) -> Hints:
        """The hints with the time left until the deadline, which is never below 0."""
        if self.deadline_at_s is None:
            return self.hints
        left_ms = max(0, round((self.deadline_at_s - now_s) * 1000))
        return replace(self.hints, deadline_ms=left_ms)


class CallMap:
    """The LLM calls in flight, by run id. Bounded: the oldest entry makes room. Thread-safe."""

    def __init__(self, max_calls: int = MAX_CALLS) -> None:
        self._max_calls = max_calls
        # Reentrant, as a session's lock; and each change is a single operation.
        self._lock = threading.RLock()
        self._calls: OrderedDict[UUID, Call] = OrderedDict()

    def __len__(self) -> int:
        return len(self._calls)

    def put(self, run_id: UUID, call: Call) -> None:
        with self._lock:
            self._calls[run_id] = call
            if len(self._calls) > self._max_calls:
                self._calls.popitem(last=False)

    def get(self, run_id: UUID) -> Call | None:
        with self._lock:
            return self._calls.get(run_id)

    def discard(self, run_id: UUID) -> None:
        with self._lock:
            self._calls.pop(run_id, None)


@dataclass(frozen=True, slots=True)
class WorkflowRun:
    """One entered ``saga.workflow`` block: a task, or a part of the enclosing block's task.

    Attributes:
        session: the block's own conversation; calls of bare clients are its steps.
        session_given: the user named the session.
        deadline_at_s: on the monotonic clock.
        outer: the enclosing block.
    """

    workflow_id: str
    task_id: str
    session: Session
    session_given: bool
    deadline_at_s: float | None
    outer: WorkflowRun | None
    _entered_by: WorkflowContext = field(repr=False)

    @property
    def session_id(self) -> str:
        return self.session.id

    @property
    def parent_session_id(self) -> str | None:
        return None if self.outer is None else self.outer.session.id

    def next_call(self) -> Call:
        """Number the next LLM call of the block's own session."""
        step, tool_name = self.session.take_step()
        hints = Hints(
            workflow_id=self.workflow_id,
            task_id=self.task_id,
            session_id=self.session.id,
            parent_session_id=self.parent_session_id,
            step=step,
            tool=None if tool_name is None else tool_type_of(tool_name),
            tool_name=tool_name,
        )
        return Call(hints, self.deadline_at_s, self.session)

    def _end(self) -> None:
        # A session that the user named may go on elsewhere.
        if not self.session_given:
            ids = (self.session.id, self.task_id, self.workflow_id)
            sender.put(Event(EventKind.SESSION_END, *ids, self.session.event_urls))


# A run id alone, never a token: callbacks of one run may end in another context than they began.
_current_run: ContextVar[UUID | None] = ContextVar("saga_current_run", default=None)
_current_workflow: ContextVar[WorkflowRun | None] = ContextVar("saga_workflow", default=None)
# The run whose request was sent last: its call serves that request and no other.
_sent_run: ContextVar[UUID | None] = ContextVar("saga_sent_run", default=None)
# Whose request was sent last, a run's or a block's, and as which call: its retries follow.
_last_sent: ContextVar[tuple[UUID | WorkflowRun, Call] | None] = ContextVar(
    "saga_last_sent", default=None
)
calls = CallMap()


class WorkflowContext:
    """A sync and async context manager that makes a block of code one run of a workflow.

    It may be entered several times; each entry is a run of its own.
    """

    def __init__(
        self, name: str, task_id: str | None, session_id: str | None, deadline_s: float | None
    ) -> None:
        self._name = name
        self._task_id = task_id
        self._session_id = session_id
        self._deadline_s = deadline_s

    def __enter__(self) -> WorkflowRun:
        outer = _current_workflow.get()
        deadline_at_s = deadline_at(self._deadline_s, time.monotonic())
        if outer is not None:
            task_id = outer.task_id if self._task_id is None else wire_id(self._task_id)
            deadline_at_s = outer.deadline_at_s if deadline_at_s is None else deadline_at_s
        else:
            task_id = wire_id(uuid.uuid4() if self._task_id is None else self._task_id)
        given = self._session_id is not None
        run = WorkflowRun(
            workflow_id=str(self._name),
            task_id=task_id,
            session=Session(wire_id(self._session_id if given else uuid.uuid4())),
            session_given=given,
            deadline_at_s=deadline_at_s,
            outer=outer,
            _entered_by=self,
        )
        _current_workflow.set(run)
        return run

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # A generator may leave the block in another context, where the block was never entered.
        run = _current_workflow.get()
        if run is not None and run._entered_by is self:
            _current_workflow.set(run.outer)
            with Guard("end of a block"):
                run._end()

    async def __aenter__(self) -> WorkflowRun:
        return self.__enter__()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.__exit__(exc_type, exc, traceback)


def workflow(
    name: str,
    task_id: str | None = None,
    session_id: str | None = None,
    deadline_s: float | None = None,
) -> WorkflowContext:
    """Make the block of a ``with`` or ``async with`` statement one run of a workflow.

    LLM calls of bare clients in the block are steps of one session. A LangChain run in the block
    belongs to the block's task; it is a session of its own whose parent is the block's, unless
    ``session_id`` is given or the run is a single model call. A nested block is a part of the
    enclosing block's task, in a session whose parent is the enclosing block's. With the block ends
    its session, unless ``session_id`` is given: allow-listed gateways that saw it are told.

    Args:
        name: the kind of agent, the same in every run of it.
        task_id: one run of it; by default the enclosing block's, else a new one.
        session_id: the conversation; by default a new one.
        deadline_s: seconds from now until the task should be done; by default the enclosing
            block's deadline, else none.
    """
    return WorkflowContext(name, task_id, session_id, deadline_s)


def enter_call(run_id: UUID) -> None:
    """Make a framework's LLM run the current one in this context."""
    _current_run.set(run_id)


def current_workflow() -> WorkflowRun | None:
    """The innermost ``saga.workflow`` block of this context."""
    return _current_workflow.get()


def current_call(*, is_retry: bool) -> Call | None:
    """The LLM call that this context is about to send; None when nothing is known of it.

    A framework's run wins over the ``saga.workflow`` block; a run that has ended counts for
    nothing, and so does one whose request was sent: what follows while it streams is another
    call. A call of a bare client takes the block's next step. A retry repeats the call.
    """
    run_id = _current_run.get()
    call = None if run_id is None else calls.get(run_id)
    block = _current_workflow.get()
    # Attempts of one call follow each other in one context; concurrent calls have their own.
    last = _last_sent.get()
    if is_retry and last is not None:
        sent_by, sent = last
        if sent_by is block or (call is not None and sent_by == run_id):
            return sent
    if run_id is not None and call is not None and _sent_run.get() != run_id:
        _sent_run.set(run_id)
        _last_sent.set((run_id, call))
        return call
    if block is None:
        # The retries of this request get no hint either.
        _last_sent.set(None)
        return None
    call = block.next_call()
    _last_sent.set((block, call))
    return call
