"""What host memory keeps of what the GPU tier gives up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_backend.host_tier import HostTier
from saga_core.pauses import PauseModel
from saga_core.policies import make_policy
from saga_core.retention import Run, RunState
from saga_core.settings import RetentionSettings


def _tier(num_blocks: int) -> HostTier:
    return HostTier(num_blocks, make_policy("prefix-lru", RetentionSettings(), PauseModel()))


def _run(run_id: int, used_s: float | None = None, state: RunState = RunState.PAUSED) -> Run:
    return Run(run_id, state, float(run_id) if used_s is None else used_s)


def _insert(tier: HostTier, keys: str, holder: object, run: Run) -> None:
    for key in keys:
        tier.insert(key.encode(), holder, run, now_s=100.0, pressure=0.0)
    tier.check_integrity()


def _evict(tier: HostTier, count: int, pinned: str = "") -> str | None:
    keys = tier.evict(count, lambda key: key.decode() not in pinned, now_s=100.0, pressure=0.0)
    tier.check_integrity()
    return None if keys is None else b"".join(keys).decode()


def test_the_run_that_is_worth_least_goes_first_from_its_tail() -> None:
    tier = _tier(9)
    _insert(tier, "cba", "young", _run(2))
    _insert(tier, "zyx", "old", _run(1))
    assert _evict(tier, 4) == "zyxc"
    assert _evict(tier, 2) == "ba"
    assert len(tier) == 0


def test_a_block_is_admitted_only_if_it_is_worth_more_than_what_it_replaces() -> None:
    tier = _tier(2)
    assert tier.admits(_run(1), now_s=100.0, pressure=0.0)
    _insert(tier, "ba", "middle", _run(5))
    assert not tier.admits(_run(4), now_s=100.0, pressure=0.0)
    assert tier.admits(_run(6), now_s=100.0, pressure=0.0)
    assert tier.refused_blocks == 1


def test_nothing_is_kept_of_a_session_that_is_over() -> None:
    assert not _tier(2).admits(_run(1, state=RunState.ENDED), now_s=100.0, pressure=0.0)


def test_what_is_back_on_the_gpu_goes_first_and_is_kept_until_then() -> None:
    tier = _tier(4)
    _insert(tier, "ba", "session", _run(9))
    _insert(tier, "zy", "other", _run(1))
    tier.used("session", [b"a", b"b", b"not here"])
    tier.check_integrity()
    assert tier.held_by("session") == 0
    assert b"a" in tier
    assert tier.admits(_run(0), now_s=100.0, pressure=0.0), "copies give way to anything"
    assert _evict(tier, 3) == "baz"


def test_what_leaves_the_gpu_again_needs_no_second_copy() -> None:
    tier = _tier(4)
    _insert(tier, "ba", "session", _run(1))
    tier.used("session", [b"a", b"b"])
    _insert(tier, "b", "session", _run(9))
    assert len(tier) == 2
    assert tier.held_by("session") == 1
    assert _evict(tier, 2) == "ab"


def test_a_branch_that_its_session_has_left_goes_first() -> None:
    tier = _tier(4)
    _insert(tier, "ba", "session", _run(9))
    _insert(tier, "y", "other", _run(1))
    tier.used("session", [b"new"])
    assert _evict(tier, 2) == "ba"


def test_a_rank_of_the_gpu_tier_holds_here_too() -> None:
    tier = _tier(4)
    _insert(tier, "a", "session", _run(1))
    _insert(tier, "y", "other", _run(2))
    tier.ranked("session", _run(7), now_s=100.0, pressure=0.0)
    tier.ranked("stranger", _run(8), now_s=100.0, pressure=0.0)
    tier.check_integrity()
    assert _evict(tier, 1) == "y"


def test_pinned_blocks_stay_and_too_many_wanted_change_nothing() -> None:
    tier = _tier(4)
    _insert(tier, "ba", "session", _run(1))
    _insert(tier, "y", "other", _run(2))
    assert _evict(tier, 3, pinned="a") is None
    assert len(tier) == 3
    assert _evict(tier, 2, pinned="a") == "by"
    assert _evict(tier, 1) == "a"


def test_clear_forgets_all() -> None:
    tier = _tier(4)
    _insert(tier, "ba", "session", _run(1))
    tier.used("session", [b"a"])
    tier.clear()
    tier.check_integrity()
    assert len(tier) == 0
    assert _evict(tier, 1) is None


_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "used", "ranked", "evict", "remove"]),
        st.integers(0, 4),
        st.lists(st.integers(0, 30), max_size=6, unique=True),
    ),
    max_size=60,
)


@pytest.mark.parametrize("policy", ["prefix-lru", "saga", "gdsf"])
@settings(max_examples=60, deadline=None)
@given(events=_EVENTS)
def test_any_order_of_events_leaves_it_whole(
    policy: str, events: list[tuple[str, int, list[int]]]
) -> None:
    model = PauseModel()
    tier = HostTier(12, make_policy(policy, RetentionSettings(), model))
    for number, (kind, holder, blocks) in enumerate(events):
        now_s = float(number)
        wait = model.left("plain", now_s=now_s)
        run = Run(number, RunState.PAUSED, now_s, wait=wait)
        keys = [bytes([block]) for block in blocks]
        if kind == "insert":
            for key in keys:
                if tier.admits(run, now_s=now_s, pressure=0.5) and len(tier) < tier.num_blocks:
                    tier.insert(key, holder, run, now_s=now_s, pressure=0.5)
        elif kind == "used":
            tier.used(holder, keys)
        elif kind == "ranked":
            tier.ranked(holder, run, now_s=now_s, pressure=0.5)
        elif kind == "remove":
            for key in keys:
                if key in tier:
                    tier.remove(key)
        else:
            before = len(tier)
            evicted = tier.evict(len(keys), lambda key: key[0] % 3 > 0, now_s=now_s, pressure=0.5)
            assert len(tier) == before - len(evicted or ())
            assert len(set(evicted or ())) == len(evicted or ())
        tier.check_integrity()
        assert len(tier) <= tier.num_blocks
