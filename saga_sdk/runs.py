"""The trees of runs that a framework reports, and the LLM calls found in them."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any
from uuid import UUID

from saga_core.hints import Hints
from saga_sdk.context import WorkflowRun, calls, current_workflow
from saga_sdk.events import Event, EventKind, sender
from saga_sdk.sessions import (
    Call,
    CallMap,
    NamedSessions,
    Session,
    Task,
    deadline_at,
    digest,
    named_sessions,
    wire_id,
)
from saga_sdk.tool_table import tool_type

MAX_RUNS = 10_000
MAX_IDLE_S = 6 * 3600.0
# After a shorter tool the next request comes as soon as an event could.
MIN_TOOL_S = 1.0
# The workflow of runs whose framework names none.
NO_NAME = "agent"


class RunKind(Enum):
    """What a run does."""

    CHAIN = "chain"
    TOOL = "tool"
    CALL = "call"


@dataclass(frozen=True, slots=True)
class RunStart:
    """A framework's report that a run starts.

    Attributes:
        name: of the run, or of the tool.
        metadata: what LangChain says beside; read for ``thread_id``, ``langgraph_node`` and the
            keys that begin with ``saga_``.
        session_id, workflow, node: what the framework says of them; they win over the metadata.
        generic_name: the name is one that the framework gives to any run.
        signature: of a call: text by which runs with a generic name are told apart; called for
            the first call of a task alone.
    """

    kind: RunKind
    run_id: UUID
    parent_run_id: UUID | None
    name: str | None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    session_id: str | None = None
    workflow: str | None = None
    node: str | None = None
    generic_name: bool = False
    signature: Callable[[], str] | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """Who reports runs, and what the user told it.

    Attributes:
        by_hand: the user added the handler; it wins over an automatic one.
        default_workflow: used when nothing else names the workflow.
    """

    workflow: str | None = None
    session_id: str | None = None
    deadline_s: float | None = None
    by_hand: bool = True
    default_workflow: str | None = None


@dataclass(frozen=True, slots=True)
class Scope:
    """The part of a run tree that is one conversation: what its LLM calls have in common.

    Attributes:
        workflow_id: None when only the task's calls will tell.
        session: None when a model was called on its own, in no chain, no block and no named
            session: such a call continues nothing that anybody could name.
        named_session: the session id that was in force by name when the scope began; a run below
            that names another one begins a new scope.
        owner: the run that the session ends with; None when others may continue the session, as
            they may one that the user named.
        of_tool: the scope began with a tool, whose session is the tool run's own.
        block: the ``saga.workflow`` block that the scope belongs to.
    """

    workflow_id: str | None
    task: Task
    session: Session | None
    parent_session_id: str | None
    deadline_at_s: float | None
    named_session: str | None
    block: WorkflowRun | None
    owner: UUID | None
    of_tool: bool = False


@dataclass(slots=True)
class _Run:
    """An open run. ``ended_in`` is where the result of this tool is seen."""

    root_id: UUID
    scope: Scope
    by_hand: bool
    started_s: float
    step: tuple[int, str | None] | None = None
    tool_name: str | None = None
    ended_in: Scope | None = None


@dataclass(slots=True)
class _Tree:
    """The open runs below one root; ``workflow_id`` is what its scopes say that say none."""

    touched_s: float
    workflow_id: str
    is_generic: bool
    open_runs: set[UUID] = field(default_factory=set)


class RunTracker:
    """Follows runs from start to end and keeps the hints of every LLM call in flight.

    A root run is a task, unless a ``saga.workflow`` block around it says which. Its session is
    the one that is named, else its own; what a tool calls is a session of the tool, spawned by
    the session that called the tool. A run whose parent is unknown is a root. Steps are counted
    per session, over several roots when the session is named. Reports of one run by several
    handlers count once. The end of a root purges what is left below it; trees that are idle for
    ``max_idle_s`` are purged when the next one starts, and the oldest trees make room when
    ``max_runs`` runs are open.

    Thread-safe, and an end never waits: the garbage collector may close an abandoned stream, and
    so report its end, anywhere, also in a thread that is inside this object. Ends are queued, and
    worked off by whoever has the lock: before the next start, and after every hold of the lock.

    A ``tool_start`` goes out for every tool, a ``tool_end`` for the last of a session's open tools
    when it took over 1 s, a ``session_end`` at the end of a run that owns its session, and a
    ``task_end`` at the end of a root that is a task; all only where calls of the session or the
    task went.

    Args:
        emit: takes the events; called without the lock.
        sessions: the named sessions; by default none yet.
    """

    def __init__(
        self,
        call_map: CallMap,
        *,
        emit: Callable[[Event], None] = lambda event: None,
        max_runs: int = MAX_RUNS,
        sessions: NamedSessions | None = None,
        max_idle_s: float = MAX_IDLE_S,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._calls = call_map
        self._emit = emit
        self._max_runs = max_runs
        self._max_idle_s = max_idle_s
        self._timer = timer
        self._lock = threading.Lock()
        self._ended: deque[UUID] = deque()
        self._runs: dict[UUID, _Run] = {}
        self._trees: OrderedDict[UUID, _Tree] = OrderedDict()
        self._sessions = NamedSessions() if sessions is None else sessions

    def __len__(self) -> int:
        return len(self._runs)

    def is_open(self, root_id: UUID) -> bool:
        """Whether the root of a tree has not ended yet."""
        return root_id in self._trees

    def after_fork(self) -> None:
        """Trust no lock in a child process, nor what another thread was changing under it."""
        if self._lock.locked():
            self._runs, self._trees = {}, OrderedDict()
            self._ended.clear()
        self._lock = threading.Lock()

    def start(self, start: RunStart, source: Source) -> None:
        """Note a run; an LLM call takes its session's next step."""
        events: list[Event] = []
        try:
            with self._lock:
                # What this thread has reported as ended, ended before this start.
                if self._ended:
                    self._work_off(events)
                self._start(start, source, events)
        finally:
            self._emit_all(events)
            self._drain()

    def end(self, run_id: UUID) -> None:
        """Note the end of a run, good or bad; a run that is not known counts for nothing.

        While the lock is held, the run leaves the call map at once, and the holder does the rest.
        """
        self._ended.append(run_id)
        self._calls.discard(run_id)
        self._drain()

    def _drain(self) -> None:
        # Who queues an end while the lock is held leaves it to the holder, who looks again after
        # the release: no end is stranded.
        while self._ended and self._lock.acquire(blocking=False):
            events: list[Event] = []
            try:
                self._work_off(events)
            finally:
                self._lock.release()
                self._emit_all(events)

    def _work_off(self, events: list[Event]) -> None:
        # The queue may grow meanwhile, but only the holder of the lock takes from it.
        while self._ended:
            events += self._end(self._ended.popleft())

    def _emit_all(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.destinations:
                self._emit(event)

    def _start(self, start: RunStart, source: Source, events: list[Event]) -> None:
        run_id = start.run_id
        known = self._runs.get(run_id)
        if known is not None and (known.by_hand or not source.by_hand):
            return
        now_s = self._timer()
        parent = self._runs.get(start.parent_run_id) if start.parent_run_id else None
        root_id = run_id if parent is None else parent.root_id
        if known is not None:
            root_id = known.root_id
        elif not self._make_room(root_id, now_s):
            return
        scope = self._scope_of(start, source, parent, now_s)
        tree = self._trees.get(root_id)
        if tree is None:
            name = source.default_workflow or start.name
            is_generic = not source.default_workflow and (start.generic_name or not name)
            tree = self._trees[root_id] = _Tree(now_s, str(name or NO_NAME), is_generic)
        run = _Run(root_id, scope, source.by_hand, now_s)
        if start.kind is RunKind.TOOL:
            run.tool_name = start.name
            run.ended_in = seen_in = scope if parent is None else parent.scope
            if known is not None:
                _forget_tool(run_id, known)
            if seen_in.session is not None:
                seen_in.session.open_tools.add(run_id)
            if known is None:
                events += _events(EventKind.TOOL_START, seen_in, tree, start.name)
        elif start.kind is RunKind.CALL:
            if tree.is_generic and start.signature is not None:
                tree.workflow_id = f"{tree.workflow_id}-{digest(start.signature(), 8)}"
                tree.is_generic = False
            if scope.session is not None:
                run.step = _step_of(scope.session, known)
            self._calls.put(run_id, _call_of(run, tree, start))
        self._runs[run_id] = run
        tree.open_runs.add(run_id)
        tree.touched_s = now_s
        self._trees.move_to_end(root_id)

    def _end(self, run_id: UUID) -> list[Event]:
        run = self._runs.pop(run_id, None)
        if run is None:
            return []
        self._calls.discard(run_id)
        tree = self._trees[run.root_id]
        tree.open_runs.discard(run_id)
        events: list[Event] = []
        if run.ended_in is not None and run.ended_in.session is not None:
            session = run.ended_in.session
            session.tool_ended(run.tool_name)
            session.open_tools.discard(run_id)
            if self._is_awaited(run_id, run, session):
                events += _events(EventKind.TOOL_END, run.ended_in, tree, run.tool_name)
        ended = {run_id: run}
        if run_id == run.root_id:
            ended |= self._purge(run_id)
        for ended_id, each in ended.items():
            if each.scope.owner == ended_id:
                events += _events(EventKind.SESSION_END, each.scope, tree)
        if run_id == run.root_id and run.scope.block is None:
            task = run.scope.task
            events.append(task.event(EventKind.TASK_END, run.scope.workflow_id or tree.workflow_id))
        return events

    def _is_awaited(self, run_id: UUID, tool: _Run, session: Session) -> bool:
        # Whether a session goes on that waited for this tool last, and for more than a moment.
        is_owner = tool.ended_in is not None and tool.ended_in.owner == run_id
        took_s = self._timer() - tool.started_s
        return not is_owner and not session.open_tools and took_s > MIN_TOOL_S

    def check_integrity(self) -> None:
        """Raise AssertionError unless every open run is in exactly one tree, and bounds hold."""
        try:
            with self._lock:
                in_trees = [run_id for tree in self._trees.values() for run_id in tree.open_runs]
                assert sorted(in_trees) == sorted(self._runs), "runs and trees differ"
                assert len(self._runs) <= self._max_runs, "too many runs"
                assert len(self._sessions) <= self._sessions.max_sessions, "too many sessions"
        finally:
            self._drain()

    def _make_room(self, root_id: UUID, now_s: float) -> bool:
        while self._trees:
            oldest_id, oldest = next(iter(self._trees.items()))
            idle = oldest_id != root_id and now_s - oldest.touched_s > self._max_idle_s
            if not idle and len(self._runs) < self._max_runs:
                break
            if oldest_id == root_id:
                # The tree itself fills the map: its further runs go without hints.
                return False
            self._purge(oldest_id)
        return True

    def _purge(self, root_id: UUID) -> dict[UUID, _Run]:
        purged = {run_id: self._runs.pop(run_id) for run_id in self._trees.pop(root_id).open_runs}
        for run_id, run in purged.items():
            self._calls.discard(run_id)
            _forget_tool(run_id, run)
        return purged

    def _scope_of(
        self, start: RunStart, source: Source, parent: _Run | None, now_s: float
    ) -> Scope:
        block = current_workflow()
        if parent is None or (block is not None and block is not parent.scope.block):
            inherited = None if parent is None else parent.scope.named_session
            return self._new_scope(start, source, block, inherited, now_s)
        scope = parent.scope
        if source.workflow is not None and source.workflow != scope.workflow_id:
            scope = replace(scope, workflow_id=source.workflow)
        # What a tool spawns is spawned by the session that called the tool.
        spawner = scope.parent_session_id
        if not scope.of_tool and scope.session is not None:
            spawner = scope.session.id
        named = _named_session(start, source)
        if named is not None and named != scope.named_session:
            return replace(
                scope,
                session=self._sessions.take(named),
                parent_session_id=spawner,
                named_session=named,
                owner=None,
                of_tool=False,
            )
        if start.kind is RunKind.TOOL:
            return replace(
                scope,
                session=Session(str(start.run_id)),
                parent_session_id=spawner,
                owner=start.run_id,
                of_tool=True,
            )
        return scope

    def _new_scope(
        self,
        start: RunStart,
        source: Source,
        block: WorkflowRun | None,
        inherited: str | None,
        now_s: float,
    ) -> Scope:
        in_force = _named_session(start, source)
        named = None if in_force == inherited else in_force
        deadline_at_s = deadline_at(source.deadline_s, now_s)
        if block is not None and deadline_at_s is None:
            deadline_at_s = block.deadline_at_s
        # A single call or tool in a block belongs to the block's own conversation, as a bare
        # client's call does; a chain or an agent has a conversation of its own.
        in_block = block is not None and (
            named == block.session.id
            if named is not None
            else block.session_given or start.kind is not RunKind.CHAIN
        )
        owner = None
        session: Session | None
        parent_session_id = None
        if block is not None and in_block:
            session, parent_session_id = block.session, block.parent_session_id
        else:
            parent_session_id = None if block is None else block.spawner_id
            if named is not None:
                session = self._sessions.take(named)
            elif start.kind is RunKind.CALL:
                session = None
            else:
                session, owner = Session(str(start.run_id)), start.run_id
            if session is not None and start.kind is RunKind.CHAIN:
                # A tool that ended in an earlier run of a named session is old news.
                session.tool_ended(None)
        return Scope(
            workflow_id=_workflow_of(start, source, block),
            task=Task(str(start.run_id)) if block is None else block.task,
            session=session,
            parent_session_id=parent_session_id,
            deadline_at_s=deadline_at_s,
            named_session=in_force,
            block=block,
            owner=owner,
        )


def _events(
    kind: EventKind, scope: Scope, tree: _Tree, tool_name: str | None = None
) -> tuple[Event, ...]:
    session = scope.session
    if session is None or not session.destinations:
        return ()
    return (session.event(kind, scope.task, scope.workflow_id or tree.workflow_id, tool_name),)


def _forget_tool(run_id: UUID, run: _Run) -> None:
    if run.ended_in is not None and run.ended_in.session is not None:
        run.ended_in.session.open_tools.discard(run_id)


def _step_of(session: Session, known: _Run | None) -> tuple[int, str | None]:
    # A second handler that reports the same run must not count it twice.
    if known is not None and known.step is not None and known.scope.session is session:
        return known.step
    return session.take_step()


def _call_of(run: _Run, tree: _Tree, start: RunStart) -> Call:
    scope, session = run.scope, run.scope.session
    node = start.node or start.metadata.get("langgraph_node")
    node = None if node is None else str(node)
    workflow_id = scope.workflow_id or tree.workflow_id
    if session is None or run.step is None:
        return Call(Hints(workflow_id=workflow_id, node=node), scope.deadline_at_s)
    step, tool_name = run.step
    hints = Hints(
        workflow_id=workflow_id,
        task_id=scope.task.id,
        session_id=session.id,
        parent_session_id=scope.parent_session_id,
        step=step,
        node=node,
        tool=None if tool_name is None else tool_type(tool_name),
        tool_name=tool_name,
    )
    return Call(hints, scope.deadline_at_s, session, scope.task, run.root_id)


def _named_session(start: RunStart, source: Source) -> str | None:
    named = (
        source.session_id
        or start.session_id
        or start.metadata.get("saga_session_id")
        or start.metadata.get("thread_id")
    )
    return wire_id(named) if named else None


def _workflow_of(start: RunStart, source: Source, block: WorkflowRun | None) -> str | None:
    said = (
        source.workflow
        or (block.workflow_id if block is not None else None)
        or start.workflow
        or start.metadata.get("saga_workflow")
    )
    return str(said) if said else None


tracker = RunTracker(calls, emit=sender.put, sessions=named_sessions)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=tracker.after_fork)
