"""An end that comes early, and a session whose requests always overlap."""

from __future__ import annotations

import pytest

from gpu_backend.session_index import SessionIndex
from saga_core.settings import RetentionSettings
from saga_core.types import Pause


def _index(policy: str = "wa-lru-ttl") -> SessionIndex:
    return SessionIndex(200, policy, RetentionSettings())


def _victims(index: SessionIndex, count: int, now_s: float) -> list[int]:
    chosen = index.victims(count, now_s=now_s, is_idle=lambda block: True)
    index.check_integrity()
    return chosen


def _other(index: SessionIndex) -> None:
    index.record("other", [100, 101], now_s=0.0)
    index.pause("other", Pause(0.99, 60.0), now_s=0.0)


@pytest.mark.parametrize("policy", ["wa-lru-ttl", "saga"])
def test_an_end_before_the_abort_of_a_waiting_request_still_ends_the_session(policy: str) -> None:
    index = _index(policy)
    _other(index)
    index.record("agent", [0, 1], now_s=1.0)
    index.resume("agent", now_s=2.0)
    index.end("agent", now_s=2.1)
    index.record("agent", [], now_s=2.2)
    assert _victims(index, 2, 2.3) == [1, 0]


@pytest.mark.parametrize("policy", ["wa-lru-ttl", "saga"])
def test_an_end_while_the_last_request_runs_ends_the_session(policy: str) -> None:
    index = _index(policy)
    _other(index)
    index.record("agent", [0, 1], now_s=1.0)
    index.resume("agent", now_s=2.0)
    index.started("agent", now_s=2.0)
    index.end("agent", now_s=2.1)
    index.record("agent", [0, 1, 2], now_s=2.2)
    assert _victims(index, 3, 2.3) == [2, 1, 0]


@pytest.mark.parametrize("policy", ["wa-lru-ttl", "saga"])
def test_an_end_while_the_only_request_runs_ends_the_session(policy: str) -> None:
    index = _index(policy)
    _other(index)
    index.resume("agent", now_s=2.0)
    index.started("agent", now_s=2.0)
    index.end("agent", now_s=2.1)
    index.record("agent", [0, 1, 2], now_s=2.2)
    assert _victims(index, 3, 2.3) == [2, 1, 0]


@pytest.mark.parametrize("policy", ["wa-lru-ttl", "saga"])
def test_a_session_whose_requests_always_overlap_does_not_keep_all_it_ever_had(policy: str) -> None:
    """As when many users are given one session id: none of its requests is waiting."""
    index = _index(policy)
    index.resume("busy", now_s=0.0)
    index.started("busy", now_s=0.0)
    for number in range(16):
        now_s = 1000.0 * number
        index.resume("busy", now_s=now_s)
        index.started("busy", now_s=now_s)
        index.record("busy", range(5 * number, 5 * number + 5), now_s=now_s + 1.0)
    index.record("agent", [100, 101], now_s=15_002.0)
    index.pause("agent", Pause(0.99, 60.0), now_s=15_002.0)
    assert not {100, 101} & set(_victims(index, 40, 15_003.0))
