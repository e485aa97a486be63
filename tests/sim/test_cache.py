"""The cache simulator: bounds, an independent LRU, signals, branches, and decisions written out."""

import random
from collections import Counter, OrderedDict

import pytest

from saga_core.policies import POLICIES
from saga_sim.belady import make_schedule, optimal_hits
from saga_sim.cache import CacheSimulator
from saga_sim.host import HostTier
from saga_sim.signals import SIGNALS, Signals, signals_of
from saga_sim.traces import read_trace
from saga_sim.workload import Draw, build_workload
from tests.sim.conftest import call, chains_of, depth_of, random_calls, workload_of

every_policy = pytest.mark.parametrize("policy", sorted(POLICIES))
ENDS = Signals(ends=True)


class Checked(CacheSimulator):
    """Looks at everything after every event."""

    def _arrive(self, i, call, now_s):
        super()._arrive(i, call, now_s)
        assert 0 <= self.result.hits[i] <= depth_of(self._workload, call)
        is_full = self._tree.used + self._extra > self._capacity
        assert not (is_full and self._idle), "idle runs are kept beyond the capacity"
        self._check()

    def _end(self, i, call, now_s):
        super()._end(i, call, now_s)
        self._check()

    def _check(self):
        self.check_integrity()
        for i in self._running:
            node = self._workload.calls[i].node
            assert self._tree.hit(node) == (self._workload.nodes.depth[node], node)


class VictimLog(Counter):
    """Counts victims, and remembers them in their order."""

    def __init__(self):
        super().__init__()
        self.log = []

    def __setitem__(self, kind, total):
        self.log.append((kind, total - self.get(kind, 0)))
        super().__setitem__(kind, total)


def simulator(workload, capacity, policy, signals=SIGNALS["none"], **options):
    schedule = make_schedule(workload)
    return Checked(workload, schedule, capacity, policy, signals, **options)


def run_of(calls, capacity, policy="saga", signals=SIGNALS["none"], **options):
    """What a script gives, with the victims' log."""
    checked = simulator(workload_of(calls), capacity, policy, signals, **options)
    checked.result.victims = VictimLog()
    return checked.run()


def random_workload(seed, **sizes):
    return workload_of(random_calls(random.Random(seed), **sizes))


def some_capacities(workload):
    """From one that running calls exceed to one that most fits into."""
    most = sum(workload.nodes.length)
    return max(1, most // 6), most // 3, 2 * most // 3


# Bounds


@every_policy
@pytest.mark.parametrize("signals", ["none", "all", "adversarial"])
def test_no_policy_beats_belady(policy, signals):
    evicted = 0
    for seed in range(6):
        workload = random_workload(seed, sessions=10)
        schedule = make_schedule(workload)
        for capacity in some_capacities(workload):
            best = optimal_hits(workload, schedule, capacity)
            checked = Checked(workload, schedule, capacity, policy, signals_of(signals), seed=seed)
            result = checked.run()
            assert sum(result.hits) <= sum(best)
            evicted += sum(result.victims.values())
    assert evicted > 100


@every_policy
def test_with_room_for_all_only_first_uses_miss(policy):
    workload = random_workload(11, sessions=10)
    result = simulator(workload, 10_000, policy, signals_of("all")).run()
    fresh = make_schedule(workload).fresh
    depths = [depth_of(workload, c) for c in workload.calls]
    assert result.hits == [d - f for d, f in zip(depths, fresh, strict=True)]
    assert (result.overcommitted, result.victims) == (0, {})


@every_policy
@pytest.mark.parametrize("signals", ["all", "adversarial"])
def test_a_seed_decides_all(policy, signals):
    workload = random_workload(12, sessions=10)
    capacity = some_capacities(workload)[1]
    once, again = (
        simulator(workload, capacity, policy, signals_of(signals), seed=3).run() for _ in range(2)
    )
    assert once == again


def test_another_seed_makes_up_other_signals():
    workload = random_workload(12, sessions=10)
    capacity = some_capacities(workload)[1]
    found = {
        tuple(simulator(workload, capacity, "saga", Signals(false_ends=0.5), seed=s).run().hits)
        for s in range(5)
    }
    assert len(found) > 1


# Against vLLM's own order, block by block


def lru_run(workload, chains, capacity):
    """A cache of blocks that are freed at a call's end, tail first.

    A block that no running call holds waits in the queue of free blocks, where a hit takes it
    out; the first in the queue is evicted when a call arrives and room is short.

    Returns the hits of each call, and the seconds that each block spent in the queue, summed.
    """
    events = sorted(
        event
        for i, c in enumerate(workload.calls)
        for event in ((c.arrival_s, 1, i), (c.end_s, 0, i))
    )
    running, free, extra = Counter(), OrderedDict(), 0
    hits = [0] * len(workload.calls)
    free_block_s = before_s = 0.0
    for now_s, is_arrival, i in events:
        chain = chains[i]
        free_block_s += (now_s - before_s) * len(free)
        before_s = now_s
        if not is_arrival:
            extra -= workload.calls[i].extra_blocks
            for block in reversed(chain):
                running[block] -= 1
                if not running[block]:
                    del running[block]
                    free[block] = None
            continue
        hits[i] = next(
            (n for n, b in enumerate(chain) if b not in running and b not in free), len(chain)
        )
        for block in chain:
            free.pop(block, None)
            running[block] += 1
        extra += workload.calls[i].extra_blocks
        while free and len(running) + len(free) + extra > capacity:
            free.popitem(last=False)
    return hits, free_block_s


@pytest.mark.parametrize("seed", range(40))
def test_prefix_lru_is_vllms_queue_of_free_blocks(seed):
    calls = random_calls(random.Random(seed), sessions=14, calls=8, horizon_s=30, growth=6)
    workload = workload_of(calls)
    chains = chains_of(workload, calls)
    for capacity in (5, *some_capacities(workload)):
        result = simulator(workload, capacity, "prefix-lru", signals_of("all")).run()
        hits, free_block_s = lru_run(workload, chains, capacity)
        assert result.hits == hits
        assert result.idle_block_s == pytest.approx(free_block_s)


# Overcommitment and overlap


def test_calls_that_fit_only_one_at_a_time_are_counted():
    result = run_of(
        [
            call("a", 0.0, range(8), 5.0),
            call("b", 1.0, range(10, 18), 5.0),  # 16 blocks run: more than there are.
            call("c", 2.0, [], 1.0, extra=1),  # Still.
            call("d", 7.0, range(20, 24)),  # Alone.
        ],
        10,
    )
    assert result.overcommitted == 2
    assert result.hits == [0, 0, 0, 0]


def test_the_answers_blocks_count_while_the_call_runs():
    calls = [call("a", 0.0, range(4)), call("b", 2.0, range(10, 14), extra=3)]
    calls.append(call("a", 4.0, range(4)))
    assert run_of(calls, 11).hits == [0, 0, 4]
    assert run_of(calls, 10).hits == [0, 0, 3]


def test_a_call_whose_answer_does_not_fit_is_counted():
    assert run_of([call("a", 0.0, range(4), extra=6)], 10).overcommitted == 0
    assert run_of([call("a", 0.0, range(4), extra=7)], 10).overcommitted == 1


def test_two_calls_of_a_session_run_at_once():
    trunk = list(range(4))
    result = run_of(
        [
            call("a", 0.0, trunk),
            call("a", 2.0, [*trunk, 10, 11], 4.0),
            call("a", 3.0, [*trunk, 20, 21, 22], 1.0),  # Ends first.
            call("a", 8.0, [*trunk, 10, 11, 12]),
            call("a", 10.0, [*trunk, 20, 21, 22, 23]),
        ],
        30,
    )
    assert result.hits == [0, 4, 4, 6, 7]


def test_a_call_that_ends_after_its_successor_leaves_a_branch():
    trunk = list(range(4))
    calls = [
        call("a", 0.0, [*trunk, 10, 11], 9.0),
        call("a", 1.0, [*trunk, 20, 21, 22], 1.0),
        call("b", 12.0, range(30, 36)),
    ]
    # 4 + 2 + 3 blocks are left; three must go. What ended first has been superseded.
    result = run_of(calls, 12)
    assert result.victims.log == [("superseded", 3)]


# Branches


def branching(last):
    trunk = list(range(6))
    return [
        call("a", 0.0, [*trunk, 10, 11, 12]),
        call("a", 2.0, [*trunk, 20, 21]),
        call("b", 4.0, range(30, 34)),
        call("a", 6.0, last),
    ]


def test_a_superseded_branch_goes_before_an_older_pause():
    calls = [call("old", 0.0, range(50, 54), 0.5), *branching([*range(6), 20, 21, 22])]
    result = run_of(calls, 16)  # 4 + 6 + 3 + 2 are there when b brings 4.
    assert result.victims.log[0] == ("superseded", 3)
    assert result.hits[-1] == 8


@every_policy
def test_a_branch_that_is_taken_up_again_is_whole_or_in_part_a_hit(policy):
    trunk = list(range(6))
    assert run_of(branching([*trunk, 10, 11, 12, 13]), 30, policy).hits[-1] == 9
    assert run_of(branching([*trunk, 10, 40]), 30, policy).hits[-1] == 7
    assert run_of(branching([0, 1, 2]), 30, policy).hits[-1] == 3


@pytest.mark.parametrize(
    ("last", "bases"),
    [
        ([*range(6), 10, 11, 12, 13], [6]),  # All of the first branch: it is no branch any more.
        ([*range(6), 10, 40], [6, 7]),  # Its last two blocks still are.
        ([*range(6), 20, 21, 22], [6]),  # None of it.
        ([50], [0, 6]),
    ],
)
def test_a_branch_is_one_until_all_of_it_is_taken_up(last, bases):
    checked = simulator(workload_of(branching(last)), 100, "saga")
    checked.run()
    runs = list(checked._idle.values())
    assert Counter(run.kind for run in runs) == {"superseded": len(bases), "paused": 2}
    assert sorted(run.base for run in runs if run.kind == "superseded") == bases


@every_policy
def test_many_branches_are_let_go_without_being_lost(policy):
    trunk = list(range(4))
    calls = [call("a", 2.0 * n, [*trunk, *range(10 * n + 10, 10 * n + 13)]) for n in range(9)]
    calls.append(call("a", 30.0, [*trunk, 10, 11, 12]))
    assert run_of(calls, 100, policy).hits[-1] == 7
    few = run_of(calls, 16, policy)
    assert sum(blocks for _, blocks in few.victims.log) == 4 + 9 * 3 - 16 + (7 - few.hits[-1])


# Signals


@pytest.mark.parametrize("policy", ["saga", "wa-lru", "wa-lru-ttl", "thresholds", "fixed-ttl"])
def test_an_ended_session_goes_first_when_ends_are_told(policy):
    calls = [
        call("stays", 0.0, range(8), ending="tool_use"),
        call("done", 2.0, range(20, 26), ending="tool_use"),
        call("next", 4.0, range(40, 46)),
        call("stays", 6.0, range(8)),
    ]
    told = run_of(calls, 14, policy, ENDS)
    assert told.victims == {"ended": 6}
    assert told.hits == [0, 0, 0, 8]
    assert "ended" not in run_of(calls, 14, policy).victims


def test_a_told_end_outweighs_a_forecast_of_a_return():
    calls = [
        call("stays", 0.0, range(8)),
        call("done", 2.0, range(20, 26)),
        call("next", 4.0, range(40, 46)),
        call("stays", 601.0, range(8)),
    ]
    # All that never return are forecast to, after the only pause there is: 600 s.
    forecast = Signals(forecast_sigma=0.0)
    assert "ended" not in run_of(calls, 14, "saga", forecast).victims
    assert run_of(calls, 14, "saga", Signals(ends=True, forecast_sigma=0.0)).victims == {"ended": 6}


def test_the_sessions_latest_call_is_the_one_that_ends_it():
    calls = [call("a", 0.0, range(5)), call("a", 2.0, range(7)), call("b", 4.0, range(20, 28))]
    result = run_of(calls, 10, "saga", ENDS)
    assert result.victims == {"ended": 5}


@every_policy
def test_a_session_that_was_said_to_be_over_can_return(policy):
    liar = Signals(false_ends=1.0)
    calls = [call("a", 2.0 * n, range(5 + n)) for n in range(5)]
    result = run_of(calls, 20, policy, liar)
    assert result.hits == [0, 5, 6, 7, 8]
    calls.append(call("b", 12.0, range(50, 65)))
    calls.append(call("a", 14.0, range(10)))
    result = run_of(calls, 20, policy, liar)
    assert set(result.victims) == {"ended"}
    assert result.hits[-1] == 5


@every_policy
def test_false_ends_on_busy_sessions_break_nothing(policy):
    workload = random_workload(21, sessions=12)
    result = simulator(
        workload, some_capacities(workload)[0], policy, Signals(false_ends=0.7)
    ).run()
    assert result.victims["ended"] > 0


def test_a_told_tool_end_keeps_the_session_that_is_about_to_return():
    """Of two pauses the older one goes, unless its tool has just ended."""
    calls = [
        call("a", 0.0, range(6), ending="tool_use", tool="Bash", tool_s=8.5),
        call("b", 2.0, range(20, 26), ending="end_turn"),
        call("c", 10.0, range(40, 44)),
        call("a", 10.5, range(6)),
        call("b", 60.0, range(20, 26)),
    ]
    assert run_of(calls, 12).hits == [0, 0, 0, 2, 2]
    told = run_of(calls, 12, "saga", Signals(tools=True, tool_ends=True))
    assert told.hits == [0, 0, 0, 6, 2]


def test_a_pause_counts_anew_from_its_tools_end():
    calls = [
        call("a", 0.0, range(6), ending="tool_use", tool="Bash", tool_s=34.0),
        call("b", 2.0, range(20, 26)),
        call("c", 40.0, range(40, 44)),  # Neither is within 30 s of its last use.
        call("a", 42.0, range(6)),
    ]
    assert run_of(calls, 12, "fixed-ttl").hits[-1] == 2
    assert run_of(calls, 12, "fixed-ttl", Signals(tool_ends=True)).hits[-1] == 6


def test_victims_count_in_the_measured_span_only():
    workload = workload_of([call(f"s{n}", 2.0 * n, range(10 * n, 10 * n + 6)) for n in range(5)])
    workload.measure_from_s = 5.0
    assert simulator(workload, 6, "saga").run().victims == {"paused": 12}


IDLING = [
    call("a", 0.0, range(5)),
    call("b", 4.0, range(10, 13), 2.0, extra=2),
    call("a", 8.0, range(5)),
]
"""Of a's five blocks and b's three, idle: five from 1 s, all from 6 s, b's from 8 to 9 s."""


@pytest.mark.parametrize(("from_s", "block_s"), [(0.0, 44.0), (5.0, 24.0), (8.5, 1.5)])
def test_idle_blocks_are_integrated_over_the_measured_span(from_s, block_s):
    workload = workload_of(IDLING)
    workload.measure_from_s = from_s
    assert simulator(workload, 100, "saga").run().idle_block_s == pytest.approx(block_s)


def test_what_comes_after_the_measured_span_does_not_count():
    workload = workload_of(IDLING)
    workload.measure_to_s = 7.0
    result = simulator(workload, 7, "saga").run()
    assert result.victims == {"paused": 3}  # For b, and none of b's for a.
    assert result.idle_block_s == pytest.approx(3 * 5 + 2 * 2 + 1 * 5)


# Shared openings


def test_a_shared_opening_survives_the_end_of_its_sessions():
    opening = list(range(10))
    calls = [
        call("old", 0.0, range(90, 93), 0.5),
        call("a", 1.0, [*opening, *range(20, 25)]),
        call("b", 3.0, [*opening, *range(30, 35)]),
        call("filler", 5.0, range(40, 52)),  # 35 blocks in all: 12 of 23 must go, or more.
        call("c", 7.0, [*opening, 60]),
        call("old", 30.0, range(90, 93)),
        call("filler", 32.0, range(40, 52)),
    ]
    result = run_of(calls, 23, "saga", ENDS)
    # What a and b have of their own is worth nothing now, then an old pause less than a recent
    # opening.
    assert result.victims.log[:3] == [("ended", 5), ("ended", 5), ("paused", 2)]
    assert result.hits[:5] == [0, 0, 10, 0, 10]


def test_a_shared_opening_goes_in_the_end():
    opening = list(range(10))
    calls = [
        call("a", 0.0, [*opening, 20]),
        call("b", 2.0, [*opening, 30]),
        call("filler", 4.0, range(40, 60)),
        call("c", 6.0, [*opening, 80]),
    ]
    result = run_of(calls, 20, "saga", ENDS)
    assert result.victims.log[:3] == [("ended", 1), ("ended", 1), ("shared", 10)]
    assert result.hits[-1] == 0


def test_every_opening_in_common_is_a_run_of_its_own():
    short, long = list(range(4)), list(range(8))
    openings = [short, short, long, long, long]
    calls = [call(f"s{n}", 2.0 * n, [*path, 100 + n]) for n, path in enumerate(openings)]
    checked = simulator(workload_of(calls), 100, "saga")
    checked.run()
    shared = [run for run in checked._idle.values() if run.kind == "shared"]
    assert [depth_of(checked._workload, run) for run in shared] == [4, 8]
    assert all(run.last_used_s == 8.0 for run in shared)  # The last session read both.


# Decisions written out

GOLDEN_CAPACITY = 20
GOLDEN_CALLS = [
    call("a", 0.0, range(4), ending="tool_use"),
    call("b", 2.0, range(10, 15), ending="end_turn"),  # Never returns, which is told.
    call("c", 4.0, range(20, 26), ending="tool_use"),
    # Keeps three blocks of its six: the other three are a superseded branch. 19 blocks in all.
    call("c", 6.0, [*range(20, 23), *range(30, 34)], ending="tool_use"),
    call("d", 8.0, range(40, 48), ending="tool_use"),  # Needs 7 more than there are.
    call("e", 10.0, range(50, 56), ending="tool_use"),  # Needs 6.
    call("a", 12.0, [*range(4), 60, 61], ending="tool_use"),  # Needs 6, or 2 if a has stayed.
    *(call(name, 100.0 + n, range(80 + n, 81 + n)) for n, name in enumerate("cde")),  # Return.
]
GOLDEN = {
    # By the end of the last use, whatever has become of the session: a (1 s), b (3 s), c's first
    # call (5 s), c's second (7 s).
    "prefix-lru": (
        [
            # For d: all of a, b's tail.
            ("paused", 4),
            ("ended", 3),
            # For e: the rest of b, c's branch, c's tail.
            ("ended", 2),
            ("superseded", 3),
            ("paused", 1),
            # For a, which has lost all: the rest of c, which is of two nodes.
            ("paused", 3),
            ("paused", 3),
        ],
        0,
    ),
    # The ended and the superseded first. Within the TTL, 13 s from the prior and half of that
    # when the cache is full, a, c and d are all protected; of such the larger goes first.
    "wa-lru-ttl": (
        [
            # For d: b, the tail of c's branch.
            ("ended", 5),
            ("superseded", 2),
            # For e: the rest of the branch, five of d's eight blocks.
            ("superseded", 1),
            ("paused", 5),
            # For a, which has lost nothing: d again.
            ("paused", 2),
        ],
        4,
    ),
    # The ended and the superseded first, then the longest pause: it is the least likely to end
    # in the next second.
    "saga": (
        [
            # For d: b, the tail of c's branch.
            ("ended", 5),
            ("superseded", 2),
            # For e: the rest of the branch, all of a, c's tail.
            ("superseded", 1),
            ("paused", 4),
            ("paused", 1),
            # For a, which has lost all: the rest of c, which is of two nodes.
            ("paused", 3),
            ("paused", 3),
        ],
        0,
    ),
}


@pytest.mark.parametrize("policy", sorted(GOLDEN))
def test_a_known_policy_decides_as_it_always_did(policy):
    victims, hits_of_a = GOLDEN[policy]
    result = run_of(GOLDEN_CALLS, GOLDEN_CAPACITY, policy, ENDS)
    assert result.victims.log[: len(victims)] == victims
    assert result.hits[:7] == [0, 0, 0, 3, 0, 0, hits_of_a]


# A host tier behind the cache


def host_of(workload, capacity=10**9, blocks_per_s=1e9):
    return HostTier(workload.nodes, capacity, blocks_per_s)


@pytest.mark.parametrize("policy", ["prefix-lru", "saga"])
def test_host_hits_go_on_where_the_workers_own_prefix_ends(policy):
    loaded = 0
    for seed in range(10):
        workload = random_workload(seed + 40, sessions=10)
        for host_blocks in (3, 10, 10**6):
            host = host_of(workload, host_blocks, 20.0)
            capacity = some_capacities(workload)[1]
            result = simulator(workload, capacity, policy, host=host).run()
            fresh = make_schedule(workload).fresh
            for i, c in enumerate(workload.calls):
                known = depth_of(workload, c) - fresh[i]
                assert result.hits[i] + result.host_hits[i] <= known
            # The tier beside it does not change what the worker does.
            assert result.hits == simulator(workload, capacity, policy).run().hits
            assert host.used <= host_blocks
            loaded += sum(result.host_hits)
    assert loaded > 50


@pytest.mark.parametrize("policy", ["prefix-lru", "saga"])
def test_an_unlimited_host_has_all_that_was_ever_computed(policy):
    for seed in range(10):
        workload = random_workload(seed + 60, sessions=10)
        fresh = make_schedule(workload).fresh
        for capacity in some_capacities(workload):
            result = simulator(workload, capacity, policy, host=host_of(workload)).run()
            for i, c in enumerate(workload.calls):
                assert result.hits[i] + result.host_hits[i] == depth_of(workload, c) - fresh[i]


# Recorded traces


def prefilled(workload, result):
    """Tokens of the measured calls' prompts that had to be computed."""
    return sum(
        c.input_tokens - hit * workload.block_tokens
        for c, hit in zip(workload.calls, result.hits, strict=True)
        if workload.measure_from_s <= c.arrival_s < workload.measure_to_s
    )


def recorded_runs(workload, pressures):
    """(prefilled by prefix-lru, by saga) per pressure; Bélády is checked not to be beaten."""
    schedule = make_schedule(workload)
    for pressure in pressures:
        capacity = workload.capacity_at(pressure)
        best = sum(optimal_hits(workload, schedule, capacity))
        tokens = []
        for policy in ("prefix-lru", "saga"):
            ran = CacheSimulator(workload, schedule, capacity, policy, SIGNALS["none"])
            result = ran.run()
            ran.check_integrity()
            assert sum(result.hits) <= best
            tokens.append(prefilled(workload, result))
        yield pressure, *tokens


def test_saga_prefills_less_than_lru_on_coding_agents(traces):
    trace = read_trace([traces / "claude_code_dev.jsonl.gz"])
    workload = build_workload(trace, Draw(measured_calls=3_000))
    for pressure, lru, saga in recorded_runs(workload, (1.2, 4.0)):
        assert saga < lru, f"at pressure {pressure}"


def test_saga_loses_nothing_where_there_is_little_to_win(traces):
    trace = read_trace([traces / "mooncake_conversation_head.jsonl.gz"])
    workload = build_workload(trace, Draw())
    for pressure, lru, saga in recorded_runs(workload, (1.2, 2.0, 4.0)):
        assert saga <= 1.02 * lru, f"at pressure {pressure}"
