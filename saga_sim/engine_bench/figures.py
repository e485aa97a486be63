"""Figures of one arm's run, and of two arms in pairs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from saga_sim.engine_bench.closed_loop import Request
from saga_sim.engine_bench.log_replay import replay
from saga_sim.engine_bench.plan import Load

# Student's t at 0.975 by degrees of freedom from 1 on; the last stands for all beyond.
_T_975 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)

RATIOS = (
    "tct_p50_s",
    "tct_p95_s",
    "tct_mean_s",
    "ttft_p50_s",
    "ttft_p95_s",
    "elapsed_s",
    "prefill_tokens",
    "engine_cpu_s",
)
"""Figures of which less is better; two arms are compared by the first one's ÷ the other's."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What was taken from a worker around the load.

    Attributes:
        counters: growth of the plugin's counters; None without the plugin.
        engine_cpu_s: CPU seconds, user and system, of all processes of the worker.
        host_blocks: blocks of its host tier.
    """

    counters: Mapping[str, float] | None
    engine_cpu_s: float
    host_blocks: int = 0


@dataclass(frozen=True, slots=True)
class ArmRun:
    """Figures of one run of one arm.

    Attributes:
        tct_p50_s, tct_p95_s, tct_mean_s: completion time of a task, from its first request to its
            last answer, waiting and pauses included.
        ttft_p50_s, ttft_p95_s: from a request to its first token, at the client.
        elapsed_s: from the first request to the last answer.
        requests_per_s, output_tokens_per_s: over ``elapsed_s``.
        prompt_tokens: of all requests. prefill_tokens: of these, not found cached in any tier.
        regret_tokens: of the prefilled, those that a cache without bound would have had.
        belady_regret_tokens: the same of Bélády's optimum on this run's requests, in the memory of
            all tiers.
        hit_rate_gpu, hit_rate_host: prompt tokens found there ÷ prompt tokens.
        pressure: tokens that live tasks held ÷ the pool, mean over the run with its beginning and
            its end, when fewer tasks live.
        counters: growth of the plugin's own counters; empty without the plugin.
    """

    tasks: int
    requests: int
    tct_p50_s: float
    tct_p95_s: float
    tct_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    elapsed_s: float
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens: int
    prefill_tokens: int
    regret_tokens: int
    belady_regret_tokens: int
    hit_rate_gpu: float
    hit_rate_host: float
    pressure: float
    engine_cpu_s: float
    counters: Mapping[str, float] = field(default_factory=dict)

    @property
    def regret_share(self) -> float:
        """Regret ÷ prefilled tokens."""
        return self.regret_tokens / self.prefill_tokens if self.prefill_tokens else 0.0

    @property
    def avoidable_tokens(self) -> int:
        """Regret beyond that of Bélády's optimum."""
        return self.regret_tokens - self.belady_regret_tokens

    @property
    def scheduler_ms_per_step(self) -> float:
        """CPU of vLLM's scheduler, with the plugin's part, per engine step; 0 without the plugin,
        where nobody counts."""
        steps = self.counters.get("scheduler_steps", 0)
        return 1000 * self.counters["scheduler_cpu_s"] / steps if steps else 0.0

    @property
    def values(self) -> dict[str, Any]:
        """All figures, for programs."""
        derived = ("regret_share", "avoidable_tokens", "scheduler_ms_per_step")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def measure(load: Load, requests: Sequence[Request], measured: Measured) -> ArmRun:
    """Work out the figures of a run from its requests and what its worker counted."""
    tct_s = list(task_times_s(requests).values())
    ttft_s = [request.first_token_s - request.sent_s for request in requests]
    elapsed_s = max(r.end_s for r in requests) - min(r.sent_s for r in requests)
    memory = load.pool_blocks + measured.host_blocks
    log = replay(requests, memory, load.options.block_tokens)
    cached = sum(request.cached_tokens for request in requests)
    host = int((measured.counters or {}).get("host_cached_tokens", 0))
    return ArmRun(
        tasks=len(tct_s),
        requests=len(requests),
        tct_p50_s=statistics.median(tct_s),
        tct_p95_s=quantile(tct_s, 0.95),
        tct_mean_s=statistics.fmean(tct_s),
        ttft_p50_s=statistics.median(ttft_s),
        ttft_p95_s=quantile(ttft_s, 0.95),
        elapsed_s=elapsed_s,
        requests_per_s=len(requests) / elapsed_s,
        output_tokens_per_s=sum(len(r.answer) for r in requests) / elapsed_s,
        prompt_tokens=log.prompt_tokens,
        prefill_tokens=log.prompt_tokens - cached,
        regret_tokens=log.regret_tokens,
        belady_regret_tokens=log.belady_regret_tokens,
        hit_rate_gpu=(cached - host) / log.prompt_tokens,
        hit_rate_host=host / log.prompt_tokens,
        pressure=_held_token_s(load, requests) / elapsed_s / load.pool_tokens,
        engine_cpu_s=measured.engine_cpu_s,
        counters=dict(measured.counters or {}),
    )


@dataclass(frozen=True, slots=True)
class Paired:
    """A figure over the pairs.

    Attributes:
        mean, low95, high95: geometric mean, and its 95 % interval by Student's t on the logarithms;
            None with a single pair, or where a value is not above 0.
    """

    each: tuple[float, ...]
    median: float
    least: float
    most: float
    mean: float | None = None
    low95: float | None = None
    high95: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Paired:
        """From one value a pair."""
        paired = cls(tuple(values), statistics.median(values), min(values), max(values))
        if len(values) < 2 or min(values) <= 0:
            return paired
        logs = [math.log(value) for value in values]
        t = _T_975[min(len(values) - 1, len(_T_975)) - 1]
        half = t * statistics.stdev(logs) / math.sqrt(len(values))
        mean = statistics.fmean(logs)
        return replace(
            paired, mean=math.exp(mean), low95=math.exp(mean - half), high95=math.exp(mean + half)
        )


def ratios(
    first: Sequence[Any], other: Sequence[Any], names: Iterable[str] = RATIOS
) -> dict[str, Paired]:
    """The first arm's figures ÷ the other's, pair by pair; above 1 the other one is better.

    A figure that is 0 in the other arm is left out.
    """
    found = {}
    for name in names:
        pairs = [(getattr(a, name), getattr(b, name)) for a, b in zip(first, other, strict=True)]
        if all(b > 0 for _, b in pairs):
            found[name] = Paired.of([a / b for a, b in pairs])
    return found


def gap_closed(first: Sequence[ArmRun], other: Sequence[ArmRun]) -> Paired | None:
    """Share of the first arm's avoidable regret that the other arm saves, pair by pair.

    (regret of the first - regret of the other) ÷ avoidable regret of the first: 1 is what Bélády
    saves in the first arm's memory and order of requests. The other arm has an order of its own,
    and may have more memory, so it can save more; below 0 it adds regret. None when there is
    nothing to avoid in some pair.
    """
    shares = []
    for a, b in zip(first, other, strict=True):
        if a.avoidable_tokens <= 0:
            return None
        shares.append((a.regret_tokens - b.regret_tokens) / a.avoidable_tokens)
    return Paired.of(shares)


def quantile(values: Sequence[float], level: float) -> float:
    """The least value with at least ``level`` of all at or below it."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(level * len(ordered)) - 1)]


class Timed(Protocol):
    """A request of a task."""

    @property
    def task(self) -> int: ...
    @property
    def sent_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...


def task_times_s(requests: Iterable[Timed]) -> dict[int, float]:
    """Of each task, in the order of their first requests: from this to its last answer."""
    sent: dict[int, float] = {}
    ended: dict[int, float] = {}
    for request in requests:
        sent[request.task] = min(request.sent_s, sent.get(request.task, math.inf))
        ended[request.task] = max(request.end_s, ended.get(request.task, 0.0))
    return {task: ended[task] - sent[task] for task in sent}


def _held_token_s(load: Load, requests: Sequence[Request]) -> float:
    """Tokens that tasks held, integrated over the run as it went."""
    times = {(r.task, r.call): (r.sent_s, r.end_s) for r in requests}
    total = 0.0
    for number, task in enumerate(load.tasks):
        calls = [
            replace(call, start_s=times[number, i][0], end_s=times[number, i][1])
            for i, call in enumerate(task.calls)
        ]
        total += replace(task, calls=tuple(calls)).held_token_s
    return total
