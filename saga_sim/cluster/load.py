"""What the agents of a cluster send: tasks of a trace, whose prompts are known by their blocks.

The identity of every full block comes from the trace, so that two prompts agree as far as they do
there; token ids are not needed. The blocks that an answer fills are those of the prompt that
continues it, and nobody's where none does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from saga_core.errors import SettingsError
from saga_sim.cluster.families import (
    Family,
    Owner,
    TenantKind,
    families_in,
    profiles_of,
    tenants_in,
    with_pareto,
)
from saga_sim.engine_bench.tasks import PlannedCall, Task, plan_task

ARRIVALS = ("closed", "poisson", "bursts")
_BURST_SHARE = 0.25
_BURST_LIVES = 2.0
"""In bursts all tasks come in the first quarter of periods of two tasks' lives."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How much the agents do.

    Attributes:
        profile: of ``saga_sim.profiles``; several with + between take turns.
        workers: engines that share the tasks.
        tasks: that are played. live_tasks: of these, at a time; None: half of them.
        pressure: tokens that live tasks hold ÷ tokens of all workers' pools.
        scale: divisor of all lengths and pauses.
        block_tokens: tokens of the engines' blocks.
        seed: which tasks are taken, their order, and when they come.
        arrivals: ``closed``: a task begins when another ends. ``poisson``: at any time, so that
            ``live_tasks`` are alive on average, were the engines as fast as the trace says.
            ``bursts``: the same, but all within a quarter of the time.
        tenants: whose the tasks are; none: nobody's.
        pareto: α of the pauses after tools, 1 to 10, the less the heavier their tail; 0: pauses are
            the profile's.
        deadline_factor: a task should be done within so many times what it takes alone.
        lost_worker_s: when half of the calls are answered a worker dies, and comes back empty so
            many seconds later; 0: none does.
    """

    profile: str = "swe"
    workers: int = 4
    tasks: int = 96
    live_tasks: int | None = None
    pressure: float = 2.0
    scale: int = 1
    block_tokens: int = 64
    seed: int = 0
    arrivals: str = "closed"
    tenants: tuple[TenantKind, ...] = ()
    pareto: float = 0.0
    deadline_factor: float = 1.5
    lost_worker_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("workers", "tasks", "live_tasks", "scale", "block_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingsError(f"{name}={value} must be at least 1")
        if not 0 < self.pressure < math.inf:
            raise SettingsError(f"pressure={self.pressure} must be above 0 and finite")
        if self.arrivals not in ARRIVALS:
            raise SettingsError(f"arrivals={self.arrivals!r}: choose one of {', '.join(ARRIVALS)}")
        if self.pareto and not 1 <= self.pareto <= 10:
            raise SettingsError(f"pareto={self.pareto} must be from 1 to 10, or 0")
        if not 1 <= self.deadline_factor < math.inf:
            raise SettingsError(f"deadline_factor={self.deadline_factor} must be at least 1")
        if not 0 <= self.lost_worker_s < math.inf:
            raise SettingsError(f"lost_worker_s={self.lost_worker_s} must be at least 0")
        if self.lost_worker_s and self.workers < 2:
            raise SettingsError("a worker that is lost needs another one: workers=1")
        if len(profiles_of(self.profile)) > 1 and self.tenants:
            raise SettingsError(f"tenants have tasks of one profile: {self.profile}")


@dataclass(frozen=True, slots=True)
class AgentCall:
    """One call, as an engine gets it.

    Attributes:
        waits_for: calls of the task, by number, that must have been answered.
        pause_s: from the last of these answers, or from the task's start, to the sending.
        hashes: of the full blocks of the prompt with its answer.
        tool: that the answer calls; None for none.
        is_last: the session has no later call.
    """

    session_id: str
    waits_for: tuple[int, ...]
    pause_s: float
    hashes: list[bytes]
    input_tokens: int
    output_tokens: int
    tool: str | None
    is_last: bool


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """Tasks to play in order, ``live_tasks`` at a time or as they come.

    Attributes:
        owners: whose each task is.
        starts_s: when each begins, rising; empty where one begins when another ends.
        blocks_per_worker: of an engine's pool, so that the pressure is met.
        footprint_tokens: mean tokens that a live task holds, on the trace's clock.
        max_tokens: longest prompt with its answer; a task ends before the call that would exceed
            it. cut_tasks: how many do.
    """

    options: LoadOptions
    tasks: tuple[tuple[AgentCall, ...], ...]
    owners: tuple[Owner, ...]
    starts_s: tuple[float, ...]
    live_tasks: int
    blocks_per_worker: int
    footprint_tokens: float
    max_tokens: int
    cut_tasks: int

    @property
    def num_calls(self) -> int:
        """Calls of all tasks."""
        return sum(map(len, self.tasks))

    def values(self) -> dict[str, Any]:
        """All but the tasks, for reports."""
        calls = [call for task in self.tasks for call in task]
        return {
            **asdict(self.options),
            "live_tasks": self.live_tasks,
            "calls": len(calls),
            "prompt_tokens": sum(call.input_tokens for call in calls),
            "output_tokens": sum(call.output_tokens for call in calls),
            "pause_s": sum(call.pause_s for call in calls),
            "blocks_per_worker": self.blocks_per_worker,
            "footprint_tokens": self.footprint_tokens,
            "max_tokens": self.max_tokens,
            "cut_tasks": self.cut_tasks,
        }


def make_load(options: LoadOptions) -> ClusterLoad:
    """The load that presses on the cluster as ``options`` ask for.

    No prompt with its answer may take more than half of a worker's pool; the pool is what the
    tasks press on after they are cut there, and where it shrinks much by that the limit is less.

    Raises:
        SettingsError: the profile is unknown, or calls do not fit into what the pressure leaves.
    """
    families = _families(options)
    size = options.block_tokens
    wanted = len(families) if options.tenants else options.tasks
    live = options.live_tasks or max(1, options.tasks // 2)
    whole = [plan_task(family.calls, options.scale, options.scale, size) for family in families]
    pool_tokens = live * _footprint(whole) / options.pressure / options.workers
    for parts in (2, 3, 4):
        max_tokens = int(pool_tokens / parts)
        kept = [
            (task.up_to(max_tokens), family) for task, family in zip(whole, families, strict=True)
        ]
        kept = [(task, family) for task, family in kept if task.calls][:wanted]
        if len(kept) < wanted:
            continue
        footprint = _footprint([task for task, _ in kept])
        blocks = round(live * footprint / options.pressure / options.workers / size)
        if blocks * size >= max_tokens + size:
            return ClusterLoad(
                options,
                tuple(_agent_calls(n, task, family) for n, (task, family) in enumerate(kept)),
                tuple(family.owner for _, family in kept),
                _starts_s([task for task, _ in kept], live, options),
                min(live, len(kept)),
                blocks,
                footprint,
                max_tokens,
                sum(task.is_cut for task, _ in kept),
            )
    raise SettingsError(
        f"calls of {options.profile} do not fit into the {pool_tokens:,.0f} tokens of a worker "
        f"that pressure {options.pressure:g} leaves: ask for more live tasks, or fewer workers"
    )


def _families(options: LoadOptions) -> list[Family]:
    unit_tokens = options.block_tokens * options.scale
    given = (options.tasks, options.seed, unit_tokens)
    if options.tenants:
        families = tenants_in(options.profile, options.tenants, *given)
    else:
        families = families_in(options.profile, *given)
    if options.pareto:
        rng = random.Random(options.seed)
        families = [with_pareto(family, options.pareto, rng) for family in families]
    return families


def _starts_s(tasks: Sequence[Task], live: int, options: LoadOptions) -> tuple[float, ...]:
    """When tasks begin that do not wait for each other, so that ``live`` are alive on average.

    A Poisson process of which the number of arrivals is known: each is anywhere, evenly.
    """
    if options.arrivals == "closed":
        return ()
    life_s = sum(task.life_s for task in tasks)
    rng = random.Random(options.seed)
    at_s = sorted(rng.random() * life_s / live for _ in tasks)
    if options.arrivals == "bursts":
        period_s = _BURST_LIVES * life_s / len(tasks)
        on_s = _BURST_SHARE * period_s
        at_s = [s // period_s * period_s + s % period_s / period_s * on_s for s in at_s]
    return tuple(at_s)


def _footprint(tasks: Sequence[Task]) -> float:
    """Tokens that a live task holds, mean over the time that tasks live."""
    return sum(task.held_token_s for task in tasks) / sum(task.life_s for task in tasks)


def _agent_calls(number: int, task: Task, family: Family) -> tuple[AgentCall, ...]:
    last = {call.session_id: place for place, call in enumerate(task.calls)}
    return tuple(
        AgentCall(
            planned.session_id,
            planned.waits_for,
            planned.pause_s,
            _hashes(number, place, task, family.trace.encode()),
            planned.input_tokens,
            planned.output_tokens,
            call.tool,
            last[planned.session_id] == place,
        )
        for place, (planned, call) in enumerate(zip(task.calls, family.calls, strict=False))
    )


def _hashes(number: int, place: int, task: Task, trace: bytes) -> list[bytes]:
    """Of the prompt's blocks, and of those that the answer fills."""
    call, size = task.calls[place], task.unit_tokens
    full = (call.input_tokens + call.output_tokens) // size
    ids = _ids(call)
    own = call.input_tokens // size
    # Where a scaled prompt fills a block less or more than the trace's, the trace's ids decide.
    ids = ids[:own]
    follower = _follower(place, task)
    if follower is not None and len(ids) == own:
        ids += _ids(follower)[own:full]
    hashes = [b"%s %d" % (trace, block) for block in ids]
    return hashes + [b"%d %d %d" % (number, place, block) for block in range(len(ids), full)]


def _follower(place: int, task: Task) -> PlannedCall | None:
    """The next call whose prompt contains this one's whole answer."""
    call = task.calls[place]
    whole = call.input_tokens + call.output_tokens
    return next(
        (
            later
            for later in task.calls[place + 1 :]
            if later.base == place and later.keep_tokens >= whole
        ),
        None,
    )


def _ids(call: PlannedCall) -> list[int]:
    return [block for run in call.chain for block in run]
