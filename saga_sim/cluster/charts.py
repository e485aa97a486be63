"""A study's charts: completion times, regret, memory, tasks on time, throughput and moves."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from saga_sim.cluster.study import ClusterStudy
from saga_sim.plots import SUFFIXES

_COLOURS = mpl.colormaps["tab20"].colors  # type: ignore[attr-defined]

_BARS = (
    ("regret", "regret: share of busy time", "regret_share"),
    ("throughput", "tasks a minute", "tasks_per_min"),
    ("moves", "share of calls that changed the worker", "moved_share"),
)


def draw_charts(study: ClusterStudy, folder: Path) -> list[Path]:
    """Draw each chart as PNG and SVG; equal results give equal files. Returns the files."""
    charts: dict[str, Callable[[Axes], None]] = {
        "completion": lambda axes: _completion(axes, study),
        "memory": lambda axes: _memory(axes, study),
        "on_time": lambda axes: _on_time(axes, study),
    }
    for name, label, value in _BARS:
        charts[name] = _bars_of(study, label, value)
    load = study.options.load
    title = f"{study.options.scenario or load.profile}, pressure {load.pressure:g}"
    paths = []
    for name, draw in charts.items():
        with mpl.rc_context({"svg.hashsalt": "saga", "font.size": 10}):
            figure = Figure(figsize=(9.5, 5.2), layout="constrained")
            axes = figure.add_subplot()
            draw(axes)
            axes.set_title(title, loc="left")
            axes.spines[["top", "right"]].set_visible(False)
            for suffix in SUFFIXES:
                path = folder / f"{name}{suffix}"
                figure.savefig(path, dpi=150, metadata={"Date": None} if suffix == ".svg" else None)
                paths.append(path)
    return paths


def _completion(axes: Axes, study: ClusterStudy) -> None:
    """How many tasks, of all seeds, had been done after so long."""
    for number, name in enumerate(study.options.arms):
        times_s = sorted(took_s for run in study.figures(name) for took_s in run.tct_s)
        shares = [(place + 1) / len(times_s) for place in range(len(times_s))]
        axes.step(times_s, shares, where="post", label=name, color=_COLOURS[number % 20])
    axes.set_xlabel("task completion time, s")
    axes.set_ylabel("share of tasks")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(LogFormatter())
    axes.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)


def _memory(axes: Axes, study: ClusterStudy) -> None:
    held, content = "held by running requests", "with content"
    rows = {
        held: [_median(study, name, "used_share") for name in study.options.arms],
        content: [_median(study, name, "cached_share") for name in study.options.arms],
    }
    _grouped(axes, study.options.arms, rows, "share of the KV pool, mean over busy time")


def _on_time(axes: Axes, study: ClusterStudy) -> None:
    arms = study.options.arms
    kinds = list(study.figures(arms[0])[0].slo)
    rows = {"all": [_median(study, name, "slo_share") for name in arms]}
    if len(kinds) > 1:
        for kind in kinds:
            rows[kind] = [
                statistics.median(run.slo[kind] for run in study.figures(name)) for name in arms
            ]
    factor = study.options.load.deadline_factor
    _grouped(axes, arms, rows, f"share of tasks within {factor:g} × their time alone")


def _bars_of(study: ClusterStudy, label: str, figure: str) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        arms = study.options.arms
        values = [[getattr(run, figure) for run in study.figures(name)] for name in arms]
        middles = [statistics.median(each) for each in values]
        spread = [
            [middle - min(each) for middle, each in zip(middles, values, strict=True)],
            [max(each) - middle for middle, each in zip(middles, values, strict=True)],
        ]
        axes.bar(range(len(arms)), middles, yerr=spread, capsize=2.5, color=_COLOURS[0])
        _label(axes, arms, label)

    return draw


def _grouped(axes: Axes, arms: Sequence[str], rows: dict[str, list[float]], label: str) -> None:
    width = 0.8 / len(rows)
    for number, (name, values) in enumerate(rows.items()):
        at = [place - 0.4 + (number + 0.5) * width for place in range(len(arms))]
        axes.bar(at, values, width, label=name, color=_COLOURS[2 * number % 20])
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    _label(axes, arms, label)


def _label(axes: Axes, arms: Sequence[str], label: str) -> None:
    axes.set_xticks(range(len(arms)), arms, rotation=35, ha="right")
    axes.set_ylabel(label)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)


def _median(study: ClusterStudy, arm: str, figure: str) -> float:
    return float(statistics.median(getattr(run, figure) for run in study.figures(arm)))
