"""The session table: pauses, what they teach, and its bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saga_core.hints import Hints
from saga_core.notices import EndNotice, PauseNotice, ResumeNotice
from saga_gateway.answers import Answer
from saga_gateway.sessions import AddressedNotice, SessionTable

TOOL = Answer(("read_file",), "tool_calls")


@pytest.fixture
def table():
    return SessionTable(max_sessions=3, silent_s=7200.0)


def run_step(table, session_id, now_s, answer=TOOL, final=False, **hints):
    session = table.begin(session_id, Hints(**hints), now_s)
    session.home = "w"
    return table.end_step(session, answer, final=final, now_s=now_s)


def pause_of(addressed):
    assert isinstance(addressed, AddressedNotice)
    assert addressed.worker_id == "w"
    assert isinstance(addressed.notice, PauseNotice)
    return addressed.notice.pause


def test_priors(table):
    pause = pause_of(run_step(table, "s", 0.0))
    assert (pause.tool_name, pause.pause_p95_s, pause.p_reuse) == ("read_file", 0.32, 0.9)
    pause = pause_of(run_step(table, "t", 0.0, Answer((), "stop")))
    assert (pause.tool_name, pause.pause_p95_s) == (None, 300.0)
    assert pause.p_reuse == pytest.approx(1 / 3)


def test_durations_are_learned_per_workflow_and_tool(table):
    now_s = 0.0
    for _ in range(20):
        run_step(table, "s", now_s, workflow_id="a")
        now_s += 50.0
    assert pause_of(run_step(table, "s", now_s, workflow_id="a")).pause_p95_s == pytest.approx(
        50.0, rel=0.02
    )
    assert pause_of(run_step(table, "s2", now_s, workflow_id="a")).pause_p95_s == pytest.approx(
        50.0, rel=0.02
    )
    assert pause_of(run_step(table, "b", now_s, workflow_id="b")).pause_p95_s == 0.32
    assert pause_of(run_step(table, "s", now_s, workflow_id="a")).p_reuse > 0.95


def test_slowest_of_parallel_tools_counts(table):
    pause = pause_of(run_step(table, "s", 0.0, Answer(("read_file", "web_get", "ls"))))
    assert (pause.tool_name, pause.pause_p95_s) == ("web_get", 4.5)


def test_a_retry_teaches_nothing(table):
    run_step(table, "s", 0.0, step=0)
    run_step(table, "s", 100.0, step=0)
    pause = pause_of(run_step(table, "s", 100.1, step=1))
    assert pause.pause_p95_s == 0.32
    assert pause.p_reuse == pytest.approx(10 / 11)


def test_no_pause_while_another_request_runs(table):
    first = table.begin("s", Hints(), 0.0)
    second = table.begin("s", Hints(), 0.0)
    first.home = "w"
    assert table.end_step(first, TOOL, final=False, now_s=1.0) is None
    assert pause_of(table.end_step(second, TOOL, final=False, now_s=2.0)).tool_name == "read_file"


def test_failed_step_opens_no_pause(table):
    assert run_step(table, "s", 0.0, answer=None) is None
    assert table.resume("s") is None


def test_final_step_ends_the_session_without_a_pause(table):
    assert run_step(table, "s", 0.0, final=True) == AddressedNotice("w", EndNotice("s"))
    assert len(table) == 0
    assert pause_of(run_step(table, "t", 0.0)).p_reuse == 0.9


def test_end_of_a_paused_session_is_learned(table):
    run_step(table, "s", 0.0)
    assert table.end("s") == AddressedNotice("w", EndNotice("s"))
    assert table.end("s") is None
    assert pause_of(run_step(table, "t", 0.0)).p_reuse == pytest.approx(9 / 11)


def test_end_while_a_request_runs_gives_no_later_pause(table):
    session = table.begin("s", Hints(), 0.0)
    session.home = "w"
    assert table.end("s") is not None
    assert table.end_step(session, TOOL, final=False, now_s=1.0) is None
    assert len(table) == 0


def test_resume_only_of_a_paused_session(table):
    assert table.resume("s") is None
    run_step(table, "s", 0.0)
    assert table.resume("s") == AddressedNotice("w", ResumeNotice("s"))
    table.begin("s", Hints(), 1.0)
    assert table.resume("s") is None


def test_silence_ends_a_session(table):
    run_step(table, "s", 0.0)
    running = table.begin("r", Hints(), 0.0)
    running.home = "w"
    table.begin("t", Hints(), 7200.0)
    assert table.resume("s") is not None
    table.begin("t", Hints(), 7200.1)
    assert table.resume("s") is None
    table.check_integrity()
    assert pause_of(table.end_step(running, TOOL, final=False, now_s=8000.0)).p_reuse < 0.9


def test_eviction_takes_the_least_recently_used_idle_one(table):
    held = table.begin("held", Hints(), 0.0)
    for n, name in enumerate("abc"):
        run_step(table, name, 1.0 + n)
    assert table.resume("a") is None
    assert table.resume("b") is not None
    assert len(table) == 3
    assert held.running == 1
    assert pause_of(run_step(table, "c", 5.0)).p_reuse == pytest.approx(10 / 12)


ACTIONS = st.tuples(
    st.sampled_from(["begin", "end_step", "fail", "final", "end", "resume"]),
    st.integers(0, 5),
    st.sampled_from([0.0, 1.0, 4000.0]),
)


@given(st.lists(ACTIONS, max_size=60))
def test_integrity_after_any_history(actions):
    table = SessionTable(max_sessions=3, silent_s=7200.0)
    open_steps, now_s = {n: [] for n in range(6)}, 0.0
    for action, n, passed_s in actions:
        now_s += passed_s
        if action == "begin":
            session = table.begin(f"s{n}", Hints(), now_s)
            session.home = "w"
            open_steps[n].append(session)
        elif action == "end":
            table.end(f"s{n}")
        elif action == "resume":
            table.resume(f"s{n}")
        elif open_steps[n]:
            answer = None if action == "fail" else TOOL
            table.end_step(open_steps[n].pop(), answer, final=action == "final", now_s=now_s)
        table.check_integrity()
