"""Workloads for tests of the simulators: from a script of calls, or random."""

from saga_sim.traces.model import Call, Trace, runs_of
from saga_sim.workload import ROOT, Draw, build_workload

BLOCK_TOKENS = 4


def call(session_id, arrival_s, blocks, duration_s=1.0, *, extra=0, tail_tokens=0, **fields):
    """A call whose prompt is the given blocks and ``tail_tokens`` more.

    While it runs it holds ``extra`` blocks beyond those, and one for the tail.
    """
    return Call(
        session_id,
        arrival_s,
        len(blocks) * BLOCK_TOKENS + tail_tokens,
        extra * BLOCK_TOKENS,
        runs_of(list(blocks)),
        duration_s,
        **fields,
    )


def trace_of(calls, clock="shared"):
    """A trace of the calls; sessions in the order of their first call."""
    sessions = {}
    for each in sorted(calls, key=lambda c: c.arrival_s):
        sessions.setdefault(each.session_id, []).append(each)
    return Trace("script", BLOCK_TOKENS, tuple(map(tuple, sessions.values())), clock)


def workload_of(calls):
    """The calls at their own times, all of them measured."""
    workload = build_workload(trace_of(calls), Draw())
    workload.measure_from_s = 0.0
    return workload


def name_of(sim_call):
    """The trace's id of a workload call's session."""
    return sim_call.session_id.rsplit("#", 1)[0]


def chains_of(workload, calls):
    """Block ids of each call of the workload, as the script has them: not by way of its nodes."""
    ids = {(c.session_id, c.arrival_s): [b for run in c.chain for b in run] for c in calls}
    assert len(ids) == len(calls), "two calls of a session at one time"
    return [ids[name_of(c), c.arrival_s] for c in workload.calls]


def depth_of(workload, sim_call):
    """Full blocks of a call's prompt."""
    return 0 if sim_call.node == ROOT else workload.nodes.depth[sim_call.node]


def random_calls(rng, *, sessions=6, calls=5, horizon_s=20, growth=4):
    """Sessions that grow, branch, go back, open alike and read each other; many ties in time."""
    next_id = 0

    def fresh(count):
        nonlocal next_id
        next_id += count
        return list(range(next_id - count, next_id))

    openings = [[], fresh(rng.randint(1, growth)), fresh(rng.randint(1, growth))]
    openings.append(openings[1] + fresh(rng.randint(1, growth)))
    made, paths = [], [openings[1]]
    for s in range(sessions):
        path, own = rng.choice(openings), [[]]
        arrival_s = float(rng.randint(0, horizon_s))
        for _ in range(rng.randint(1, calls)):
            kind = rng.random()
            if kind < 0.6:
                path = path + fresh(rng.randint(0, growth))
            elif kind < 0.8:
                path = path[: rng.randint(0, len(path))] + fresh(rng.randint(0, growth))
            elif kind < 0.9:
                path = rng.choice(own)
            else:
                path = rng.choice(paths) + fresh(rng.randint(0, 1))
            own.append(path)
            paths.append(path)
            tool = rng.choice([None, "Bash", "Read"])
            made.append(
                call(
                    f"s{s}",
                    arrival_s,
                    path,
                    rng.choice([0.5, 1.0, 2.0, 5.0]),
                    extra=rng.randint(0, 2),
                    tail_tokens=rng.randint(0, BLOCK_TOKENS - 1),
                    ending="end_turn" if tool is None else "tool_use",
                    tool=tool,
                    tool_s=None if tool is None else rng.choice([0.5, 1.0, 30.0]),
                )
            )
            # Often before the call before has ended.
            arrival_s += rng.choice([1.0, 1.0, 2.0, 3.0, 5.0, 8.0])
    return made
