"""Events: what the SDK tells a gateway when no LLM call is there to carry it.

They go to ``POST /saga/v1/events`` as a JSON array. Losing one does no harm.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from saga_core.hints import clean
from saga_sdk.guard import Guard
from saga_sdk.hosts import allowed

MAX_QUEUED = 1000
MAX_BATCH = 100
MAX_SILENCES = 256
LINGER_S = 0.02
TIMEOUT_S = 2.0
FLUSH_S = 1.0
FIRST_SILENCE_S = 1.0
MAX_SILENCE_S = 300.0

# What an endpoint answers that has no such route.
_NO_SUCH_ROUTE = frozenset({404, 405, 410, 501})
_REFUSED = frozenset({401, 403})
_logger = logging.getLogger("saga_sdk")

Post = Callable[[str, bytes, float, str | None], int]


class EventKind(StrEnum):
    """What has happened. The start of a task is said by its first LLM call."""

    TASK_END = "task_end"
    TOOL_START = "tool_start"
    TOOL_END = "tool_end"
    SESSION_END = "session_end"


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a gateway takes events, and what authenticates them there.

    Attributes:
        authorization: the ``Authorization`` header of the LLM call that went to the same origin:
            what belongs to its sender is its sender's to end. Never logged.
    """

    url: str
    authorization: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a session or a task.

    Attributes:
        session_id: None in an event of a task.
        destinations: the gateways that are told.
        at_s: when it happened, in seconds of the Unix epoch.
    """

    kind: EventKind
    session_id: str | None
    task_id: str
    workflow_id: str
    destinations: tuple[Destination, ...]
    tool_name: str | None = None
    at_s: float = 0.0

    def fields(self) -> dict[str, str | float]:
        """The event as it is sent, with the ids as the hint headers write them."""
        said = {
            "session_id": self.session_id or "",
            "task_id": self.task_id,
            "workflow_id": self.workflow_id,
            "tool_name": self.tool_name or "",
        }
        cleaned = {name: clean(value) for name, value in said.items()}
        written: dict[str, str | float] = {"event": self.kind.value}
        written |= {name: value for name, value in cleaned.items() if value is not None}
        return written | {"timestamp": round(self.at_s, 3)}


@dataclass(frozen=True, slots=True)
class _Silence:
    """How long a destination is left alone after ``failures`` in a row, on the sender's timer."""

    failures: int
    until_s: float


def _post(url: str, body: bytes, timeout_s: float, authorization: str | None) -> int:
    # Lazy: the HTTP modules take longer to import than the whole SDK's own.
    from saga_sdk.post import post_json

    return post_json(url, body, timeout_s, authorization)


class EventSender:
    """A bounded queue of events and the daemon thread that sends them, in batches.

    The thread starts with the first event. It waits 20 ms for more before it sends a batch. A
    batch that fails is lost, and its URL is left alone for 1 s, twice as long after each further
    failure, 300 s at most; events for it are dropped meanwhile. Where the key is refused, this
    holds for the key alone. A URL that answers 404 is never asked again. A full queue drops its
    oldest event. At exit the queue has 1 s to empty. A forked child begins with an empty queue.
    Thread-safe; nothing here raises or waits for the network but :meth:`flush` and :meth:`stop`.

    Args:
        may_send: says whether a URL may see events.
        post: sends a body to a URL, with an ``Authorization`` header if it is not None, and
            returns the status, or raises OSError.
        timer: the clock of the back-off, in seconds.

    Attributes:
        sent: events that a gateway took.
        dropped: events that were lost, for whatever reason.
    """

    def __init__(
        self,
        *,
        may_send: Callable[[str], bool] = allowed.__contains__,
        post: Post = _post,
        timer: Callable[[], float] = time.monotonic,
        max_queued: int = MAX_QUEUED,
    ) -> None:
        self._may_send = may_send
        self._post = post
        self._timer = timer
        self._max_queued = max_queued
        self._reset()

    def _reset(self) -> None:
        # Its lock is reentrant: a collected generator may report its end inside put.
        self._changed = threading.Condition()
        self._queue: deque[tuple[Destination, Event]] = deque()
        self._silences: dict[str | Destination, _Silence] = {}
        self._thread: threading.Thread | None = None
        self._busy = False
        self._flushing = 0
        self.sent = 0
        self.dropped = 0

    def __len__(self) -> int:
        """Events in the queue."""
        return len(self._queue)

    def after_fork(self) -> None:
        """Begin anew in a child process, which has neither the thread nor a lock to trust."""
        self._reset()

    def put(self, event: Event) -> None:
        """Queue an event for each of its destinations that may see it."""
        if not event.destinations:
            return
        with _PUT:
            destinations = [to for to in event.destinations if self._may_send(to.url)]
            if not destinations:
                return
            now_s = self._timer()
            with self._changed:
                for destination in destinations:
                    if self._is_silent(destination, now_s):
                        self.dropped += 1
                        continue
                    if len(self._queue) >= self._max_queued:
                        self._queue.popleft()
                        self.dropped += 1
                    self._queue.append((destination, event))
                    # Between these two the thread lingers, and is left to do so.
                    if len(self._queue) in (1, MAX_BATCH):
                        self._wake()
                if self._queue and not self._is_alive():
                    self._wake()

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Wait until everything that is queued is sent or dropped; False when time runs out."""
        with self._changed:
            if not self._is_alive():
                return not self._queue
            self._flushing += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: not self._queue and not self._busy, timeout_s)
            finally:
                self._flushing -= 1

    def stop(self, timeout_s: float = 2 * TIMEOUT_S) -> None:
        """End the thread, and forget what is queued and which URLs are left alone."""
        with self._changed:
            thread = self._thread
            self._thread = None
            self._busy = False
            self._queue.clear()
            self._silences.clear()
            self._changed.notify_all()
        if thread is not None:
            thread.join(timeout_s)
        atexit.unregister(self._flush_at_exit)

    def _is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _is_silent(self, to: Destination, now_s: float) -> bool:
        silences = (self._silences.get(to.url), self._silences.get(to)) if self._silences else ()
        return any(silence is not None and now_s < silence.until_s for silence in silences)

    def _wake(self) -> None:
        if self._is_alive():
            self._changed.notify_all()
            return
        thread = threading.Thread(target=self._work, name="saga-events", daemon=True)
        thread.start()
        self._thread = thread
        atexit.unregister(self._flush_at_exit)
        atexit.register(self._flush_at_exit)

    def _flush_at_exit(self) -> None:
        with Guard("flush of events"):
            self.flush()

    def _work(self) -> None:
        # Should it fail, the next event starts another thread.
        with _SEND:
            self._send_all()

    def _send_all(self) -> None:
        me = threading.current_thread()

        def is_full() -> bool:
            return self._thread is not me or self._flushing > 0 or len(self._queue) >= MAX_BATCH

        while True:
            with self._changed:
                if self._thread is me:
                    self._busy = False
                    self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue or self._thread is not me)
                self._changed.wait_for(is_full, LINGER_S)
                if self._thread is not me:
                    return
                if not self._queue:
                    continue
                destination, batch = self._take()
                self._busy = True
            with _SEND:
                self._deliver(destination, batch)

    def _take(self) -> tuple[Destination, list[Event]]:
        destination = self._queue[0][0]
        batch: list[Event] = []
        rest: deque[tuple[Destination, Event]] = deque()
        # A put in the middle of this, by a collected generator, goes to the new queue.
        queued, self._queue = self._queue, deque()
        for entry in queued:
            if len(batch) < MAX_BATCH and entry[0] == destination:
                batch.append(entry[1])
            else:
                rest.append(entry)
        self._queue.extendleft(reversed(rest))
        return destination, batch

    def _deliver(self, to: Destination, batch: Iterable[Event]) -> None:
        import json

        fields = [event.fields() for event in batch]
        # The permission may be gone since the events were queued.
        may_send = self._may_send(to.url)
        with self._changed:
            if not may_send or self._is_silent(to, self._timer()):
                self.dropped += len(fields)
                return
        status: int | None = None
        try:
            status = self._post(to.url, json.dumps(fields).encode(), TIMEOUT_S, to.authorization)
        except OSError as error:
            _logger.debug("no events to %s: %s", to.url, error)
        finally:
            self._note(to, status, len(fields))

    def _note(self, to: Destination, status: int | None, count: int) -> None:
        whose = to if status in _REFUSED else to.url
        with self._changed:
            before = self._silences.pop(whose, None)
            if status is not None and 200 <= status < 300:
                self.sent += count
                return
            self.dropped += count
            failures = 1 if before is None else before.failures + 1
            if status in _NO_SUCH_ROUTE:
                until_s = float("inf")
            else:
                # The exponent is capped: 2.0**1024 raises.
                backoff_s = FIRST_SILENCE_S * 2.0 ** min(failures - 1, 30)
                until_s = self._timer() + min(MAX_SILENCE_S, backoff_s)
            self._silences[whose] = _Silence(failures, until_s)
            if len(self._silences) > MAX_SILENCES:
                del self._silences[next(iter(self._silences))]


_PUT = Guard("event queue")
_SEND = Guard("event sender")
sender = EventSender()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=sender.after_fork)
