"""Preemption for a waiting request, by vLLM's own means, under ``--scheduling-policy priority``.

vLLM lets priority order its waiting queue, and preempts only when a running request cannot grow:
a request of high priority waits until others end. This rule, off by default, makes those of lower
priority give way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request

from saga_core.preemption import RunningRequest, WaitingRequest, choose_preempted

GUARD_S = 1.0
"""How long a request that has given way runs before it may have to again, seconds."""
MAX_PREEMPTED = 8
"""How many requests give way to one waiting request, in one step and in all."""


class WaitingPreemption:
    """Preempts running requests of one scheduler for its first waiting one.

    What gives way keeps its KV as any preempted request does: cached, free, and ranked as the KV
    of a queued request. Batches in flight are no danger: vLLM delivers what they return for the
    request, or drops it and computes it anew; where a connector might write to the freed blocks,
    vLLM holds these back until the batch is done, and here they count as free.

    Args:
        scheduler: a vLLM scheduler, Scheduler or AsyncScheduler.

    Attributes:
        total_preempted: how often a request has given way so far.
    """

    def __init__(self, scheduler: Any) -> None:
        self.total_preempted = 0
        self._scheduler = scheduler
        # Requests that gave way, and since when they run again; None until they do.
        self._resumed_s: dict[str, float | None] = {}
        # Waiting requests, and how many gave way to them.
        self._gave_way: dict[str, int] = {}

    def preempt_for_waiting(self, now_s: float) -> int:
        """Make room for the first waiting request; to be called right before ``schedule()``.

        Returns how many requests gave way. Nobody does for a request that could not start then:
        one that waits for its grammar or its KV.
        """
        self._forget_finished()
        self._note_resumed(now_s)
        waiting = self._first_waiting()
        if waiting is None:
            return 0
        before = self._gave_way.get(waiting.request_id, 0)
        lower = {
            request.request_id: request
            for request in self._scheduler.running
            if request.priority > waiting.priority
        }
        if not lower or before >= MAX_PREEMPTED:
            return 0
        lack, reused = self._lack(waiting)
        chosen = choose_preempted(
            lack,
            (
                RunningRequest(id_, one.priority, one.arrival_time, self._resumed_s.get(id_))
                for id_, one in lower.items()
            ),
            own_blocks=lambda id_: sum(
                block.ref_cnt == 1 and block.block_id not in reused
                for block in _each(self._scheduler.kv_cache_manager.get_blocks(id_))
            ),
            now_s=now_s,
            guard_s=GUARD_S,
            max_preempted=MAX_PREEMPTED - before,
        )
        for request_id in chosen:
            self._preempt(lower[request_id], now_s)
        self.total_preempted += len(chosen)
        if chosen:
            self._gave_way[waiting.request_id] = before + len(chosen)
        return len(chosen)

    def _forget_finished(self) -> None:
        known = self._scheduler.requests
        for table in (self._resumed_s, self._gave_way):
            for request_id in [id_ for id_ in table if id_ not in known]:
                del table[request_id]

    def _note_resumed(self, now_s: float) -> None:
        if self._resumed_s:
            for request in self._scheduler.running:
                if self._resumed_s.get(request.request_id, now_s) is None:
                    self._resumed_s[request.request_id] = now_s

    def _first_waiting(self) -> Request | None:
        """The best waiting request that vLLM would start if it had room."""
        s = self._scheduler
        if s.policy is not SchedulingPolicy.PRIORITY or s.pause_state is not PauseState.UNPAUSED:
            return None
        queues = (s.kv_holding_waiting, s.waiting)
        ready = (next(filter(self._is_ready, queue), None) for queue in queues)
        return min((request for request in ready if request is not None), default=None)

    def _is_ready(self, request: Request) -> bool:
        is_stale = request.num_stale_output_tokens > 0 and not request.drop_stale_output
        # vLLM asks this only when it has a slot to give.
        return not is_stale and bool(self._scheduler._handle_blocked_waiting_request(request))

    def _lack(self, waiting: Request) -> tuple[WaitingRequest, set[int]]:
        """What it lacks, and the cached blocks it would take up that running requests use."""
        s, manager = self._scheduler, self._scheduler.kv_cache_manager
        slots = 1 + len(s.running) + s.num_waiting_for_streaming_input - s.max_num_active_reqs
        free = manager.block_pool.get_num_free_blocks()
        free += sum(len(blocks) for _, blocks in s.deferred_frees)
        blocks = s._request_remaining_blocks(waiting) + manager.watermark_blocks - free
        reused: set[int] = set()
        if blocks > 0 and not waiting.num_computed_tokens:
            hit = _each(manager.get_computed_blocks(waiting)[0])
            reused = {block.block_id for block in hit if block.ref_cnt > 0}
        return WaitingRequest(waiting.priority, slots, blocks - len(reused)), reused

    def _preempt(self, request: Request, now_s: float) -> None:
        s = self._scheduler
        s.running.remove(request)
        s._preempt_request(request, now_s, drop_stale_output=s.requires_kv_delivery)
        # Should it be resumed at once, the worker has to be sent all of its tokens.
        s.prev_step_scheduled_req_ids.discard(request.request_id)
        self._resumed_s[request.request_id] = None


def _each(kv_blocks: Any) -> Iterator[KVCacheBlock]:
    """The blocks of every group; the null block stands for none."""
    return (block for group in kv_blocks.blocks for block in group if not block.is_null)
