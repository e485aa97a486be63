"""Events: what the SDK tells a gateway when no LLM call is there to carry it.

They go to ``POST /saga/v1/events`` as a JSON array. Losing one does no harm.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from saga_core.hints import clean
from saga_sdk.guard import Guard
from saga_sdk.hosts import allowed

MAX_QUEUED = 1000
MAX_BATCH = 100
MAX_SILENCES = 256
TIMEOUT_S = 2.0
FLUSH_S = 1.0
FIRST_SILENCE_S = 1.0
MAX_SILENCE_S = 300.0

# What an endpoint answers that has no such route.
_NO_SUCH_ROUTE = frozenset({404, 405, 410, 501})
_logger = logging.getLogger("saga_sdk")

Post = Callable[[str, bytes, float], int]


class EventKind(StrEnum):
    """What has happened."""

    TOOL_END = "tool_end"
    SESSION_END = "session_end"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a session.

    Attributes:
        urls: where the session's gateways take events.
    """

    kind: EventKind
    session_id: str
    task_id: str
    workflow_id: str
    urls: tuple[str, ...]
    tool_name: str | None = None

    def fields(self) -> dict[str, str]:
        """The event as it is sent, with the ids as the hint headers write them."""
        said = {
            "session_id": self.session_id,
            "task_id": self.task_id,
            "workflow_id": self.workflow_id,
            "tool_name": self.tool_name or "",
        }
        cleaned = {name: clean(value) for name, value in said.items()}
        return {"event": self.kind.value} | {n: v for n, v in cleaned.items() if v is not None}


@dataclass(frozen=True, slots=True)
class _Silence:
    """How long a URL is left alone after ``failures`` in a row, on the sender's timer."""

    failures: int
    until_s: float


def _post(url: str, body: bytes, timeout_s: float) -> int:
    # Lazy: the HTTP modules take longer to import than the whole SDK's own.
    from saga_sdk.post import post_json

    return post_json(url, body, timeout_s)


class EventSender:
    """A bounded queue of events and the daemon thread that sends them, in batches.

    The thread starts with the first event. A batch that fails is lost, and its URL is left alone
    for 1 s, twice as long after each further failure, 300 s at most; events for it are dropped
    meanwhile. A URL that answers 404 is never asked again. A full queue drops its oldest event.
    At exit the queue has 1 s to empty. Thread-safe; nothing here raises or waits for the network
    but :meth:`flush` and :meth:`stop`.

    Args:
        may_send: says whether a URL may see events.
        post: sends a body to a URL and returns the status, or raises OSError.
        timer: the clock of the back-off, in seconds.
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
        self._queue: deque[tuple[str, Event]] = deque()
        self._silences: dict[str, _Silence] = {}
        self._thread: threading.Thread | None = None
        self._busy = False
        self.dropped = 0

    def after_fork(self) -> None:
        """Begin anew in a child process, which has neither the thread nor a lock to trust."""
        self._reset()

    def put(self, event: Event) -> None:
        """Queue an event for each of its URLs that may see it."""
        with Guard("event queue"):
            urls = [url for url in event.urls if self._may_send(url)]
            if not urls:
                return
            now_s = self._timer()
            with self._changed:
                for url in urls:
                    if self._is_silent(url, now_s):
                        self.dropped += 1
                        continue
                    if len(self._queue) >= self._max_queued:
                        self._queue.popleft()
                        self.dropped += 1
                    self._queue.append((url, event))
                if self._queue:
                    self._wake()

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Wait until everything that is queued is sent or dropped; False when time runs out."""
        with self._changed:
            if not self._is_alive():
                return not self._queue
            return self._changed.wait_for(lambda: not self._queue and not self._busy, timeout_s)

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

    def _is_silent(self, url: str, now_s: float) -> bool:
        silence = self._silences.get(url)
        return silence is not None and now_s < silence.until_s

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
        me = threading.current_thread()
        while True:
            with self._changed:
                if self._thread is me:
                    self._busy = False
                    self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue or self._thread is not me)
                if self._thread is not me:
                    return
                url, batch = self._take()
                self._busy = True
            with Guard("event sender"):
                self._deliver(url, batch)

    def _take(self) -> tuple[str, list[Event]]:
        url = self._queue[0][0]
        batch: list[Event] = []
        rest: deque[tuple[str, Event]] = deque()
        # A put in the middle of this, by a collected generator, goes to the new queue.
        queued, self._queue = self._queue, deque()
        for entry in queued:
            if entry[0] == url and len(batch) < MAX_BATCH:
                batch.append(entry[1])
            else:
                rest.append(entry)
        self._queue.extendleft(reversed(rest))
        return url, batch

    def _deliver(self, url: str, batch: Iterable[Event]) -> None:
        fields = [event.fields() for event in batch]
        # The permission may be gone since the events were queued.
        may_send = self._may_send(url)
        with self._changed:
            if not may_send or self._is_silent(url, self._timer()):
                self.dropped += len(fields)
                return
        status: int | None = None
        try:
            status = self._post(url, json.dumps(fields).encode(), TIMEOUT_S)
        except OSError as error:
            _logger.debug("no events to %s: %s", url, error)
        finally:
            self._note(url, status, len(fields))

    def _note(self, url: str, status: int | None, count: int) -> None:
        with self._changed:
            before = self._silences.pop(url, None)
            if status is not None and 200 <= status < 300:
                return
            self.dropped += count
            failures = 1 if before is None else before.failures + 1
            if status in _NO_SUCH_ROUTE:
                until_s = float("inf")
            else:
                # The exponent is capped: 2.0**1024 raises.
                backoff_s = FIRST_SILENCE_S * 2.0 ** min(failures - 1, 30)
                until_s = self._timer() + min(MAX_SILENCE_S, backoff_s)
            self._silences[url] = _Silence(failures, until_s)
            if len(self._silences) > MAX_SILENCES:
                del self._silences[next(iter(self._silences))]


sender = EventSender()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=sender.after_fork)
