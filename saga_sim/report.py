"""What a study of policies shows: a table, and a JSON object for programs."""

from __future__ import annotations

import json
import platform
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from saga_sim.signals import signals_of
from saga_sim.study import CacheStudy, Cell, PolicyRun, StudyOptions
from saga_sim.traces import Trace

VERSION = 1

PAPER: Mapping[str, Mapping[str, float]] = {
    "swe": {"prefix-lru": 1.97, "wa-lru": 1.31},
    "web": {"prefix-lru": 1.74, "wa-lru": 1.28},
}
"""Tokens prefilled ÷ Bélády's on SWE-bench and WebArena, by profile (arXiv 2605.00528)."""

_ALL_COLUMNS = 100
"""Width from which ranges, victims and the paper's figures are shown."""
_WIDE_COLUMNS = 130
"""Width from which a figure and its range stand on one line."""

VICTIMS = ("paused", "superseded", "shared", "ended")

_FIGURES: Mapping[str, Callable[[PolicyRun], float | None]] = {
    "total_ratio": lambda run: run.total_ratio,
    "regen_ratio": lambda run: run.regen_ratio,
    "gap_closed": lambda run: run.gap_closed,
    "hit_rate": lambda run: run.hit_rate,
    "retained_share": lambda run: run.retained_share,
}


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the seeds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """From one value a seed, those without left out; None when none has one."""
        known = [value for value in values if value is not None]
        return cls(statistics.median(known), min(known), max(known)) if known else None


@dataclass(frozen=True, slots=True)
class Row:
    """A policy with its signals at one capacity: its runs, one a seed."""

    runs: Sequence[PolicyRun]

    @property
    def first(self) -> PolicyRun:
        """The run that stands for what all have in common."""
        return self.runs[0]

    def spread(self, figure: str) -> Spread | None:
        """One of the figures over the seeds: see ``_FIGURES``."""
        return Spread.of(map(_FIGURES[figure], self.runs))

    @property
    def pressure(self) -> float:
        """Median over the seeds."""
        return statistics.median(run.cell.pressure for run in self.runs)

    @property
    def victims(self) -> dict[str, float]:
        """Share of the evicted blocks by kind, all seeds together; empty when none was evicted."""
        blocks = sum((Counter(run.victims) for run in self.runs), Counter[str]())
        total = blocks.total()
        kinds = [*VICTIMS, *sorted(blocks.keys() - set(VICTIMS))]
        return {kind: blocks[kind] / total for kind in kinds} if total else {}


def rows_of(runs: Iterable[PolicyRun]) -> list[Row]:
    """Group runs by capacity, policy and signals, in the order in which these first come."""
    groups: dict[tuple[int, str, str], list[PolicyRun]] = {}
    for run in runs:
        groups.setdefault((run.cell.point, run.policy, run.signals), []).append(run)
    return [Row(groups[key]) for key in sorted(groups, key=lambda key: key[0])]


def label_of(signals: str) -> str:
    """How a set of signals is called where people read it: a forecast is named as injected."""
    sigma = signals_of(signals).forecast_sigma
    if sigma is None:
        return signals
    injected = f"injected forecast (log σ {sigma:g})"
    return injected if signals == "forecast" else f"{signals} + {injected}"


# JSON


def summarise(
    study: CacheStudy, rows: Sequence[Row], hardware: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Everything that was asked and measured as one JSON object; equal studies give equal ones.

    ``hardware`` is how the capacities came about, where it was not by pressure.
    """
    return {
        "version": VERSION,
        "saga_version": version("saga-sdk"),
        "python_version": platform.python_version(),
        "trace": _trace_values(study.trace),
        "options": asdict(study.options),
        "hardware": dict(hardware or {}),
        "cells": [_cell_values(cell) for cell in _cells(rows)],
        "results": [_row_values(row) for row in rows],
        "paper": {
            "source": "arXiv 2605.00528, its own workload",
            "figure": "total_ratio",
            "values": {name: dict(values) for name, values in PAPER.items()},
        },
    }


def write_json(summary: Mapping[str, Any], path: Path) -> None:
    """Write a summary."""
    text = json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def _trace_values(trace: Trace) -> dict[str, Any]:
    return {
        "name": trace.name,
        "sessions": len(trace.sessions),
        "calls": sum(map(len, trace.sessions)),
        "block_tokens": trace.block_tokens,
        "clock": trace.clock,
        "notes": list(trace.notes),
    }


def _cells(rows: Sequence[Row]) -> list[Cell]:
    cells = {(run.cell.point, run.cell.seed): run.cell for row in rows for run in row.runs}
    return [cells[key] for key in sorted(cells)]


def _cell_values(cell: Cell) -> dict[str, Any]:
    values = asdict(cell)
    for reference in (values["belady"], values["lru"]):
        reference["hit_rate"] = reference["hit_tokens"] / cell.input_tokens
        reference["regen_tokens"] = reference["prefilled_tokens"] - cell.first_tokens
    return values


def _row_values(row: Row) -> dict[str, Any]:
    spreads = {figure: row.spread(figure) for figure in _FIGURES}
    return {
        "point": row.first.cell.point,
        "pressure": row.pressure,
        "policy": row.first.policy,
        "signals": row.first.signals,
        "injected_forecast_log_sigma": signals_of(row.first.signals).forecast_sigma,
        **{name: None if spread is None else asdict(spread) for name, spread in spreads.items()},
        "victims": row.victims,
        "seeds": [_run_values(run) for run in row.runs],
    }


def _run_values(run: PolicyRun) -> dict[str, Any]:
    return {
        "seed": run.cell.seed,
        **asdict(run.usage),
        "regen_tokens": run.regen_tokens,
        **{name: figure(run) for name, figure in _FIGURES.items()},
        "victim_blocks": dict(run.victims),
        "retained_tokens": run.retained_tokens,
        "overcommitted_calls": run.overcommitted,
    }


# Table


def print_report(
    study: CacheStudy, rows: Sequence[Row], console: Console, *, profile: str | None = None
) -> None:
    """Print what was simulated, the table, and what its columns mean.

    ``profile`` is the made-up profile that the trace is, if it is one: the paper has figures of
    similar workloads, which the table then shows beside ours.
    """
    for line in _head(study, rows):
        console.print(line, highlight=False, markup=False)
    has_host = study.options.host_blocks is not None
    paper = PAPER.get(profile or "")
    console.print(_table(rows, console.width, has_host=has_host, paper=paper))
    for line in _foot(study.options, console.width):
        console.print(line, highlight=False, markup=False)


def _head(study: CacheStudy, rows: Sequence[Row]) -> list[str]:
    trace, options, cells = study.trace, study.options, _cells(rows)
    calls = sum(map(len, trace.sessions))
    drawn = "arrivals as recorded"
    if trace.clock != "shared":
        drawn = f"{options.live_sessions:g} sessions alive on average"
    measured = statistics.median(cell.measured_calls for cell in cells)
    footprint = statistics.median(cell.footprint_tokens for cell in cells)
    return [
        f"{trace.name}: {_counted(len(trace.sessions), 'session')}, {_counted(calls, 'call')}, "
        f"blocks of {trace.block_tokens} tokens",
        *(f"  {note}" for note in trace.notes),
        f"{drawn}, {_counted(options.seeds, 'seed')}, {measured:,.0f} calls measured; live "
        f"footprint {footprint:,.0f} tokens",
        *(_capacity_line(cells, rows, point) for point in range(options.num_points)),
    ]


def _capacity_line(cells: Sequence[Cell], rows: Sequence[Row], point: int) -> str:
    here = [cell for cell in cells if cell.point == point]
    capacity = statistics.median(cell.capacity_tokens for cell in here)
    pressure = statistics.median(cell.pressure for cell in here)
    line = f"  pressure {pressure:.3g}: capacity {capacity:,.0f} tokens"
    runs = [run for row in rows for run in row.runs if run.cell.point == point]
    over = statistics.median(run.overcommitted / run.cell.calls for run in runs)
    if over < 0.0005:
        return line
    return f"{line}; running calls alone exceed it at {over:.1%} of arrivals"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _table(
    rows: Sequence[Row], width: int, *, has_host: bool, paper: Mapping[str, float] | None
) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("pres-\nsure", justify="right", no_wrap=True)
    table.add_column("policy", no_wrap=True)
    table.add_column("signals")
    columns = ["total\n÷ Bélády", "regen\n÷ Bélády", "gap\nclosed, %", "hit\nrate, %"]
    columns += ["idle,\n%"] * (width >= _WIDE_COLUMNS)
    columns += ["from\nhost, %"] * has_host
    if width >= _ALL_COLUMNS:
        columns += ["victims,\n%"] + ["paper's\ntotal"] * bool(paper)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    gap = None if width < _ALL_COLUMNS else " " if width >= _WIDE_COLUMNS else "\n"
    point = -1
    for row in rows:
        if row.first.cell.point != point:
            point = row.first.cell.point
            table.add_section()
            table.add_row(*_belady_cells(row))
        policy = row.first.policy
        cells = [f"{row.pressure:.3g}", policy, label_of(row.first.signals)]
        cells += _figure_cells(row, has_host, gap)
        cells.append("/".join(f"{100 * share:.0f}" for share in row.victims.values()))
        cells.append(f"{paper[policy]:.2f}" if paper and policy in paper else "")
        table.add_row(*cells[: len(table.columns)])
    return table


def _belady_cells(row: Row) -> list[str]:
    hit_rate = statistics.median(
        run.cell.belady.hit_tokens / run.cell.input_tokens for run in row.runs
    )
    return [f"{row.pressure:.3g}", "Bélády", "", "1", "1", "100", f"{100 * hit_rate:.1f}"]


def _figure_cells(row: Row, has_host: bool, gap: str | None) -> list[str]:
    cells = [
        _shown(row.spread("total_ratio"), 3, gap),
        _shown(row.spread("regen_ratio"), 2, gap),
        _shown(row.spread("gap_closed"), 0, gap, factor=100),
        f"{100 * statistics.median(run.hit_rate for run in row.runs):.1f}",
    ]
    if gap == " ":
        cells.append(f"{100 * statistics.median(run.retained_share for run in row.runs):.0f}")
    if has_host:
        shares = (run.usage.loaded_tokens / run.cell.input_tokens for run in row.runs)
        cells.append(f"{100 * statistics.median(shares):.1f}")
    return cells


def _shown(spread: Spread | None, digits: int, gap: str | None, *, factor: int = 1) -> str:
    """The median, ``gap`` and the range if it has two ends; no range without a gap.

    A dash stands for no figure.
    """
    if spread is None:
        return "-"
    median = f"{factor * spread.median:.{digits}f}"
    if gap is None or spread.least == spread.most:
        return median
    least, most = (f"{factor * end:.{min(digits, 2)}f}" for end in (spread.least, spread.most))
    return f"{median}{gap}({least}..{most})"


def _foot(options: StudyOptions, width: int) -> list[str]:
    lines = [
        "total: prompt tokens prefilled. regen: those that a cache without bound would have had. "
        "Bélády: the fewest that any cache of that size prefills, which takes knowing the future. "
        "gap closed: what a policy saves over prefix-lru ÷ what Bélády saves. idle: share of the "
        "capacity that paused and left prefixes hold, mean over time.",
    ]
    if options.seeds > 1:
        lines[0] += " Figures are medians over the seeds"
        lines[0] += " (least..most)." if width >= _ALL_COLUMNS else "."
    if width >= _ALL_COLUMNS:
        lines.append(
            "victims: evicted blocks of paused sessions / branches left behind / prefixes that "
            "several share / sessions known to have ended."
        )
    if any(signals_of(name).forecast_sigma is not None for name in options.signals):
        lines.append(
            "An injected forecast is made from the trace's own future, with the error stated: no "
            "worker has it. It shows what knowing the pauses would be worth."
        )
    if options.host_blocks is not None:
        lines.append(
            "Tokens loaded from the host tier do not count as prefilled. Bélády has no such tier: "
            "ratios below 1 are no error."
        )
    swe, web = PAPER["swe"], PAPER["web"]
    lines.append(
        "The paper's ratio of prefilled tokens to Bélády, arXiv 2605.00528, their workload: prefix "
        f"LRU {swe['prefix-lru']} (SWE) and {web['prefix-lru']} (Web), WA-LRU {swe['wa-lru']} and "
        f"{web['wa-lru']}."
    )
    return lines
