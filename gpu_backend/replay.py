"""Prefetch as requests of the engine's own: a session's last prompt is asked for once more.

vLLM's scheduler then takes what is on the GPU, loads what the connector has, and computes the
rest, as for any request. Such a request comes last, makes one token that nobody is told of, and
gives way when clients' requests wait.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from gpu_backend.kv_retention import KVRetention
from gpu_backend.prefetch import Chain, Prefetch, Prefetcher, Residence
from gpu_backend.residence import count_in_host, count_on_gpu
from saga_core.pauses import Outlook
from saga_core.prefetch import TierSpeed

_PREFIX = "saga-prefetch-"
_QUEUED = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
_LAST_PRIORITY = 2**31 - 1


class Replay:
    """Prefetches of one scheduler.

    Args:
        scheduler: vLLM's scheduler with the retention attached; it must have one KV cache group.
        add_request: queues a request without telling the retention of it.
    """

    def __init__(
        self, scheduler: Any, saga: KVRetention, add_request: Callable[[Request], None]
    ) -> None:
        self._scheduler = scheduler
        self._saga = saga
        self._add_request = add_request
        self._requests: dict[str, tuple[Prefetch, Request]] = {}
        self._admitted: dict[str, tuple[int, int]] = {}
        self._numbers = itertools.count()
        self.prefetcher = Prefetcher(
            saga.num_blocks, saga.block_tokens, saga.settings.pressure_high
        )

    def is_own(self, request_id: str) -> bool:
        """Whether the request is one of these, not a client's."""
        return request_id in self._requests

    @property
    def has_own(self) -> bool:
        """Whether one of these requests is under way."""
        return bool(self._requests)

    # Events

    def released(self, request: Request, *, now_s: float) -> None:
        """A client's request is about to give up its blocks."""
        session_id = request.session_id
        if session_id is None or not request.is_finished():
            return
        if request.mm_features or request.prompt_embeds is not None or request.pooling_params:
            return  # More than token ids would be needed to ask for it again.
        chain = Chain(
            tokens=array("I", request._all_token_ids),
            hashes=request.block_hashes[: request.num_computed_tokens // self._saga.block_tokens],
            lora_request=request.lora_request,
            cache_salt=request.cache_salt,
        )
        self.prefetcher.paused(session_id, chain, now_s=now_s)

    def allocate(
        self, allocate: Callable[..., Any], request: Request, *args: Any, **kwargs: Any
    ) -> Any:
        """vLLM's allocate_slots for one of these requests; the first success is its admission."""
        blocks = allocate(request, *args, **kwargs)
        if blocks is not None and request.request_id not in self._admitted:
            local = kwargs.get("num_new_computed_tokens", 0)
            loaded = kwargs.get("num_external_computed_tokens", 0)
            size = self._saga.block_tokens
            self._admitted[request.request_id] = (local // size, loaded // size)
        return blocks

    def ended(self, request: Request, blocks: list[int], *, now_s: float) -> None:
        """One of these requests has given up its blocks, cached ones in chain order: they are the
        session's. A preempted one comes back."""
        if not request.is_finished():
            return
        prefetch, _ = self._requests.pop(request.request_id)
        local, loaded = self._admitted.pop(request.request_id, (0, 0))
        index = self._saga.index
        assert index is not None
        self.prefetcher.finished(
            prefetch,
            loaded_blocks=min(loaded, max(0, len(blocks) - local)),
            computed_blocks=max(0, len(blocks) - local - loaded),
            is_cancelled=request.status is RequestStatus.FINISHED_ABORTED,
            now_s=now_s,
        )
        index.restore(prefetch.session_id, blocks, now_s=now_s)

    def without_own(self, outputs: Any) -> Any:
        """The engine's outputs without those of these requests, which nobody waits for."""
        for client in outputs.values():
            if any(output.request_id.startswith(_PREFIX) for output in client.outputs):
                client.outputs = [o for o in client.outputs if not o.request_id.startswith(_PREFIX)]
        return outputs

    # Decisions

    def before_step(self, *, now_s: float) -> None:
        """Give way to clients' requests, then start what is due."""
        if self._requests:
            self._give_way()
        if not self._count_clients_waiting():
            for prefetch in self.prefetcher.due(self, now_s=now_s):
                self._start(prefetch)

    def _give_way(self) -> None:
        clients = len(self._scheduler.requests) - len(self._requests)
        waiting = self._count_clients_waiting()
        ids = [
            request_id
            for request_id, (prefetch, request) in self._requests.items()
            if (prefetch.is_computed and clients) or (waiting and request.status in _QUEUED)
        ]
        for request_id in ids:  # Of several vLLM makes a set, whose order is any.
            self._scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def _start(self, prefetch: Prefetch) -> None:
        chain = prefetch.chain
        request = Request(
            request_id=f"{_PREFIX}{next(self._numbers)}",
            # One token more: the last one of a prompt is computed in any case.
            prompt_token_ids=list(chain.tokens[: prefetch.blocks * self._saga.block_tokens + 1]),
            sampling_params=SamplingParams(max_tokens=1, temperature=0.0, detokenize=False),
            pooling_params=None,
            lora_request=chain.lora_request,
            cache_salt=chain.cache_salt,
            priority=_LAST_PRIORITY,
        )
        request.block_hashes = list(chain.hashes[: prefetch.blocks])
        self._requests[request.request_id] = (prefetch, request)
        self._add_request(request)

    def _count_clients_waiting(self) -> int:
        scheduler = self._scheduler
        own = sum(
            request.status is not RequestStatus.RUNNING for _, request in self._requests.values()
        )
        return int(scheduler.get_request_counts()[1] - own)

    # What the prefetcher asks (EngineView)

    def residence(self, chain: Chain) -> Residence:
        """Where the chain's blocks are."""
        pool = self._scheduler.kv_cache_manager.block_pool
        on_gpu = count_on_gpu(pool, chain.hashes)
        return Residence(on_gpu, count_in_host(self._saga.host, chain.hashes, on_gpu))

    def outlook(self, session_id: str, now_s: float) -> Outlook | None:
        """See :meth:`SessionIndex.outlook`."""
        assert self._saga.index is not None
        return self._saga.index.outlook(session_id, now_s=now_s)

    def displaced(self, blocks: int, now_s: float) -> tuple[int, float]:
        """Of so many blocks taken from the pool, those that a run holds, and their worth."""
        assert self._saga.index is not None
        unheld = self._scheduler.kv_cache_manager.block_pool.count_unheld_at_front(blocks)
        return blocks - unheld, self._saga.index.least_worth(now_s=now_s)

    def speed(self) -> TierSpeed | None:
        """Measured rates; that of the host tier is assumed until something was loaded."""
        prefill = self._saga.prefill_rate.tokens_per_s
        if prefill is None:
            return None
        return TierSpeed(prefill, self._saga.load_tokens_per_s() or prefill)

    def is_idle(self) -> bool:
        """Whether no client's request is under way."""
        return len(self._scheduler.requests) == len(self._requests)

    def usage(self) -> float:
        """Share of the pool that running requests use, 0 to 1."""
        return float(self._scheduler.kv_cache_manager.usage)
