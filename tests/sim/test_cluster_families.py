from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from saga_core.errors import SettingsError
from saga_sim.cluster.families import (
    PARETO_LEAST_S,
    PARETO_MOST_S,
    TenantKind,
    families_in,
    tenants_in,
    with_pareto,
)
from saga_sim.cluster.load import LoadOptions, make_load
from saga_sim.workload import end_s_of

KINDS = (TenantKind("heavy", 2, 40), TenantKind("light", 3, 10))


def test_tenants_have_tasks_of_their_steps_and_as_many_alive() -> None:
    families = tenants_in("swe", KINDS, 35, 7, 64)
    assert {(len(each.calls), each.owner.kind) for each in families} == {
        (40, "heavy"),
        (10, "light"),
    }
    # 2 tenants of 40 steps and 3 of 10, as many steps each: 1 task for 4.
    assert Counter(each.owner.tenant for each in families) == {
        "heavy-1": 2,
        "heavy-2": 2,
        "light-1": 10,
        "light-2": 10,
        "light-3": 10,
    }
    sessions = [each.calls[0].session_id for each in families]
    assert len(set(sessions)) == len(sessions)
    assert all(each.calls[-1].tool is None for each in families)
    assert all(call.tool is not None for each in families for call in each.calls[:-1])


def test_tenants_are_the_same_for_a_seed() -> None:
    assert tenants_in("swe", KINDS, 20, 1, 64) == tenants_in("swe", KINDS, 20, 1, 64)
    assert tenants_in("swe", KINDS, 20, 1, 64) != tenants_in("swe", KINDS, 20, 2, 64)


def test_profiles_take_turns_and_share_nothing() -> None:
    families = families_in("swe+web+chat", 9, 0, 64)
    assert [each.owner.kind for each in families[:4]] == ["swe", "web", "chat", "swe"]
    load = make_load(LoadOptions("swe+web", 2, 12, 12, scale=8, block_tokens=16))
    assert [owner.kind for owner in load.owners] == ["swe", "web"] * 6
    swe, web = (
        {block for task in load.tasks[first::2] for call in task for block in call.hashes}
        for first in (0, 1)
    )
    assert not swe & web


def test_heavy_tails_keep_the_tools_and_change_their_time() -> None:
    family = families_in("swe", 4, 0, 64)[0]
    heavy = with_pareto(family, 1.1, random.Random(0))
    assert [call.tool for call in heavy.calls] == [call.tool for call in family.calls]
    pauses_s = [b.arrival_s - end_s_of(a) for a, b in pairwise(heavy.calls)]
    assert min(pauses_s) >= PARETO_LEAST_S - 1e-9
    assert max(pauses_s) <= PARETO_MOST_S + 1e-9

    def above(alpha: float) -> float:
        rng = random.Random(1)
        many = [with_pareto(each, alpha, rng) for each in families_in("swe", 40, 0, 64)]
        gaps_s = [b.arrival_s - end_s_of(a) for one in many for a, b in pairwise(one.calls)]
        return sum(gap_s > 10.0 for gap_s in gaps_s) / len(gaps_s)

    assert above(1.1) == pytest.approx(10**-1.1, rel=0.2)
    assert above(2.0) == pytest.approx(10**-2.0, rel=0.4)


def test_a_person_thinks_as_long_as_before() -> None:
    family = families_in("chat", 4, 0, 64)[0]
    heavy = with_pareto(family, 1.1, random.Random(0))
    for before, after in zip(family.calls, heavy.calls, strict=True):
        assert after.arrival_s == pytest.approx(before.arrival_s)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(SettingsError, match="at least 1"):
        TenantKind("none", 0, 1)
    with pytest.raises(SettingsError, match="each once"):
        families_in("swe+swe", 4, 0, 64)
    with pytest.raises(SettingsError, match="too few tasks"):
        tenants_in("chat", (TenantKind("long", 1, 1_000),), 1, 0, 64)
    with pytest.raises(SettingsError, match="branch"):
        with_pareto(families_in("tree", 1, 0, 64)[0], 1.1, random.Random(0))


def test_open_loops_have_so_many_alive_on_average() -> None:
    for arrivals in ("poisson", "bursts"):
        load = make_load(
            LoadOptions("web", 2, 200, 20, scale=8, block_tokens=16, arrivals=arrivals)
        )
        assert len(load.starts_s) == 200
        assert list(load.starts_s) == sorted(load.starts_s)
        pauses_s = sum(call.pause_s for task in load.tasks for call in task)
        assert load.starts_s[-1] > pauses_s / 20  # Lives are longer than their pauses.
    gaps_s = [b - a for a, b in pairwise(load.starts_s)]
    assert max(gaps_s) > 20 * sum(gaps_s) / len(gaps_s)  # Nobody comes between two bursts.
