"""Workloads from traces: forest, draws, families, splits, the live footprint."""

import random
from collections import Counter, defaultdict
from itertools import combinations, pairwise

import pytest

from saga_sim.traces import TraceError
from saga_sim.traces.model import Trace
from saga_sim.workload import ROOT, Draw, build_workload
from tests.sim.conftest import (
    BLOCK_TOKENS,
    call,
    chains_of,
    depth_of,
    name_of,
    random_calls,
    trace_of,
    workload_of,
)


def path_of(workload, node):
    """Nodes from the root down."""
    path = []
    while node != ROOT:
        path.insert(0, node)
        node = workload.nodes.parent[node]
    return path


def drawn(calls, **draw):
    """The calls' sessions, each on a clock of its own, drawn at random."""
    return build_workload(trace_of(calls, clock="session"), Draw(**draw))


def copies_of(workload):
    """Calls of each copy of each session, in order: name → copy's id → calls."""
    copies = defaultdict(lambda: defaultdict(list))
    for each in workload.calls:
        copies[name_of(each)][each.session_id].append(each)
    return copies


def nodes_of(workload, calls):
    return {node for each in calls for node in path_of(workload, each.node)}


# Forest


@pytest.mark.parametrize("seed", range(10))
def test_paths_have_in_common_what_prompts_have_in_common(seed):
    calls = random_calls(random.Random(seed), sessions=8)
    workload = workload_of(calls)
    chains = chains_of(workload, calls)
    for each, chain in zip(workload.calls, chains, strict=True):
        assert depth_of(workload, each) == len(chain)
    paths = [path_of(workload, each.node) for each in workload.calls]
    for (path, chain), (other_path, other_chain) in combinations(
        zip(paths, chains, strict=True), 2
    ):
        nodes = [a for a, b in zip(path, other_path, strict=False) if a == b]
        blocks = [a for a, b in zip(chain, other_chain, strict=False) if a == b]
        assert sum(workload.nodes.length[node] for node in nodes) == len(blocks)


@pytest.mark.parametrize("seed", range(5))
def test_nodes_are_runs_that_follow_their_parents(seed):
    nodes = workload_of(random_calls(random.Random(seed), sessions=8)).nodes
    for node, (parent, length, depth) in enumerate(
        zip(nodes.parent, nodes.length, nodes.depth, strict=True)
    ):
        assert ROOT <= parent < node
        assert length > 0
        assert depth == length + (0 if parent == ROOT else nodes.depth[parent])


def test_a_run_is_cut_where_prompts_part_or_end():
    workload = workload_of(
        [
            call("a", 0.0, range(10)),
            call("a", 2.0, [*range(6), 20, 21]),
            call("b", 4.0, range(8)),
        ]
    )
    long, branch, short = (path_of(workload, each.node) for each in workload.calls)
    lengths = [[workload.nodes.length[node] for node in path] for path in (long, branch, short)]
    assert lengths == [[6, 2, 2], [6, 2], [6, 2]]
    assert short == long[:2]
    assert branch[0] == long[0]
    assert len(workload.nodes.parent) == 4


@pytest.mark.parametrize(
    "chain",
    [
        [20, 3],  # Opens at 20, but 3 follows 2.
        [0, 1, 3],
        [3, 4],
        [0, 1, 2, 3, 4, 0],
    ],
)
def test_an_id_with_two_predecessors_is_refused(chain):
    calls = [call("a", 0.0, range(10)), call("b", 2.0, chain)]
    with pytest.raises(TraceError, match=r"block \d+ follows two different blocks"):
        workload_of(calls)


# Calls


def test_a_call_holds_blocks_for_its_answer_and_the_rest_of_its_prompt():
    (one, two, three) = workload_of(
        [
            call("a", 0.0, range(3)),
            call("a", 2.0, range(3), tail_tokens=1),
            call("a", 4.0, range(3), extra=2, tail_tokens=3),
        ]
    ).calls
    assert (one.extra_blocks, two.extra_blocks, three.extra_blocks) == (0, 1, 3)
    assert (three.input_tokens, three.output_tokens) == (15, 8)


def test_a_call_knows_its_tools_end_and_its_sessions_next_call():
    one, two = workload_of(
        [
            call("a", 1.0, range(3), 2.0, tool="Bash", tool_s=0.5, ending="tool_use"),
            call("a", 7.0, range(3), 2.0, ending="end_turn"),
        ]
    ).calls
    assert (one.end_s, one.tool, one.tool_end_s, one.next_s) == (3.0, "Bash", 3.5, 7.0)
    assert (two.end_s, two.tool, two.tool_end_s, two.next_s) == (9.0, None, None, None)
    assert (one.ending, two.ending) == ("tool_use", "end_turn")


def test_durations_are_filled_in_where_the_trace_has_none():
    ends = {
        each.arrival_s: each.end_s - each.arrival_s
        for each in workload_of(
            [
                call("a", 0.0, range(3), None, extra=25),  # 100 tokens: 3 s.
                call("a", 10.0, range(4), None, extra=25),  # The next one comes after 2 s.
                call("a", 12.0, range(5), None, extra=50),  # Nothing comes: 5 s.
                call("b", 100.0, range(3), 0.0),
            ]
        ).calls
    }
    assert ends == {
        0.0: pytest.approx(3.0),
        10.0: pytest.approx(1.6),
        12.0: pytest.approx(5.0),
        100.0: pytest.approx(1e-3),
    }


def test_calls_of_a_session_that_arrive_together_keep_their_order():
    workload = workload_of([call("a", 0.0, range(3)), call("a", 0.0, range(5))])
    assert [each.input_tokens for each in workload.calls] == [12, 20]
    assert [each.next_s for each in workload.calls] == [0.0, None]


# Splits and families


def test_a_session_is_split_where_it_pauses_for_over_an_hour():
    workload = workload_of(
        [
            call("a", 0.0, range(3), 1.0),
            call("a", 3601.0, range(4), 1.0),  # An hour after the end: still the same.
            call("a", 7202.5, range(5), 1.0),
            call("a", 7204.0, range(6), 1.0),
        ]
    )
    sessions = Counter(each.session_id for each in workload.calls)
    assert sorted(sessions.values()) == [2, 2]
    assert [each.next_s for each in workload.calls] == [3601.0, None, 7204.0, None]


def family(**fields):
    """An agent, a sub-agent of it, and one of that."""
    return [
        call("main", 0.0, range(4), 1.0),
        call("main", 50.0, range(6), 1.0),
        call("sub", 2.0, range(20, 24), 1.0, parent_session_id="main", **fields),
        call("sub", 9.0, range(20, 26), 1.0, parent_session_id="main"),
        call("subsub", 4.5, range(30, 34), 1.0, parent_session_id="sub"),
    ]


def test_a_family_keeps_its_relative_times():
    workload = drawn([*family(), call("alone", 0.0, [90])], live_sessions=2, measured_calls=200)
    families = defaultdict(list)
    for each in workload.calls:
        families[each.session_id.rsplit("#", 1)[1]].append(each)
    seen = 0
    for calls in families.values():
        if name_of(calls[0]) == "alone":
            assert len(calls) == 1
            continue
        seen += 1
        start_s = calls[0].arrival_s
        assert [(name_of(c), pytest.approx(c.arrival_s - start_s)) for c in calls] == [
            ("main", 0.0),
            ("sub", 2.0),
            ("subsub", 4.5),
            ("sub", 9.0),
            ("main", 50.0),
        ]
    assert seen > 10


def test_a_family_is_not_split_while_one_of_it_is_busy():
    calls = [
        call("main", 0.0, range(4), 1.0),
        call("sub", 2.0, range(20, 24), 4000.0, parent_session_id="main"),
        call("main", 5.0, range(5), 1.0),
        call("main", 4010.0, range(6), 1.0),
    ]
    workload = workload_of(calls)
    assert {each.session_id.rsplit("#", 1)[1] for each in workload.calls} == {"0"}
    assert workload.calls[2].next_s == 4010.0


def test_a_parent_that_the_trace_lacks_is_none():
    calls = [call("sub", 0.0, range(4), parent_session_id="gone"), call("b", 1.0, [9])]
    assert len(workload_of(calls).calls) == 2


@pytest.mark.timeout(2)
def test_a_session_that_is_its_own_parent_ends():
    calls = [call("a", 0.0, range(4), parent_session_id="a")]
    assert len(workload_of(calls).calls) == 1


# Copies

OPENING = list(range(5))
THREE = [
    call("a", 0.0, [*OPENING, *range(10, 13)]),
    call("a", 4.0, [*OPENING, *range(10, 16)]),
    call("b", 0.0, [*OPENING, *range(20, 24)]),
    call("b", 7.0, [*OPENING, *range(20, 29)]),
    call("c", 0.0, range(30, 36)),
    call("c", 2.0, range(30, 38)),
]


def test_copies_share_what_different_sessions_share_and_nothing_else():
    workload = drawn(THREE, live_sessions=5, measured_calls=200)
    nodes = workload.nodes
    first = {path_of(workload, each.node)[0] for each in workload.calls if name_of(each) != "c"}
    assert [nodes.length[node] for node in first] == [5]  # One opening for all of a and b.
    copies = copies_of(workload)
    assert min(len(of) for of in copies.values()) > 10
    everyone = [calls for of in copies.values() for calls in of.values()]
    for one, other in combinations(everyone[:60], 2):
        common = nodes_of(workload, one) & nodes_of(workload, other)
        if "c" in (name_of(one[0]), name_of(other[0])):
            assert not common
        else:
            assert common == first
    for of in copies.values():
        for one, two in of.values():  # A copy has its own prefix in common, as in the trace.
            assert one.node in path_of(workload, two.node)


def test_copies_of_a_split_session_share_nothing():
    calls = [call("a", 0.0, range(5)), call("a", 5000.0, range(8))]
    workload = drawn(calls, live_sessions=3, measured_calls=50)
    of = list(copies_of(workload)["a"].values())
    assert len(of) > 10
    firsts = [calls for calls in of if depth_of(workload, calls[0]) == 5]
    for one, other in combinations(firsts, 2):
        assert not nodes_of(workload, one) & nodes_of(workload, other)


def test_sessions_are_dealt_equally_often():
    copies = copies_of(drawn(THREE, live_sessions=5, measured_calls=300))
    counts = [len(of) for of in copies.values()]
    assert max(counts) - min(counts) <= 1


def test_the_deck_is_shuffled_anew():
    workload = drawn(THREE, live_sessions=5, measured_calls=100)
    ids = {each.session_id for each in workload.calls}
    dealt = [i.split("#")[0] for i in sorted(ids, key=lambda i: int(i.split("#")[1]))]
    rounds = [tuple(dealt[n : n + 3]) for n in range(0, len(dealt) - 2, 3)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert len(set(rounds)) > 2


# Clocks and arrivals


def test_a_shared_clock_keeps_the_arrivals():
    calls = random_calls(random.Random(3), sessions=8)
    trace = trace_of(calls)
    workload = build_workload(trace, Draw(live_sessions=1, measured_calls=1, seed=9))
    expected = sorted((c.arrival_s, c.session_id) for c in calls)
    assert [(c.arrival_s, name_of(c)) for c in workload.calls] == expected
    first_s = min(c.arrival_s for c in workload.calls)
    last_s = max(c.end_s for c in workload.calls)
    assert workload.measure_from_s == pytest.approx(first_s + 0.2 * (last_s - first_s))
    assert workload.measure_to_s == last_s


def test_a_shared_clock_may_begin_anywhere():
    at_zero = [call("a", 1.0 * n, range(4 + n), 0.5) for n in range(10)]
    later = [call("a", 1e6 + n, range(4 + n), 0.5) for n in range(10)]
    footprints = [
        build_workload(trace_of(calls), Draw()).footprint_blocks for calls in (at_zero, later)
    ]
    assert footprints[1] == pytest.approx(footprints[0], rel=1e-3)


def life_s(calls):
    return max(each.end_s for each in calls) - calls[0].arrival_s


@pytest.mark.parametrize("live", [5.0, 40.0])
def test_about_the_asked_sessions_are_alive_and_calls_are_measured(live):
    rng = random.Random(0)
    calls = []
    for s in range(30):
        arrival_s = 0.0
        for n in range(rng.randint(1, 12)):
            calls.append(call(f"s{s}", arrival_s, range(100 * s, 100 * s + n + 1), 1.0))
            arrival_s += 1.0 + rng.choice([1.0, 10.0, 100.0])
    alive, measured = [], []
    for seed in range(4):
        workload = drawn(calls, live_sessions=live, measured_calls=2_000, seed=seed)
        from_s, to_s = workload.measure_from_s, workload.measure_to_s
        session_s = sum(
            max(0.0, min(of[0].arrival_s + life_s(of), to_s) - max(of[0].arrival_s, from_s))
            for copies in copies_of(workload).values()
            for of in copies.values()
        )
        alive.append(session_s / (to_s - from_s))
        measured.append(sum(from_s <= c.arrival_s < to_s for c in workload.calls))
    assert sum(alive) / 4 == pytest.approx(live, rel=0.12)
    assert sum(measured) / 4 == pytest.approx(2_000, rel=0.12)


def test_a_seed_decides_the_draw():
    def made(seed):
        return drawn(THREE, live_sessions=5, measured_calls=100, seed=seed)

    assert made(1) == made(1)
    assert made(1) != made(2)


def test_calls_come_in_the_order_of_arrival():
    workload = drawn(THREE, live_sessions=20, measured_calls=300)
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(workload.calls))


# Pressure


def test_the_footprint_is_what_live_sessions_hold_on_average():
    workload = build_workload(
        trace_of(
            [
                # To 6 s, when the next one comes; measured from 2 s on: 4 s of 5 + 1 blocks.
                call("a", 0.0, range(5), 2.0, extra=1),
                call("a", 6.0, range(8), 4.0),  # To its end: 4 s of 8 blocks.
                call("b", 4.0, range(20, 23), 1.0),  # 1 s of 3 blocks.
                call("c", 7.0, [], 1.0, extra=9),  # Nothing that could be read again.
            ]
        ),
        Draw(),
    )
    assert (workload.measure_from_s, workload.measure_to_s) == (2.0, 10.0)
    assert workload.footprint_blocks == pytest.approx((4 * 6 + 4 * 8 + 1 * 3) / 8)


def test_the_capacity_is_the_footprint_over_the_pressure():
    workload = workload_of([call("a", 0.0, range(5))])
    workload.footprint_blocks = 90.0
    assert [workload.capacity_at(p) for p in (0.5, 1.2, 4.0, 1000.0)] == [180, 75, 22, 1]


def test_a_workload_says_where_it_comes_from():
    trace = Trace("made up", BLOCK_TOKENS, ((call("a", 0.0, range(3)),),), "shared")
    workload = build_workload(trace, Draw())
    assert (workload.name, workload.block_tokens) == ("made up", BLOCK_TOKENS)
