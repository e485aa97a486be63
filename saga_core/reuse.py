"""How soon an idle prefix is read again: hazards learned online by class and age."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import accumulate

_FIRST_EDGE_S = 2**-8
_PER_OCTAVE = 3
GHOST_S = 7200.0
"""Age at which an idle prefix no longer counts as one that may be read again, seconds."""

AGE_EDGES_S: tuple[float, ...] = (
    0.0,
    *(
        _FIRST_EDGE_S * 2 ** (k / _PER_OCTAVE)
        for k in range(math.ceil(_PER_OCTAVE * math.log2(GHOST_S / _FIRST_EDGE_S)))
    ),
)
"""Lower edges of the age buckets, seconds: three an octave from 4 ms to 2 h."""

_WIDTHS_S = tuple(
    upper - lower for lower, upper in zip(AGE_EDGES_S, (*AGE_EDGES_S[1:], 2 * GHOST_S), strict=True)
)
_NUM_AGES = len(AGE_EDGES_S)
_ENDS_S = (*AGE_EDGES_S[1:], math.inf)

ReuseClass = tuple[Hashable, ...]
"""A path of ever finer kinds of idle prefix; every prefix of the path is a class too, its parent.
The first element is the kind: "paused", "ended", "superseded", "shared", "plain"."""

# Share of the prior hazard with which a kind starts; other kinds start at 1.
_PRIOR_SHARE: dict[Hashable, float] = {"ended": 0.01, "superseded": 0.05, "announced": 10.0}
_KIND_STRENGTH = 0.2
_BAND = 9
_BATCH = 64


def age_bucket(age_s: float) -> int:
    """Number of the bucket that holds ``age_s`` (not negative)."""
    return bisect_right(AGE_EDGES_S, age_s) - 1


def bucket_end_s(age_s: float) -> float:
    """Age at which the bucket of ``age_s`` ends, seconds; infinite for the last one."""
    return _ENDS_S[age_bucket(age_s)]


@dataclass(slots=True)
class _Table:
    """Evidence of one class: reads again and seconds at risk, per age bucket.

    A prefix that lies idle through many buckets is noted at both ends: ``entered[b]`` counts those
    that lay through bucket b and not through the one before, less those the other way round.
    """

    reads: list[float] = field(default_factory=lambda: [0.0] * _NUM_AGES)
    partly_s: list[float] = field(default_factory=lambda: [0.0] * _NUM_AGES)
    entered: list[float] = field(default_factory=lambda: [0.0] * _NUM_AGES)
    touched_s: float = -math.inf
    epoch: int = -1
    hazards: list[float] = field(default_factory=list)
    worths: list[float] = field(default_factory=list)
    passed: list[float] = field(default_factory=list)

    @property
    def risk_s(self) -> list[float]:
        """Seconds at risk per age bucket."""
        through = accumulate(self.entered)
        parts = zip(self.partly_s, through, _WIDTHS_S, strict=True)
        return [partly_s + width_s * count for partly_s, count, width_s in parts]


class ReuseHazards:
    """Hazard of being read again, per class and age, per second.

    h[c, b] = w (reads + k) / (risk + k / h_parent[b]) + (1 - w) h_parent[b], from the reads and
    the idle seconds at risk that were seen at ages in bucket b, those of evicted and of never read
    prefixes included, so that termination needs no model of its own; w is how likely it is that
    the class differs from its parent at all. The parent of a kind is 0.3 / (age + 5), times the
    kind's prior share. Evidence halves every ``half_life_s``.

    Tables are worked out once per epoch, on first use; ``refresh`` begins the next one. Evidence
    is noted at once and taken into them a batch at a time, which costs a fraction.

    Args:
        strength: k, pseudo-reads with which a parent speaks in its child's bucket.
        half_life_s: age of evidence at which it counts half, seconds.
        max_classes: the least recently updated class goes beyond this many.
    """

    def __init__(
        self, *, strength: float = 0.7, half_life_s: float = math.inf, max_classes: int = 8192
    ) -> None:
        self._strength = strength
        self._half_life_s = half_life_s
        self._max_classes = max_classes
        self._filled: OrderedDict[ReuseClass, _Table] = OrderedDict()
        self._noted: list[tuple[ReuseClass, float, float, float | None, float]] = []
        self._epoch = 0

    def refresh(self) -> None:
        """Let what was observed so far count from now on."""
        self._epoch += 1

    def at_risk(self, cls: ReuseClass, from_age_s: float, to_age_s: float, *, now_s: float) -> None:
        """A prefix of the class lay idle from one age to another, and was not read."""
        self._note((cls, from_age_s, to_age_s, None, now_s))

    def read(self, cls: ReuseClass, age_s: float, *, now_s: float, share: float = 1.0) -> None:
        """A prefix of the class was read at ``age_s``, ``share`` of its blocks (0 to 1)."""
        self._note((cls, age_s, age_s, share, now_s))

    def hazard(self, cls: ReuseClass, age_s: float) -> float:
        """Reads per second of a prefix of the class at ``age_s``."""
        return self._hazards(cls)[age_bucket(age_s)]

    def worth(self, cls: ReuseClass, age_s: float) -> float:
        """What keeping a block is worth: expected reads per block-second, for the best stop.

        Gittins index max_k (1 - S_k) / ∫₀^k S over stopping ages k, S the survival from
        ``age_s`` on: how good the best stretch ahead is, not only the present moment. It equals
        the hazard where that falls with age. Constant within an age bucket.
        """
        return self.worth_and_end_s(cls, age_s)[0]

    def worth_and_end_s(self, cls: ReuseClass, age_s: float) -> tuple[float, float]:
        """The worth, and the age until which it stays as it is."""
        table = self._current(cls)
        if not table.worths:
            table.worths = _gittins(table.hazards)
        bucket = age_bucket(age_s)
        return table.worths[bucket], _ENDS_S[bucket]

    def log_likelihood(
        self, cls: ReuseClass, from_age_s: float, to_age_s: float, *, was_read: bool
    ) -> float:
        """Log of the density of a read at ``to_age_s``, or of the chance of none until then.

        Given that there was none until ``from_age_s``.
        """
        table = self._integrated(cls)
        log_survival = self._passed(table, from_age_s) - self._passed(table, to_age_s)
        return log_survival + (math.log(self.hazard(cls, to_age_s)) if was_read else 0.0)

    def p_read(self, cls: ReuseClass, age_s: float, until_age_s: float = GHOST_S) -> float:
        """Probability that a prefix of the class is read after ``age_s``, before the other age."""
        table = self._integrated(cls)
        return -math.expm1(min(0.0, self._passed(table, age_s) - self._passed(table, until_age_s)))

    def read_age_s(self, cls: ReuseClass, age_s: float, share: float) -> float:
        """Age by which the ``share`` (0 to 1) of the reads that follow ``age_s`` has come."""
        table = self._integrated(cls)
        left = 1.0 - share * self.p_read(cls, age_s)
        target = self._passed(table, age_s) - math.log(left)
        bucket = max(age_bucket(age_s), bisect_right(table.passed, target) - 1)
        return AGE_EDGES_S[bucket] + (target - table.passed[bucket]) / table.hazards[bucket]

    def _integrated(self, cls: ReuseClass) -> _Table:
        table = self._current(cls)
        if not table.passed:
            total = 0.0
            for hazard, width_s in zip(table.hazards, _WIDTHS_S, strict=True):
                table.passed.append(total)
                total += hazard * width_s
        return table

    @staticmethod
    def _passed(table: _Table, age_s: float) -> float:
        bucket = age_bucket(age_s)
        return table.passed[bucket] + table.hazards[bucket] * (age_s - AGE_EDGES_S[bucket])

    def _note(self, seen: tuple[ReuseClass, float, float, float | None, float]) -> None:
        self._noted.append(seen)
        if len(self._noted) >= _BATCH:
            self._take_in()

    @property
    def _tables(self) -> OrderedDict[ReuseClass, _Table]:
        self._take_in()
        return self._filled

    def _take_in(self) -> None:
        """Add what was noted to the tables of its classes and their parents, in its order."""
        noted, self._noted = self._noted, []
        for cls, from_age_s, to_age_s, share, now_s in noted:
            first, last = age_bucket(from_age_s), age_bucket(to_age_s)
            path = [self._touch(cls[:depth], now_s) for depth in range(len(cls), 0, -1)]
            if share is not None:
                for table in path:
                    table.reads[last] += share
                continue
            if first == last:
                for table in path:
                    table.partly_s[last] += to_age_s - from_age_s
                continue
            first_s, last_s = _ENDS_S[first] - from_age_s, to_age_s - AGE_EDGES_S[last]
            for table in path:
                table.partly_s[first] += first_s
                table.partly_s[last] += last_s
                table.entered[first + 1] += 1.0
                table.entered[last] -= 1.0

    def _touch(self, cls: ReuseClass, now_s: float) -> _Table:
        table = self._filled.get(cls)
        if table is None:
            table = self._filled[cls] = _Table(touched_s=now_s)
            if len(self._filled) > self._max_classes:
                self._filled.popitem(last=False)
            return table
        if now_s - table.touched_s > 0.01 * self._half_life_s:
            factor = 0.5 ** ((now_s - table.touched_s) / self._half_life_s)
            table.reads = [factor * reads for reads in table.reads]
            table.partly_s = [factor * partly_s for partly_s in table.partly_s]
            table.entered = [factor * count for count in table.entered]
            table.touched_s = now_s
        self._filled.move_to_end(cls)
        return table

    def _hazards(self, cls: ReuseClass) -> list[float]:
        if not cls:
            return _PRIOR
        return self._current(cls).hazards

    def _current(self, cls: ReuseClass) -> _Table:
        table = self._filled.get(cls)
        if table is not None and table.epoch == self._epoch:
            return table
        table = self._tables.get(cls)
        if table is None:
            if len(cls) > 1:
                return self._current(cls[:-1])
            table = self._tables[cls] = _Table()
        if table.epoch != self._epoch:
            share, k = 1.0, self._strength
            if len(cls) == 1:
                share, k = _PRIOR_SHARE.get(cls[0], 1.0), _KIND_STRENGTH
            parents = [share * parent for parent in self._hazards(cls[:-1])]
            table.hazards = _averaged(table.reads, table.risk_s, parents, k)
            table.worths, table.passed = [], []
            table.epoch = self._epoch
        return table


_PRIOR = [
    0.3 / (lower + 0.5 * width_s + 5.0)
    for lower, width_s in zip(AGE_EDGES_S, _WIDTHS_S, strict=True)
]


def _averaged(
    reads: list[float], risk_s: list[float], parents: list[float], k: float
) -> list[float]:
    """Hazards of a class: its own and its parent's, by what is known of which of the two holds.

    In each band of ages the evidence weighs two models that start even: every bucket's hazard is
    drawn from Gamma(k, k / parent), or it is the parent's. Context tree weighting does the same
    for symbols (Willems, Shtarkov, Tjalkens 1995). A class that is no different from its parent
    is not told apart from it by the noise of its few reads.
    """
    hazards = []
    for start in range(0, len(parents), _BAND):
        band = slice(start, start + _BAND)
        rows = list(zip(reads[band], risk_s[band], parents[band], strict=True))
        evidence = sum(_log_bayes_factor(*row, k) for row in rows)
        own = 0.5 + 0.5 * math.tanh(0.5 * evidence)
        hazards += [own * (r + k) / (s + k / p) + (1.0 - own) * p for r, s, p in rows]
    return hazards


def _log_bayes_factor(reads: float, risk_s: float, parent: float, k: float) -> float:
    """Log of how much likelier the reads are under Gamma(k, k / parent) than under ``parent``."""
    expected = parent * risk_s
    factor = expected - (k + reads) * math.log1p(expected / k)
    if reads:
        factor += math.lgamma(k + reads) - math.lgamma(k) - reads * math.log(k)
    return factor


def _gittins(hazards: list[float]) -> list[float]:
    """The index at the start of each bucket.

    From the last bucket backwards, stretches are merged while the later one is the better: what is
    left is the concave hull of reads over block-seconds, whose first slope is the index.
    """
    worths = [0.0] * len(hazards)
    stack: list[tuple[float, float, float]] = []
    for bucket in range(len(hazards) - 1, -1, -1):
        passed = hazards[bucket] * _WIDTHS_S[bucket]
        reads = -math.expm1(-passed)
        held_s = reads / hazards[bucket]
        while stack and stack[-1][0] * held_s > reads * stack[-1][1]:
            later_reads, later_s, later_passed = stack.pop()
            survive = math.exp(-passed)
            reads += survive * later_reads
            held_s += survive * later_s
            passed += later_passed
        stack.append((reads, held_s, passed))
        worths[bucket] = reads / held_s
    return worths


_PRIOR_TOOL = (9.0, 1.0)
_PRIOR_NO_TOOL = (1.0, 2.0)


class ReuseModel:
    """Share of pauses after which the session's prefix was read again, per key: P_reuse.

    P_reuse = Σ_u P(v → u) · overlap(s, u) (SAGA paper); over the past steps of a key this is the
    mean share of the cached prefix that the next step read, 0 where there was none. It is smoothed
    by ten pseudo-pauses of which nine return after a tool call, three of which one returns after
    an answer without one. The least recently updated key goes at ``max_keys``.
    """

    def __init__(self, max_keys: int = 10_000) -> None:
        self._max_keys = max_keys
        self._counts: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def observe(self, key: Hashable, *, overlap: float) -> None:
        """Add one pause whose outcome is known: the share that was read again, 0 to 1."""
        pauses, reused = self._counts.get(key, (0.0, 0.0))
        self._counts[key] = (pauses + 1.0, reused + overlap)
        self._counts.move_to_end(key)
        if len(self._counts) > self._max_keys:
            self._counts.popitem(last=False)

    def p_reuse(self, key: Hashable, *, tool_called: bool) -> float:
        """Expected share of its prefix that a session in this kind of pause reads again."""
        pauses, reused = self._counts.get(key, (0.0, 0.0))
        returned, ended = _PRIOR_TOOL if tool_called else _PRIOR_NO_TOOL
        return (returned + reused) / (returned + ended + pauses)
