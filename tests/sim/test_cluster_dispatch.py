from __future__ import annotations

from typing import Any

import pytest

from saga_core.coordinator import Coordinator
from saga_core.coordinator_events import RequestArrived
from saga_sim.cluster.dispatch import (
    Arrival,
    Coordinated,
    Dispatcher,
    Done,
    FirstTaskFirst,
    Fleet,
    LeastAttained,
    Placed,
    Sent,
)
from saga_sim.cluster.estimates import Estimates
from saga_sim.cluster.pausing import Pausing
from saga_sim.cluster.routers import Affinity, WorkerLoad

FLEET = Fleet(2, pool_tokens=1000, block_tokens=16, max_running=8, prefill_tokens_per_s=1000.0)


def loads() -> list[WorkerLoad]:
    return [WorkerLoad(number, 0, 0, 0.0) for number in range(2)]


def arrive(
    dispatcher: Dispatcher, task: int, call: int = 0, tokens: int = 100, now_s: float = 0.0
) -> Sent:
    arrival = Arrival((task, call), f"s{task}", [], tokens, f"t{task % 2}", 50.0)
    return dispatcher.arrived(arrival, loads, now_s)


def answer(dispatcher: Dispatcher, task: int, call: int, tokens: int, **more: Any) -> Sent:
    given = {"cached_tokens": 0, "output_tokens": 10, "first_token_s": 1.0, "end_s": 2.0, **more}
    done = Done((task, call), f"s{task}", tokens, **given)
    return dispatcher.answered(done, done.end_s)


def test_the_task_with_the_least_service_goes_first() -> None:
    dispatcher = LeastAttained(Affinity(), FLEET)
    assert [placed.priority for placed in arrive(dispatcher, 0)] == [0]
    # 2 s of prefill and 6 s of decode: three doublings of a second.
    answer(dispatcher, 0, 0, 3000, cached_tokens=1000, end_s=7.0)
    assert [placed.priority for placed in arrive(dispatcher, 0, 1)] == [3]
    assert [placed.priority for placed in arrive(dispatcher, 1)] == [0]
    dispatcher.task_ended(0, 9.0)
    assert [placed.priority for placed in arrive(dispatcher, 0, 2)] == [0]


def test_the_task_that_came_first_goes_first() -> None:
    dispatcher = FirstTaskFirst(Affinity())
    order = [arrive(dispatcher, task)[0].priority for task in (5, 3, 5, 9, 3)]
    assert order == [0, 1, 0, 2, 1]


def test_estimates_are_means_of_what_was() -> None:
    estimates = Estimates(1000.0)
    first = estimates.arrived(0, "a", "s0", 500, 0.0)
    assert (first.output_tokens, first.step_s, first.work_s, first.task_s) == (0, 0.5, 0.5, None)
    estimates.answered(0, "s0", prompt_tokens=500, output_tokens=101, decode_s=2.0)
    again = estimates.arrived(0, "a", "s0", 701, 5.0)
    # 100 new tokens, and 101 more at 0.02 s; one step is done, and so is one expected.
    assert again.step_s == pytest.approx(0.1 + 101 * 0.02)
    assert again.work_s == pytest.approx(again.step_s)
    for _ in range(3):
        estimates.answered(0, "s0", prompt_tokens=701, output_tokens=101, decode_s=2.0)
    estimates.task_ended(0, 30.0)
    other = estimates.arrived(1, "a", "s1", 0, 40.0)
    assert other.task_s == 30.0
    assert other.work_s == pytest.approx(4 * other.step_s)
    assert estimates.arrived(2, "b", "s2", 100, 40.0).task_s is None


@pytest.mark.parametrize("knows", [True, False])
def test_the_coordinator_is_told_whose_a_request_is(
    knows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[RequestArrived] = []
    apply = Coordinator.apply

    def watch(self: Coordinator, event: Any) -> Any:
        if isinstance(event, RequestArrived):
            told.append(event)
        return apply(self, event)

    monkeypatch.setattr(Coordinator, "apply", watch)
    dispatcher = Coordinated(FLEET, knows_deadlines=knows)
    assert len(arrive(dispatcher, 3)) == 1
    assert (told[0].tenant, told[0].task_id) == ("t1", "3")
    assert told[0].deadline_s == (50.0 if knows else None)
    assert told[0].step_s == pytest.approx(0.1)


def test_what_a_lost_worker_had_goes_to_another_one() -> None:
    dispatcher = Coordinated(FLEET)
    sent = [*arrive(dispatcher, 0), *arrive(dispatcher, 1), *arrive(dispatcher, 2)]
    assert {placed.worker for placed in sent} == {0, 1}
    lost = [placed.key for placed in sent if placed.worker == 0]
    arrivals = [Arrival(key, f"s{key[0]}", [], 100) for key in lost]
    again = dispatcher.lost(0, arrivals, loads, 1.0)
    assert sorted(placed.key for placed in again) == sorted(lost)
    assert {placed.worker for placed in again} == {1}
    dispatcher.back(0, 2.0)
    assert [placed.worker for placed in arrive(dispatcher, 3)] == [0]


# Pausing


def test_whole_tasks_are_let_in_while_they_fit() -> None:
    dispatcher = Pausing(FLEET)
    assert arrive(dispatcher, 0, tokens=600) == [Placed((0, 0), 0)]
    assert arrive(dispatcher, 1, tokens=600) == [Placed((1, 0), 1)]
    assert arrive(dispatcher, 2, tokens=600) == []
    # An answer frees nothing: the task lives on. Its end does.
    assert answer(dispatcher, 1, 0, 600) == []
    assert dispatcher.task_ended(1, 2.0) == [Placed((2, 0), 1)]


def test_the_smallest_task_whose_tool_runs_is_paused_for_one_that_grows() -> None:
    dispatcher = Pausing(FLEET)
    for task, tokens in ((0, 500), (1, 900), (2, 300), (3, 100)):
        assert len(arrive(dispatcher, task, tokens=tokens)) == 1
    # Worker 0 has the tasks 0, 2 and 3; 1 is alone at worker 1.
    answer(dispatcher, 0, 0, 500)
    answer(dispatcher, 2, 0, 300)
    answer(dispatcher, 3, 0, 100)
    assert arrive(dispatcher, 0, 1, tokens=640) == [Placed((0, 1), 0)]
    assert arrive(dispatcher, 2, 1, tokens=320) == [Placed((2, 1), 0)]  # It was not paused.
    assert arrive(dispatcher, 3, 1, tokens=120) == []  # It was.
    assert dispatcher.task_ended(0, 9.0) == [Placed((3, 1), 0)]


def test_a_task_that_outgrows_all_is_paused_unless_it_is_alone() -> None:
    dispatcher = Pausing(FLEET)
    for task in range(4):
        arrive(dispatcher, task, tokens=450)
    answer(dispatcher, 0, 0, 450)
    assert arrive(dispatcher, 0, 1, tokens=900) == []
    assert dispatcher.task_ended(2, 5.0) == [Placed((0, 1), 0)]
    answer(dispatcher, 0, 1, 900)
    assert arrive(dispatcher, 0, 2, tokens=5000) == [Placed((0, 2), 0)]


def test_tasks_of_a_lost_worker_are_let_in_elsewhere() -> None:
    dispatcher = Pausing(FLEET)
    for task in range(2):
        arrive(dispatcher, task, tokens=450)
    again = dispatcher.lost(0, [Arrival((0, 0), "s0", [], 450)], loads, 1.0)
    assert again == [Placed((0, 0), 1)]
    assert arrive(dispatcher, 2, tokens=450) == []
    assert dispatcher.back(0, 2.0) == [Placed((2, 0), 0)]
