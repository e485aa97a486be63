"""How good what was foretold is: accuracy, ranking of ends, calibration, coverage of quantiles."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

_DRAWS = 1000
_BINS = 10


@dataclass(frozen=True, slots=True)
class Coverage:
    """How often pauses kept within their P95.

    Attributes:
        pauses, sessions: how many were measured, and of how many sessions.
        share: of the pauses that did not exceed the P95 that was foretold before them.
        low, high: its 95 % interval, sessions drawn with replacement (percentile bootstrap).
        median_ratio: median of the foretold P95 over the actual pause.
    """

    pauses: int
    sessions: int
    share: float
    low: float
    high: float
    median_ratio: float

    @property
    def is_met(self) -> bool:
        """Whether 500 pauses were measured and 0.95 lies in the interval."""
        return self.pauses >= 500 and self.low <= 0.95 <= self.high


@dataclass(frozen=True, slots=True)
class Ends:
    """How well ends were foretold.

    Attributes:
        auc: chance that a step that was the last had the greater probability of an end.
        brier: mean squared error of that probability; of the plain share of ends beside.
        brier_of_share: the same of the training sessions' share of ends.
        ece: mean gap between what was foretold and what came, over ten bins of equal width.
        bins: of each that holds any: steps, mean probability, share that ended.
    """

    auc: float
    brier: float
    brier_of_share: float
    ece: float
    bins: tuple[tuple[int, float, float], ...]


def ends_of(scored: Sequence[tuple[float, bool]], share: float) -> Ends:
    """How well ends were foretold, of steps with the probability of an end and whether it came.

    Args:
        share: that of the steps that were the last.
    """
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(_BINS)]
    for p, did_end in scored:
        bins[min(int(p * _BINS), _BINS - 1)].append((p, did_end))
    rows = tuple(
        (len(rows), sum(p for p, _ in rows) / len(rows), share_of(did for _, did in rows))
        for rows in bins
        if rows
    )
    return Ends(
        auc=auc_of(scored),
        brier=sum((p - did) ** 2 for p, did in scored) / len(scored),
        brier_of_share=sum((share - did) ** 2 for _, did in scored) / len(scored),
        ece=sum(count * abs(p - came) for count, p, came in rows) / len(scored),
        bins=rows,
    )


def auc_of(scored: Sequence[tuple[float, bool]]) -> float:
    """Area under the curve: equal scores count half. 0.5 where all or none ended."""
    ordered = sorted(scored)
    ended = sum(did for _, did in ordered)
    if not 0 < ended < len(ordered):
        return 0.5
    ranks, at = 0.0, 0
    while at < len(ordered):
        stop = at
        while stop < len(ordered) and ordered[stop][0] == ordered[at][0]:
            stop += 1
        ranks += 0.5 * (at + 1 + stop) * sum(did for _, did in ordered[at:stop])
        at = stop
    return (ranks - 0.5 * ended * (ended + 1)) / (ended * (len(ordered) - ended))


def coverage(sessions: Sequence[Sequence[tuple[float, float]]], *, seed: int = 0) -> Coverage:
    """Coverage of (pause, foretold P95) pairs, grouped by session."""
    clusters = [
        (sum(pause_s <= p95_s for pause_s, p95_s in pairs), len(pairs))
        for pairs in sessions
        if pairs
    ]
    rng = random.Random(seed)
    draws = sorted(_pooled(rng.choices(clusters, k=len(clusters))) for _ in range(_DRAWS))
    ratios = [p95_s / max(pause_s, 1e-3) for pairs in sessions for pause_s, p95_s in pairs]
    return Coverage(
        pauses=len(ratios),
        sessions=len(clusters),
        share=_pooled(clusters),
        low=draws[int(0.025 * _DRAWS)],
        high=draws[int(0.975 * _DRAWS) - 1],
        median_ratio=median(ratios),
    )


def _pooled(clusters: Sequence[tuple[int, int]]) -> float:
    return sum(covered for covered, _ in clusters) / sum(total for _, total in clusters)


def share_of(of: Iterable[bool]) -> float:
    """Share of what is true; 0 of nothing."""
    values = list(of)
    return sum(values) / len(values) if values else 0.0
