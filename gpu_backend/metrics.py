"""A worker's state as Prometheus series.

They are made anew from the engine's answer at each scrape, so a series vanishes with what it
describes, and it does not matter which of several API servers is scraped. No label is a session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gpu_backend.control import Answer
from gpu_backend.telemetry import GPUMemory

PREFETCH_OUTCOMES = ("started", "useful", "late", "wasted", "cancelled")
EVICTION_REASONS = ("unheld", "ended", "idle", "paused", "resuming")

_Samples: TypeAlias = Iterable[tuple[Sequence[str], float | None]]


@dataclass(frozen=True, slots=True)
class Series:
    """A family of series, made from a worker's state.

    Attributes:
        labels: beside ``policy``, the live one, which all have.
        read: label values and value of each series; None leaves one out.
    """

    name: str
    help: str
    labels: tuple[str, ...]
    read: Callable[[Answer], _Samples]

    def family(self, state: Answer) -> Metric:
        """The family with its samples, none where the state has nothing for it."""
        names = ["policy", *self.labels]
        family: Any
        if self.name.endswith("_total"):
            family = CounterMetricFamily(self.name, self.help, labels=names)
        else:
            family = GaugeMetricFamily(self.name, self.help, labels=names)
        for values, value in self.read(state):
            if value is not None:
                family.add_metric([state["policy"], *values], value)
        return family  # type: ignore[no-any-return]


def exposition(state: Answer | None, gpus: Sequence[GPUMemory]) -> bytes:
    """Prometheus text. Without a state, or with the plugin off, it says only that it is off."""
    return generate_latest(_Collected(list(_families(state, gpus))))


class _Collected(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _families(state: Answer | None, gpus: Sequence[GPUMemory]) -> Iterator[Metric]:
    is_on = state is not None and bool(state["enabled"])
    yield GaugeMetricFamily(ENABLED, "1 while the SAGA plugin is on, else 0", float(is_on))
    if state is not None and is_on:
        for series in SERIES:
            family = series.family(state)
            if family.samples:
                yield family
    if gpus:
        for name, text, field in GPU_SERIES:
            family = GaugeMetricFamily(name, text, labels=["gpu"])
            for gpu in gpus:
                family.add_metric([gpu.gpu], getattr(gpu, field))
            yield family


# What each series reads


def _at(*path: str) -> Callable[[Answer], _Samples]:
    """One series with no label of its own: the number at this path of the state."""
    return lambda state: [((), _number(state, *path))]


def _number(state: Answer, *path: str) -> float | None:
    value: Any = state
    for name in path:
        if not isinstance(value, dict) or value.get(name) is None:
            return None
        value = value[name]
    return float(value)


def _hit_tokens(state: Answer) -> _Samples:
    cached = _number(state, "counters", "cached_tokens")
    host = _number(state, "counters", "host_cached_tokens")
    if cached is not None:
        yield ("gpu",), cached - (host or 0.0)
    if state.get("host"):
        yield ("host",), host


def _retained_bytes(state: Answer) -> _Samples:
    block_bytes = _number(state, "block_bytes")
    if block_bytes:  # 0: not known.
        for tier, path in (("gpu", ("held", "session_blocks")), ("host", ("host", "held_blocks"))):
            blocks = _number(state, *path)
            yield (tier,), None if blocks is None else blocks * block_bytes


def _each(*path: str, names: Iterable[str], suffix: str = "") -> Callable[[Answer], _Samples]:
    """One series for each name, the value of its label: the number at path and name."""
    return lambda state: [((name,), _number(state, *path, name + suffix)) for name in names]


def _shadow(counter: str) -> Callable[[Answer], _Samples]:
    def read(state: Answer) -> _Samples:
        shadow = state.get("shadow")
        if shadow and shadow.get("off_reason") is None:
            yield (shadow["policy"],), _number(shadow, "counters", counter)

    return read


ENABLED = "saga_worker_enabled"

SERIES = (
    Series(
        "saga_worker_admitted_requests_total",
        "requests admitted, each once",
        (),
        _at("counters", "requests"),
    ),
    Series(
        "saga_worker_prompt_tokens_total",
        "prompt tokens of admitted requests",
        (),
        _at("counters", "prompt_tokens"),
    ),
    Series(
        "saga_worker_hit_tokens_total",
        "of the prompt tokens, those whose KV was cached, by the tier it was in",
        ("tier",),
        _hit_tokens,
    ),
    Series(
        "saga_worker_regret_tokens_total",
        "prompt tokens prefilled again because their KV had been evicted",
        (),
        _at("counters", "regret_tokens"),
    ),
    Series(
        "saga_worker_preempted_tokens_total",
        "tokens computed again after a preemption; none of the above",
        (),
        _at("counters", "preempted_tokens"),
    ),
    Series(
        "saga_worker_evicted_blocks_total",
        "blocks evicted from GPU memory, by the state of the run that the policy chose; unheld: "
        "no run held them",
        ("reason",),
        _each("evictions", names=EVICTION_REASONS),
    ),
    Series(
        "saga_worker_pinned_block_seconds_total",
        "blocks that sessions hold × seconds, each block once, from the end of a step until it "
        "is evicted or given up",
        (),
        _at("counters", "pinned_block_s"),
    ),
    Series(
        "saga_worker_retained_bytes",
        "KV that is kept for sessions in GPU memory, and KV in the host tier",
        ("tier",),
        _retained_bytes,
    ),
    Series(
        "saga_worker_prefetches_total",
        "prefetches by outcome; each that has started gets one of the others",
        ("outcome",),
        _each("prefetch", names=PREFETCH_OUTCOMES),
    ),
    Series(
        "saga_worker_prefetch_tokens_total",
        "tokens that prefetches brought back: loaded from the host tier, or computed again",
        ("source",),
        _each("prefetch", names=("loaded", "computed"), suffix="_tokens"),
    ),
    Series("saga_worker_sessions", "sessions known", (), _at("held", "sessions")),
    Series(
        "saga_worker_pressure",
        "blocks that sessions hold ÷ blocks in GPU memory",
        (),
        _at("pressure"),
    ),
    Series(
        "saga_worker_queue_requests",
        "requests in the engine",
        ("state",),
        _each("queue", names=("running", "waiting")),
    ),
    Series(
        "saga_worker_prefill_tokens_per_second",
        "measured prefill rate",
        (),
        _at("prefill_tokens_per_s"),
    ),
    Series(
        "saga_worker_host_load_tokens_per_second",
        "measured rate of loads from the host tier",
        (),
        _at("host", "load_tokens_per_s"),
    ),
    Series(
        "saga_worker_host_refused_blocks_total",
        "evicted blocks that were worth less than all that the host tier held",
        (),
        _at("host", "refused_blocks"),
    ),
    Series("saga_worker_scheduler_steps_total", "engine steps", (), _at("scheduler", "steps")),
    Series(
        "saga_worker_scheduler_cpu_seconds_total",
        "CPU seconds of the scheduler in these steps, the plugin's included",
        (),
        _at("scheduler", "cpu_s"),
    ),
    Series(
        "saga_worker_gave_way_total",
        "running requests preempted for a waiting one of higher priority",
        (),
        _at("scheduler", "gave_way"),
    ),
    Series("saga_worker_notices_total", "notices taken", (), _at("counters", "notices")),
    Series(
        "saga_worker_unknown_session_notices_total",
        "of these, about sessions that are not known here",
        (),
        _at("counters", "unknown_sessions"),
    ),
    Series(
        "saga_worker_shadow_prompt_tokens_total",
        "prompt tokens that the shadow policy has seen",
        ("shadow",),
        _shadow("prompt_tokens"),
    ),
    Series(
        "saga_worker_shadow_hit_tokens_total",
        "of these, those that it would have hit",
        ("shadow",),
        _shadow("cached_tokens"),
    ),
    Series(
        "saga_worker_shadow_regret_tokens_total",
        "of these, those that it would have evicted and prefilled again",
        ("shadow",),
        _shadow("regret_tokens"),
    ),
)
"""Every family that is made from the state."""

GPU_SERIES = (
    ("saga_worker_gpu_memory_used_bytes", "GPU memory in use, by any process", "used_bytes"),
    ("saga_worker_gpu_memory_total_bytes", "GPU memory installed", "total_bytes"),
)
"""Families of the host's GPUs: name, help, field of GPUMemory."""
