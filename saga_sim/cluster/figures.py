"""Figures of one run of an arm, and of two arms over the seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from saga_sim.cluster.counts import Answered
from saga_sim.cluster.load import ClusterLoad
from saga_sim.cluster.simulation import Cluster
from saga_sim.engine_bench.figures import Paired, quantile

RATIOS = ("tct_p50_s", "tct_p95_s", "tct_mean_s", "ttft_p50_s", "ttft_p95_s", "elapsed_s", "busy_s")
"""Figures of which less is better; compared by the reference's ÷ the arm's."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One run, on the virtual clock.

    Attributes:
        tct_p50_s, tct_p95_s, tct_mean_s: completion time of a task, from its first request to its
            last answer, waiting and pauses included.
        ttft_p50_s, ttft_p95_s: from a request to its first token.
        elapsed_s: from the start to the last answer.
        prompt_tokens: of all requests; ``cached_tokens`` and ``prefill_tokens`` of them add up.
        regret_tokens: of the prefilled, those that some worker of the cluster had computed before.
        recomputed_tokens: computed again after preemptions, in none of the above.
        prefetched_tokens: computed by the plugin ahead of requests.
        regret_share: time of steps spent on ``regret_tokens`` ÷ time of all steps.
        hit_rate: cached ÷ prompt tokens.
        busy_s: time of all workers' steps. busy_share: this ÷ workers × ``elapsed_s``.
        used_share: share of the pools that running requests held, mean over the steps' time.
        cached_share: share that held something readable, in use or not.
        pressure: tokens that live sessions held ÷ the pools, mean over the run with its beginning
            and its end, when fewer tasks live; what several share counts for each.
        moved_share: calls that another worker served than their session's call before ÷ calls
            that have one.
        counters: the plugin's own, summed over the workers; empty without it.
    """

    tasks: int
    requests: int
    tct_p50_s: float
    tct_p95_s: float
    tct_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    elapsed_s: float
    tasks_per_min: float
    prompt_tokens: int
    cached_tokens: int
    prefill_tokens: int
    regret_tokens: int
    recomputed_tokens: int
    prefetched_tokens: int
    output_tokens: int
    regret_share: float
    hit_rate: float
    busy_s: float
    busy_share: float
    used_share: float
    cached_share: float
    pressure: float
    moved_share: float
    steps: int
    counters: Mapping[str, float]

    @property
    def values(self) -> dict[str, Any]:
        """All figures, for programs."""
        return asdict(self)


def measure(cluster: Cluster) -> Figures:
    """Work out the figures of a run that is over."""
    answered, load = cluster.answered, cluster.load
    totals = [worker.totals for worker in cluster.workers]
    tct_s = _task_times_s(answered)
    ttft_s = [one.first_token_s - one.sent_s for one in answered]
    elapsed_s = max(one.end_s for one in answered)
    busy_s = sum(one.busy_s for one in totals)
    prompt_tokens = sum(one.prompt_tokens for one in answered)
    cached_tokens = sum(one.cached_tokens for one in answered)
    pool_tokens = load.options.workers * load.blocks_per_worker * load.options.block_tokens
    return Figures(
        tasks=len(tct_s),
        requests=len(answered),
        tct_p50_s=statistics.median(tct_s),
        tct_p95_s=quantile(tct_s, 0.95),
        tct_mean_s=statistics.fmean(tct_s),
        ttft_p50_s=statistics.median(ttft_s),
        ttft_p95_s=quantile(ttft_s, 0.95),
        elapsed_s=elapsed_s,
        tasks_per_min=60 * len(tct_s) / elapsed_s,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        prefill_tokens=sum(one.prefill_tokens for one in answered),
        regret_tokens=sum(one.regret_tokens for one in answered),
        recomputed_tokens=sum(one.recomputed_tokens for one in answered),
        prefetched_tokens=sum(one.own_tokens for one in totals),
        output_tokens=sum(one.output_tokens for one in answered),
        regret_share=sum(one.regret_s for one in totals) / busy_s,
        hit_rate=cached_tokens / prompt_tokens,
        busy_s=busy_s,
        busy_share=busy_s / elapsed_s / load.options.workers,
        used_share=sum(one.used_share_s for one in totals) / busy_s,
        cached_share=sum(one.cached_share_s for one in totals) / busy_s,
        pressure=_held_token_s(answered, load) / elapsed_s / pool_tokens,
        moved_share=_moved_share(answered),
        steps=sum(one.steps for one in totals),
        counters=cluster.plugin_counters(),
    )


def ratios(reference: Sequence[Figures], other: Sequence[Figures]) -> dict[str, Paired]:
    """The reference's figures ÷ the other's, seed by seed; above 1 the other one is better."""
    found = {}
    for name in RATIOS:
        ours = [getattr(run, name) for run in reference]
        theirs = [getattr(run, name) for run in other]
        if all(theirs):
            found[name] = Paired.of([a / b for a, b in zip(ours, theirs, strict=True)])
    return found


def _task_times_s(answered: Sequence[Answered]) -> list[float]:
    sent: dict[int, float] = {}
    ended: dict[int, float] = {}
    for one in answered:
        sent[one.task] = min(one.sent_s, sent.get(one.task, math.inf))
        ended[one.task] = max(one.end_s, ended.get(one.task, 0.0))
    return [ended[task] - sent[task] for task in sorted(sent)]


def _by_session(answered: Sequence[Answered]) -> list[list[Answered]]:
    sessions: dict[tuple[int, str], list[Answered]] = {}
    for one in sorted(answered, key=lambda one: (one.sent_s, one.task, one.call)):
        sessions.setdefault((one.task, one.session_id), []).append(one)
    return list(sessions.values())


def _held_token_s(answered: Sequence[Answered], load: ClusterLoad) -> float:
    """Tokens of live sessions' latest prompts with their answers, integrated over the run."""
    total = 0.0
    for calls in _by_session(answered):
        for place, call in enumerate(calls):
            until_s = calls[place + 1].sent_s if place + 1 < len(calls) else call.end_s
            total += (until_s - call.sent_s) * (call.prompt_tokens + call.output_tokens)
    return total


def _moved_share(answered: Sequence[Answered]) -> float:
    moved = total = 0
    for calls in _by_session(answered):
        total += len(calls) - 1
        moved += sum(a.worker != b.worker for a, b in pairwise(calls))
    return moved / total if total else 0.0
