"""What the session index tells the pause model: who read what again, when, and how much of it."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_backend.session_index import SessionIndex
from saga_core.pauses import PauseModel, Step, Wait
from saga_core.reuse import AGE_EDGES_S
from saga_core.settings import RetentionSettings
from saga_core.types import Pause


class Told:
    """An index, and the reads that its model hears of: kind, gap, share, session.

    Left out are waits that are given up as soon as they have begun.
    """

    def __init__(self, policy: str = "saga", num_blocks: int = 100, **settings: float) -> None:
        constants = RetentionSettings(**settings)  # type: ignore[arg-type]
        self.index = SessionIndex(num_blocks, policy, constants)
        self.model: PauseModel = self.index._model
        self.reads: list[tuple[Any, float, float, str | None]] = []
        self._read = self.model.read
        self.model.read = self._listen  # type: ignore[method-assign]

    def _listen(
        self, wait: Wait, *, now_s: float, share: float = 1.0, session_id: str | None = None
    ) -> None:
        if not wait.is_over:
            gap_s = now_s - wait.plain.since_s
            if gap_s or share:
                self.reads.append((wait.plain.cls[0], gap_s, share, session_id))
        self._read(wait, now_s=now_s, share=share, session_id=session_id)

    def serve(
        self,
        session_id: str | None,
        blocks: list[int],
        *,
        at_s: float,
        known_blocks: int | None = None,
        run_s: float = 0.0,
        ending: object = None,
    ) -> None:
        """A request arrives at ``at_s``, starts at once and ends ``run_s`` later."""
        if session_id is not None:
            self.index.resume(session_id, now_s=at_s)
            self.index.started(session_id, now_s=at_s, known_blocks=known_blocks)
        step = Step(16 * len(blocks), run_s, ending)  # type: ignore[arg-type]
        self.index.record(session_id, blocks, now_s=at_s + run_s, step=step)
        self.index.check_integrity()

    def victims(self, count: int, now_s: float) -> list[int]:
        chosen = self.index.victims(count, now_s=now_s, is_idle=lambda block: True)
        self.index.check_integrity()
        return chosen


def test_a_pause_lasts_from_the_end_of_a_step_to_the_arrival_of_the_next() -> None:
    told = Told()
    told.serve("a", [0, 1], at_s=0.0, run_s=4.0)
    told.index.resume("a", now_s=10.0)
    told.index.started("a", now_s=25.0, known_blocks=2)  # It was queued for long.
    assert told.reads == [("paused", 6.0, 1.0, "a")]


@pytest.mark.parametrize(
    ("known_blocks", "share"), [(0, 0.0), (1, 0.25), (4, 1.0), (9, 1.0), (None, 1.0)]
)
def test_the_overlap_is_the_share_of_the_last_chain_that_the_new_prompt_contains(
    known_blocks: int | None, share: float
) -> None:
    told = Told()
    told.serve("a", [0, 1, 2, 3], at_s=0.0)
    told.serve("a", [0, 8], at_s=5.0, known_blocks=known_blocks)
    assert told.reads == [("paused", 5.0, share, "a")]


def test_a_session_too_short_for_a_block_has_returned_all_the_same() -> None:
    told = Told()
    told.serve("a", [], at_s=0.0)
    told.serve("a", [0], at_s=5.0, known_blocks=0)
    assert told.reads == [("paused", 5.0, 1.0, "a")]


def test_a_return_is_learned_from_when_all_blocks_are_gone() -> None:
    told = Told()
    told.serve("a", [0, 1], at_s=0.0)
    assert told.victims(2, 1.0) == [1, 0]
    told.serve("a", [5, 6], at_s=3.0, known_blocks=1)
    assert told.reads == [("paused", 3.0, 0.5, "a")]


def test_a_session_that_comes_back_after_its_end_is_read_like_any_other() -> None:
    told = Told()
    told.serve("a", [0, 1], at_s=0.0)
    told.index.end("a", now_s=1.0)
    told.serve("a", [0, 1], at_s=3.0, known_blocks=2)
    assert told.reads == [("paused", 3.0, 1.0, "a")]


def test_a_request_that_is_given_up_in_the_queue_does_not_end_the_pause() -> None:
    told = Told()
    told.serve("a", [0, 1], at_s=0.0)
    told.index.resume("a", now_s=2.0)
    told.index.record("a", [], now_s=3.0)
    told.index.check_integrity()
    assert told.reads == []
    told.serve("a", [0, 1], at_s=9.0, known_blocks=2)
    assert told.reads == [("paused", 9.0, 1.0, "a")]


def test_with_two_in_the_queue_the_pause_ends_with_the_one_that_starts() -> None:
    told = Told()
    told.serve("a", [0, 1], at_s=0.0)
    told.index.resume("a", now_s=2.0)
    told.index.resume("a", now_s=4.0)
    told.index.record("a", [], now_s=5.0)
    told.index.check_integrity()
    told.index.started("a", now_s=6.0, known_blocks=2)
    assert told.reads == [("paused", 2.0, 1.0, "a")]


def test_a_step_that_nobody_announced_ends_the_pause_before_it() -> None:
    told = Told()
    told.index.record("a", [0, 1], now_s=0.0)
    told.index.record("a", [0, 2, 3], now_s=7.0)
    assert told.reads == [("paused", 7.0, 0.5, "a")]
    told.index.resume("a", now_s=9.0)
    told.index.record("a", [0, 2, 3, 4], now_s=20.0)  # Arrived, but nobody said that it started.
    assert told.reads[1:] == [("paused", 2.0, 1.0, "a")]


def test_running_and_preempted_requests_teach_nothing() -> None:
    told = Told()
    told.serve("a", [0, 1], at_s=0.0)
    told.index.resume("a", now_s=1.0)
    told.index.started("a", now_s=1.0)
    del told.reads[:]
    told.index.record("a", [0, 1], now_s=2.0, resuming=True)
    told.index.started("a", now_s=3.0)
    told.index.record("a", [0, 1, 2], now_s=4.0)
    assert told.reads == []
    watched = [wait for wait in told.model.waits() if not wait.is_over]
    assert [wait.plain.cls[0] for wait in watched] == ["paused"]


def test_what_a_session_leaves_is_superseded_until_it_is_taken_up_again() -> None:
    told = Told()
    told.serve("a", [0, 1, 2, 3], at_s=0.0)
    told.serve("a", [0, 8], at_s=1.0, known_blocks=1)
    told.serve("other", [0, 9], at_s=2.0)
    del told.reads[:]
    told.serve("a", [0, 1, 2, 7], at_s=6.0, known_blocks=3)
    # Of 1, 2, 3 two are back; what is left waits on.
    assert ("superseded", 5.0, pytest.approx(2 / 3), None) in told.reads
    told.serve("a", [0, 1, 2, 3], at_s=8.0, known_blocks=4)
    assert ("superseded", 2.0, pytest.approx(1 / 3), None) in told.reads


def test_a_plain_request_that_goes_on_from_another_reads_it() -> None:
    told = Told()
    told.serve(None, [0, 1, 2, 3], at_s=0.0)
    told.serve(None, [0, 1, 8], at_s=5.0, run_s=2.0)
    assert told.reads == [("plain", 5.0, 0.5, None)]
    told.serve(None, [2, 3], at_s=9.0)  # What was left of the first waits since the second.
    assert told.reads[1:] == [("plain", 2.0, 0.5, None)]


def test_a_session_reads_plain_runs_with_its_first_request_only() -> None:
    told = Told()
    told.serve(None, [0, 1], at_s=0.0)
    told.serve("a", [0, 1, 2], at_s=4.0)
    assert told.reads == [("plain", 4.0, 1.0, None)]
    del told.reads[:]
    told.serve("a", [0, 1, 2, 3], at_s=6.0, known_blocks=3)
    assert told.reads == [("paused", 2.0, 1.0, "a")]


@pytest.mark.parametrize("is_chosen", [True, False])
def test_a_plain_run_that_is_lost_was_not_read_until_then(is_chosen: bool) -> None:
    told = Told()
    told.serve(None, [0, 1], at_s=0.0)
    if is_chosen:
        assert told.victims(2, 5.0) == [1, 0]
    for block in (0, 1):
        told.index.evicted(block, now_s=5.0)
    assert told.reads == [("plain", 5.0, 0.0, None)]
    assert told.model._hazards._tables["plain",].reads == [0.0] * len(AGE_EDGES_S)
    assert sum(told.model._hazards._tables["plain",].risk_s) == 5.0


def test_a_prefix_of_several_sessions_becomes_a_run_of_its_own() -> None:
    told = Told("prefix-lru")
    told.serve("a", [0, 1, 2], at_s=0.0)
    assert told.index.counts().runs == 1
    told.serve("b", [0, 1, 3], at_s=5.0)
    assert told.index.counts().runs == 3
    assert told.reads == []
    told.serve("b", [0, 1, 3, 4], at_s=6.0, known_blocks=3)
    told.serve("c", [0, 1, 5], at_s=9.0)
    assert told.reads == [("paused", 1.0, 1.0, "b"), ("shared", 4.0, 1.0, None)]
    for session_id in ("a", "b", "c"):
        told.index.end(session_id, now_s=10.0)
    assert told.victims(9, 10.0) == [2, 4, 3, 5, 1, 0]


def test_a_shared_prefix_outlives_its_sessions() -> None:
    told = Told()
    for number in range(6):
        told.serve(f"s{number}", [0, 1, 10 + number], at_s=float(number))
        told.index.end(f"s{number}", now_s=number + 0.5)
    assert set(told.victims(6, 60.0)) == set(range(10, 16))
    assert told.victims(9, 60.0) == [1, 0]


def test_a_longer_shared_prefix_takes_the_place_of_a_shorter_one() -> None:
    told = Told("prefix-lru")
    told.serve("a", [0, 1, 2], at_s=0.0)
    told.serve("b", [0, 3], at_s=1.0)
    told.serve("c", [0, 1, 4], at_s=2.0)
    assert [held.kind for held in told.index._held.values()].count("shared") == 1
    assert told.reads == [("shared", 1.0, 1.0, None)]


@pytest.mark.parametrize(
    ("pause", "view"),
    [
        (Pause(0.5, 1.0, "bash"), "tool"),
        (Pause(0.5, 1.0, "bash", 3.0), "forecast"),
        (Pause(0.5, 1.0), None),
    ],
)
def test_what_a_notice_says_is_known_of_the_wait(pause: Pause, view: str | None) -> None:
    told = Told()
    told.serve("a", [0], at_s=0.0)
    told.index.pause("a", pause, now_s=1.0)
    hint = told.index._sessions["a"].wait.hint
    assert (hint and hint.cls[0]) == view
    told.index.expect("a", now_s=2.0)
    hint = told.index._sessions["a"].wait.hint
    assert hint is not None
    assert (hint.cls, hint.since_s) == (("announced",), 2.0)
    told.index.end("a", now_s=3.0)
    hint = told.index._sessions["a"].wait.hint
    assert hint is not None
    assert hint.cls == ("ended",)


@pytest.mark.parametrize("says_end", [True, False])
def test_a_notice_changes_the_place_at_once(says_end: bool) -> None:
    told = Told()
    told.serve("a", [0], at_s=0.0)
    told.serve("b", [1], at_s=0.0)
    if says_end:
        told.index.end("b", now_s=0.0)
    else:
        told.index.pause("b", Pause(1.0, 9e3, "bash", pause_p50_s=3e3), now_s=0.0)
    assert told.victims(2, 0.0) == [1, 0]


def test_to_session_lru_what_a_session_leaves_is_as_recent_as_its_next_request() -> None:
    told = Told("session-lru")
    told.serve("a", [0, 1], at_s=0.0)
    told.serve("b", [4], at_s=1.0)
    told.serve("a", [0, 2], at_s=2.0)
    assert told.victims(4, 3.0)[0] == 4


def test_saga_keeps_the_kind_of_step_after_which_sessions_return() -> None:
    told = Told()
    for number in range(40):
        at_s = 10.0 * number
        told.serve("agent", [0, 1], at_s=at_s, known_blocks=2, ending=(7, 8))
        told.serve(f"visitor{number}", [10 + number], at_s=at_s + 8.0, ending=(1, 2))
    # The agent, whose pause began before the last visit, goes after all visitors.
    assert set(told.victims(40, 399.0)) == set(range(10, 50))
    assert told.victims(2, 399.0) == [1, 0]


def test_sessions_over_the_bound_and_a_cleared_cache_teach_nothing() -> None:
    told = Told(max_sessions=2)
    for number in range(4):
        told.serve(f"s{number}", [number], at_s=10.0 * number)
    watched = [wait for wait in told.model.waits() if not wait.is_over]
    assert sorted(wait.plain.cls[0] for wait in watched) == ["paused", "paused", "plain", "plain"]
    told.index.clear()
    assert all(wait.is_over for wait in told.model.waits())
    assert told.reads == []
