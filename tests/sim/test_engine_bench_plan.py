"""A trace becomes a load: what each call waits for and continues, and the pressure that is met."""

from __future__ import annotations

from dataclasses import replace

import pytest

from saga_core.errors import SettingsError
from saga_sim.engine_bench import LoadOptions, make_load
from saga_sim.engine_bench.tasks import common_blocks, plan_task, prompt_of
from saga_sim.profiles import make_profile
from saga_sim.traces import Call, Trace
from saga_sim.workload import families_of

BLOCK = 64
SCALE = 16
UNIT = BLOCK // SCALE
SESSIONS = {"swe": 40, "web": 60, "chat": 120, "tree": 800}


def call(session_id, arrival_s, blocks, output_tokens=160, duration_s=1.0, parent=None, tail=0):
    return Call(
        session_id,
        arrival_s,
        sum(map(len, blocks)) * BLOCK + tail,
        output_tokens,
        tuple(blocks),
        duration_s,
        parent_session_id=parent,
    )


def plan(*calls):
    return plan_task(sorted(calls, key=lambda c: c.arrival_s), SCALE, SCALE, UNIT).calls


def trace_of(*sessions):
    return Trace("script", BLOCK, sessions)


def test_a_call_continues_the_prompt_and_the_answer_before_it_after_its_pause():
    first, second = plan(call("a", 0.0, [range(10)]), call("a", 17.0, [range(20)]))
    assert (first.base, first.waits_for, first.keep_tokens, first.pause_s) == (None, (), 0, 0.0)
    assert (second.base, second.waits_for) == (0, (0,))
    assert second.pause_s == pytest.approx(16.0 / SCALE)
    assert (first.input_tokens, first.output_tokens) == (10 * UNIT, 10)
    assert second.keep_tokens == first.input_tokens + first.output_tokens
    assert second.input_tokens == 20 * UNIT


def test_a_prompt_that_has_no_room_for_the_answer_keeps_the_prompt_only():
    first, second = plan(call("a", 0.0, [range(10)]), call("a", 5.0, [range(10)], tail=32))
    assert second.keep_tokens == first.input_tokens == second.input_tokens - 2


def test_a_prompt_that_branches_keeps_the_earlier_call_that_goes_furthest():
    first, second, third = plan(
        call("a", 0.0, [range(10)]),
        call("a", 5.0, [range(20)]),
        call("a", 9.0, [range(12), range(100, 110)]),
    )
    assert second.keep_tokens == 10 * UNIT + first.output_tokens
    assert (third.base, third.keep_tokens) == (0, 10 * UNIT + first.output_tokens)
    assert third.waits_for == (0, 1)
    far = plan(
        call("a", 0.0, [range(10)]),
        call("a", 5.0, [range(20)]),
        call("a", 9.0, [range(18), range(100, 110)]),
    )[2]
    assert (far.base, far.keep_tokens) == (1, 18 * UNIT)


def test_a_spawned_session_waits_for_its_parent_and_the_parent_for_it():
    calls = plan(
        call("parent", 0.0, [range(10)]),
        call("child", 3.0, [range(10), range(50, 60)], parent="parent"),
        call("child", 6.0, [range(10), range(50, 70)], parent="parent"),
        call("parent", 12.0, [range(20)]),
    )
    assert [each.waits_for for each in calls] == [(), (0,), (1,), (0, 2)]
    assert [each.base for each in calls] == [None, 0, 1, 0]
    assert calls[1].pause_s == pytest.approx(2.0 / SCALE)
    assert calls[3].pause_s == pytest.approx(5.0 / SCALE)


def test_calls_side_by_side_do_not_wait_for_each_other():
    one, two = plan(
        call("a", 0.0, [range(10)], duration_s=9.0), call("a", 4.0, [range(5), range(50, 60)])
    )
    assert (two.waits_for, two.base) == ((), None)
    assert two.pause_s == pytest.approx(4.0 / SCALE)
    assert one.end_s > two.start_s


def test_equal_blocks_have_equal_tokens_and_others_differ():
    (one,) = plan(call("a", 0.0, [range(10)], tail=32))
    (two,) = plan(call("b", 0.0, [range(8), range(90, 95)]))
    a = prompt_of(one, [], "a", UNIT, 1024)
    b = prompt_of(two, [], "b", UNIT, 1024)
    assert (len(a), len(b)) == (one.input_tokens, two.input_tokens)
    assert a[: 8 * UNIT] == b[: 8 * UNIT]
    assert a[8 * UNIT : 10 * UNIT] != b[8 * UNIT : 10 * UNIT]
    assert a[-2:] != prompt_of(one, [], "other", UNIT, 1024)[-2:]
    assert all(3 <= token < 1024 for token in a + b)
    context = [5] * 13
    kept = prompt_of(replace(one, keep_tokens=13), context, "a", UNIT, 1024)
    assert (kept[:13], kept[13:]) == (context, a[13:])


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        ([range(10)], [range(10)], 10),
        ([range(10)], [range(7)], 7),
        ([range(5), range(9, 12)], [range(5), range(9, 11), range(20, 22)], 7),
        ([range(5)], [range(3), range(9, 11)], 3),
        ([range(3)], [range(1, 4)], 0),
        ([], [range(3)], 0),
    ],
)
def test_common_blocks(one, other, common):
    assert common_blocks(one, other) == common_blocks(other, one) == common


def test_a_task_holds_its_latest_prompt_and_answer_and_shared_blocks_once():
    family = [
        call("a", 0.0, [range(10)], duration_s=16.0),
        call("b", 32.0, [range(10), range(50, 60)], duration_s=16.0, parent="a"),
        call("a", 64.0, [range(20)], duration_s=16.0),
    ]
    task = plan_task(family, SCALE, SCALE, UNIT)
    alone, both, last = 10 * UNIT + 10, 20 * UNIT + 20, 20 * UNIT + 10
    assert task.life_s == 5.0
    assert task.held_token_s == 2 * alone + both + alone + last


@pytest.mark.parametrize("name", ["swe", "web", "chat", "tree"])
def test_the_pool_is_what_makes_the_pressure(name):
    options = LoadOptions(pressure=2.0, scale=64, pool_tokens=32_768)
    load = make_load(make_profile(name, sessions=SESSIONS[name], seed=1), options)
    held = sum(task.held_token_s for task in load.tasks) / sum(task.life_s for task in load.tasks)
    assert load.footprint_tokens == pytest.approx(held)
    assert abs(load.pool_tokens - load.live_tasks * held / 2.0) <= options.block_tokens / 2
    assert len(load.tasks) == 2 * load.live_tasks
    longest = max(c.input_tokens + c.output_tokens for task in load.tasks for c in task.calls)
    assert longest <= load.max_tokens < load.pool_tokens


def test_equal_options_give_equal_loads_and_a_seed_others():
    trace = make_profile("swe", sessions=60, seed=1)
    options = LoadOptions(scale=64, pool_tokens=32_768)
    assert make_load(trace, options) == make_load(trace, options)
    assert make_load(trace, options).tasks != make_load(trace, replace(options, seed=1)).tasks


def test_a_task_ends_before_the_call_that_is_too_long():
    sessions = [
        tuple(
            call(f"s{n}", 20.0 * i, [range(1_000 * n, 1_000 * n + 10 * (i + 1))]) for i in range(9)
        )
        for n in range(1, 25)
    ]
    options = LoadOptions(pool_tokens=12_800, block_tokens=4)
    load = make_load(trace_of(*sessions), options)
    assert load.max_tokens == 400
    assert load.cut_tasks == 0
    short = make_load(trace_of(*sessions), replace(options, pool_tokens=6_400))
    assert short.cut_tasks == len(short.tasks) > 0
    assert all(len(task.calls) == 4 for task in short.tasks)


def test_the_time_scale_is_for_pauses_alone():
    trace = make_profile("swe", sessions=60, seed=1)
    options = LoadOptions(scale=64, pool_tokens=32_768)
    load, slow = (make_load(trace, replace(options, time_scale=t)) for t in (None, 8.0))
    assert slow.pool_blocks == load.pool_blocks
    for task, longer in zip(load.tasks, slow.tasks, strict=True):
        assert [c.input_tokens for c in task.calls] == [c.input_tokens for c in longer.calls]
        for a, b in zip(task.calls, longer.calls, strict=True):
            assert b.pause_s == pytest.approx(8 * a.pause_s)


def test_what_cannot_be_loaded_is_refused_with_the_way_out():
    trace = make_profile("swe", sessions=6, seed=1)
    with pytest.raises(SettingsError, match="blocks of 64 tokens cannot be divided by scale=7"):
        make_load(trace, LoadOptions(scale=7))
    with pytest.raises(SettingsError, match="has 6 tasks that fit; pressure 2 needs 9"):
        make_load(trace, LoadOptions(live_tasks=9))
    with pytest.raises(SettingsError, match="ask for more sessions"):
        make_load(trace, LoadOptions(live_tasks=1))
    with pytest.raises(SettingsError, match="pressure=0 must be above 0"):
        LoadOptions(pressure=0)


def test_families_of_a_tree_are_its_searches():
    families = families_of(make_profile("tree", sessions=60, seed=1))
    assert 2 <= len(families) < 60
    assert sum(len({c.session_id for c in family}) for family in families) == 60
