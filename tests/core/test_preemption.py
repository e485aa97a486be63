from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saga_core.preemption import RunningRequest, WaitingRequest, choose_preempted


def _choose(
    waiting: WaitingRequest,
    running: Sequence[RunningRequest],
    blocks: Mapping[str, int],
    *,
    now_s: float = 100.0,
    max_preempted: int = 8,
) -> tuple[str, ...]:
    return choose_preempted(
        waiting,
        running,
        own_blocks=blocks.__getitem__,
        now_s=now_s,
        guard_s=1.0,
        max_preempted=max_preempted,
    )


RUNNING = [
    RunningRequest("a", 5, 1.0),
    RunningRequest("b", 9, 2.0),
    RunningRequest("c", 9, 3.0),
    RunningRequest("d", 1, 4.0),
]
BLOCKS = {"a": 10, "b": 10, "c": 10, "d": 10}


@pytest.mark.parametrize(
    ("priority", "slots", "blocks", "chosen"),
    [
        (0, 0, 0, ""),  # Nothing is missing.
        (0, -3, -7, ""),
        (0, 1, 0, "c"),
        (0, 0, 1, "c"),  # The lowest priority first, the latest of these.
        (0, 0, 11, "cb"),
        (0, 2, 1, "cb"),
        (0, 0, 40, "cbad"),
        (0, 0, 41, ""),  # All together do not make the room.
        (0, 5, 0, ""),
        (1, 0, 30, "cba"),
        (1, 0, 31, ""),  # An equal does not give way.
        (5, 0, 20, "cb"),
        (9, 1, 0, ""),
    ],
)
def test_the_lowest_give_way_until_there_is_room(
    priority: int, slots: int, blocks: int, chosen: str
) -> None:
    assert _choose(WaitingRequest(priority, slots, blocks), RUNNING, BLOCKS) == tuple(chosen)


def test_equals_in_priority_and_arrival_are_ordered_by_id() -> None:
    running = [RunningRequest(id_, 9, 1.0) for id_ in ("b", "c", "a")]
    assert _choose(WaitingRequest(0, 2, 0), running, {"a": 1, "b": 1, "c": 1}) == ("c", "b")


def test_one_that_has_just_resumed_is_left_alone() -> None:
    running = [RunningRequest("a", 9, 1.0, resumed_s=99.5), RunningRequest("b", 5, 1.0)]
    one, both = WaitingRequest(0, 1, 0), WaitingRequest(0, 2, 0)
    assert _choose(one, running, {"a": 1, "b": 1}) == ("b",)
    assert _choose(both, running, {"a": 1, "b": 1}) == ()
    assert _choose(both, running, {"a": 1, "b": 1}, now_s=100.5) == ("a", "b")


@pytest.mark.parametrize(("most", "chosen"), [(0, ()), (1, ()), (2, ("c", "b"))])
def test_when_more_than_the_limit_would_be_needed_nobody_gives_way(
    most: int, chosen: tuple[str, ...]
) -> None:
    assert _choose(WaitingRequest(0, 0, 20), RUNNING, BLOCKS, max_preempted=most) == chosen


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 9)), max_size=8),
    st.builds(WaitingRequest, st.integers(0, 3), st.integers(-1, 4), st.integers(-1, 20)),
    st.integers(0, 8),
)
def test_what_is_chosen_is_enough_and_no_more(
    drawn: list[tuple[int, int, int]], waiting: WaitingRequest, most: int
) -> None:
    running = {
        f"r{n}": RunningRequest(f"r{n}", priority, arrival_s)
        for n, (priority, arrival_s, _) in enumerate(drawn)
    }
    blocks = {f"r{n}": own for n, (_, _, own) in enumerate(drawn)}
    chosen = _choose(waiting, list(running.values()), blocks, max_preempted=most)
    assert len(set(chosen)) == len(chosen) <= most
    assert all(running[id_].priority > waiting.priority for id_ in chosen)
    if chosen:
        for part, is_enough in ((chosen, True), (chosen[:-1], False)):
            has_slots = len(part) >= waiting.missing_slots
            has_blocks = sum(blocks[id_] for id_ in part) >= waiting.missing_blocks
            assert (has_slots and has_blocks) is is_enough
    spared = [one for id_, one in running.items() if id_ not in chosen]
    assert not chosen or all(
        one.priority <= min(running[id_].priority for id_ in chosen) for one in spared
    )
