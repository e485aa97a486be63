"""Tasks, sessions and LLM calls, as long as the program works on them."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from itertools import count
from numbers import Real
from uuid import UUID

from saga_core.hints import Hints, clean
from saga_sdk.events import Destination, Event, EventKind

MAX_CALLS = 10_000
MAX_SESSIONS = 10_000
MAX_DESTINATIONS = 8
# Its milliseconds fit the hint; a longer deadline could not be said.
MAX_DEADLINE_S = 1e11
_MAX_STEM_CHARS = 200


def wire_id(value: object) -> str:
    """Write any id as a legal hint value.

    A legal id stays as it is. Another one is cleaned and gets a digest of the original, so that
    ids that differ only in foreign characters stay apart.
    """
    text = str(value)
    cleaned = clean(text)
    if cleaned == text:
        return text
    return f"{(cleaned or 'id')[:_MAX_STEM_CHARS]}-{digest(text)}"


def digest(text: str, chars: int = 12) -> str:
    """A few hexadecimal characters by which texts are told apart."""
    # Lazy: it loads OpenSSL, which takes longer than all the rest.
    import hashlib

    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:chars]


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


class _Told:
    """Something that gateways have heard of, and are told the end of.

    Attributes:
        id: a legal hint value.
        destinations: where the servers that its calls went to would take events; 8 at most.
    """

    __slots__ = ("_urls", "destinations", "id")

    def __init__(self, own_id: str) -> None:
        self.id = own_id
        self._urls: tuple[str, ...] = ()
        self.destinations: tuple[Destination, ...] = ()

    def sent_to(self, events_url: str, authorization: str | None = None) -> None:
        """Note the server that a call with this id goes to, and how the call authenticates."""
        if events_url in self._urls or len(self._urls) >= MAX_DESTINATIONS:
            return
        self._urls = (*self._urls, events_url)
        self.destinations = (*self.destinations, Destination(events_url, authorization))

    def is_sent_to(self, events_url: str) -> bool:
        """Whether that server is noted."""
        return events_url in self._urls

    def forget_gateways(self) -> None:
        """Nobody has to be told any more, until the next call."""
        self._urls, self.destinations = (), ()


class Task(_Told):
    """One run of a workflow."""

    __slots__ = ()

    def event(self, kind: EventKind, workflow_id: str) -> Event:
        return Event(kind, None, self.id, workflow_id, self.destinations, at_s=time.time())


class Session(_Told):
    """One growing conversation: numbers its LLM calls and keeps the tool that ended last.

    Without locks, as each change is a single operation: the garbage collector may close a stream,
    and so report an end, anywhere, and a forked child finds no lock that nobody will release.

    Attributes:
        open_tools: tools that the session waits for.
    """

    __slots__ = ("_ended_tool", "_steps", "open_tools")

    def __init__(self, session_id: str) -> None:
        super().__init__(session_id)
        self._steps = count()
        # Holds one name at most; a dict, as what it does in one operation no thread interrupts.
        self._ended_tool: dict[None, str] = {}
        self.open_tools: set[object] = set()

    def take_step(self) -> tuple[int, str | None]:
        """Number the next LLM call, and name the tool whose result it carries, if any."""
        return next(self._steps), self._ended_tool.pop(None, None)

    def tool_ended(self, tool_name: str | None) -> None:
        """Note the tool that ended last; None forgets it."""
        if tool_name is None:
            self._ended_tool.clear()
        else:
            self._ended_tool[None] = tool_name

    def event(
        self, kind: EventKind, task: Task, workflow_id: str, tool_name: str | None = None
    ) -> Event:
        return Event(
            kind, self.id, task.id, workflow_id, self.destinations, tool_name, at_s=time.time()
        )


class NamedSessions:
    """Sessions that the program or a framework has named: each counts its steps on, over several
    runs and blocks. Bounded: the one that was used least recently makes room. Thread-safe.
    """

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self.max_sessions = max_sessions
        self._lock = threading.RLock()
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, session_id: str) -> Session | None:
        """The session of that id, if it is remembered."""
        return self._sessions.get(session_id)

    def take(self, session_id: str) -> Session:
        """The session of that id, a new one if it is not remembered."""
        with self._lock:
            session = self._sessions.setdefault(session_id, Session(session_id))
            self._sessions.move_to_end(session_id)
            if len(self._sessions) > self.max_sessions:
                self._sessions.popitem(last=False)
            return session

    def clear(self) -> None:
        """Forget them all."""
        with self._lock:
            self._sessions.clear()

    def after_fork(self) -> None:
        """Trust no lock in a child process, nor what another thread was changing under it."""
        self._lock = threading.RLock()
        self._sessions = OrderedDict()


@dataclass(frozen=True, slots=True)
class Call:
    """One LLM call: its hints, the same for every attempt, and its task's deadline.

    Attributes:
        deadline_at_s: on the monotonic clock.
        session: the session whose step it is.
        task: the task that it belongs to.
        root_id: the root of the run tree that it is in; None in a block's own session.
    """

    hints: Hints
    deadline_at_s: float | None = None
    session: Session | None = None
    task: Task | None = None
    root_id: UUID | None = None

    def deadline_ms(self, now_s: float) -> int | None:
        """Milliseconds left until the deadline, never below 0; None without one."""
        if self.deadline_at_s is None:
            return None
        return max(0, round((self.deadline_at_s - now_s) * 1000))


class CallMap:
    """The LLM calls in flight, by run id. Bounded: the oldest entry makes room.

    Thread-safe without a lock, as a session is.
    """

    def __init__(self, max_calls: int = MAX_CALLS) -> None:
        self._max_calls = max_calls
        self._calls: dict[UUID, Call] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def put(self, run_id: UUID, call: Call) -> None:
        self._calls[run_id] = call
        if len(self._calls) > self._max_calls:
            self.discard(next(iter(self._calls)))

    def get(self, run_id: UUID) -> Call | None:
        return self._calls.get(run_id)

    def discard(self, run_id: UUID) -> None:
        self._calls.pop(run_id, None)


named_sessions = NamedSessions()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=named_sessions.after_fork)
