"""Figures of one run of an arm."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

from saga_sim.cluster.counts import Answered
from saga_sim.cluster.load import ClusterLoad
from saga_sim.cluster.simulation import Cluster
from saga_sim.engine_bench.figures import quantile, task_times_s

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
        prompt_tokens: of all requests; ``cached_tokens``, which were on the GPU,
            ``loaded_tokens``, which came from host memory, and ``prefill_tokens`` of them add up.
        regret_tokens: of the prefilled, those that some worker of the cluster had computed before.
        recomputed_tokens: computed again after preemptions, in none of the above.
        prefetched_tokens: computed by the plugin ahead of requests.
        regret_share: time of steps spent on ``regret_tokens`` ÷ time of all steps.
        hit_rate: cached and loaded ÷ prompt tokens. hit_rate_gpu, hit_rate_host: of these the
            cached, and the loaded. computed_share: prefilled ÷ prompt tokens.
        link_loaded_tokens, link_stored_tokens: that got over the links to host memory, those of
            prefetches and of preempted requests among them. load_share, store_share: time that the
            links were busy that way ÷ workers × ``elapsed_s``.
        copy_wait_share: of ``busy_s``, waiting for copies of blocks before they are overwritten.
        busy_s: time of all workers' steps. busy_share: this ÷ workers × ``elapsed_s``.
        used_share: share of the pools that running requests held, mean over the steps' time.
        cached_share: share that held something readable, in use or not.
        pressure: tokens that live sessions held ÷ the pools, mean over the run with its beginning
            and its end, when fewer tasks live; what several share counts for each.
        slo_share: tasks done within ``deadline_factor`` × what they take alone (``cluster.alone``)
            ÷ tasks. slo: the same of each kind of task.
        slowdown_p50, slowdown_p95: completion time ÷ what the task takes alone.
        tct_s: of each task, by number.
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
    loaded_tokens: int
    prefill_tokens: int
    regret_tokens: int
    recomputed_tokens: int
    prefetched_tokens: int
    output_tokens: int
    regret_share: float
    hit_rate: float
    hit_rate_gpu: float
    hit_rate_host: float
    computed_share: float
    link_loaded_tokens: int
    link_stored_tokens: int
    load_share: float
    store_share: float
    copy_wait_share: float
    busy_s: float
    busy_share: float
    used_share: float
    cached_share: float
    pressure: float
    moved_share: float
    slo_share: float
    slowdown_p50: float
    slowdown_p95: float
    steps: int
    slo: Mapping[str, float]
    tct_s: Sequence[float]
    counters: Mapping[str, float]

    @property
    def values(self) -> dict[str, Any]:
        """All figures, for programs."""
        return asdict(self)


SINGLE = tuple(one.name for one in fields(Figures) if one.name not in ("slo", "tct_s", "counters"))
"""Names of the figures that are one number each."""


def measure(cluster: Cluster) -> Figures:
    """Work out the figures of a run that is over."""
    answered, load = cluster.answered, cluster.load
    totals = [worker.totals for worker in cluster.workers]
    times_s = task_times_s(answered)
    tct_s = [times_s[task] for task in range(len(load.tasks))]
    slowdown = [took_s / alone for took_s, alone in zip(tct_s, cluster.alone_s, strict=True)]
    is_on_time = [one <= load.options.deadline_factor for one in slowdown]
    ttft_s = [one.first_token_s - one.sent_s for one in answered]
    elapsed_s = max(one.end_s for one in answered)
    busy_s = sum(one.busy_s for one in totals)
    prompt_tokens = sum(one.prompt_tokens for one in answered)
    cached_tokens = sum(one.cached_tokens for one in answered)
    loaded_tokens = sum(one.loaded_tokens for one in answered)
    prefill_tokens = sum(one.prefill_tokens for one in answered)
    links = [link for worker in cluster.workers for link in worker.links]
    size = load.options.block_tokens
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
        loaded_tokens=loaded_tokens,
        prefill_tokens=prefill_tokens,
        regret_tokens=sum(one.regret_tokens for one in answered),
        recomputed_tokens=sum(one.recomputed_tokens for one in answered),
        prefetched_tokens=sum(one.own_tokens for one in totals),
        output_tokens=sum(one.output_tokens for one in answered),
        regret_share=sum(one.regret_s for one in totals) / busy_s,
        hit_rate=(cached_tokens + loaded_tokens) / prompt_tokens,
        hit_rate_gpu=cached_tokens / prompt_tokens,
        hit_rate_host=loaded_tokens / prompt_tokens,
        computed_share=prefill_tokens / prompt_tokens,
        link_loaded_tokens=sum(link.loads.blocks for link in links) * size,
        link_stored_tokens=sum(link.stores.blocks for link in links) * size,
        load_share=sum(link.loads.busy_s for link in links) / elapsed_s / load.options.workers,
        store_share=sum(link.stores.busy_s for link in links) / elapsed_s / load.options.workers,
        copy_wait_share=sum(one.copy_wait_s for one in totals) / busy_s,
        busy_s=busy_s,
        busy_share=busy_s / elapsed_s / load.options.workers,
        used_share=sum(one.used_share_s for one in totals) / busy_s,
        cached_share=sum(one.cached_share_s for one in totals) / busy_s,
        pressure=_held_token_s(answered, load) / elapsed_s / pool_tokens,
        moved_share=_moved_share(answered),
        slo_share=statistics.fmean(is_on_time),
        slowdown_p50=statistics.median(slowdown),
        slowdown_p95=quantile(slowdown, 0.95),
        steps=sum(one.steps for one in totals),
        slo=_by_kind(is_on_time, load),
        tct_s=tct_s,
        counters=cluster.plugin_counters(),
    )


def _by_kind(is_on_time: Sequence[bool], load: ClusterLoad) -> dict[str, float]:
    """Share of the tasks of each kind that are on time, in the order of the options."""
    found: dict[str, list[bool]] = {one.kind: [] for one in load.options.tenants}
    for owner, is_met in zip(load.owners, is_on_time, strict=True):
        found.setdefault(owner.kind, []).append(is_met)
    return {kind: statistics.fmean(each) for kind, each in found.items()}


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
