"""The event sender on its own: bounds, back-off, endpoints that take no events, the exit."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import saga_sdk as saga
from saga_core.errors import SettingsError
from saga_sdk import events, headers
from saga_sdk.events import Destination, Event, EventKind, EventSender
from saga_sdk.post import post_json
from saga_sdk.testing import ScriptedServer
from tests.plans import follow_plan

GATEWAY = "http://gateway:80/saga/v1/events"
OTHER = "http://other:80/saga/v1/events"
WAIT_S = 30.0


def ended(number: int, *urls: str) -> Event:
    destinations = tuple(Destination(url) for url in urls or (GATEWAY,))
    return Event(EventKind.SESSION_END, f"s-{number}", "t", "my flow", destinations, at_s=1.25)


class Post:
    """Stands for the network: records, answers as told, and may be held up."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.answer: int | Exception = 202
        self.attempts: list[tuple[str, list[str]]] = []
        self.authorizations: list[str | None] = []
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, url: str, body: bytes, timeout_s: float, authorization: str | None) -> int:
        self.authorizations.append(authorization)
        assert threading.current_thread() is not threading.main_thread()
        self.attempts.append((url, [event["session_id"] for event in json.loads(body)]))
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def post() -> Post:
    return Post()


@pytest.fixture
def sender(post: Post) -> Iterator[EventSender]:
    sender = EventSender(
        may_send=lambda url: True, post=post, timer=lambda: post.now_s, max_queued=4
    )
    yield sender
    post.gate.set()
    sender.stop()


def hold(post: Post, sender: EventSender) -> None:
    """Let one event be under way, so that further ones queue up."""
    post.gate.clear()
    sender.put(ended(0))
    assert post.entered.wait(WAIT_S)


def test_what_is_sent() -> None:
    assert ended(1).fields() == {
        "event": "session_end",
        "session_id": "s-1",
        "task_id": "t",
        "workflow_id": "my-flow",
        "timestamp": 1.25,
    }
    task_end = Event(EventKind.TASK_END, None, "t", "w", ())
    assert "session_id" not in task_end.fields()
    tool_end = Event(EventKind.TOOL_END, "s", "t", "w", (), "read file")
    assert tool_end.fields()["tool_name"] == "read-file"


def test_no_thread_before_the_first_event(sender: EventSender) -> None:
    before = threading.active_count()
    assert sender.flush()
    assert threading.active_count() == before
    sender.put(ended(1))
    assert sender.flush(WAIT_S)
    (thread,) = [t for t in threading.enumerate() if t.name == "saga-events"]
    assert thread.daemon
    sender.stop()
    assert not thread.is_alive()


def test_events_that_queue_up_go_together_by_url(post: Post, sender: EventSender) -> None:
    hold(post, sender)
    sender.put(ended(1, GATEWAY, OTHER))
    sender.put(ended(2))
    post.gate.set()
    assert sender.flush(WAIT_S)
    assert post.attempts == [(GATEWAY, ["s-0"]), (GATEWAY, ["s-1", "s-2"]), (OTHER, ["s-1"])]
    assert sender.dropped == 0


def test_a_full_queue_drops_the_oldest(post: Post, sender: EventSender) -> None:
    hold(post, sender)
    for number in range(1, 8):
        sender.put(ended(number))
    assert sender.dropped == 3
    post.gate.set()
    assert sender.flush(WAIT_S)
    assert post.attempts[1:] == [(GATEWAY, ["s-4", "s-5", "s-6", "s-7"])]


def test_what_is_no_longer_allowed_is_dropped(post: Post) -> None:
    saga.instrument(GATEWAY)
    sender = EventSender(post=post, timer=lambda: post.now_s)
    try:
        hold(post, sender)
        for number in range(1, 4):
            sender.put(ended(number))
        saga.uninstrument()
        post.gate.set()
        assert sender.flush(WAIT_S)
        assert post.attempts == [(GATEWAY, ["s-0"])]
        assert sender.dropped == 3
        # The URL is not left alone for it.
        saga.instrument(GATEWAY)
        sender.put(ended(4))
        assert sender.flush(WAIT_S)
        assert post.attempts[1:] == [(GATEWAY, ["s-4"])]
    finally:
        post.gate.set()
        sender.stop()


@pytest.mark.timeout(10)
def test_an_event_that_is_put_while_a_batch_is_taken_is_kept(
    sender: EventSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "_wake", lambda: None)

    class PutsAnother(str):
        """A URL whose comparison lets the garbage collector run, as it were."""

        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            if not late:
                late.append(ended(9))
                sender.put(late[0])
            return str.__eq__(self, other)

    late: list[Event] = []
    for number, url in ((1, GATEWAY), (2, OTHER), (3, PutsAnother(GATEWAY)), (4, OTHER)):
        sender._queue.append((Destination(url), ended(number)))
    destination, batch = sender._take()
    assert (destination.url, [event.session_id for event in batch]) == (GATEWAY, ["s-1", "s-3"])
    assert [event.session_id for _, event in sender._queue] == ["s-2", "s-4", "s-9"]


def test_a_batch_is_bounded(
    post: Post, sender: EventSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_BATCH", 2)
    hold(post, sender)
    for number in range(1, 4):
        sender.put(ended(number))
    post.gate.set()
    assert sender.flush(WAIT_S)
    assert [sessions for _, sessions in post.attempts[1:]] == [["s-1", "s-2"], ["s-3"]]


@pytest.mark.parametrize(
    "answer", [500, 401, 403, 307, ConnectionRefusedError("dead"), TimeoutError("slow")]
)
def test_the_back_off_grows(post: Post, sender: EventSender, answer: int | Exception) -> None:
    post.answer = answer
    tried_s = []
    for tenth in range(160):
        post.now_s = tenth / 10
        before = len(post.attempts)
        sender.put(ended(tenth))
        assert sender.flush(WAIT_S)
        if len(post.attempts) > before:
            tried_s.append(post.now_s)
    assert tried_s == [0.0, 1.0, 3.0, 7.0, 15.0]
    assert sender.dropped == 160

    post.now_s, post.answer = 1e9, 202
    for number in range(3):
        sender.put(ended(number))
        assert sender.flush(WAIT_S)
    assert len(post.attempts) == 8
    assert sender.dropped == 160


def test_a_refused_key_is_left_alone_by_itself(post: Post, sender: EventSender) -> None:
    def ended_by(key: str) -> Event:
        return Event(EventKind.SESSION_END, "s", "t", "w", (Destination(GATEWAY, key),))

    post.answer = 401
    for key in ("bad", "bad", "good"):
        sender.put(ended_by(key))
        assert sender.flush(WAIT_S)
    assert post.authorizations == ["bad", "good"]
    post.now_s, post.answer = 10.0, 503
    for key in ("bad", "good"):
        sender.put(ended_by(key))
        assert sender.flush(WAIT_S)
    assert post.authorizations == ["bad", "good", "bad"]


def test_events_of_one_moment_go_together(post: Post, sender: EventSender) -> None:
    for number in range(3):
        sender.put(ended(number))
    assert sender.flush(WAIT_S)
    assert sum(len(sessions) for _, sessions in post.attempts) == 3
    assert len(post.attempts) <= 2
    assert (sender.sent, sender.dropped, len(sender)) == (3, 0, 0)


def test_the_back_off_has_a_limit(post: Post, sender: EventSender) -> None:
    post.answer = 503
    for _ in range(40):
        sender.put(ended(1))
        assert sender.flush(WAIT_S)
        post.now_s += events.MAX_SILENCE_S
    assert len(post.attempts) == 40


def test_what_queued_up_for_a_dead_endpoint_is_dropped(post: Post, sender: EventSender) -> None:
    hold(post, sender)
    sender.put(ended(1))
    sender.put(ended(2, OTHER))
    post.answer = ConnectionRefusedError("dead")
    post.gate.set()
    assert sender.flush(WAIT_S)
    assert post.attempts == [(GATEWAY, ["s-0"]), (OTHER, ["s-2"])]
    assert sender.dropped == 3


@pytest.mark.parametrize("status", [404, 405, 501])
def test_an_endpoint_without_the_route_is_asked_once(
    post: Post, sender: EventSender, status: int
) -> None:
    post.answer = status
    for _ in range(5):
        sender.put(ended(1))
        assert sender.flush(WAIT_S)
        post.now_s += 1e9
    assert len(post.attempts) == 1
    post.answer = 202
    sender.put(ended(2, OTHER))
    assert sender.flush(WAIT_S)
    assert post.attempts[1:] == [(OTHER, ["s-2"])]


def test_the_memory_of_bad_endpoints_is_bounded(
    post: Post, sender: EventSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_SILENCES", 2)
    post.answer = 404
    for url in ("http://a:1/", "http://b:1/", "http://c:1/", "http://b:1/", "http://a:1/"):
        sender.put(ended(1, url))
        assert sender.flush(WAIT_S)
    assert [url[7] for url, _ in post.attempts] == ["a", "b", "c", "a"]


def test_a_fault_of_ours_is_a_failure_of_the_endpoint(
    post: Post, sender: EventSender, caplog: pytest.LogCaptureFixture
) -> None:
    post.answer = RuntimeError("ours")
    for _ in range(3):
        sender.put(ended(1))
        assert sender.flush(WAIT_S)
    assert len(post.attempts) == 1
    assert len([r for r in caplog.records if r.name == "saga_sdk"]) == 1


def test_a_thread_that_cannot_start_breaks_nothing(
    sender: EventSender, post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        sender.put(ended(1))
        assert not sender.flush()
    sender.put(ended(2))
    assert sender.flush(WAIT_S)
    assert post.attempts == [(GATEWAY, ["s-1", "s-2"])]


def test_the_wait_at_exit_ends(post: Post, sender: EventSender) -> None:
    hold(post, sender)
    assert not sender.flush(0.01)


def test_hosts_that_are_not_allowed_get_nothing(post: Post) -> None:
    sender = EventSender(may_send=lambda url: url == OTHER, post=post)
    sender.put(ended(1, GATEWAY, OTHER))
    assert sender.flush(WAIT_S)
    sender.stop()
    assert post.attempts == [(OTHER, ["s-1"])]


def test_a_forked_child_begins_anew(post: Post, sender: EventSender) -> None:
    hold(post, sender)
    sender.put(ended(1))
    post.gate.set()
    sender.after_fork()
    assert sender.flush()
    sender.put(ended(2))
    assert sender.flush(WAIT_S)
    assert post.attempts[-1] == (GATEWAY, ["s-2"])


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://Gateway:8000/v1/chat/completions", "http://gateway:8000/saga/v1/events"),
        ("https://u:p@gw/llm/v1/responses?a=/v1/", "https://gw:443/llm/saga/v1/events"),
        ("http://[::1]:1/openai/chat/completions", "http://[::1]:1/saga/v1/events"),
    ],
)
def test_where_events_go(url: str, expected: str) -> None:
    assert headers.events_url(url) == expected
    with pytest.raises(SettingsError):
        headers.events_url(url.partition("//")[2])


@pytest.mark.parametrize("status", [202, 307, 404, 500])
def test_every_status_is_an_answer(server: ScriptedServer, status: int) -> None:
    server.events_status = status
    url = headers.events_url(f"{server.base_url}/chat/completions")
    assert post_json(url, b"[]", WAIT_S) == status
    assert len(server.event_requests) == 1


def test_no_answer_is_an_os_error(server: ScriptedServer) -> None:
    with ScriptedServer(follow_plan) as gone:
        url = headers.events_url(f"{gone.base_url}/chat/completions")
    with pytest.raises(OSError, match="refused"):
        post_json(url, b"[]", WAIT_S)


AT_EXIT = """
import sys, openai, saga_sdk as saga
url = sys.argv[1]
saga.instrument(url)
with openai.OpenAI(base_url=url, api_key="none") as client, saga.workflow("swe"):
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
"""


def test_the_last_event_is_sent_at_exit(server: ScriptedServer) -> None:
    done: Any = subprocess.run(
        [sys.executable, "-c", AT_EXIT, server.base_url], capture_output=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, b"")
    (hints,) = server.hints
    session_end, task_end = server.events
    assert (session_end["event"], session_end["session_id"]) == ("session_end", hints.session_id)
    assert (task_end["event"], task_end["task_id"]) == ("task_end", hints.task_id)
