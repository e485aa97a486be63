"""The run tracker on its own: bounds, stale runs and odd orders of reports."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saga_core.hints import Hints
from saga_sdk.events import Event, EventKind
from saga_sdk.runs import RunKind, RunStart, RunTracker, Source
from saga_sdk.sessions import Call, CallMap, NamedSessions, Session


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def call_map() -> CallMap:
    return CallMap()


def make_tracker(call_map: CallMap, clock: Clock, **bounds: Any) -> RunTracker:
    return RunTracker(call_map, timer=clock, **bounds)


def report(
    kind: RunKind, number: int, parent: int | None = None, name: str = "n", **metadata: Any
) -> RunStart:
    parent_run_id = None if parent is None else UUID(int=parent)
    return RunStart(kind, UUID(int=number), parent_run_id, name, metadata)


BY_HAND = Source()
AUTOMATIC = Source(by_hand=False)


def hints_of(call_map: CallMap, number: int) -> Hints:
    call = call_map.get(UUID(int=number))
    assert call is not None
    return call.hints


def test_idle_trees_are_purged_when_another_begins(call_map: CallMap, clock: Clock) -> None:
    tracker = make_tracker(call_map, clock, max_idle_s=10.0)
    tracker.start(report(RunKind.CHAIN, 1), BY_HAND)
    tracker.start(report(RunKind.CALL, 2, parent=1), BY_HAND)
    clock.now_s = 10.0
    tracker.start(report(RunKind.CHAIN, 3), BY_HAND)
    assert len(tracker) == 3
    clock.now_s = 10.5
    tracker.start(report(RunKind.CHAIN, 4), BY_HAND)
    assert (len(tracker), len(call_map)) == (2, 0)
    tracker.check_integrity()


def test_activity_keeps_a_tree(call_map: CallMap, clock: Clock) -> None:
    tracker = make_tracker(call_map, clock, max_idle_s=10.0)
    tracker.start(report(RunKind.CHAIN, 1), BY_HAND)
    for number, now_s in ((2, 9.0), (3, 18.0), (4, 27.0)):
        clock.now_s = now_s
        tracker.start(report(RunKind.CALL, number, parent=1), BY_HAND)
    assert hints_of(call_map, 4).step == 2


def test_the_oldest_tree_makes_room(call_map: CallMap, clock: Clock) -> None:
    tracker = make_tracker(call_map, clock, max_runs=3)
    for number in range(5):
        tracker.start(report(RunKind.CALL, number), BY_HAND)
    assert (len(tracker), len(call_map)) == (3, 3)
    assert call_map.get(UUID(int=1)) is None
    tracker.check_integrity()


def test_a_tree_that_fills_the_map_goes_on_without_hints(call_map: CallMap, clock: Clock) -> None:
    tracker = make_tracker(call_map, clock, max_runs=2)
    tracker.start(report(RunKind.CHAIN, 1), BY_HAND)
    for number in (2, 3):
        tracker.start(report(RunKind.CALL, number, parent=1), BY_HAND)
    assert call_map.get(UUID(int=3)) is None
    tracker.end(UUID(int=2))
    tracker.start(report(RunKind.CALL, 4, parent=1), BY_HAND)
    assert hints_of(call_map, 4).step == 1


def test_named_sessions_are_bounded(call_map: CallMap, clock: Clock) -> None:
    tracker = make_tracker(call_map, clock, sessions=NamedSessions(2))
    for number, thread in enumerate(("a", "b", "a", "c", "a", "b")):
        tracker.start(report(RunKind.CALL, number, thread_id=thread), BY_HAND)
    steps = [hints_of(call_map, number).step for number in range(6)]
    assert steps == [0, 0, 1, 0, 2, 0]
    tracker.check_integrity()


def test_a_run_with_an_unknown_parent_is_a_root(call_map: CallMap, clock: Clock) -> None:
    tracker = make_tracker(call_map, clock)
    tracker.start(report(RunKind.CHAIN, 2, parent=1), BY_HAND)
    tracker.start(report(RunKind.CALL, 3, parent=2), BY_HAND)
    assert hints_of(call_map, 3).task_id == str(UUID(int=2))
    tracker.end(UUID(int=2))
    tracker.end(UUID(int=2))
    assert (len(tracker), len(call_map)) == (0, 0)


def test_the_end_of_a_root_purges_what_never_ended(call_map: CallMap, clock: Clock) -> None:
    tracker = make_tracker(call_map, clock)
    tracker.start(report(RunKind.CHAIN, 1), BY_HAND)
    tracker.start(report(RunKind.CHAIN, 2, parent=1), BY_HAND)
    tracker.start(report(RunKind.CALL, 3, parent=2), BY_HAND)
    tracker.end(UUID(int=1))
    assert (len(tracker), len(call_map)) == (0, 0)


@pytest.mark.parametrize("sources", [(AUTOMATIC, BY_HAND), (BY_HAND, AUTOMATIC)])
def test_two_reports_of_one_call_count_once(
    call_map: CallMap, clock: Clock, sources: tuple[Source, Source]
) -> None:
    tracker = make_tracker(call_map, clock)
    named = Source(workflow="mine")
    for start in (
        report(RunKind.CHAIN, 1),
        report(RunKind.TOOL, 2, parent=1, name="read_file"),
    ):
        for source in sources:
            tracker.start(start, named if source.by_hand else source)
    for _ in sources:
        tracker.end(UUID(int=2))
    for number in (3, 4):
        for source in sources:
            start = report(RunKind.CALL, number, parent=1)
            tracker.start(start, named if source.by_hand else source)
    assert [hints_of(call_map, n).step for n in (3, 4)] == [0, 1]
    assert [hints_of(call_map, n).tool_name for n in (3, 4)] == ["read_file", None]
    assert {hints_of(call_map, n).workflow_id for n in (3, 4)} == {"mine"}


def test_a_run_below_a_tool_may_name_its_session(call_map: CallMap, clock: Clock) -> None:
    tracker = make_tracker(call_map, clock)
    tracker.start(report(RunKind.CHAIN, 1, thread_id="outer"), BY_HAND)
    tracker.start(report(RunKind.TOOL, 2, parent=1, thread_id="outer"), BY_HAND)
    tracker.start(report(RunKind.CHAIN, 3, parent=2, thread_id="inner"), BY_HAND)
    tracker.start(report(RunKind.CALL, 4, parent=3, thread_id="inner"), BY_HAND)
    hints = hints_of(call_map, 4)
    assert (hints.session_id, hints.parent_session_id) == ("inner", "outer")


def test_a_tool_of_an_earlier_turn_is_forgotten(call_map: CallMap, clock: Clock) -> None:
    tracker = make_tracker(call_map, clock)
    tracker.start(report(RunKind.CHAIN, 1, thread_id="t"), BY_HAND)
    tracker.start(report(RunKind.TOOL, 2, parent=1, thread_id="t"), BY_HAND)
    tracker.end(UUID(int=2))
    tracker.end(UUID(int=1))
    tracker.start(report(RunKind.CHAIN, 3, thread_id="t"), BY_HAND)
    tracker.start(report(RunKind.CALL, 4, parent=3, thread_id="t"), BY_HAND)
    assert hints_of(call_map, 4).tool_name is None


def test_the_oldest_call_makes_room() -> None:
    call_map = CallMap(max_calls=2)
    for number in range(3):
        call_map.put(UUID(int=number), Call(Hints(step=number)))
    assert len(call_map) == 2
    assert call_map.get(UUID(int=0)) is None


class Told(Clock):
    """A clock that does something, once, when the tracker reads it: that is inside its lock."""

    def __init__(self) -> None:
        super().__init__()
        self.then: Callable[[], object] | None = None

    def __call__(self) -> float:
        then, self.then = self.then, None
        if then is not None:
            then()
        return super().__call__()


def open_session(call_map: CallMap, tracker: RunTracker) -> None:
    """Leave the chain 1 and its call 2 open, whose session has an event to tell."""
    tracker.start(report(RunKind.CHAIN, 1), BY_HAND)
    tracker.start(report(RunKind.CALL, 2, parent=1), BY_HAND)
    call = call_map.get(UUID(int=2))
    assert call is not None
    assert call.session is not None
    call.session.sent_to("http://gateway:80/saga/v1/events")


@pytest.mark.timeout(10)
@pytest.mark.parametrize("fails", [False, True])
def test_an_end_inside_a_start_is_worked_off_after_it(call_map: CallMap, fails: bool) -> None:
    # As when the garbage collector closes an abandoned stream there.
    clock, events = Told(), list[Event]()
    tracker = make_tracker(call_map, clock, emit=events.append)
    open_session(call_map, tracker)

    def end_both() -> None:
        assert tracker._lock.locked()
        for number in (2, 1):
            tracker.end(UUID(int=number))
        assert call_map.get(UUID(int=2)) is None
        if fails:
            raise ZeroDivisionError

    clock.then = end_both
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        tracker.start(report(RunKind.CALL, 3), BY_HAND)
    assert len(tracker) == len(call_map) == (0 if fails else 1)
    assert [(event.kind, event.session_id) for event in events] == [
        (EventKind.SESSION_END, str(UUID(int=1)))
    ]
    tracker.end(UUID(int=3))
    tracker.check_integrity()
    assert (len(tracker), len(call_map)) == (0, 0)


@pytest.mark.timeout(10)
def test_an_end_inside_an_end_is_worked_off_after_it(call_map: CallMap) -> None:
    clock = Told()
    tracker = make_tracker(call_map, clock)
    tracker.start(report(RunKind.CHAIN, 1), BY_HAND)
    tracker.start(report(RunKind.TOOL, 2, parent=1), BY_HAND)
    tracker.start(report(RunKind.CALL, 3), BY_HAND)
    clock.then = lambda: tracker.end(UUID(int=3))
    tracker.end(UUID(int=2))
    assert (len(tracker), len(call_map)) == (1, 0)
    tracker.end(UUID(int=1))
    tracker.check_integrity()


@pytest.mark.timeout(10)
def test_an_end_does_not_wait_for_another_threads_start(call_map: CallMap) -> None:
    clock, inside, gate = Told(), threading.Event(), threading.Event()
    tracker = make_tracker(call_map, clock)
    tracker.start(report(RunKind.CHAIN, 1), BY_HAND)
    tracker.start(report(RunKind.TOOL, 2, parent=1, name="read_file"), BY_HAND)

    def wait() -> None:
        inside.set()
        assert gate.wait(5)

    clock.then = wait
    with ThreadPoolExecutor() as pool:
        other = pool.submit(tracker.start, report(RunKind.CHAIN, 3), BY_HAND)
        assert inside.wait(5)
        tracker.end(UUID(int=2))
        assert len(tracker) == 2
        gate.set()
        # The end comes first, whoever works it off.
        tracker.start(report(RunKind.CALL, 4, parent=1), BY_HAND)
        other.result(5)
    assert hints_of(call_map, 4).tool_name == "read_file"
    assert len(tracker) == 3
    for number in (4, 3, 1):
        tracker.end(UUID(int=number))
    tracker.check_integrity()


def test_ends_of_many_threads_are_not_stranded(call_map: CallMap, clock: Clock) -> None:
    tracker = make_tracker(call_map, clock)

    def work(first: int) -> None:
        for number in range(first, first + 200):
            tracker.start(report(RunKind.CALL, number), BY_HAND)
            tracker.end(UUID(int=number))
            assert call_map.get(UUID(int=number)) is None

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(0, 8000, 1000)))
    assert (len(tracker), len(call_map)) == (0, 0)
    tracker.check_integrity()


def test_a_model_called_on_its_own_says_its_workflow_alone(call_map: CallMap, clock: Clock) -> None:
    tracker = make_tracker(call_map, clock)
    tracker.start(report(RunKind.CALL, 1, name="ChatModel"), BY_HAND)
    assert hints_of(call_map, 1) == Hints(workflow_id="ChatModel")
    tracker.start(report(RunKind.CALL, 2, thread_id="t"), BY_HAND)
    assert (hints_of(call_map, 2).session_id, hints_of(call_map, 2).step) == ("t", 0)


def test_steps_of_a_session_are_numbered_once_in_many_threads() -> None:
    session = Session("s")
    session.tool_ended("read_file")
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda _: session.take_step(), range(800)))
    assert sorted(step for step, _ in taken) == list(range(800))
    assert [name for _, name in taken if name] == ["read_file"]


EVENTS = st.lists(
    st.tuples(
        st.sampled_from([*RunKind, None]),
        st.integers(0, 12),
        st.one_of(st.none(), st.integers(0, 12)),
        st.sampled_from([BY_HAND, AUTOMATIC, Source(session_id="s")]),
        st.sampled_from([{}, {"thread_id": "a"}, {"thread_id": 7, "langgraph_node": 1}]),
        st.floats(0, 20),
    ),
    max_size=60,
)


@given(EVENTS)
@settings(max_examples=300, deadline=None)
def test_any_order_of_reports_keeps_the_tracker_whole(events: Any) -> None:
    clock, call_map = Clock(), CallMap()
    tracker = make_tracker(call_map, clock, max_runs=6, sessions=NamedSessions(2), max_idle_s=30.0)
    for kind, number, parent, source, metadata, wait_s in events:
        clock.now_s += wait_s
        if kind is None:
            tracker.end(UUID(int=number))
        else:
            tracker.start(report(kind, number, parent, **metadata), source)
        tracker.check_integrity()
        assert len(call_map) <= len(tracker)
    for number in range(13):
        tracker.end(UUID(int=number))
    tracker.check_integrity()
    assert (len(tracker), len(call_map)) == (0, 0)
