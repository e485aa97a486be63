"""The sessions that the gateway knows, where they stand in their graphs, and what that teaches."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from saga_core.graph import Graphs, Walk
from saga_core.hints import Hints, clean
from saga_core.notices import EndNotice, Notice, PauseNotice, ResumeNotice
from saga_core.transitions import Node
from saga_core.types import Pause
from saga_gateway.answers import Answer
from saga_gateway.identify import Identified

_CHARS_PER_TOKEN = 4

WorkflowKey = tuple[str | None, str]
"""The tenant, None for nobody, and the workflow: what a graph is learned under."""


@dataclass(slots=True)
class Session:
    """One growing conversation.

    Attributes:
        walk: where it stands in its workflow's graph; the workflow's key is in it.
        is_found: it was told by its content; no client has named it.
        home: id of the worker that serves it; None before the first placement.
        running: its requests that are being served.
        last_used_s: when a request of it last began or ended.
        step: the step number that its last request named, if it did.
        agent: the node that its last request named, if it did.
        is_answered: its last request has been.
        repeats: its last request asks again for a step that has been answered.
        paused_s: when its pause began; None while none is open.
        prompt_chars: length of its last prompt, where that was read.
        observed_tokens: length of what the last prompt added after the answer before it.
        overlap: share of the prompt before that the last one began with.
        prompt_tokens, tokens, body_bytes: of its last answered request: its prompt, with its
            answer, and its length in bytes; 0 before.
        steps_left: that are expected to follow; None: not worked out yet.
        p_return, pause_s: of its last pause: probability that it comes back, and when.
    """

    session_id: str
    walk: Walk = field(default_factory=Walk)
    is_found: bool = False
    home: str | None = None
    running: int = 0
    last_used_s: float = 0.0
    step: int | None = None
    agent: str | None = None
    is_answered: bool = False
    repeats: bool = False
    paused_s: float | None = None
    prompt_chars: int = 0
    observed_tokens: int | None = None
    overlap: float | None = None
    prompt_tokens: int = 0
    tokens: int = 0
    body_bytes: int = 0
    steps_left: float | None = None
    p_return: float = 1.0
    pause_s: float = 0.0

    @property
    def has_workflow(self) -> bool:
        """Whether its workflow is known."""
        return self.walk.workflow is not None

    def read(self, found: Identified) -> None:
        """Take what the content of its newest request tells."""
        self.observed_tokens = found.observed_chars // _CHARS_PER_TOKEN
        self.overlap = None
        if self.prompt_chars and found.prompt_chars:
            self.overlap = min(1.0, found.known_chars / self.prompt_chars)
        self.prompt_chars = found.prompt_chars


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

    Args:
        max_sessions: how many are remembered.
        silent_s: silence after which a session has ended, seconds.
        graphs: what is learned; by default none yet.
        wall_clock: seconds since 1970: what is learned outlives this process.

    Attributes:
        forgotten: is told of each session that is not remembered any more.
    """

    def __init__(
        self,
        max_sessions: int,
        silent_s: float,
        graphs: Graphs | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._max_sessions = max_sessions
        self._silent_s = silent_s
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self.graphs = Graphs() if graphs is None else graphs
        self._wall_clock = wall_clock
        self.forgotten: Callable[[str], None] = lambda session_id: None

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        """The sessions as they are now, the most recently used first."""
        return iter(list(reversed(self._sessions.values())))

    def is_running(self, session_id: str) -> bool:
        """Whether a request of the session is being served."""
        session = self._sessions.get(session_id)
        return session is not None and session.running > 0

    def get(self, session_id: str) -> Session | None:
        """The session, while it is remembered."""
        return self._sessions.get(session_id)

    def begin(
        self,
        session_id: str,
        hints: Hints,
        now_s: float,
        *,
        tenant: str | None = None,
        found: Identified | None = None,
        workflow_id: str | None = None,
    ) -> Session:
        """A request of the session has arrived; closes its pause and counts it as running.

        A request that repeats the step before is a retry: the pause that it cuts short teaches
        nothing.

        Args:
            found: what its content told, where it named no session.
            workflow_id: its workflow, where that is known and the request does not name it.
        """
        self._drop_silent(now_s)
        session = self._sessions.get(session_id)
        if session is None:
            session = self._sessions[session_id] = Session(session_id)
            session.is_found = found is not None
        retry = hints.step is not None and hints.step == session.step
        if found is not None:
            retry = retry or found.is_retry
            session.read(found)
        if hints.workflow_id is not None:
            workflow_id = hints.workflow_id
        elif session.has_workflow:
            workflow_id = None  # It stays what it began as, whatever tools a step goes without.
        if workflow_id is not None:
            session.walk.workflow = _key(tenant, workflow_id)
        if session.paused_s is not None and not retry:
            self.graphs.returned(session.walk, max(0.0, now_s - session.paused_s))
        session.paused_s = None
        session.repeats = retry and session.is_answered
        session.is_answered = False
        session.step, session.agent = hints.step, hints.node
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
        tool = self._learn(session, answer)
        if final:
            self.graphs.ended(session.walk, now_s=self._wall_clock())
            return self.end(session.session_id)
        if session.running:
            return None
        notice = self._open_pause(session, tool, now_s)
        self._keep_bound(now_s)
        return None if notice is None else AddressedNotice(session.home, notice)

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

    def _learn(self, session: Session, answer: Answer) -> str | None:
        """The graph learns of the step; returns the tool that the session waits for."""
        workflow, tool = session.walk.workflow, None
        if len(answer.tool_names) == 1:
            tool = answer.tool_names[0]
        elif answer.tool_names:
            # Tools called together end with the slowest one.
            tool = max(
                answer.tool_names, key=lambda name: self.graphs.pause_s(workflow, name, 0.95)
            )
        tool = clean(tool) if tool else None
        session.is_answered = True
        self.graphs.stepped(
            session.walk,
            _node(session.agent, tool),
            now_s=self._wall_clock(),
            step=max(session.walk.step, 0) if session.repeats else session.step,
            output_tokens=None if answer.usage is None else answer.usage.completion_tokens,
            observation_tokens=session.observed_tokens,
            overlap=session.overlap,
        )
        return tool

    def _open_pause(self, session: Session, tool: str | None, now_s: float) -> PauseNotice | None:
        """The session waits; None where nothing is known of it that a worker does not see."""
        session.paused_s = now_s
        outlook = self.graphs.outlook(session.walk)
        session.steps_left = 0.0 if outlook.is_cold else outlook.steps_left
        # Of what nobody has seen before, a tool that was called says that it goes on.
        is_known = tool is not None or not outlook.is_cold
        session.p_return = 1.0 - outlook.p_end if is_known else 0.0
        session.pause_s = outlook.pause_p50_s
        if session.is_found and outlook.is_cold and tool is None:
            return None
        pause = Pause(outlook.p_reuse, outlook.pause_p95_s, tool)
        return PauseNotice(session.session_id, pause)

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
            self.graphs.ended(session.walk, now_s=self._wall_clock())
            session.paused_s = None
        self.forgotten(session.session_id)


# A hundred thousand sessions stand at few nodes of few workflows: one object serves all.
@lru_cache(maxsize=4096)
def _key(tenant: str | None, workflow_id: str) -> WorkflowKey:
    return tenant, workflow_id


@lru_cache(maxsize=4096)
def _node(agent: str | None, tool: str | None) -> Node:
    return Node(agent, tool)
