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
from saga_sim.engine_bench.tasks import PlannedCall, Task, plan_task
from saga_sim.profiles import make_profile
from saga_sim.traces import Call, Trace
from saga_sim.workload import families_of, split

_SESSIONS_PER_TASK = {"tree": 32}
"""Sessions of a profile that surely hold a task more; one where a task is a session."""

_PROFILE_SEED = 100


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How much the agents do.

    Attributes:
        profile: of ``saga_sim.profiles``.
        workers: engines that share the tasks.
        tasks: that are played. live_tasks: of these, at a time; None: half of them.
        pressure: tokens that live tasks hold ÷ tokens of all workers' pools.
        scale: divisor of all lengths and pauses.
        block_tokens: tokens of the engines' blocks.
        seed: which tasks are taken, and their order.
    """

    profile: str = "swe"
    workers: int = 4
    tasks: int = 96
    live_tasks: int | None = None
    pressure: float = 2.0
    scale: int = 1
    block_tokens: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("workers", "tasks", "live_tasks", "scale", "block_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingsError(f"{name}={value} must be at least 1")
        if not 0 < self.pressure < math.inf:
            raise SettingsError(f"pressure={self.pressure} must be above 0 and finite")


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
    """Tasks to play in order, ``live_tasks`` at a time.

    Attributes:
        blocks_per_worker: of an engine's pool, so that the pressure is met.
        footprint_tokens: mean tokens that a live task holds, on the trace's clock.
        max_tokens: longest prompt with its answer; a task ends before the call that would exceed
            it. cut_tasks: how many do.
    """

    options: LoadOptions
    tasks: tuple[tuple[AgentCall, ...], ...]
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
    live = options.live_tasks or max(1, options.tasks // 2)
    whole = [plan_task(family, options.scale, options.scale, size) for family in families]
    pool_tokens = live * _footprint(whole) / options.pressure / options.workers
    for parts in (2, 3, 4):
        max_tokens = int(pool_tokens / parts)
        kept = [
            (task.up_to(max_tokens), family) for task, family in zip(whole, families, strict=True)
        ]
        kept = [(task, family) for task, family in kept if task.calls][: options.tasks]
        if len(kept) < options.tasks:
            continue
        footprint = _footprint([task for task, _ in kept])
        blocks = round(live * footprint / options.pressure / options.workers / size)
        if blocks * size >= max_tokens + size:
            return ClusterLoad(
                options,
                tuple(_agent_calls(n, task, family) for n, (task, family) in enumerate(kept)),
                min(live, options.tasks),
                blocks,
                footprint,
                max_tokens,
                sum(task.is_cut for task, _ in kept),
            )
    raise SettingsError(
        f"calls of {options.profile} do not fit into the {pool_tokens:,.0f} tokens of a worker "
        f"that pressure {options.pressure:g} leaves: ask for more live tasks, or fewer workers"
    )


def _families(options: LoadOptions) -> list[list[Call]]:
    """Tasks of the profile in the order of the seed: as many as are played, and some more."""
    per_task = _SESSIONS_PER_TASK.get(options.profile, 1)
    trace: Trace = make_profile(
        options.profile,
        sessions=(options.tasks + 16) * per_task,
        seed=_PROFILE_SEED + options.seed,
        block_tokens=options.block_tokens * options.scale,
    )
    families = [part for family in families_of(trace) for part in split(family)]
    random.Random(options.seed).shuffle(families)
    return families[: options.tasks + 16]


def _footprint(tasks: Sequence[Task]) -> float:
    """Tokens that a live task holds, mean over the time that tasks live."""
    return sum(task.held_token_s for task in tasks) / sum(task.life_s for task in tasks)


def _agent_calls(number: int, task: Task, family: Sequence[Call]) -> tuple[AgentCall, ...]:
    last = {call.session_id: place for place, call in enumerate(task.calls)}
    return tuple(
        AgentCall(
            planned.session_id,
            planned.waits_for,
            planned.pause_s,
            _hashes(number, place, task),
            planned.input_tokens,
            planned.output_tokens,
            call.tool,
            last[planned.session_id] == place,
        )
        for place, (planned, call) in enumerate(zip(task.calls, family, strict=False))
    )


def _hashes(number: int, place: int, task: Task) -> list[bytes]:
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
    hashes = [b"%d" % block for block in ids]
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
