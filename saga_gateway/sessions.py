"""The sessions that the gateway knows, and what their pauses teach."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from saga_core.durations import PauseDurations
from saga_core.hints import Hints, clean
from saga_core.notices import EndNotice, Notice, PauseNotice, ResumeNotice
from saga_core.reuse import ReuseModel
from saga_core.types import Pause, ToolType, tool_type_of
from saga_gateway.answers import Answer
from saga_gateway.identify import Identified

PauseKey = tuple[str | None, str | None]
"""The workflow and the tool that a pause is learned under."""


@dataclass(slots=True)
class Session:
    """One growing conversation.

    Attributes:
        workflow_id: the workflow that its requests name, if any did.
        home: id of the worker that serves it; None before the first placement.
        running: its requests that are being served.
        last_used_s: when a request of it last began or ended.
        step: the step number that its last request named, if it did.
        paused_s: when its pause began; None while none is open.
        pause_key: what the open pause is learned under.
    """

    session_id: str
    workflow_id: str | None = None
    home: str | None = None
    running: int = 0
    last_used_s: float = 0.0
    step: int | None = None
    paused_s: float | None = None
    pause_key: PauseKey = (None, None)


@dataclass(frozen=True, slots=True)
class AddressedNotice:
    """A notice and the worker that it is for."""

    worker_id: str
    notice: Notice


class SessionTable:
    """A bounded table of sessions, least recently used first.

    A pause opens when a step has been read to its end and no other request of the session runs. It
    closes at the session's next request, whose arrival gives its length and shows that the session
    came back; or at the session's end, by word, by silence or by eviction, which shows that it did
    not. A session with running requests is not evicted: the table may exceed its bound by these.
    """

    def __init__(self, max_sessions: int, silent_s: float) -> None:
        self._max_sessions = max_sessions
        self._silent_s = silent_s
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._durations = PauseDurations()
        self._reuse = ReuseModel()

    def __len__(self) -> int:
        return len(self._sessions)

    def is_running(self, session_id: str) -> bool:
        """Whether a request of the session is being served."""
        session = self._sessions.get(session_id)
        return session is not None and session.running > 0

    def begin(
        self, session_id: str, hints: Hints, now_s: float, found: Identified | None = None
    ) -> Session:
        """A request of the session has arrived; closes its pause and counts it as running.

        A request that repeats the step before is a retry: the pause that it cuts short teaches
        nothing.

        Args:
            found: what its content told, where it named no session.
        """
        self._drop_silent(now_s)
        session = self._sessions.get(session_id)
        if session is None:
            session = self._sessions[session_id] = Session(session_id)
        retry = hints.step is not None and hints.step == session.step
        workflow_id = hints.workflow_id
        if found is not None:
            retry = found.is_retry
            workflow_id = workflow_id or found.workflow_id
        if session.paused_s is not None and not retry:
            self._durations.observe(session.pause_key, max(0.0, now_s - session.paused_s))
            self._reuse.observe(session.pause_key, overlap=1.0)
        session.paused_s = None
        session.step = hints.step
        session.workflow_id = workflow_id or session.workflow_id
        session.running += 1
        self._touch(session, now_s)
        self._keep_bound(now_s)
        return session

    def end_step(
        self, session: Session, answer: Answer | None, *, final: bool, now_s: float
    ) -> AddressedNotice | None:
        """A request of the session is over.

        Args:
            answer: what it ended with; None when it failed, was given up or could not be read, of
                which nothing is learned.
            final: the request was said to be the session's last.
            now_s: when it ended.
        """
        session.running -= 1
        if self._sessions.get(session.session_id) is not session:
            return None
        self._touch(session, now_s)
        if answer is None or session.home is None:
            self._keep_bound(now_s)
            return None
        if final:
            return self.end(session.session_id)
        if session.running:
            return None
        notice = AddressedNotice(session.home, self._open_pause(session, answer, now_s))
        self._keep_bound(now_s)
        return notice

    def end(self, session_id: str) -> AddressedNotice | None:
        """The session is over and is forgotten; None when it is not known or has no worker."""
        session = self._sessions.get(session_id)
        if session is None:
            return None
        self._forget(session)
        if session.home is None:
            return None
        return AddressedNotice(session.home, EndNotice(session_id))

    def resume(self, session_id: str) -> AddressedNotice | None:
        """The session's tool has ended; None when the session does not wait."""
        session = self._sessions.get(session_id)
        if session is None or session.home is None or session.paused_s is None:
            return None
        return AddressedNotice(session.home, ResumeNotice(session_id))

    def check_integrity(self) -> None:
        """Raise AssertionError when the table contradicts itself."""
        idle = sum(1 for session in self._sessions.values() if not session.running)
        if len(self._sessions) > self._max_sessions and idle:
            raise AssertionError("the table is over its bound with idle sessions in it")
        for session_id, session in self._sessions.items():
            if session.session_id != session_id or session.running < 0:
                raise AssertionError(f"session {session_id} is out of order: {session}")
            if session.running and session.paused_s is not None:
                raise AssertionError(f"session {session_id} runs and is paused")

    def _open_pause(self, session: Session, answer: Answer, now_s: float) -> PauseNotice:
        workflow = session.workflow_id
        called = [
            (self._durations.p95_s((workflow, name), tool_type_of(name)), name)
            for name in answer.tool_names
        ]
        if called:
            # Tools called together end with the slowest one.
            p95_s, tool = max(called)
            session.pause_key = (workflow, tool)
        else:
            tool = None
            session.pause_key = (workflow, None)
            p95_s = self._durations.p95_s(session.pause_key, ToolType.HUMAN)
        session.paused_s = now_s
        p_reuse = self._reuse.p_reuse(session.pause_key, tool_called=tool is not None)
        return PauseNotice(session.session_id, Pause(p_reuse, p95_s, clean(tool) if tool else None))

    def _touch(self, session: Session, now_s: float) -> None:
        session.last_used_s = now_s
        self._sessions.move_to_end(session.session_id)

    def _drop_silent(self, now_s: float) -> None:
        while self._sessions:
            session = next(iter(self._sessions.values()))
            if now_s - session.last_used_s <= self._silent_s:
                return
            if session.running:
                self._touch(session, now_s)
            else:
                self._forget(session)

    def _keep_bound(self, now_s: float) -> None:
        while len(self._sessions) > self._max_sessions and self._evict(now_s):
            pass

    def _evict(self, now_s: float) -> bool:
        """Forget the least recently used idle session; False when there is none."""
        for _ in range(len(self._sessions)):
            session = next(iter(self._sessions.values()))
            if not session.running:
                self._forget(session)
                return True
            self._touch(session, now_s)
        return False

    def _forget(self, session: Session) -> None:
        """Drop a session; a pause that is still open ends without a return."""
        del self._sessions[session.session_id]
        if session.paused_s is not None:
            self._reuse.observe(session.pause_key, overlap=0.0)
            session.paused_s = None
