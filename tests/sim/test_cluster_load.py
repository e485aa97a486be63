from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from saga_core.errors import SettingsError
from saga_sim.cluster.load import AgentCall, ClusterLoad, LoadOptions, make_load

SIZE = 16


def load_of(profile: str, **options: Any) -> ClusterLoad:
    given: dict[str, Any] = {"tasks": 24, "workers": 2, "scale": 8, "block_tokens": SIZE}
    return make_load(LoadOptions(profile, **{**given, **options}))


def common(one: AgentCall, other: AgentCall) -> int:
    same = (a == b for a, b in zip(one.hashes, other.hashes, strict=False))
    return next((n for n, is_same in enumerate(same) if not is_same), len(one.hashes))


@pytest.mark.parametrize("profile", ["swe", "web", "chat", "tree"])
def test_a_hash_stands_for_all_of_its_prefix(profile: str) -> None:
    load = load_of(profile)
    before: dict[bytes, bytes | None] = {}
    for task in load.tasks:
        for call in task:
            assert len(call.hashes) == (call.input_tokens + call.output_tokens) // SIZE
            assert len(set(call.hashes)) == len(call.hashes)
            assert call.input_tokens + call.output_tokens <= load.max_tokens
            for above, block in pairwise([None, *call.hashes]):
                assert block is not None
                assert before.setdefault(block, above) == above


def test_a_prompt_of_swe_continues_all_of_the_one_before_with_its_answer() -> None:
    for task in load_of("swe").tasks:
        for before, after in pairwise(task):
            assert common(before, after) == len(before.hashes)


def test_half_of_the_prompts_of_web_drop_an_observation() -> None:
    pairs = [pair for task in load_of("web").tasks for pair in pairwise(task)]
    whole = sum(common(before, after) == len(before.hashes) for before, after in pairs)
    assert 0.4 < whole / len(pairs) < 0.8
    for before, after in pairs:
        # The system prompt, at least, stays.
        assert common(before, after) >= 2_048 // 8 // SIZE - 1


def test_tasks_share_their_system_prompt_and_nothing_else() -> None:
    first, second = (task[0] for task in load_of("swe").tasks[:2])
    assert common(first, second) == 1_536 // 8 // SIZE
    assert not set(first.hashes[12:]).intersection(second.hashes)


def test_the_pools_are_fitted_to_the_pressure() -> None:
    load = load_of("swe", pressure=2.0)
    pool_tokens = 2 * load.blocks_per_worker * SIZE
    assert load.live_tasks == 12
    assert load.live_tasks * load.footprint_tokens / pool_tokens == pytest.approx(2.0, rel=0.01)
    assert load.blocks_per_worker * SIZE > load.max_tokens


def test_the_seed_decides_all() -> None:
    assert load_of("web", seed=1) == load_of("web", seed=1)
    assert load_of("web", seed=1) != load_of("web", seed=2)


def test_the_last_call_of_each_session_is_marked() -> None:
    for task in load_of("tree").tasks:
        last = {call.session_id: call for call in task}
        assert all(call.is_last == (last[call.session_id] is call) for call in task)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"workers": 0}, "workers=0"),
        ({"live_tasks": 0}, "live_tasks=0"),
        ({"pressure": 0.0}, "pressure=0"),
        ({"pressure": float("nan")}, "pressure=nan"),
        ({"profile": "none"}, "unknown profile"),
        ({"live_tasks": 2}, "ask for more live tasks"),
    ],
)
def test_loads_that_cannot_be_are_refused(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        load_of(**{"profile": "swe", **wrong})
