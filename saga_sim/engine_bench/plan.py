"""What agents will send to one engine: tasks of a trace, shrunk, and how much memory they press on.

Lengths and times of the trace are divided by one factor, so that an answer keeps its proportion to
the prompt it extends and to the pause after it, and a session crosses as many blocks, in
proportion to the pool, as it would. Only the order and the lengths come from the trace: an answer
is what the engine generates, and the next prompt of the session continues it.

How many tasks are alive at a time: with *f* the mean tokens that a live task holds, weighted by
time on the trace's clock, ``live`` tasks press on a pool of *m* tokens with ``live · f ÷ m``. The
number nearest to the pressure that is asked for is taken, and the pool is then fitted, so that the
pressure is met.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from saga_core.errors import SettingsError
from saga_sim.engine_bench.tasks import Task, plan_task
from saga_sim.traces import Trace
from saga_sim.workload import families_of, split

PROFILE_SESSIONS = {"swe": 200, "web": 200, "chat": 400, "tree": 2_000}
"""Sessions of a profile that tasks are taken from; a search of tree has about twenty."""

ROUNDS = 2
"""Tasks that are played ÷ tasks alive at a time: later ones start when sessions differ in age."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a trace becomes a load.

    Attributes:
        pressure: tokens that live tasks hold ÷ tokens of the pool.
        live_tasks: tasks alive at a time; None: as many as press on ``pool_tokens``.
        scale: divisor of the trace's lengths. time_scale: divisor of its times; None: ``scale``.
        pool_tokens: KV memory to be pressed on, in tokens of the trace: 131,072 are what an 8B
            model (128 KiB a token) keeps in 16 GiB.
        block_tokens: tokens of the engine's blocks.
        seed: which tasks are taken, and every token that is not an answer.
        vocabulary: token ids run from 3 up to this.
    """

    pressure: float = 2.0
    live_tasks: int | None = None
    scale: int = 16
    time_scale: float | None = None
    pool_tokens: int = 131_072
    block_tokens: int = 32
    seed: int = 0
    vocabulary: int = 1024

    def __post_init__(self) -> None:
        for name in ("pressure", "live_tasks", "scale", "time_scale"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise SettingsError(f"{name}={value} must be above 0 and finite")


@dataclass(frozen=True, slots=True)
class Load:
    """Tasks to play, in order, ``live_tasks`` at a time.

    Attributes:
        pool_blocks: blocks of the engine's pool, without vLLM's null block.
        footprint_tokens: mean tokens that a live task holds.
        max_tokens: longest prompt with its answer; a task ends before the call that would exceed
            it. cut_tasks: how many do.
    """

    name: str
    options: LoadOptions
    tasks: tuple[Task, ...]
    live_tasks: int
    pool_blocks: int
    footprint_tokens: float
    max_tokens: int
    cut_tasks: int

    @property
    def num_calls(self) -> int:
        """Calls of all tasks."""
        return sum(len(task.calls) for task in self.tasks)

    @property
    def pool_tokens(self) -> int:
        """Tokens of the pool."""
        return self.pool_blocks * self.options.block_tokens


def make_load(trace: Trace, options: LoadOptions) -> Load:
    """The load that presses on an engine as ``options`` ask for.

    No prompt with its answer may take more than half of ``pool_tokens``, or half of what the live
    tasks would hold: the engine could run little beside it. Where the tasks that are drawn hold so
    little that the fitted pool is smaller than that, the limit is a third, or a quarter.

    Raises:
        SettingsError: the trace's blocks cannot be divided, or it has too few or too long tasks.
    """
    whole = _plan(trace, options)
    pool_tokens = options.pool_tokens / options.scale
    if options.live_tasks is not None:
        pool_tokens = options.live_tasks * _footprint(whole) / options.pressure
    for parts in (2, 3, 4):
        load = _fit(trace, options, whole, pool_tokens, int(pool_tokens / parts))
        if load is not None:
            return load
    raise SettingsError(
        f"calls of {trace.name} do not fit into the pool that pressure {options.pressure:g} "
        "leaves: ask for more sessions"
    )


def _plan(trace: Trace, options: LoadOptions) -> list[Task]:
    """All tasks of the trace, shrunk, in the order of the seed."""
    if trace.block_tokens % options.scale:
        raise SettingsError(
            f"blocks of {trace.block_tokens} tokens cannot be divided by scale={options.scale}"
        )
    unit_tokens = trace.block_tokens // options.scale
    time_scale = options.time_scale or options.scale
    families = [part for family in families_of(trace) for part in split(family)]
    random.Random(options.seed).shuffle(families)
    return [plan_task(family, options.scale, time_scale, unit_tokens) for family in families]


def _fit(
    trace: Trace, options: LoadOptions, whole: Sequence[Task], pool_tokens: float, max_tokens: int
) -> Load | None:
    """The load with calls of at most ``max_tokens``; None when these do not fit into its pool."""
    fitting = [task for task in (task.up_to(max_tokens) for task in whole) if task.calls]
    if not fitting:
        return None
    live = options.live_tasks or max(1, round(options.pressure * pool_tokens / _footprint(fitting)))
    if len(fitting) < live:
        raise SettingsError(
            f"{trace.name} has {len(fitting)} tasks that fit; pressure {options.pressure:g} needs "
            f"{live} at a time"
        )
    tasks = tuple(fitting[: ROUNDS * live])
    footprint = _footprint(tasks)
    pool_blocks = round(live * footprint / options.pressure / options.block_tokens)
    if pool_blocks * options.block_tokens < max_tokens + options.block_tokens:
        return None
    num_cut = sum(task.is_cut for task in tasks)
    return Load(trace.name, options, tasks, live, pool_blocks, footprint, max_tokens, num_cut)


def _footprint(tasks: Sequence[Task]) -> float:
    """Tokens that a live task holds, mean over the time that tasks live."""
    seconds = sum(task.life_s for task in tasks)
    return sum(task.held_token_s for task in tasks) / seconds
