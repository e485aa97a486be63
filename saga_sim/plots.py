"""A study's figure: tokens prefilled ÷ Bélády's by pressure, one line per policy and signals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from saga_core.errors import SagaError
from saga_sim.report import Row, label_of

SUFFIXES = (".png", ".svg")

_COLOURS = ("#4d4d4d", "#d95f02", "#1b6fb5", "#2e8b57", "#9b59b6", "#b8860b", "#c0392b", "#17a2a2")
_STYLES = (("-", "o"), ("--", "s"), ("-.", "^"), (":", "D"), ("-", "v"), ("--", "P"), ("-.", "X"))


def check_suffix(path: Path) -> None:
    """Raise SagaError if the name of a figure's file ends in something that is not drawn."""
    if path.suffix.lower() not in SUFFIXES:
        raise SagaError(f"--plot {path}: the name must end in {' or '.join(SUFFIXES)}")


def plot_totals(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw medians and, with several seeds, their range; equal rows give equal files.

    Raises:
        SagaError: the file's name does not end in ``.png`` or ``.svg``.
    """
    check_suffix(path)
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        lines.setdefault((row.first.policy, row.first.signals), []).append(row)
    with mpl.rc_context({"svg.hashsalt": "saga", "font.size": 10}):
        figure = Figure(figsize=(9.5, 5.2), layout="constrained")
        axes = figure.add_subplot()
        policies = list(dict.fromkeys(policy for policy, _ in lines))
        signals = list(dict.fromkeys(name for _, name in lines))
        for (policy, name), line in lines.items():
            colour = _COLOURS[policies.index(policy) % len(_COLOURS)]
            _draw(axes, line, colour, _STYLES[signals.index(name) % len(_STYLES)])
        _finish(axes, sorted({row.pressure for row in rows}), title)
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure.savefig(path, dpi=150, metadata=metadata)


def _draw(axes: Axes, line: Sequence[Row], colour: str, style: tuple[str, str]) -> None:
    points = [(row.pressure, spread) for row in line if (spread := row.spread("total_ratio"))]
    first = line[0].first
    label = f"{first.policy}, {label_of(first.signals)}"
    axes.errorbar(
        [pressure for pressure, _ in points],
        [spread.median for _, spread in points],
        yerr=[
            [spread.median - spread.least for _, spread in points],
            [spread.most - spread.median for _, spread in points],
        ],
        color=colour,
        linestyle=style[0],
        marker=style[1],
        markersize=5,
        linewidth=1.6,
        elinewidth=0.8,
        capsize=2.5,
        label=label,
    )


def _finish(axes: Axes, pressures: Sequence[float], title: str) -> None:
    axes.axhline(1.0, color="black", linewidth=1.2, label="Bélády")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(list(pressures)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axes.set_xlabel("pressure: live footprint ÷ KV capacity")
    axes.set_ylabel("prompt tokens prefilled ÷ Bélády's")
    axes.set_title(title, loc="left")
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
