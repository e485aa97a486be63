from __future__ import annotations

from collections import Counter

import pytest

from saga_core.notices import EndNotice, PauseNotice, ResumeNotice
from saga_sim.cluster.hints import Hints, Teller, Told
from saga_sim.cluster.load import AgentCall, ClusterLoad, LoadOptions, make_load


@pytest.fixture(scope="module")
def load() -> ClusterLoad:
    return make_load(LoadOptions("web", 2, 24, scale=8, block_tokens=16))


def told(load: ClusterLoad, hints: Hints, **tells: bool) -> list[tuple[AgentCall, Told]]:
    teller = Teller(load, hints, **{"tells_tools": True, "tells_ends": True, **tells})
    return [(call, teller.answered(call, 0.0)) for task in load.tasks for call in task]


def test_true_hints_name_the_tool_and_the_end(load: ClusterLoad) -> None:
    for call, (notices, is_over) in told(load, Hints.TRUE):
        assert is_over == call.is_last
        (notice,) = notices
        if call.is_last:
            assert notice == EndNotice(call.session_id)
        else:
            assert isinstance(notice, PauseNotice)
            assert (notice.pause.tool_name, notice.pause.p_reuse) == (call.tool, 1.0)


def test_what_is_not_to_be_told_is_not(load: ClusterLoad) -> None:
    for hints in Hints:
        silent = told(load, hints, tells_tools=False, tells_ends=False)
        assert not any(notices for _, (notices, _) in silent)
    ends = told(load, Hints.TRUE, tells_tools=False)
    assert all(bool(notices) == call.is_last for call, (notices, _) in ends)


def test_pauses_are_learned_from_those_before(load: ClusterLoad) -> None:
    teller = Teller(load, Hints.TRUE, tells_tools=True, tells_ends=True)
    call = load.tasks[0][0]

    def p95_s() -> float:
        (notice,) = teller.answered(call, 0.0).notices
        assert isinstance(notice, PauseNotice)
        return notice.pause.pause_p95_s

    before_s = p95_s()
    for _ in range(200):
        teller.answered(call, 0.0)
        teller.returned(call.session_id, 300.0)
    assert p95_s() > 2 * before_s


def test_random_hints_say_anything_of_anybody(load: ClusterLoad) -> None:
    found = told(load, Hints.RANDOM)
    ends = [call for call, (notices, _) in found if isinstance(notices[0], EndNotice)]
    assert len(ends) == pytest.approx(len(load.tasks), rel=0.5)
    assert any(not call.is_last for call in ends)
    pauses = [
        (call, notices[0].pause)
        for call, (notices, _) in found
        if isinstance(notices[0], PauseNotice)
    ]
    assert len({round(pause.p_reuse, 1) for _, pause in pauses}) > 8
    right = sum(call.tool == pause.tool_name for call, pause in pauses)
    assert right < len(pauses) / 2
    assert all(is_over == isinstance(notices[0], EndNotice) for _, (notices, is_over) in found)


def test_adversarial_hints_say_the_contrary(load: ClusterLoad) -> None:
    kinds: Counter[str] = Counter()
    for call, (notices, is_over) in told(load, Hints.ADVERSARIAL):
        if call.is_last:
            assert not is_over
            assert [type(notice) for notice in notices] == [PauseNotice, ResumeNotice]
            continue
        (notice,) = notices
        kinds[type(notice).__name__] += 1
        assert is_over == isinstance(notice, EndNotice)
        if isinstance(notice, PauseNotice):
            assert notice.pause.tool_name != call.tool
            assert notice.pause.p_reuse == 0.0
    assert min(kinds["EndNotice"], kinds["PauseNotice"]) > 100


def test_a_router_may_take_no_hint_for_an_end(load: ClusterLoad) -> None:
    for call, (_, is_over) in told(load, Hints.ADVERSARIAL, keeps_homes=True):
        assert is_over == call.is_last


def test_the_seed_decides_what_is_said(load: ClusterLoad) -> None:
    assert told(load, Hints.RANDOM) == told(load, Hints.RANDOM)
