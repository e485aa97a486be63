"""The trees of runs that a framework reports, and the LLM calls found in them."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any
from uuid import UUID

from saga_core.hints import Hints
from saga_core.types import tool_type_of
from saga_sdk.context import (
    Call,
    CallMap,
    Session,
    WorkflowRun,
    calls,
    current_workflow,
    deadline_at,
    wire_id,
)
from saga_sdk.events import Event, EventKind, sender

MAX_RUNS = 10_000
MAX_SESSIONS = 10_000
MAX_IDLE_S = 6 * 3600.0
# After a shorter tool the next request comes as soon as an event could.
MIN_TOOL_S = 1.0


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
    """

    kind: RunKind
    run_id: UUID
    parent_run_id: UUID | None
    name: str | None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    session_id: str | None = None
    workflow: str | None = None
    node: str | None = None


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
        named_session: the session id that was in force by name when the scope began; a run below
            that names another one begins a new scope.
        owner: the run that the session ends with; None when others may continue the session, as
            they may one that the user named, or one of a model that was called on its own.
        of_tool: the scope began with a tool, whose session is the tool run's own.
        block: the ``saga.workflow`` block that the scope belongs to.
    """

    workflow_id: str
    task_id: str
    session: Session
    parent_session_id: str | None
    deadline_at_s: float | None
    named_session: str | None
    block: WorkflowRun | None
    owner: UUID | None
    of_tool: bool = False

    def event(self, kind: EventKind, tool_name: str | None = None) -> Event:
        urls = self.session.event_urls
        return Event(kind, self.session.id, self.task_id, self.workflow_id, urls, tool_name)


@dataclass(frozen=True, slots=True)
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
    touched_s: float
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

    At the end of a run that owns its session a ``session_end`` goes out, and a ``tool_end`` for
    the last of a session's open tools, when it took over 1 s; both only where calls of the
    session went.

    Args:
        emit: takes the events; called without the lock.
    """

    def __init__(
        self,
        call_map: CallMap,
        *,
        emit: Callable[[Event], None] = lambda event: None,
        max_runs: int = MAX_RUNS,
        max_sessions: int = MAX_SESSIONS,
        max_idle_s: float = MAX_IDLE_S,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._calls = call_map
        self._emit = emit
        self._max_runs = max_runs
        self._max_sessions = max_sessions
        self._max_idle_s = max_idle_s
        self._timer = timer
        self._lock = threading.Lock()
        self._ended: deque[UUID] = deque()
        self._runs: dict[UUID, _Run] = {}
        self._trees: OrderedDict[UUID, _Tree] = OrderedDict()
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._runs)

    def start(self, start: RunStart, source: Source) -> None:
        """Note a run; an LLM call takes its session's next step."""
        events: list[Event] = []
        try:
            with self._lock:
                # What this thread has reported as ended, ended before this start.
                self._work_off(events)
                self._start(start, source)
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
            if event.urls:
                self._emit(event)

    def _start(self, start: RunStart, source: Source) -> None:
        known = self._runs.get(start.run_id)
        if known is not None and (known.by_hand or not source.by_hand):
            return
        now_s = self._timer()
        parent = self._runs.get(start.parent_run_id) if start.parent_run_id else None
        root_id = start.run_id if parent is None else parent.root_id
        if known is not None:
            root_id = known.root_id
        elif not self._make_room(root_id, now_s):
            return
        scope = self._scope_of(start, source, parent, now_s)
        run = _Run(root_id, scope, source.by_hand, now_s)
        if start.kind is RunKind.TOOL:
            seen_by = scope if parent is None else parent.scope
            run = replace(run, tool_name=start.name, ended_in=seen_by)
        elif start.kind is RunKind.CALL:
            step = _step_of(scope.session, known)
            run = replace(run, step=step)
            self._calls.put(start.run_id, _call_of(scope, step, start))
        self._runs[start.run_id] = run
        tree = self._trees.setdefault(root_id, _Tree(now_s))
        tree.open_runs.add(start.run_id)
        tree.touched_s = now_s
        self._trees.move_to_end(root_id)

    def _end(self, run_id: UUID) -> list[Event]:
        run = self._runs.pop(run_id, None)
        if run is None:
            return []
        self._calls.discard(run_id)
        tree = self._trees[run.root_id]
        tree.open_runs.discard(run_id)
        events = []
        if run.ended_in is not None:
            run.ended_in.session.tool_ended(run.tool_name)
            if self._is_awaited(run_id, run, tree):
                events.append(run.ended_in.event(EventKind.TOOL_END, run.tool_name))
        ended = {run_id: run}
        if run_id == run.root_id:
            ended |= self._purge(run_id)
        for ended_id, each in ended.items():
            if each.scope.owner == ended_id:
                events.append(each.scope.event(EventKind.SESSION_END))
        return events

    def _is_awaited(self, run_id: UUID, tool: _Run, tree: _Tree) -> bool:
        # Whether a session goes on that waited for this tool last, and for more than a moment.
        seen_in = tool.ended_in
        if seen_in is None or seen_in.owner == run_id:
            return False
        if self._timer() - tool.started_s <= MIN_TOOL_S:
            return False
        others = (self._runs[other_id].ended_in for other_id in tree.open_runs)
        return not any(other and other.session is seen_in.session for other in others)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every open run is in exactly one tree, and bounds hold."""
        try:
            with self._lock:
                in_trees = [run_id for tree in self._trees.values() for run_id in tree.open_runs]
                assert sorted(in_trees) == sorted(self._runs), "runs and trees differ"
                assert len(self._runs) <= self._max_runs, "too many runs"
                assert len(self._sessions) <= self._max_sessions, "too many sessions"
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
        for run_id in purged:
            self._calls.discard(run_id)
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
        spawner = scope.parent_session_id if scope.of_tool else scope.session.id
        named = _named_session(start, source)
        if named is not None and named != scope.named_session:
            return replace(
                scope,
                session=self._session(named),
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
        if block is not None and in_block:
            session, parent_session_id = block.session, block.parent_session_id
        else:
            session = Session(str(start.run_id)) if named is None else self._session(named)
            parent_session_id = None if block is None else block.session.id
            if named is None and start.kind is not RunKind.CALL:
                owner = start.run_id
            if start.kind is RunKind.CHAIN:
                # A tool that ended in an earlier run of a named session is old news.
                session.tool_ended(None)
        return Scope(
            workflow_id=_workflow_of(start, source, block),
            task_id=str(start.run_id) if block is None else block.task_id,
            session=session,
            parent_session_id=parent_session_id,
            deadline_at_s=deadline_at_s,
            named_session=in_force,
            block=block,
            owner=owner,
        )

    def _session(self, session_id: str) -> Session:
        session = self._sessions.setdefault(session_id, Session(session_id))
        self._sessions.move_to_end(session_id)
        if len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)
        return session


def _step_of(session: Session, known: _Run | None) -> tuple[int, str | None]:
    # A second handler that reports the same run must not count it twice.
    if known is not None and known.step is not None and known.scope.session is session:
        return known.step
    return session.take_step()


def _call_of(scope: Scope, taken: tuple[int, str | None], start: RunStart) -> Call:
    step, tool_name = taken
    node = start.node or start.metadata.get("langgraph_node")
    hints = Hints(
        workflow_id=scope.workflow_id,
        task_id=scope.task_id,
        session_id=scope.session.id,
        parent_session_id=scope.parent_session_id,
        step=step,
        node=None if node is None else str(node),
        tool=None if tool_name is None else tool_type_of(tool_name),
        tool_name=tool_name,
    )
    return Call(hints, scope.deadline_at_s, scope.session)


def _named_session(start: RunStart, source: Source) -> str | None:
    named = (
        source.session_id
        or start.session_id
        or start.metadata.get("saga_session_id")
        or start.metadata.get("thread_id")
    )
    return wire_id(named) if named else None


def _workflow_of(start: RunStart, source: Source, block: WorkflowRun | None) -> str:
    return str(
        source.workflow
        or (block.workflow_id if block is not None else None)
        or start.workflow
        or start.metadata.get("saga_workflow")
        or source.default_workflow
        or start.name
        or start.run_id
    )


tracker = RunTracker(calls, emit=sender.put)
