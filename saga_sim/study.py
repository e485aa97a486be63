"""A study of retention policies: a trace replayed at a grid of pressures, signals and seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from saga_core.errors import SagaError, SettingsError
from saga_core.policies import POLICIES
from saga_sim.belady import Schedule, make_schedule, optimal_hits
from saga_sim.cache import CacheRun, CacheSimulator
from saga_sim.host import HostTier
from saga_sim.signals import signals_of
from saga_sim.traces import Trace
from saga_sim.workload import ROOT, Draw, Workload, build_workload

REFERENCE_POLICY = "prefix-lru"
NO_SIGNALS = "none"
SIGNAL_BLIND = frozenset({"prefix-lru", "session-lru", "gdsf"})
"""Policies that decide the same whatever is signalled; they run without signals only."""


class StudyError(SagaError):
    """A study cannot be made, or its result cannot be true."""


@dataclass(frozen=True, slots=True)
class StudyOptions:
    """The grid, and how its workloads are drawn.

    Attributes:
        pressures: live footprint ÷ capacity, each above 0.
        seeds: how many draws, from seed 0 on.
        live_sessions, measured_calls: as in :class:`~saga_sim.workload.Draw`.
        capacity_blocks: a capacity that takes the place of the pressures; None: theirs.
        host_blocks, host_blocks_per_s: size and bandwidth of a host tier; both None: there is none.
    """

    policies: tuple[str, ...] = (REFERENCE_POLICY, "wa-lru", "saga")
    signals: tuple[str, ...] = (NO_SIGNALS, "close", "forecast", "all")
    pressures: tuple[float, ...] = (1.2, 2.0, 4.0)
    seeds: int = 3
    live_sessions: float = 40.0
    measured_calls: int = 12_000
    capacity_blocks: int | None = None
    host_blocks: int | None = None
    host_blocks_per_s: float | None = None

    def __post_init__(self) -> None:
        for policy in self.policies:
            if policy not in POLICIES:
                known = ", ".join(sorted(POLICIES))
                raise SettingsError(f"unknown policy {policy!r}; choose from {known}")
        for signals in self.signals:
            signals_of(signals)
        for name in ("policies", "signals", "pressures"):
            values = getattr(self, name)
            if not values:
                raise SettingsError(f"{name} are empty; name one at least")
            if len(set(values)) < len(values):
                raise SettingsError(f"{name} name one twice: {', '.join(map(str, values))}")
        positive = {f"pressure {pressure:g}": pressure for pressure in self.pressures}
        for name in ("live_sessions", "capacity_blocks", "host_blocks", "host_blocks_per_s"):
            value = getattr(self, name)
            if value is not None:
                positive[f"{name}={value:g}"] = value
        for shown, number in positive.items():
            if not 0 < number < math.inf:
                raise SettingsError(f"{shown} must be above 0 and finite")
        for name in ("seeds", "measured_calls"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name}={getattr(self, name)} must be at least 1")
        if (self.host_blocks is None) != (self.host_blocks_per_s is None):
            raise SettingsError("host_blocks and host_blocks_per_s go together")

    @property
    def rows(self) -> list[tuple[str, str]]:
        """The policies, each with the signals that it runs with, in order."""
        rows: list[tuple[str, str]] = []
        for policy in self.policies:
            signals = (NO_SIGNALS,) if policy in SIGNAL_BLIND else self.signals
            rows += [(policy, name) for name in signals]
        return rows

    @property
    def num_points(self) -> int:
        """How many capacities there are."""
        return len(self.pressures) if self.capacity_blocks is None else 1


@dataclass(frozen=True, slots=True)
class Usage:
    """Prompt tokens of the measured calls by where their KV came from.

    Attributes:
        hit_tokens: it was resident.
        loaded_tokens: it was loaded from the host tier.
        prefilled_tokens: it was computed.
    """

    hit_tokens: int
    loaded_tokens: int
    prefilled_tokens: int


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload at one capacity, with what bounds every policy there.

    Attributes:
        point: number of the capacity, from 0.
        pressure: footprint ÷ capacity, as chosen or, with a fixed capacity, as it came out.
        calls: all calls of the workload. measured_calls: those in the measured span.
        input_tokens: prompts of the measured calls.
        first_tokens: of these, what a cache without bound computes.
        belady: the optimum, without a host tier. lru: the reference policy.
    """

    seed: int
    point: int
    pressure: float
    capacity_tokens: int
    footprint_tokens: int
    calls: int
    measured_calls: int
    input_tokens: int
    first_tokens: int
    belady: Usage
    lru: Usage


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """What a policy did in a cell.

    Attributes:
        victims: blocks evicted in the measured span, by the kind of their run.
        retained_tokens: tokens that idle runs held, mean over the measured span.
        overcommitted: of all calls, those at whose arrival running calls alone exceeded the
            capacity.
    """

    cell: Cell
    policy: str
    signals: str
    usage: Usage
    victims: Mapping[str, int]
    retained_tokens: float
    overcommitted: int

    @property
    def retained_share(self) -> float:
        """Share of the capacity that idle runs held."""
        return self.retained_tokens / self.cell.capacity_tokens

    @property
    def hit_rate(self) -> float:
        """Resident tokens ÷ prompt tokens."""
        return self.usage.hit_tokens / self.cell.input_tokens

    @property
    def regen_tokens(self) -> int:
        """Tokens computed that a cache without bound would have had."""
        return self.usage.prefilled_tokens - self.cell.first_tokens

    @property
    def total_ratio(self) -> float | None:
        """Tokens computed ÷ Bélády's; None when Bélády computes none."""
        return _ratio(self.usage.prefilled_tokens, self.cell.belady.prefilled_tokens)

    @property
    def regen_ratio(self) -> float | None:
        """Tokens computed again ÷ Bélády's; None when Bélády computes none again."""
        least = self.cell.belady.prefilled_tokens - self.cell.first_tokens
        return _ratio(self.regen_tokens, least)

    @property
    def gap_closed(self) -> float | None:
        """What is saved over the reference policy ÷ what Bélády saves; None without a gap."""
        lru = self.cell.lru.prefilled_tokens
        gap = lru - self.cell.belady.prefilled_tokens
        return _ratio(lru - self.usage.prefilled_tokens, gap)


def _ratio(value: int, of: int) -> float | None:
    return value / of if of > 0 else None


class CacheStudy:
    """Runs the grid of ``options`` over ``trace``, one run after the other."""

    def __init__(self, trace: Trace, options: StudyOptions) -> None:
        self.trace = trace
        self.options = options

    @property
    def num_runs(self) -> int:
        """How many results :meth:`run` yields."""
        options = self.options
        return options.seeds * options.num_points * len(options.rows)

    def run(self) -> Iterator[PolicyRun]:
        """Yield the results as they come: by seed, then capacity, policy and signals.

        Raises:
            StudyError: the workload has nothing to measure, or a policy computed less than Bélády
                over the whole run, which is a bug of the simulator.
        """
        options = self.options
        for seed in range(options.seeds):
            draw = Draw(options.live_sessions, options.measured_calls, seed)
            workload = build_workload(self.trace, draw)
            schedule = make_schedule(workload)
            for point in range(options.num_points):
                yield from _Bench(workload, schedule, options, seed, point).run()


class _Bench:
    """One workload at one capacity."""

    def __init__(
        self, workload: Workload, schedule: Schedule, options: StudyOptions, seed: int, point: int
    ) -> None:
        self._workload = workload
        self._schedule = schedule
        self._options = options
        self._seed = seed
        self._point = point
        self._capacity = options.capacity_blocks or workload.capacity_at(options.pressures[point])
        self._optimal_hits = optimal_hits(workload, schedule, self._capacity)
        self._least_misses = sum(self._depths()) - sum(self._optimal_hits)

    def run(self) -> Iterator[PolicyRun]:
        lru = self._simulate(REFERENCE_POLICY, NO_SIGNALS)
        cell = self._cell(lru)
        for policy, signals in self._options.rows:
            run = lru if policy == REFERENCE_POLICY else self._simulate(policy, signals)
            usage = self._usage(run.hits, run.host_hits)
            victims = dict(sorted(run.victims.items()))
            span_s = self._workload.measure_to_s - self._workload.measure_from_s
            retained = run.idle_block_s * self._workload.block_tokens / span_s
            yield PolicyRun(cell, policy, signals, usage, victims, retained, run.overcommitted)

    def _simulate(self, policy: str, signals: str) -> CacheRun:
        run = CacheSimulator(
            self._workload,
            self._schedule,
            self._capacity,
            policy,
            signals_of(signals),
            seed=self._seed,
            host=self._host(),
        ).run()
        # Over the whole run: what the optimum gives up in the warm-up others may gain later.
        misses = sum(self._depths()) - sum(run.hits)
        if misses < self._least_misses:
            raise StudyError(
                f"Bélády beaten: {policy} with signals {signals} missed {misses:,} blocks, the "
                f"optimum {self._least_misses:,} (capacity {self._capacity:,} blocks, seed "
                f"{self._seed}); this is a bug of the simulator"
            )
        return run

    def _host(self) -> HostTier | None:
        options = self._options
        if options.host_blocks is None or options.host_blocks_per_s is None:
            return None
        return HostTier(self._workload.nodes, options.host_blocks, options.host_blocks_per_s)

    def _cell(self, lru: CacheRun) -> Cell:
        workload = self._workload
        measured = [call for call in workload.calls if workload.is_measured(call.arrival_s)]
        if not sum(call.input_tokens for call in measured) or not workload.footprint_blocks:
            raise StudyError(
                f"{workload.name} leaves nothing to measure: {len(measured)} calls arrive in the "
                "measured span; ask for more calls, or give a trace with longer prompts"
            )
        unbounded = [
            depth - fresh for depth, fresh in zip(self._depths(), self._schedule.fresh, strict=True)
        ]
        return Cell(
            seed=self._seed,
            point=self._point,
            pressure=(
                self._options.pressures[self._point]
                if self._options.capacity_blocks is None
                else workload.footprint_blocks / self._capacity
            ),
            capacity_tokens=self._capacity * workload.block_tokens,
            footprint_tokens=round(workload.footprint_blocks * workload.block_tokens),
            calls=len(workload.calls),
            measured_calls=len(measured),
            input_tokens=sum(call.input_tokens for call in measured),
            first_tokens=self._usage(unbounded).prefilled_tokens,
            belady=self._usage(self._optimal_hits),
            lru=self._usage(lru.hits, lru.host_hits),
        )

    def _usage(self, hits: Sequence[int], host_hits: Sequence[int] | None = None) -> Usage:
        """Tokens of the measured calls, from blocks per call."""
        workload = self._workload
        total = hit = loaded = 0
        for i, call in enumerate(workload.calls):
            if workload.is_measured(call.arrival_s):
                total += call.input_tokens
                hit += hits[i] * workload.block_tokens
                loaded += host_hits[i] * workload.block_tokens if host_hits else 0
        return Usage(hit, loaded, total - hit - loaded)

    def _depths(self) -> Iterator[int]:
        """Full blocks of each call's prompt."""
        depth = self._workload.nodes.depth
        return (0 if call.node == ROOT else depth[call.node] for call in self._workload.calls)
