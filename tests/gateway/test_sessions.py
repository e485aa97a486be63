"""The session table: pauses, what they teach, and its bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saga_core.conversations import Relation
from saga_core.hints import Hints
from saga_core.notices import EndNotice, PauseNotice, ResumeNotice
from saga_core.transitions import Node
from saga_gateway.answers import Answer
from saga_gateway.identify import Identified
from saga_gateway.sessions import AddressedNotice, SessionTable

TOOL = Answer(("read_file",), "tool_calls")


@pytest.fixture
def table():
    return SessionTable(max_sessions=3, silent_s=7200.0)


def run_step(table, session_id, now_s, answer=TOOL, final=False, **hints):
    session = table.begin(session_id, Hints(**hints), now_s)
    session.home = "w"
    return table.end_step(session, answer, final=final, now_s=now_s)


def steps(table, workflow_id="w"):
    return sum(node.count for node in table.graphs.graph((None, workflow_id)).nodes)


def found_as(relation):
    return Identified("s", relation, None, "w", 0)


def pause_of(addressed):
    assert isinstance(addressed, AddressedNotice)
    assert addressed.worker_id == "w"
    assert isinstance(addressed.notice, PauseNotice)
    return addressed.notice.pause


def test_priors(table):
    called = pause_of(run_step(table, "s", 0.0))
    assert (called.tool_name, called.pause_p95_s) == ("read_file", pytest.approx(0.32))
    answered = pause_of(run_step(table, "t", 0.0, Answer((), "stop")))
    assert (answered.tool_name, answered.pause_p95_s) == (None, pytest.approx(300.0))
    assert called.p_reuse >= 0.9 > answered.p_reuse


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
    other = pause_of(run_step(table, "b", now_s, Answer(("web_get",)), workflow_id="b"))
    assert other.pause_p95_s == pytest.approx(4.5)
    assert pause_of(run_step(table, "s", now_s, workflow_id="a")).p_reuse > 0.95


def test_slowest_of_parallel_tools_counts(table):
    pause = pause_of(run_step(table, "s", 0.0, Answer(("read_file", "web_get", "ls"))))
    assert (pause.tool_name, pause.pause_p95_s) == ("web_get", pytest.approx(4.5))


def test_a_retry_teaches_nothing(table):
    run_step(table, "s", 0.0, step=0, workflow_id="w")
    run_step(table, "s", 100.0, step=0, workflow_id="w")
    pause = pause_of(run_step(table, "s", 100.1, step=1, workflow_id="w"))
    assert pause.pause_p95_s < 1.0
    assert steps(table) == pytest.approx(2)
    found = [found_as(relation) for relation in (Relation.NEW, Relation.RETRY, Relation.CONTINUES)]
    for now_s, each in enumerate(found):
        session = table.begin("f", Hints(workflow_id="v"), now_s, found=each)
        session.home = "w"
        table.end_step(session, TOOL, final=False, now_s=now_s)
    assert steps(table, "v") == pytest.approx(2)


def test_a_step_that_failed_and_is_tried_again_counts_once(table):
    run_step(table, "s", 0.0, workflow_id="w")
    for now_s, relation in ((1.0, Relation.CONTINUES), (2.0, Relation.RETRY)):
        session = table.begin("s", Hints(), now_s, found=found_as(relation))
        answer = TOOL if relation is Relation.RETRY else None
        table.end_step(session, answer, final=False, now_s=now_s)
    assert steps(table) == pytest.approx(2)


def test_what_a_session_is_told_by_measures_what_it_reads_again(table):
    for now_s, (chars, known) in enumerate([(1000, 0), (1200, 1000), (400, 120)]):
        found = Identified("s", Relation.CONTINUES, None, "w", 40, chars, known)
        session = table.begin("s", Hints(), now_s, found=found, workflow_id="w")
        session.home = "w"
        table.end_step(session, TOOL, final=False, now_s=now_s)
    (edge,) = [
        e for e in table.graphs.graph((None, "w")).edges if e.source == Node(None, "read_file")
    ]
    assert edge.overlap == pytest.approx((1.0 + 0.1) / 2)


def test_a_found_session_of_a_strange_workflow_gives_no_word_after_a_plain_answer(table):
    for answer, is_told in ((Answer((), "stop"), False), (TOOL, True)):
        session = table.begin("s", Hints(), 0.0, found=found_as(Relation.NEW), workflow_id="w")
        session.home = "w"
        told = table.end_step(session, answer, final=False, now_s=0.0)
        assert (told is not None) == is_told


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
    ended = run_step(table, "s", 0.0, final=True, workflow_id="w")
    assert ended == AddressedNotice("w", EndNotice("s"))
    assert len(table) == 0
    assert table.graphs.graph((None, "w")).nodes[0].p_end == 1.0


def test_end_of_a_paused_session_is_learned(table):
    before = pause_of(run_step(table, "s", 0.0)).p_reuse
    assert table.end("s") == AddressedNotice("w", EndNotice("s"))
    assert table.end("s") is None
    assert pause_of(run_step(table, "t", 0.0)).p_reuse < before - 0.05


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
    run_step(table, "s", 0.0, workflow_id="w")
    running = table.begin("r", Hints(), 0.0)
    running.home = "w"
    table.begin("t", Hints(), 7200.0)
    assert table.resume("s") is not None
    table.begin("t", Hints(), 7200.1)
    assert table.resume("s") is None
    table.check_integrity()
    known = table.graphs.graph((None, "w"))
    assert (known.tasks, known.nodes[0].p_end) == (1.0, 1.0)
    assert table.end_step(running, TOOL, final=False, now_s=8000.0) is not None


def test_eviction_takes_the_least_recently_used_idle_one(table):
    held = table.begin("held", Hints(), 0.0)
    for n, name in enumerate("abc"):
        run_step(table, name, 1.0 + n)
    assert table.resume("a") is None
    assert table.resume("b") is not None
    assert len(table) == 3
    assert held.running == 1


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
