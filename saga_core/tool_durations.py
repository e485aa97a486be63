"""How long the pauses of a workflow last: what it showed itself, backed by what others showed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Generator, Hashable
from functools import lru_cache
from itertools import accumulate
from statistics import NormalDist
from typing import Any, NamedTuple

from saga_core.durations import (
    PRIOR_P50_S,
    PRIOR_P95_S,
    Quantiles,
    bin_of,
    bin_value,
)
from saga_core.fields import StateError, fields_of, items_of, label
from saga_core.types import ToolType, tool_type_of

_GENERATION = 4096
_BACKING = (8.0, 4.0)
"""As how many pauses all workflows' pauses of the tool count beside the workflow's own, at most;
and as how many those of all tools of its type."""

_POINTS = 20
_PRIOR_PAUSES = 1.0
_STALE_SHARE, _MAX_STALE = 4, 64
_MANY, _PASSED_ON = 64, 8
_SAVED_AT_ONCE = 16

Key = tuple[Hashable, ...]


class _Mixture(NamedTuple):
    """A distribution as its bins in order, and how many pauses lie up to each."""

    bins: list[int]
    cumulated: list[float]
    p50_s: float
    p95_s: float

    def value_s(self, rank: float) -> float:
        """The value at which ``rank`` pauses are reached."""
        return _value_s(self.bins, self.cumulated, rank)


class _Level:
    """The pauses of one key, with their mixture and their points as last worked out."""

    __slots__ = ("mixed_at", "mixture", "pointed_at", "points", "quantiles")

    def __init__(self, quantiles: Quantiles | None = None) -> None:
        self.quantiles = Quantiles(_GENERATION) if quantiles is None else quantiles
        self.mixture: _Mixture | None = None
        self.points: list[int] = []
        self.mixed_at = self.pointed_at = 0

    def spread(self) -> list[int]:
        """The bins of 20 pauses that are spread as the key's are; of all where they are fewer."""
        total = self.quantiles.total
        if not self.points or _is_stale(self.pointed_at, total):
            bins = sorted(self.quantiles.bins().items())
            cumulated = list(accumulate(count for _, count in bins))
            held = cumulated[-1] if cumulated else 0.0
            step = max(held / _POINTS, 1.0)
            ranks = (step * (point + 0.5) for point in range(int(held / step + 1e-9)))
            self.points = [bins[bisect_left(cumulated, rank)][0] for rank in ranks]
            self.pointed_at = total
        return self.points


class ToolDurations:
    """Quantiles of pause lengths per workflow and tool.

    They are those of a mixture: the workflow's own pauses with the tool, the tool's in all
    workflows as up to 8 more, those of all tools of its type as up to 4 more, and the type's prior
    as one. A step that called no tool waits for a person: its pauses are a kind of their own, and
    their type is ``human``. The least recently used key goes when ``max_keys`` is reached.
    """

    def __init__(self, max_keys: int = 10_000) -> None:
        self._max_keys = max_keys
        self._levels: OrderedDict[Key, _Level] = OrderedDict()

    def __len__(self) -> int:
        return len(self._levels)

    def observe(self, workflow: Hashable, tool: str | None, duration_s: float) -> None:
        """Add one finished pause of ``duration_s`` seconds (not negative).

        Beyond 64 of a workflow and tool, one in eight counts for all workflows: it speaks for
        fewer there, and costs less.
        """
        keys = _keys(workflow, tool)
        own = self._level(keys[0]).quantiles
        own.add(duration_s)
        if own.total <= _MANY or own.total % _PASSED_ON == 0:
            for key in keys[1:]:
                self._level(key).quantiles.add(duration_s)

    def declare(self, workflow: Hashable, tool: str | None, p50_s: float, p95_s: float) -> None:
        """Let pauses be spread as these quantiles say; it counts as 20 pauses of the workflow."""
        level = self._level((workflow, tool))
        low_s, high_s = max(p50_s, 1e-6), max(p95_s, p50_s, 1e-6)
        for point in range(_POINTS):
            level.quantiles.add(_log_normal_s(low_s, high_s, (point + 0.5) / _POINTS))
        level.mixture = None

    def quantile_s(self, workflow: Hashable, tool: str | None, q: float) -> float:
        """The time that a share ``q`` of the pauses does not exceed, seconds."""
        mixture = self._mixture(workflow, tool)
        if mixture is None:
            return _prior_s(_type_of(tool), q)
        return mixture.value_s(q * mixture.cumulated[-1])

    def own_s(self, workflow: Hashable, tool: str | None, q: float) -> float | None:
        """The same of the workflow's own pauses alone, or as declared; None when it has none."""
        level = self._levels.get(_keys(workflow, tool)[0])
        return None if level is None else level.quantiles.quantile(q)

    def p50_p95_s(self, workflow: Hashable, tool: str | None) -> tuple[float, float]:
        """Both of these quantiles, seconds."""
        mixture = self._mixture(workflow, tool)
        if mixture is None:
            tool_type = _type_of(tool)
            return PRIOR_P50_S[tool_type], PRIOR_P95_S[tool_type]
        return mixture.p50_s, mixture.p95_s

    def remaining_s(
        self, workflow: Hashable, tool: str | None, age_s: float, q: float = 0.5
    ) -> float:
        """Quantile ``q`` of the time left of a pause that has lasted ``age_s`` seconds.

        Residual life: (T - age) given T > age. Past everything seen it is ``age_s`` again: long
        pauses have heavy tails.
        """
        mixture = self._mixture(workflow, tool)
        if mixture is None:
            return max(_prior_s(_type_of(tool), q) - age_s, 0.0) or age_s
        passed = bisect_right(mixture.bins, bin_of(age_s))
        before = mixture.cumulated[passed - 1] if passed else 0.0
        left = mixture.cumulated[-1] - before
        if passed == len(mixture.bins) or left <= 0.0:
            return age_s
        # A little more than before: rank 0 would be the last bin that has passed.
        rank = before + max(q, 1e-9) * left
        return max(0.0, mixture.value_s(rank) - age_s)

    def pauses(self, workflow: Hashable, tool: str | None) -> int:
        """How many pauses of the workflow with the tool have come."""
        level = self._levels.get(_keys(workflow, tool)[0])
        return 0 if level is None else level.quantiles.total

    def merge(self, other: ToolDurations) -> None:
        """Add all that ``other`` holds; ``other`` stays as it is."""
        for key, level in other._levels.items():
            self._level(key).quantiles.merge(level.quantiles)
        for level in self._levels.values():
            level.mixture, level.points = None, []

    def state(self) -> Generator[None, None, dict[str, Any]]:
        """All that it holds, as values of JSON, a little at a time; see ``Graphs.saving``.

        Workflows are texts or tuples of texts.
        """
        levels = []
        for number, (key, level) in enumerate(list(self._levels.items())):
            parts = [key_state(part) for part in key]
            levels.append({"key": parts, "pauses": level.quantiles.state()})
            if number % _SAVED_AT_ONCE == 0:
                yield
        return {"levels": levels}

    @classmethod
    def from_state(
        cls, state: Any, max_keys: int = 10_000, where: str = "durations"
    ) -> ToolDurations:
        """What ``state`` gave.

        Raises:
            StateError: it is not such a state.
        """
        durations = cls(max_keys)
        for item, place in items_of(fields_of(state, where), "levels", f"{where}."):
            fields = fields_of(item, place)
            key = fields.get("key")
            if not isinstance(key, list) or not 1 <= len(key) <= 2:
                raise StateError(f"{place}.key: expected a list of one or two texts")
            parts = tuple(key_of(part, f"{place}.key") for part in key)
            quantiles = Quantiles.from_state(fields.get("pauses"), _GENERATION, f"{place}.pauses")
            durations._levels[parts] = _Level(quantiles)
            durations._keep_bound()
        return durations

    def _level(self, key: Key) -> _Level:
        level = self._levels.get(key)
        if level is None:
            level = self._levels[key] = _Level()
            self._keep_bound()
        else:
            self._levels.move_to_end(key)
        return level

    def _keep_bound(self) -> None:
        while len(self._levels) > self._max_keys:
            self._levels.popitem(last=False)

    def _mixture(self, workflow: Hashable, tool: str | None) -> _Mixture | None:
        """The mixture for the key; None when nothing was seen at any level."""
        keys: tuple[Key, ...] = _keys(workflow, tool)
        level = self._levels.get(keys[0])
        if level is None:
            # Nothing of its own: what the others have is what there is, and it has a place to keep.
            keys = keys[1:] if keys[1] in self._levels else keys[2:]
            level = self._levels.get(keys[0]) if keys else None
            if level is None:
                return None
        total = level.quantiles.total
        if level.mixture is None or _is_stale(level.mixed_at, total):
            level.mixture, level.mixed_at = self._mix(keys, _type_of(tool)), total
        return level.mixture

    def _mix(self, keys: tuple[Key, ...], tool_type: ToolType) -> _Mixture:
        mixed = self._levels[keys[0]].quantiles.bins()
        backing = [(_prior_bins(tool_type), _PRIOR_PAUSES)]
        for key, pauses in zip(keys[1:], _BACKING, strict=False):
            if (level := self._levels.get(key)) is not None:
                backing.append((level.spread(), pauses))
        for points, pauses in backing:
            count = min(1.0, pauses / max(1, len(points)))
            for each in points:
                mixed[each] = mixed.get(each, 0.0) + count
        bins = sorted(mixed)
        cumulated = list(accumulate(mixed[each] for each in bins))
        p50_s, p95_s = (_value_s(bins, cumulated, q * cumulated[-1]) for q in (0.5, 0.95))
        return _Mixture(bins, cumulated, p50_s, p95_s)


def _value_s(bins: list[int], cumulated: list[float], rank: float) -> float:
    return bin_value(bins[min(bisect_left(cumulated, rank), len(bins) - 1)])


def key_state(key: Hashable) -> Any:
    """A workflow's key as a value of JSON.

    Raises:
        StateError: it is neither a text, nor None, nor a tuple of these.
    """
    if isinstance(key, tuple):
        return [key_state(part) for part in key]
    if key is None or isinstance(key, str):
        return str(key) if isinstance(key, str) else None
    raise StateError(f"the key {key!r} is not made of texts; such a workflow cannot be saved")


def key_of(state: Any, where: str) -> Hashable:
    """The key that ``key_state`` wrote.

    Raises:
        StateError: it is not such a key.
    """
    if isinstance(state, list) and len(state) <= 8:
        return tuple(label(part, f"{where}[{at}]") for at, part in enumerate(state))
    return label(state, where)


def _keys(workflow: Hashable, tool: str | None) -> tuple[Key, Key, Key]:
    """The keys under which a pause counts, the finest first."""
    return (workflow, tool), (tool,), (_TYPE_KEYS[_type_of(tool)],)


def _type_of(tool: str | None) -> ToolType:
    return ToolType.HUMAN if tool is None else tool_type_of(tool)


# No tool has such a name: a name is not empty before the colon.
_TYPE_KEYS = {tool_type: f":{tool_type.value}" for tool_type in ToolType}


def _is_stale(then: int, now: int) -> bool:
    """Whether enough pauses have come since there were ``then``: a quarter more, or 64."""
    return now - then > min(then // _STALE_SHARE, _MAX_STALE)


_NORMAL = NormalDist()
_Z95 = _NORMAL.inv_cdf(0.95)


def _prior_s(tool_type: ToolType, q: float) -> float:
    return _log_normal_s(PRIOR_P50_S[tool_type], PRIOR_P95_S[tool_type], q)


@lru_cache
def _prior_bins(tool_type: ToolType) -> list[int]:
    return [bin_of(_prior_s(tool_type, (point + 0.5) / _POINTS)) for point in range(_POINTS)]


def _log_normal_s(p50_s: float, p95_s: float, q: float) -> float:
    """Quantile of the log-normal distribution with that P50 and P95."""
    z = _NORMAL.inv_cdf(min(max(q, 1e-6), 1.0 - 1e-6))
    return float(p50_s * (p95_s / p50_s) ** (z / _Z95))
