"""Which tasks a load is made of: of one profile, of several in turn, or of tenants."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from saga_core.errors import SettingsError
from saga_sim.profiles import PROFILES, make_profile
from saga_sim.traces import Call
from saga_sim.workload import end_s_of, families_of, split

_SESSIONS_PER_TASK = {"tree": 32}
"""Sessions of a profile that surely hold a task more; one where a task is a session."""

_PROFILE_SEED = 100
_SPARE = 16
_MOST_DRAWN = 20_000

PARETO_LEAST_S, PARETO_MOST_S = 1.0, 600.0
"""Bounds of a heavy-tailed pause (ours)."""


@dataclass(frozen=True, slots=True)
class TenantKind:
    """Tenants that are alike.

    Attributes:
        kind: what they are called. tenants: how many there are.
        steps: of each of their tasks.
    """

    kind: str
    tenants: int
    steps: int

    def __post_init__(self) -> None:
        if self.tenants < 1 or self.steps < 1:
            raise SettingsError(f"tenants and their steps must be at least 1: {self}")


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a task is.

    Attributes:
        tenant: its name; "" where there is one.
        kind: of the tenant, or the profile.
    """

    tenant: str
    kind: str


@dataclass(frozen=True, slots=True)
class Family:
    """A task as its calls in the trace.

    Attributes:
        trace: which trace its block ids are of.
    """

    owner: Owner
    trace: str
    calls: Sequence[Call]


def profiles_of(profile: str) -> list[str]:
    """The names that ``profile`` joins with ``+``.

    Raises:
        SettingsError: one is unknown, or named twice.
    """
    names = profile.split("+")
    unknown = [name for name in names if name not in PROFILES]
    if unknown or len(set(names)) < len(names):
        known = ", ".join(sorted(PROFILES))
        wrong = unknown[0] if unknown else profile
        raise SettingsError(
            f"unknown profile {wrong!r}; choose of {known}, each once, with + between"
        )
    return names


def families_in(profile: str, tasks: int, seed: int, unit_tokens: int) -> list[Family]:
    """Tasks in the order of the seed: as many as are played, and some more.

    Those of several profiles take turns.

    Args:
        unit_tokens: of a block of the trace.
    """
    names = profiles_of(profile)
    each = -(-tasks // len(names)) + _SPARE
    drawn = [
        [Family(Owner("", name), name, calls) for calls in _draw(name, each, seed, unit_tokens)]
        for name in names
    ]
    return [family for turn in zip(*drawn, strict=True) for family in turn][: tasks + _SPARE]


def tenants_in(
    profile: str, kinds: Sequence[TenantKind], tasks: int, seed: int, unit_tokens: int
) -> list[Family]:
    """Tasks of tenants, each with the steps of its kind.

    All tenants have as many tasks alive at a time, on average: the shorter its tasks, the more of
    them a tenant has, at least one. A task is the beginning of a session of the profile that has
    so many steps; its last answer calls no tool.
    """
    (name,) = profiles_of(profile)
    counts = _task_counts(kinds, tasks)
    wanted = [(kind.steps, count * kind.tenants) for kind, count in counts]
    left = _long_enough(name, wanted, seed, unit_tokens)
    rng = random.Random(seed)
    made: list[Family] = []
    for kind, count in sorted(counts, key=lambda each: -each[0].steps):
        fitting = [calls for calls in left if len(calls) >= kind.steps]
        rng.shuffle(fitting)
        needed = count * kind.tenants
        left = [calls for calls in left if len(calls) < kind.steps] + fitting[needed:]
        for number, calls in enumerate(fitting[:needed]):
            owner = Owner(f"{kind.kind}-{number % kind.tenants + 1}", kind.kind)
            made.append(Family(owner, name, _ended(calls[: kind.steps])))
    rng.shuffle(made)
    return made


def with_pareto(family: Family, alpha: float, rng: random.Random) -> Family:
    """The task with other pauses after tools: Pareto, from ``PARETO_LEAST_S``, cut at the most.

    Raises:
        SettingsError: several sessions of the task depend on each other.
    """
    if len({call.session_id for call in family.calls}) > 1:
        raise SettingsError(f"heavy-tailed pauses are not for tasks that branch: {family.trace}")
    calls: list[Call] = []
    now_s = family.calls[0].arrival_s
    for before, call in zip([None, *family.calls], family.calls, strict=False):
        if before is not None:
            pause_s = call.arrival_s - end_s_of(before)
            if before.tool is not None:
                drawn_s = PARETO_LEAST_S * (1.0 - rng.random()) ** (-1.0 / alpha)
                pause_s = min(PARETO_MOST_S, drawn_s)
            now_s += end_s_of(before) - before.arrival_s + pause_s
        calls.append(replace(call, arrival_s=now_s))
    return replace(family, calls=calls)


def _draw(name: str, count: int, seed: int, unit_tokens: int) -> list[list[Call]]:
    """``count`` tasks of a profile, in the order of the seed."""
    drawn = list(_tasks(name, count * _SESSIONS_PER_TASK.get(name, 1), seed, unit_tokens))
    random.Random(seed).shuffle(drawn)
    return drawn[:count]


def _tasks(name: str, sessions: int, seed: int, unit_tokens: int) -> Iterator[list[Call]]:
    trace = make_profile(
        name, sessions=sessions, seed=_PROFILE_SEED + seed, block_tokens=unit_tokens
    )
    for family in families_of(trace):
        yield from split(family)


def _task_counts(kinds: Sequence[TenantKind], tasks: int) -> list[tuple[TenantKind, int]]:
    """Tasks of each tenant of a kind, ``tasks`` in all, about."""
    weight = sum(kind.tenants / kind.steps for kind in kinds)
    return [(kind, max(1, round(tasks / kind.steps / weight))) for kind in kinds]


def _long_enough(
    name: str, wanted: Sequence[tuple[int, int]], seed: int, unit_tokens: int
) -> list[list[Call]]:
    """Tasks of the profile, of which so many each have so many steps, none counted twice."""
    sessions = 2 * sum(count for _, count in wanted)
    while sessions <= _MOST_DRAWN:
        drawn = list(_tasks(name, sessions, seed, unit_tokens))
        lengths = sorted(map(len, drawn), reverse=True)
        needed = sorted((steps for steps, count in wanted for _ in range(count)), reverse=True)
        if all(has >= steps for has, steps in zip(lengths, needed, strict=False)):
            return drawn
        sessions *= 2
    raise SettingsError(f"{name}: too few tasks have {max(wanted)[0]} steps")


def _ended(calls: Sequence[Call]) -> list[Call]:
    last = replace(calls[-1], tool=None, tool_s=None, ending="end_turn")
    return [*calls[:-1], last]
