"""Bélády's optimum at block level: the fewest blocks that any cache of a size must compute again.

Each block is needed while a call that contains it runs, and may be kept or not over each gap
between two such spans. Keeping it costs room over the gap and saves one computation. Gaps have
equal worth, so dropping the one that ends last whenever the room does not suffice is optimal; a
block is needed at least as late as those before it in its chain, so with ties deepest first what
is kept is always a prefix.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from saga_sim.workload import ROOT, Workload


@dataclass(frozen=True, slots=True)
class Gap:
    """Blocks that fall idle together and are needed again together.

    Attributes:
        blocks: how many.
        depth: blocks of the chain down to their last one.
        next_event: number of the arrival that needs them again; past all events when none does.
    """

    blocks: int
    depth: int
    next_event: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """What does not depend on the capacity: which blocks each event needs and sets free.

    Attributes:
        events: (time, is_arrival, call) in order.
        gaps: all gaps.
        resumes: per call, the gaps that its arrival ends.
        fresh: per call, blocks of its path that no call has had before.
        frees: per call, the gaps that begin at its end.
    """

    events: list[tuple[float, bool, int]]
    gaps: list[Gap]
    resumes: list[list[int]]
    fresh: list[int]
    frees: list[list[int]]

    def needs(self, call: int) -> int:
        """Blocks of the call's path that no running call held when it arrived."""
        return self.fresh[call] + sum(self.gaps[gap].blocks for gap in self.resumes[call])

    def sets_free(self, call: int) -> int:
        """Blocks of the call's path that no running call holds after its end."""
        return sum(self.gaps[gap].blocks for gap in self.frees[call])


def make_schedule(workload: Workload) -> Schedule:
    """Work out once per workload what every capacity shares."""
    nodes, calls = workload.nodes, workload.calls
    events = events_of(workload)
    next_event = [len(events)] * len(nodes.parent)
    # Backwards: which arrival needs each node of a path next, seen from the end of a call.
    later: list[list[tuple[int, int]]] = [[] for _ in calls]
    for number in range(len(events) - 1, -1, -1):
        _, is_arrival, i = events[number]
        node = calls[i].node
        while node != ROOT:
            if is_arrival:
                next_event[node] = number
            elif not later[i] or later[i][-1][1] != next_event[node]:
                later[i].append((node, next_event[node]))
            node = nodes.parent[node]
    return _forwards(workload, events, later)


def events_of(workload: Workload) -> list[tuple[float, bool, int]]:
    """Ends and arrivals of the calls in order of time; at one time ends come first."""
    calls = workload.calls
    events = [(call.arrival_s, True, i) for i, call in enumerate(calls)]
    events += [(call.end_s, False, i) for i, call in enumerate(calls)]
    events.sort()
    return events


def _forwards(
    workload: Workload,
    events: list[tuple[float, bool, int]],
    later: list[list[tuple[int, int]]],
) -> Schedule:
    nodes, calls = workload.nodes, workload.calls
    pins = [0] * len(nodes.parent)
    gap_of = [-1] * len(nodes.parent)
    gaps: list[Gap] = []
    resumes: list[list[int]] = [[] for _ in calls]
    frees: list[list[int]] = [[] for _ in calls]
    fresh = [0] * len(calls)
    for _, is_arrival, i in events:
        node = calls[i].node
        if is_arrival:
            while node != ROOT:
                if pins[node] == 0:
                    gap = gap_of[node]
                    if gap < 0:
                        fresh[i] += nodes.length[node]
                    elif not resumes[i] or resumes[i][-1] != gap:
                        resumes[i].append(gap)
                pins[node] += 1
                node = nodes.parent[node]
            continue
        for k, (tip, needed_at) in enumerate(later[i]):
            stop = later[i][k + 1][0] if k + 1 < len(later[i]) else ROOT
            first = len(gaps)
            blocks, depth, node = 0, 0, tip
            while node != stop:
                pins[node] -= 1
                if pins[node] == 0:
                    gap_of[node] = first
                    depth = depth or nodes.depth[node]
                    blocks += nodes.length[node]
                node = nodes.parent[node]
            if blocks:
                gaps.append(Gap(blocks, depth, needed_at))
                frees[i].append(first)
    return Schedule(events, gaps, resumes, fresh, frees)


def optimal_hits(workload: Workload, schedule: Schedule, capacity_blocks: int) -> list[int]:
    """Blocks of each call's prompt that the optimum holds when it arrives.

    Running calls are always held, also when they need more than the capacity; room is made when a
    call arrives.
    """
    gaps, calls = schedule.gaps, workload.calls
    kept = [0] * len(gaps)
    farthest: list[tuple[int, int, int]] = []
    idle = pinned = 0
    hits = [0] * len(calls)
    for _, is_arrival, i in schedule.events:
        call = calls[i]
        if not is_arrival:
            for gap_id in schedule.frees[i]:
                gap = gaps[gap_id]
                kept[gap_id] = gap.blocks
                idle += gap.blocks
                pinned -= gap.blocks
                heapq.heappush(farthest, (-gap.next_event, -gap.depth, gap_id))
            pinned -= call.extra_blocks
            continue
        missing = schedule.fresh[i]
        for gap_id in schedule.resumes[i]:
            idle -= kept[gap_id]
            missing += gaps[gap_id].blocks - kept[gap_id]
            pinned += gaps[gap_id].blocks
            kept[gap_id] = 0
        pinned += schedule.fresh[i] + call.extra_blocks
        hits[i] = (workload.nodes.depth[call.node] if call.node != ROOT else 0) - missing
        over = pinned + idle - capacity_blocks
        while over > 0 and idle > 0:
            gap_id = farthest[0][2]
            dropped = min(kept[gap_id], over)
            kept[gap_id] -= dropped
            idle -= dropped
            over -= dropped
            if kept[gap_id] == 0:
                heapq.heappop(farthest)
    return hits
