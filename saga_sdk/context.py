"""Where the program is: the current workflow, its sessions, and the LLM call about to be sent."""

from __future__ import annotations

import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from uuid import UUID

from saga_core.hints import Hints
from saga_sdk import semconv
from saga_sdk.events import EventKind, sender
from saga_sdk.guard import Guard
from saga_sdk.options import options
from saga_sdk.sessions import (
    Call,
    CallMap,
    Session,
    Task,
    deadline_at,
    named_sessions,
    wire_id,
)
from saga_sdk.tool_table import tool_type

__all__ = [
    "Call",
    "CallMap",
    "Session",
    "Task",
    "WorkflowContext",
    "WorkflowRun",
    "calls",
    "current_call",
    "current_workflow",
    "deadline_at",
    "enter_call",
    "wire_id",
    "workflow",
]

_BLOCK_START = Guard("start of a block")
_BLOCK_END = Guard("end of a block")


@dataclass(frozen=True, slots=True, eq=False)
class WorkflowRun:
    """One entered ``saga.workflow`` block: a task, or a part of the enclosing block's task.

    Attributes:
        session: the block's own conversation; calls of bare clients are its steps.
        session_given: the user named the session.
        parent_session_id: of the session that spawned the block's.
        deadline_at_s: on the monotonic clock.
        outer: the enclosing block.
        of_tool: the block is the inside of a tool: its session begins with the first call in it.
    """

    workflow_id: str
    task: Task
    session: Session
    session_given: bool
    parent_session_id: str | None
    deadline_at_s: float | None
    outer: WorkflowRun | None
    of_tool: bool = False
    _entered_by: WorkflowContext | None = field(default=None, repr=False)
    _context_before: Any = field(default=None, repr=False)

    @property
    def task_id(self) -> str:
        return self.task.id

    @property
    def session_id(self) -> str:
        return self.session.id

    @property
    def spawner_id(self) -> str | None:
        """The session that spawns what runs in the block: of a tool that asks no model itself,
        that which called the tool.
        """
        is_silent = self.of_tool and not self.session.destinations
        return self.parent_session_id if is_silent else self.session.id

    def next_call(self) -> Call:
        """Number the next LLM call of the block's own session."""
        step, tool_name = self.session.take_step()
        hints = Hints(
            workflow_id=self.workflow_id,
            task_id=self.task.id,
            session_id=self.session.id,
            parent_session_id=self.parent_session_id,
            step=step,
            tool=None if tool_name is None else tool_type(tool_name),
            tool_name=tool_name,
        )
        return Call(hints, self.deadline_at_s, self.session, self.task)

    def end_session(self) -> None:
        """Tell the gateways that the block's session has ended."""
        if self.session.destinations:
            sender.put(self.session.event(EventKind.SESSION_END, self.task, self.workflow_id))
            self.session.forget_gateways()

    def end_task(self) -> None:
        """Tell the gateways that the task has ended."""
        if self.task.destinations:
            sender.put(self.task.event(EventKind.TASK_END, self.workflow_id))
            self.task.forget_gateways()


# A run id alone, never a token: callbacks of one run may end in another context than they began.
_current_run: ContextVar[UUID | None] = ContextVar("saga_current_run", default=None)
_current_workflow: ContextVar[WorkflowRun | None] = ContextVar("saga_workflow", default=None)


@dataclass(slots=True)
class _Sent:
    """The request that was sent last: by a run or by a block, as which call; its retries follow.

    Attributes:
        run_id: the run whose request was sent last: its call serves that request and no other.
    """

    by: UUID | WorkflowRun | None
    call: Call | None
    run_id: UUID | None


_NOTHING_SENT = _Sent(None, None, None)
_sent: ContextVar[_Sent] = ContextVar("saga_sent", default=_NOTHING_SENT)
calls = CallMap()
# What a block is whose start failed: it is never the current one.
_NO_RUN = WorkflowRun("none", Task("none"), Session("none"), True, None, None, None)


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
        with _BLOCK_START:
            run = self._new_run(_current_workflow.get())
            _current_workflow.set(run)
            return run
        return _NO_RUN

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
            with _BLOCK_END:
                _end(run)

    async def __aenter__(self) -> WorkflowRun:
        return self.__enter__()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.__exit__(exc_type, exc, traceback)

    def _new_run(self, outer: WorkflowRun | None) -> WorkflowRun:
        deadline_at_s = deadline_at(self._deadline_s, time.monotonic())
        if outer is not None and deadline_at_s is None:
            deadline_at_s = outer.deadline_at_s
        named = None if self._task_id is None else wire_id(self._task_id)
        if outer is not None and named in (None, outer.task_id):
            task = outer.task
        else:
            task = Task(named or str(uuid.uuid4()))
        given = self._session_id is not None
        if given:
            session = named_sessions.take(wire_id(self._session_id))
            if outer is None or outer.session is not session:
                session.tool_ended(None)  # A tool of an earlier block is old news.
        else:
            session = Session(str(uuid.uuid4()))
        return WorkflowRun(
            workflow_id=str(self._name),
            task=task,
            session=session,
            session_given=given,
            parent_session_id=_parent_of(session, outer),
            deadline_at_s=deadline_at_s,
            outer=outer,
            _entered_by=self,
            _context_before=_attach_baggage(task, session, self._name),
        )


def _parent_of(session: Session, outer: WorkflowRun | None) -> str | None:
    if outer is None:
        return None
    return outer.parent_session_id if outer.session is session else outer.spawner_id


def _end(run: WorkflowRun) -> None:
    if run._context_before is not None:
        semconv.restore(run._context_before)
    # A session that the user named may go on elsewhere; an enclosing block ends its task itself.
    if not run.session_given:
        run.end_session()
    if run.outer is None or run.outer.task is not run.task:
        run.end_task()


def _attach_baggage(task: Task, session: Session, workflow_id: str) -> Any:
    if not options.attach_baggage:
        return None
    return semconv.attach_baggage(Hints(str(workflow_id), task.id, session.id))


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
    enclosing block's task, in a session whose parent is the enclosing block's. With the block end
    its session, unless ``session_id`` is given, and its task, unless an enclosing block goes on
    with it: allow-listed gateways that saw them are told.

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


def enter_block(run: WorkflowRun | None) -> None:
    """Make a block the innermost one of this context."""
    _current_workflow.set(run)


def current_workflow() -> WorkflowRun | None:
    """The innermost ``saga.workflow`` block of this context."""
    return _current_workflow.get()


def inside_of(call: Call | None) -> WorkflowRun | None:
    """The block of a tool that a model's answer to ``call`` asked for: calls in it are a session
    of the tool's own, spawned by the session that called the tool.
    """
    if call is None or call.session is None or call.task is None:
        return None
    return WorkflowRun(
        workflow_id=call.hints.workflow_id or "",
        task=call.task,
        session=Session(str(uuid.uuid4())),
        session_given=False,
        parent_session_id=call.session.id,
        deadline_at_s=call.deadline_at_s,
        outer=current_workflow(),
        of_tool=True,
    )


def last_call() -> Call | None:
    """The LLM call that this context sent last; None before the first."""
    return _sent.get().call


def current_call(*, is_retry: bool) -> Call | None:
    """The LLM call that this context is about to send; None when nothing is known of it.

    A framework's run wins over the ``saga.workflow`` block; a run that has ended counts for
    nothing, and so does one whose request was sent: what follows while it streams is another
    call. A call of a bare client takes the block's next step. A retry repeats the call.
    """
    run_id = _current_run.get()
    call = None if run_id is None else calls.get(run_id)
    block = _current_workflow.get()
    sent = _sent.get()
    # Attempts of one call follow each other in one context; concurrent calls have their own.
    if is_retry and sent.call is not None:
        is_runs = call is not None and sent.by == run_id
        if is_runs or (block is not None and sent.by is block):
            return sent.call
    if call is not None and sent.run_id != run_id:
        _sent.set(_Sent(run_id, call, run_id))
        return call
    # Without a block, the retries of this request get no hint either.
    call = None if block is None else block.next_call()
    if call is not None or sent.call is not None:
        _sent.set(_Sent(block, call, sent.run_id))
    return call
