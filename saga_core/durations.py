"""How long pauses last: quantile sketches learned online, from a prior until there is evidence."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from ddsketch import DDSketch

from saga_core.fields import StateError, fields_of, number_of, numbers
from saga_core.types import ToolType

PRIOR_P50_S: dict[ToolType, float] = {
    ToolType.FILE_IO: 0.045,
    ToolType.CODE_EXEC: 0.18,
    ToolType.WEB_API: 0.85,
    ToolType.DB_QUERY: 0.12,
    ToolType.SUBAGENT: 30.0,
    ToolType.HUMAN: 60.0,
    ToolType.OTHER: 2.5,
}
PRIOR_P95_S: dict[ToolType, float] = {
    ToolType.FILE_IO: 0.32,
    ToolType.CODE_EXEC: 2.4,
    ToolType.WEB_API: 4.5,
    ToolType.DB_QUERY: 0.89,
    ToolType.SUBAGENT: 60.0,
    ToolType.HUMAN: 300.0,
    ToolType.OTHER: 13.0,
}
"""P50 and P95 per type before anything was seen, seconds. The first four are the SAGA paper's; the
others are ours: a shell call of a coding agent for ``other``, minutes for a person."""

_GENERATION = 512
_ENOUGH = 8
_BATCH = 64
_STALE = 16
_MAX_STALE = 256
_MAX_ASKED = 16
_RELATIVE_ERROR = 0.02


class Quantiles:
    """Quantiles of a stream of non-negative numbers, within 2 % of the value.

    Two DDSketches: one that fills and the full one before it. The older is dropped when the newer
    holds ``generation`` numbers, so that between the last 512 and 1,024 numbers count where it is
    not said. Numbers are taken into them a batch at a time, which costs a fraction.
    """

    def __init__(self, generation: int = _GENERATION) -> None:
        self._generation = generation
        self._recent = DDSketch(_RELATIVE_ERROR)
        self._before: DDSketch | None = None
        self._added: list[float] = []
        # Numbers that have come so far, and by quantile: how many had when it was worked out.
        self._total = 0
        self._asked: dict[float, tuple[int, float | None]] = {}

    def __len__(self) -> int:
        self._take_in()
        before = 0 if self._before is None else self._before.count
        return int(self._recent.count + before)

    def add(self, value: float) -> None:
        """Add one number."""
        self._total += 1
        self._added.append(value)
        if len(self._added) >= _BATCH:
            self._take_in()

    def merge(self, other: Quantiles) -> None:
        """Add all that ``other`` holds; what that one answers is not changed."""
        self._take_in()
        other._take_in()
        self._total += len(other)
        self._asked.clear()
        for sketch in (other._before, other._recent):
            if sketch is not None and sketch.count:
                self._recent.merge(sketch)

    def quantile(self, q: float) -> float | None:
        """The value below which a share ``q`` (0 to 1) lies; None before the first number.

        It is worked out anew when a sixteenth more numbers have come, or 256.
        """
        asked = self._asked.get(q)
        if asked is not None and not _is_stale(asked[0], self._total):
            return asked[1]
        value = self._quantile(q)
        self._asked[q] = (self._total, value)
        if len(self._asked) > _MAX_ASKED:
            self._asked.clear()
        return value

    def _quantile(self, q: float) -> float | None:
        self._take_in()
        if self._before is None:
            value = self._recent.get_quantile_value(q)
        else:
            both = DDSketch(_RELATIVE_ERROR)
            both.merge(self._before)
            both.merge(self._recent)
            value = both.get_quantile_value(q)
        return None if value is None else float(value)

    def _take_in(self) -> None:
        for value in self._added:
            if self._recent.count >= self._generation:
                self._before, self._recent = self._recent, DDSketch(_RELATIVE_ERROR)
            self._recent.add(value)
        self._added.clear()

    @property
    def total(self) -> int:
        """How many numbers have come, those that no longer count included."""
        return self._total

    def bins(self) -> dict[int, float]:
        """How many of the numbers that count lie in each bin; ``bin_value`` says where it lies."""
        self._take_in()
        counts = _bins(self._recent)
        if self._before is not None:
            for key, count in _bins(self._before).items():
                counts[key] = counts.get(key, 0.0) + count
        return counts

    def state(self) -> dict[str, Any]:
        """All that it holds, as values of JSON."""
        self._take_in()
        before = None if self._before is None else _sketch_state(self._before)
        return {"recent": _sketch_state(self._recent), "before": before, "total": self._total}

    @classmethod
    def from_state(
        cls, state: Any, generation: int = _GENERATION, where: str = "quantiles"
    ) -> Quantiles:
        """What ``state`` gave.

        Raises:
            StateError: it is not such a state.
        """
        fields = fields_of(state, where)
        quantiles = cls(generation)
        quantiles._recent = _sketch_of(fields.get("recent"), f"{where}.recent")
        if fields.get("before") is not None:
            quantiles._before = _sketch_of(fields["before"], f"{where}.before")
        quantiles._total = int(number_of(fields, "total", where, least=len(quantiles)))
        return quantiles

    @property
    def are_enough(self) -> bool:
        """Whether eight numbers have come."""
        return self._total >= _ENOUGH

    def cuts(self, count: int) -> tuple[float, ...]:
        """The ``count`` values that part the numbers into equally many; () before eight numbers."""
        if not self.are_enough:
            return ()
        found = (self.quantile((k + 1) / (count + 1)) for k in range(count))
        return tuple(value for value in found if value is not None)

    def remaining_s(self, age_s: float, q: float = 0.5) -> float | None:
        """Quantile ``q`` of the time left, given that ``age_s`` has passed.

        Residual life: (T - age) given T > age. None when no number exceeds ``age_s``.
        """
        low, high = 0.0, 1.0
        if (self._quantile(1.0) or 0.0) <= age_s:
            return None
        for _ in range(12):
            middle = 0.5 * (low + high)
            if (self._quantile(middle) or 0.0) <= age_s:
                low = middle
            else:
                high = middle
        value = self._quantile(1.0 - (1.0 - q) * (1.0 - high))
        return None if value is None else max(0.0, value - age_s)


ZERO_BIN = -(2**31)
"""The bin of numbers that are zero, below all others."""

_MAPPING = DDSketch(_RELATIVE_ERROR)._mapping
_MAX_BIN = 17_000


def bin_of(value: float) -> int:
    """The bin that holds ``value`` (not negative)."""
    return int(_MAPPING.key(value)) if value > _MAPPING.min_possible else ZERO_BIN


def bin_value(key: int) -> float:
    """The value in the middle of a bin."""
    return 0.0 if key == ZERO_BIN else float(_MAPPING.value(key))


def _is_stale(then: int, now: int) -> bool:
    """Whether enough numbers have come since there were ``then`` for the answer to have changed."""
    return now - then > min(then // _STALE, _MAX_STALE)


def _bins(sketch: DDSketch) -> dict[int, float]:
    # The sketch writes itself as protobuf only; its bins are the same in every language's version.
    store = sketch._store
    counts = {key: count for key, count in enumerate(store.bins, store.offset) if count}
    if sketch._zero_count:
        counts[ZERO_BIN] = sketch._zero_count
    return counts


def _sketch_state(sketch: DDSketch) -> dict[str, Any]:
    bins = _bins(sketch)
    ends = (sketch._min, sketch._max) if bins else (0.0, 0.0)
    return {
        "bins": list(bins),
        "counts": list(bins.values()),
        "min": ends[0],
        "max": ends[1],
        "sum": sketch._sum,
    }


def _sketch_of(state: Any, where: str) -> DDSketch:
    fields = fields_of(state, where)
    counts = numbers(fields.get("counts"), None, f"{where}.counts")
    keys = fields.get("bins")
    if not isinstance(keys, list) or len(keys) != len(counts) or not all(map(_is_bin, keys)):
        raise StateError(f"{where}.bins: expected a list of {len(counts)} numbers of bins")
    sketch = DDSketch(_RELATIVE_ERROR)
    for key, count in zip(keys, counts, strict=True):
        if count and key == ZERO_BIN:
            sketch._zero_count += count
        elif count:
            sketch._store.add(key, count)
    sketch._count = sketch._zero_count + sketch._store.count
    if sketch._count:
        sketch._min, sketch._max = number_of(fields, "min", where), number_of(fields, "max", where)
        sketch._sum = number_of(fields, "sum", where)
    return sketch


def _is_bin(key: object) -> bool:
    return type(key) is int and (key == ZERO_BIN or abs(key) <= _MAX_BIN)


class PauseDurations:
    """Quantiles of pause lengths per key.

    A key with fewer than eight samples answers the larger of the prior and its own quantile: a
    TTL that is too long costs room, one that is too short costs a prefill. The least recently
    updated key goes when ``max_keys`` is reached.
    """

    def __init__(self, max_keys: int = 10_000) -> None:
        self._max_keys = max_keys
        self._quantiles: OrderedDict[Hashable, Quantiles] = OrderedDict()

    def observe(self, key: Hashable, duration_s: float) -> None:
        """Add one finished pause of ``duration_s`` seconds (not negative)."""
        quantiles = self._quantiles.get(key)
        if quantiles is None:
            quantiles = self._quantiles[key] = Quantiles()
            if len(self._quantiles) > self._max_keys:
                self._quantiles.popitem(last=False)
        self._quantiles.move_to_end(key)
        quantiles.add(duration_s)

    def p50_s(self, key: Hashable, prior: ToolType) -> float:
        """Median of the key's pauses, seconds."""
        return self._quantile_s(key, 0.5, PRIOR_P50_S[prior])

    def p95_s(self, key: Hashable, prior: ToolType) -> float:
        """95th percentile of the key's pauses, seconds."""
        return self._quantile_s(key, 0.95, PRIOR_P95_S[prior])

    def remaining_s(self, key: Hashable, age_s: float, prior: ToolType, q: float = 0.5) -> float:
        """Quantile ``q`` of the time left of a pause that has lasted ``age_s`` seconds.

        Past everything seen it answers ``age_s`` again: long pauses have heavy tails.
        """
        quantiles = self._quantiles.get(key)
        if quantiles is None or not quantiles.are_enough:
            return max(PRIOR_P50_S[prior] - age_s, 0.0) or age_s
        left_s = quantiles.remaining_s(age_s, q)
        return age_s if left_s is None else left_s

    def _quantile_s(self, key: Hashable, q: float, prior_s: float) -> float:
        quantiles = self._quantiles.get(key)
        if quantiles is None:
            return prior_s
        value = quantiles.quantile(q) or 0.0
        return value if quantiles.are_enough else max(prior_s, value)
