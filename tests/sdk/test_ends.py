"""Ends that the program says itself, and what the SDK says of itself."""

from __future__ import annotations

import os
from collections.abc import Iterator

import openai
import pytest

import saga_sdk as saga
from saga_sdk.events import sender
from saga_sdk.testing import ScriptedServer
from tests.sdk.agents import ask, make_agent

WAIT_S = 30.0


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[openai.OpenAI]:
    saga.instrument(server.base_url)
    with openai.OpenAI(base_url=server.base_url, api_key="key") as client:
        yield client


def chat(client: openai.OpenAI) -> None:
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])


def said(server: ScriptedServer) -> list[tuple[str, str | None, str | None]]:
    assert sender.flush(WAIT_S)
    return [(e["event"], e.get("session_id"), e.get("task_id")) for e in server.events]


def test_a_session_that_was_named_ends_when_it_is_said(
    server: ScriptedServer, client: openai.OpenAI
) -> None:
    with saga.workflow("swe", task_id="t", session_id="chat 1") as block:
        chat(client)
        saga.end_session()
        saga.end_session()
    ended = ("session_end", block.session_id, "t")
    assert said(server) == [ended, ("task_end", None, "t")]
    with saga.workflow("swe", task_id="u", session_id="chat 1"), saga.workflow("inner"):
        saga.end_session("chat 1")
        assert said(server)[2:] == []
    with saga.workflow("swe", task_id="u", session_id="chat 1"):
        chat(client)
        with saga.workflow("inner"):
            saga.end_session("chat 1")
    assert said(server)[2:] == [("session_end", block.session_id, "u"), ("task_end", None, "u")]


def test_a_session_goes_on_after_its_end(server: ScriptedServer, client: openai.OpenAI) -> None:
    with saga.workflow("swe", task_id="t") as block:
        chat(client)
        saga.end_session()
        chat(client)
    ended = ("session_end", block.session_id, "t")
    assert said(server) == [ended, ended, ("task_end", None, "t")]


def test_a_thread_ends_when_it_is_said(server: ScriptedServer, client: openai.OpenAI) -> None:
    config = {"metadata": {"thread_id": "thread 7"}}
    make_agent(server.base_url, name="agent").invoke(ask(""), config)
    (hints,) = server.hints
    saga.end_session("thread 7")
    saga.end_session("thread 7")
    assert [e for e in said(server) if e[0] == "session_end"] == [
        ("session_end", hints.session_id, None)
    ] * 2
    # The first was said to those who saw it, with their key; the second to all base URLs.
    authorizations = [request.get("authorization") for request in server.event_requests]
    assert authorizations[-1] is None
    assert "Bearer none" in authorizations[:-1]


def test_a_session_of_another_process_is_said_to_all(
    server: ScriptedServer, other_server: ScriptedServer
) -> None:
    saga.instrument([server.base_url, f"{other_server.base_url}/"])
    saga.end_session("elsewhere")
    saga.end_task("task elsewhere")
    for each in (server, other_server):
        (session, task) = said(each)
        assert session == ("session_end", "elsewhere", None)
        assert task[:2] == ("task_end", None)
        assert (task[2] or "").startswith("task-elsewhere-")


def test_a_task_ends_when_it_is_said(server: ScriptedServer, client: openai.OpenAI) -> None:
    with saga.workflow("outer", task_id="t") as outer:
        chat(client)
        with saga.workflow("named", session_id="s"):
            chat(client)
            with saga.workflow("inner") as inner:
                chat(client)
                saga.end_task("t")
                expected = [
                    ("session_end", inner.session_id, "t"),
                    ("session_end", outer.session_id, "t"),
                    ("task_end", None, "t"),
                ]
                assert said(server) == expected
                saga.end_task()
    assert said(server) == expected


def test_nothing_to_end_is_nothing(server: ScriptedServer) -> None:
    saga.end_session()
    saga.end_task()
    saga.end_session("s")
    assert said(server) == []


class Unspeakable:
    """An id that cannot be written."""

    def __str__(self) -> str:
        raise ZeroDivisionError


def test_an_id_that_cannot_be_written_breaks_nothing(
    client: openai.OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    bad: str = Unspeakable()  # type: ignore[assignment]
    saga.end_session(bad)
    saga.end_task(bad)
    with saga.workflow(bad), saga.workflow("swe", task_id=bad) as block:
        chat(client)
        assert block.session_id == "none"
    assert len([r for r in caplog.records if r.name == "saga_sdk"]) == 2


def test_stats(server: ScriptedServer, client: openai.OpenAI) -> None:
    before = saga.stats()
    assert (before.open_runs, before.open_calls, before.events_queued) == (0, 0, 0)
    with saga.workflow("swe"):
        chat(client)
    make_agent(server.base_url).invoke(ask(""), {"metadata": {"thread_id": "t"}})
    assert sender.flush(WAIT_S)
    after = saga.stats()
    assert after.events_sent - before.events_sent == 3
    assert (after.named_sessions, after.open_runs) == (1, 0)
    server.events_status = 500
    with saga.workflow("swe"):
        chat(client)
    assert sender.flush(WAIT_S)
    assert saga.stats().events_dropped - before.events_dropped == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_goes_on(server: ScriptedServer, client: openai.OpenAI) -> None:
    with saga.workflow("swe"):
        chat(client)
    assert sender.flush(WAIT_S)
    events = len(server.events)
    # Locks that other threads hold in the parent nobody releases in the child.
    from saga_sdk.hosts import allowed
    from saga_sdk.runs import tracker

    with sender._changed, allowed._lock, tracker._lock:
        pid = os.fork()
        if pid == 0:
            try:
                work_in_child(server)
            except BaseException:  # noqa: BLE001 (nothing of the parent's may run in the child)
                os._exit(1)
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(server.events) == events + 4
    assert (server.hints[-2].workflow_id, server.hints[-1].step) == ("child", 0)


def work_in_child(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    with (
        openai.OpenAI(base_url=server.base_url, api_key="none") as client,
        saga.workflow("child"),
    ):
        chat(client)
    make_agent(server.base_url).invoke(ask(""))
    assert sender.flush(WAIT_S)
    assert saga.stats().open_runs == 0
