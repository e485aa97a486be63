"""Order of the waiting queue: sessions whose KV is there go before those that would evict it.

vLLM admits in order of arrival. With more live sessions than the pool holds that is the worst
order: each evicts the KV of the one that comes next, and all prefill everything again.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from vllm.v1.request import Request, RequestStatus

from gpu_backend.kv_retention import KVRetention
from gpu_backend.residence import count_in_host, count_on_gpu
from saga_core.admission import WaitingPrompt, admission_order

_MAX_ORDERED = 64
_FRESH_S = 0.05
_ASSUMED_TOKENS_PER_S = 1000.0
"""Prefill rate before one is measured; only how requests compare depends on it."""


class AdmissionOrder:
    """Orders the waiting requests of sessions among themselves.

    Requests without a session keep their places in the queue, and so do those that were preempted
    or wait for something else; under ``--scheduling-policy priority`` nothing is ordered. The
    first 64 are looked at.

    Args:
        scheduler: vLLM's scheduler with the retention attached; it must have one KV cache group.
        max_overtaken_s: a request that has waited so long is overtaken no more.
    """

    def __init__(self, scheduler: Any, saga: KVRetention, max_overtaken_s: float) -> None:
        self._scheduler = scheduler
        self._saga = saga
        self._max_overtaken_s = max_overtaken_s
        self._arrived_s: dict[str, float] = {}
        # Tokens to compute, and when they were counted.
        self._missing: dict[str, tuple[int, float]] = {}

    def before_step(self, *, now_s: float) -> None:
        """Order the queue for the step that comes."""
        queue = self._scheduler.waiting
        if not isinstance(queue, deque) or len(queue) < 2:
            return
        places = [
            place
            for place, request in enumerate(queue)
            if request.session_id is not None and request.status is RequestStatus.WAITING
        ][:_MAX_ORDERED]
        if len(places) < 2:
            return
        requests = [queue[place] for place in places]
        self._forget({request.request_id for request in queue})
        rate = self._saga.prefill_rate.tokens_per_s or _ASSUMED_TOKENS_PER_S
        order = admission_order(
            [
                WaitingPrompt(
                    request.request_id,
                    now_s - self._arrived_s.setdefault(request.request_id, now_s),
                    self._missing_tokens(request, now_s) / rate,
                )
                for request in requests
            ],
            max_overtaken_s=self._max_overtaken_s,
        )
        for place, chosen in zip(places, order, strict=True):
            queue[place] = requests[chosen]

    def _missing_tokens(self, request: Request, now_s: float) -> int:
        known = self._missing.get(request.request_id)
        if known is not None and now_s - known[1] < _FRESH_S:
            return known[0]
        hashes = request.block_hashes
        there = count_on_gpu(self._scheduler.kv_cache_manager.block_pool, hashes)
        there += count_in_host(self._saga.host, hashes, there)
        missing = request.num_tokens - there * self._saga.block_tokens
        self._missing[request.request_id] = (missing, now_s)
        return missing

    def _forget(self, waiting: set[str]) -> None:
        if len(self._arrived_s) > 2 * len(waiting) + 64:
            self._arrived_s = {id_: at for id_, at in self._arrived_s.items() if id_ in waiting}
            self._missing = {id_: known for id_, known in self._missing.items() if id_ in waiting}
