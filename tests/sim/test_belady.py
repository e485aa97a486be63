"""Bélády's optimum against a linear program, brute force and block by block."""

import random
from collections import Counter, defaultdict
from itertools import combinations

import numpy as np
import pytest
from scipy.optimize import linprog

from saga_sim.belady import make_schedule, optimal_hits
from tests.sim.conftest import call, chains_of, depth_of, random_calls, workload_of

FAR = 10**9


def hits_of(workload, capacity):
    return optimal_hits(workload, make_schedule(workload), capacity)


def misses_of(workload, capacity):
    blocks = sum(depth_of(workload, c) for c in workload.calls)
    return blocks - sum(hits_of(workload, capacity))


def random_case(seed, **sizes):
    """A workload, the blocks of its calls, and how many there are."""
    calls = random_calls(random.Random(seed), **sizes)
    workload = workload_of(calls)
    chains = chains_of(workload, calls)
    return workload, chains, len({block for chain in chains for block in chain})


def events_of(workload):
    """(time, is arrival, call): at one time ends come first, then the order of the calls."""
    calls = enumerate(workload.calls)
    return sorted(e for i, c in calls for e in ((c.arrival_s, 1, i), (c.end_s, 0, i)))


def needs_of(workload, chains):
    """What a cache must decide about, from the blocks of running calls alone.

    Returns the number of first uses, the gaps (event after which a block falls idle, event at
    which it is needed again), and the blocks that running calls hold after each event.
    """
    running, idle_from = Counter(), {}
    first_uses, gaps, held, extra = 0, [], [], 0
    for number, (_, is_arrival, i) in enumerate(events_of(workload)):
        for block in chains[i]:
            if is_arrival and running[block] == 0:
                if block in idle_from:
                    gaps.append((idle_from.pop(block), number))
                else:
                    first_uses += 1
            running[block] += 1 if is_arrival else -1
            if running[block] == 0:
                idle_from[block] = number
        extra += workload.calls[i].extra_blocks * (1 if is_arrival else -1)
        held.append(sum(count > 0 for count in running.values()) + extra)
    return first_uses, gaps, held


def fewest_misses(workload, chains, capacity, *, room_at_ends=False):
    """Optimum of the linear program that keeps blocks over gaps while there is room.

    Room must suffice after every arrival, or after every event.
    """
    first_uses, gaps, held = needs_of(workload, chains)
    if not gaps:
        return first_uses
    checked = [n for n, (_, arrival, _) in enumerate(events_of(workload)) if arrival]
    if room_at_ends:
        checked = range(len(held))
    covers = np.array([[start <= n < stop for start, stop in gaps] for n in checked], dtype=float)
    room = [max(0, capacity - held[n]) for n in checked]
    found = linprog(-np.ones(len(gaps)), A_ub=covers, b_ub=room, bounds=(0, 1), method="highs")
    assert found.status == 0
    assert found.fun == pytest.approx(round(found.fun), abs=1e-6)
    return first_uses + len(gaps) + round(found.fun)


@pytest.mark.parametrize("seed", range(20))
def test_no_cache_misses_less_by_linear_program(seed):
    workload, chains, blocks = random_case(seed, sessions=8)
    _, _, held = needs_of(workload, chains)
    for capacity in {1, max(held) // 2, max(held), (max(held) + blocks) // 2, blocks + 20}:
        misses = misses_of(workload, capacity)
        assert misses == fewest_misses(workload, chains, capacity)
        stricter = fewest_misses(workload, chains, capacity, room_at_ends=True)
        # Calls that need more than there is leave more behind until the next one arrives.
        assert misses == stricter if capacity >= max(held) else misses <= stricter


def test_the_linear_programs_instances_are_worth_solving():
    """Gaps, ties, overlaps of one session and too little room all occur."""
    seen = Counter()
    for seed in range(20):
        workload, chains, blocks = random_case(seed, sessions=8)
        first_uses, gaps, held = needs_of(workload, chains)
        capacity = max(held) // 2
        seen["conflict"] += fewest_misses(workload, chains, capacity) > first_uses
        seen["kept"] += fewest_misses(workload, chains, capacity) < first_uses + len(gaps)
        seen["more than room"] += any(n > capacity for n in held)
        times = Counter(time for time, _, _ in events_of(workload))
        seen["tie"] += max(times.values()) > 1
        seen["overlap"] += any(c.next_s is not None and c.next_s < c.end_s for c in workload.calls)
        seen["branch"] += max(Counter(workload.nodes.parent).values()) > 1
        seen["empty prompt"] += any(not chain for chain in chains)
        assert blocks > 20
    assert min(seen[kind] for kind in ("conflict", "kept", "more than room", "tie")) == 20
    assert min(seen[kind] for kind in ("overlap", "branch", "empty prompt")) > 5


def brute_force(workload, chains, capacity):
    """Fewest misses over all choices of what to keep; only an unbroken prefix is a hit."""
    running, extra = Counter(), 0
    states = {frozenset(): 0}  # idle blocks that are kept → fewest misses so far
    for _, is_arrival, i in events_of(workload):
        chain = chains[i]
        extra += workload.calls[i].extra_blocks * (1 if is_arrival else -1)
        if not is_arrival:
            for block in chain:
                running[block] -= 1
            freed = {block for block in chain if not running[block]}
            states = {kept | freed: misses for kept, misses in states.items()}
            continue
        before = {block for block, count in running.items() if count}
        running.update(chain)
        held = sum(count > 0 for count in running.values()) + extra
        after = {}
        for kept, misses in states.items():
            resident = kept | before
            hit = next((n for n, b in enumerate(chain) if b not in resident), len(chain))
            idle = kept - set(chain)
            room = min(len(idle), max(0, capacity - held))
            for choice in combinations(sorted(idle), room):
                key = frozenset(choice)
                after[key] = min(after.get(key, FAR), misses + len(chain) - hit)
        states = after
    return min(states.values())


@pytest.mark.parametrize("seed", range(40))
def test_no_choice_of_what_to_keep_misses_less(seed):
    workload, chains, _ = random_case(seed, sessions=4, calls=3, horizon_s=10, growth=2)
    for capacity in (3, 5, 7, 9):
        assert misses_of(workload, capacity) == brute_force(workload, chains, capacity)


def block_by_block(workload, chains, capacity):
    """Hits of each call if the block needed farthest ahead goes first, the deepest of equals.

    What is resident is checked to be prefixes after every event.
    """
    events = events_of(workload)
    arrivals = defaultdict(list)
    place, above = {}, {}
    for number, (_, is_arrival, i) in enumerate(events):
        for depth, block in enumerate(chains[i]):
            place[block], above[block] = depth, chains[i][depth - 1] if depth else None
            if is_arrival:
                arrivals[block].append(number)
    running, idle, extra = Counter(), set(), 0
    hits = [0] * len(workload.calls)
    for number, (_, is_arrival, i) in enumerate(events):
        extra += workload.calls[i].extra_blocks * (1 if is_arrival else -1)
        resident = idle | {block for block, count in running.items() if count}
        for block in chains[i]:
            running[block] += 1 if is_arrival else -1
        if is_arrival:
            hits[i] = sum(block in resident for block in chains[i])
            assert all(block in resident for block in chains[i][: hits[i]])
        idle = {b for b in resident if not running[b]}
        held = sum(count > 0 for count in running.values()) + extra

        def order(block, number=number):
            return next((n for n in arrivals[block] if n > number), FAR), place[block]

        if is_arrival:
            idle = set(sorted(idle, key=order)[: max(0, capacity - held)])
        resident = idle | {block for block, count in running.items() if count}
        assert all(above[block] is None or above[block] in resident for block in resident)
    return hits


@pytest.mark.parametrize("seed", range(20))
def test_each_call_hits_what_the_rule_keeps_block_by_block_and_that_is_a_prefix(seed):
    workload, chains, blocks = random_case(seed + 100, sessions=8)
    for capacity in (2, blocks // 3, blocks // 2, blocks):
        assert hits_of(workload, capacity) == block_by_block(workload, chains, capacity)


@pytest.mark.parametrize("seed", range(20))
def test_hits_are_part_of_the_prompt_and_grow_with_the_capacity(seed):
    workload, _, blocks = random_case(seed + 200, sessions=10)
    before = -1
    for capacity in range(1, blocks + 20, 3):
        hits = hits_of(workload, capacity)
        assert all(
            0 <= hit <= depth_of(workload, c) for hit, c in zip(hits, workload.calls, strict=True)
        )
        assert sum(hits) >= before
        before = sum(hits)


@pytest.mark.parametrize("seed", range(20))
def test_with_room_for_all_only_first_uses_miss(seed):
    workload, chains, _ = random_case(seed + 300)
    seen, expected = set(), []
    for chain in chains:  # In the order of arrival.
        expected.append(sum(block in seen for block in chain))
        seen.update(chain)
    assert hits_of(workload, FAR) == expected
    fresh = make_schedule(workload).fresh
    assert [len(c) - n for c, n in zip(chains, fresh, strict=True)] == expected


def test_with_hardly_any_room_only_what_runs_is_hit():
    shared = range(3)
    workload = workload_of(
        [
            call("a", 0.0, shared, 5.0),
            call("b", 1.0, shared, 1.0),
            call("c", 7.0, [10]),
            call("d", 9.0, shared),
        ]
    )
    assert hits_of(workload, 1) == [0, 3, 0, 0]


def test_the_blocks_needed_last_go_first():
    a, b, c = range(4), range(10, 14), range(20, 24)
    workload = workload_of(
        [
            call("a", 0.0, a),
            call("b", 2.0, b),
            call("c", 4.0, c),
            call("a", 6.0, a),
            call("b", 8.0, b),
        ]
    )
    # While c runs, six of the eight idle blocks fit: two of b's, needed after a's, give way.
    assert hits_of(workload, 10) == [0, 0, 0, 4, 2]


def test_a_schedule_serves_every_capacity():
    workload, _, blocks = random_case(7)
    schedule = make_schedule(workload)
    once = [optimal_hits(workload, schedule, n) for n in (3, blocks, 3)]
    assert once[0] == once[2] == hits_of(workload, 3)


@pytest.mark.parametrize("seed", range(5))
def test_a_schedule_says_what_running_calls_hold(seed):
    workload, chains, _ = random_case(seed)
    schedule = make_schedule(workload)
    held = extra = 0
    _, _, expected = needs_of(workload, chains)
    for (_, is_arrival, i), blocks in zip(events_of(workload), expected, strict=True):
        held += schedule.needs(i) if is_arrival else -schedule.sets_free(i)
        extra += workload.calls[i].extra_blocks * (1 if is_arrival else -1)
        assert held + extra == blocks


def test_one_end_frees_what_is_needed_at_different_times_separately():
    opening = list(range(4))
    workload = workload_of(
        [
            call("a", 0.0, [*opening, 10, 11]),
            call("b", 2.0, [*opening, 20]),
            call("a", 4.0, [*opening, 10, 11]),
        ]
    )
    schedule = make_schedule(workload)
    assert [(g.blocks, g.depth) for g in map(schedule.gaps.__getitem__, schedule.frees[0])] == [
        (2, 6),
        (4, 4),
    ]
    assert schedule.fresh == [6, 1, 0]
