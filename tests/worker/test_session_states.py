"""What a session's overlapping, compacted and lost requests do to its blocks."""

from __future__ import annotations

from gpu_backend.session_index import SessionIndex
from saga_core.settings import RetentionSettings


def _index(num_blocks: int = 100, **settings: float) -> SessionIndex:
    constants = RetentionSettings(**settings)  # type: ignore[arg-type]
    return SessionIndex(num_blocks, "wa-lru-ttl", constants)


def _serve(index: SessionIndex, session_id: str, blocks: list[int], now_s: float) -> None:
    index.resume(session_id, now_s=now_s)
    index.started(session_id, now_s=now_s)
    index.record(session_id, blocks, now_s=now_s)
    index.check_integrity()


def _victims(index: SessionIndex, count: int, now_s: float) -> list[int]:
    chosen = index.victims(count, now_s=now_s, is_idle=lambda block: True)
    index.check_integrity()
    return chosen


def test_what_a_compacted_prompt_left_behind_goes_before_a_live_pause() -> None:
    index = _index()
    _serve(index, "compacted", list(range(40)), 0.0)
    _serve(index, "paused", list(range(50, 60)), 1.0)
    index.resume("compacted", now_s=2.0)
    index.started("compacted", now_s=2.0)  # Its new prompt shares nothing with the old one.
    assert _victims(index, 3, 2.0) == [39, 38, 37]


def test_a_waiting_requests_blocks_go_last() -> None:
    index = _index()
    _serve(index, "waiting", [0, 1], 0.0)
    _serve(index, "paused", [2, 3], 0.0)
    index.resume("waiting", now_s=1.0)
    assert _victims(index, 3, 1.0) == [3, 2, 1]


def test_a_branch_that_ends_leaves_its_siblings_blocks_alone() -> None:
    index = _index()
    for _ in range(2):
        index.resume("agent", now_s=0.0)
    index.record("agent", [0, 1, 2], now_s=1.0)
    index.record("agent", [0, 1, 7], now_s=2.0)
    index.check_integrity()
    assert index.counts().session_blocks == 4
    assert _victims(index, 2, 3.0) == [2, 7]  # The branches go before what they share.


def test_an_abort_does_not_demote_the_retry_that_waits() -> None:
    index = _index()
    _serve(index, "agent", [0, 1], 0.0)
    _serve(index, "other", [2, 3], 0.0)
    index.resume("agent", now_s=1.0)
    index.resume("agent", now_s=1.5)
    index.record("agent", [], now_s=2.0)  # The first was aborted in the queue.
    index.check_integrity()
    assert set(_victims(index, 2, 2.0)) == {2, 3}


def test_sessions_that_did_not_return_within_two_hours_teach_that_some_do_not() -> None:
    index = _index(tau_max_s=1.0)
    for number in range(30):
        _serve(index, f"gone{number}", [number], float(number))
        assert _victims(index, 1, float(number)) == [number]
    for number in range(8):  # Each event looks at some of those that wait.
        _serve(index, "clock", [40], 7300.0 + number)
    _serve(index, "new", [50], 7400.0)
    index.record(None, [60], now_s=7401.0)
    # Its chance to return has sunk under the threshold: not protected, so by its score.
    assert _victims(index, 3, 7401.0) == [40, 50, 60]


def test_a_lost_session_is_still_awaited() -> None:
    index = _index(ttl_max_s=1e6)
    for number in range(30):
        _serve(index, f"gone{number}", [number], float(number))
        assert _victims(index, 1, float(number)) == [number]
    _serve(index, "new", [50], 40.0)
    index.record(None, [60], now_s=41.0)
    assert _victims(index, 2, 41.0) == [60, 50]


def test_plain_runs_over_one_prefix_do_not_pile_up_entries() -> None:
    index = _index(2_000)
    prefix = list(range(500))
    for number in range(1_400):
        index.record(None, [*prefix, 500 + number], now_s=float(number))
    index.check_integrity()  # Holds that a run has at most twice its live entries, and some slack.
    entries = sum(len(held.blocks) for held in index._held.values())
    assert entries <= 2 * 2_000 + 16 * 1_400


def test_sessions_over_one_prefix_are_bounded_in_entries() -> None:
    index = _index(100)
    prefix = list(range(90))
    for number in range(300):
        _serve(index, f"s{number}", prefix, float(number))
    assert index.counts().sessions <= 64 * 100 // 90
    assert index.counts().session_blocks == 90
