"""vLLM's scheduler, telling the retention what arrives, starts and ends.

One mixin serves over Scheduler and over AsyncScheduler: the class that vLLM would have chosen is
kept as the base, so nothing of it is lost. A failure of ours switches the retention off; it never
reaches the engine.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.request import Request, RequestStatus

from gpu_backend import block_pool
from gpu_backend.admission import AdmissionOrder
from gpu_backend.config import WorkerConfig
from gpu_backend.host_tier import Key
from gpu_backend.kv_retention import KVRetention
from gpu_backend.preempt import WaitingPreemption
from gpu_backend.replay import Replay
from gpu_backend.shadow import ShadowCache
from saga_core.notices import decode_notices
from saga_core.pauses import Step

logger = logging.getLogger("vllm.saga")
_T = TypeVar("_T")


class SagaSchedulerMixin:
    """Adds a :class:`KVRetention` to a vLLM scheduler; ``saga`` is None when it is off."""

    saga: KVRetention | None = None
    _saga_replay: Replay | None = None
    _saga_admission: AdmissionOrder | None = None
    _saga_preemption: WaitingPreemption | None = None
    kv_cache_manager: Any
    connector: Any
    vllm_config: Any
    get_request_counts: Callable[[], tuple[int, int]]
    sched_step_seq: int
    processed_step_seq: int
    _request_blocks_can_be_freed: Callable[[Request], bool]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Releases whose blocks vLLM gives back later, with the step that has to end first.
        self._saga_deferred: deque[tuple[int, Callable[[KVRetention], None]]] = deque()
        # When each batch in flight was scheduled, and how many prompt tokens it computes.
        self._saga_batches: deque[tuple[float, int]] = deque()
        self._saga_updated_s = 0.0
        self._saga_steps, self._saga_cpu_s = 0, 0.0
        # vLLM's allocate_slots, while ours stands in its place.
        self._saga_allocate_slots: Callable[..., Any] | None = None
        super().__init__(*args, **kwargs)
        try:
            self._saga_attach(WorkerConfig.from_environment())
        except Exception:
            self.saga = None  # The engine must start as stock vLLM.
            logger.exception("SAGA is off, vLLM starts as stock: the plugin could not attach")

    def add_request(self, request: Request) -> None:
        super().add_request(request)  # type: ignore[misc]
        self._saga_guard(lambda saga: saga.arrived(request.session_id), None)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        started_s = time.thread_time()
        self._saga_guard(self._saga_before_step, None)
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if self._saga_allocate_slots is not None:
            self.kv_cache_manager.allocate_slots = self._saga_allocate_slots
            self._saga_allocate_slots = None
        # A request that decodes computes one token; nearly all others are of prompts.
        prefill = output.total_num_scheduled_tokens - len(output.num_scheduled_tokens)
        self._saga_guard(lambda saga: self._saga_batches.append((saga.clock(), prefill)), None)
        self._saga_steps += 1
        self._saga_cpu_s += time.thread_time() - started_s
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        started_s = time.thread_time()
        self._saga_guard(self._saga_measure, None)
        replay = self._saga_replay
        has_own = replay is not None and replay.has_own
        outputs = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        if replay is not None and has_own:
            outputs = replay.without_own(outputs)
        self._saga_cpu_s += time.thread_time() - started_s
        return outputs

    def _free_request_blocks(self, request: Request) -> None:
        self._saga_guard(lambda saga: self._saga_release(saga, request), None)
        super()._free_request_blocks(request)  # type: ignore[misc]

    def _drain_deferred_frees(self) -> None:
        super()._drain_deferred_frees()  # type: ignore[misc]
        while self._saga_deferred and self._saga_deferred[0][0] <= self.processed_step_seq:
            _, release = self._saga_deferred.popleft()
            self._saga_guard(release, None)

    def saga_control(self, message: dict[str, Any]) -> dict[str, Any]:
        """Take a message of the control API; the answer is the state of the worker.

        ``notify``: the body of a notice. ``tick``: time has passed on an idle engine; answered with
        ``wake_in_s``, after which it is to come again at the latest, or null. ``sessions``: list so
        many, those with the most tokens. ``steps``: list the latest requests of sessions.

        Raises:
            NoticeError: the body is malformed; nothing is changed.
        """
        notices = decode_notices(message["notify"]) if "notify" in message else []
        if self.saga is None:
            return {"enabled": False, "scheduling_policy": self.vllm_config.scheduler_config.policy}
        self._saga_guard(lambda saga: saga.notify(notices), None)
        if message.get("tick"):
            return {"wake_in_s": self._saga_guard(self._saga_tick, None)}
        running, waiting = self.get_request_counts()
        return {
            "enabled": self.saga.off_reason is None,
            "scheduling_policy": self.vllm_config.scheduler_config.policy,
            "queue": {"running": running, "waiting": waiting},
            "max_running": self.vllm_config.scheduler_config.max_num_seqs,
            "free_blocks": self.kv_cache_manager.block_pool.get_num_free_blocks(),
            "scheduler": {
                "steps": self._saga_steps,
                "cpu_s": self._saga_cpu_s,
                "gave_way": self._saga_preemption.total_preempted if self._saga_preemption else 0,
            },
            **self.saga.state(num_sessions=int(message.get("sessions", 0))),
            **({"last_steps": self.saga.finished_steps.state()} if message.get("steps") else {}),
        }

    # Internals

    def _saga_before_step(self, saga: KVRetention) -> None:
        if self._saga_replay is not None:
            self._saga_replay.before_step(now_s=saga.clock())
        if self._saga_admission is not None:
            self._saga_admission.before_step(now_s=saga.clock())
        if self._saga_preemption is not None:
            self._saga_preemption.preempt_for_waiting(saga.clock())

    def _saga_tick(self, saga: KVRetention) -> float | None:
        if self._saga_replay is None:
            return None
        now_s = saga.clock()
        self._saga_replay.before_step(now_s=now_s)
        return self._saga_replay.prefetcher.wake_in_s(now_s)

    def _saga_measure(self, saga: KVRetention) -> None:
        """The oldest batch in flight is done; it began when the one before it was."""
        now_s = saga.clock()
        scheduled_s, prefill = self._saga_batches.popleft()
        saga.prefill_rate.observe(prefill, now_s - max(scheduled_s, self._saga_updated_s))
        self._saga_updated_s = now_s

    def _saga_attach(self, config: WorkerConfig) -> None:
        manager = self.kv_cache_manager
        pool = manager.block_pool
        if not pool.enable_caching:
            logger.warning("SAGA is off: prefix caching is disabled, there is no KV to retain")
            return
        groups = manager.kv_cache_config.kv_cache_groups
        saga = KVRetention(
            policy_name=config.policy,
            num_blocks=len(pool.blocks),
            block_tokens=groups[0].kv_cache_spec.block_size,
            settings=config.retention,
            clock=time.monotonic,
            block_bytes=sum(
                group.kv_cache_spec.page_size_bytes * len(group.layer_names) for group in groups
            ),
        )
        self._saga_counts_regret = len(groups) == 1 and saga.block_tokens == pool.hash_block_size
        if not self._saga_counts_regret:
            logger.warning("SAGA counts no regret: the blocks are not those that vLLM hashes")
        block_pool.attach(pool, saga)
        self._saga_attach_host(saga)
        for name in ("get_computed_blocks", "get_computed_blocks_for_connector"):
            look_up = functools.partial(self._saga_look_up, getattr(manager, name))
            setattr(manager, name, look_up)
        if config.prefetch and self._saga_can_prefetch(saga):
            self._saga_replay = Replay(self, saga, super().add_request)  # type: ignore[misc]
            saga.attach_prefetcher(self._saga_replay.prefetcher)
        if config.order_waiting and saga.index is not None and self._saga_counts_regret:
            self._saga_admission = AdmissionOrder(self, saga, config.retention.max_overtaken_s)
        if config.preempt_waiting:
            self._saga_preemption = WaitingPreemption(self)
        if config.shadow is not None and self._saga_counts_regret:
            saga.shadow = ShadowCache(
                config.shadow, saga.num_blocks, saga.block_tokens, config.retention
            )
        self.saga = saga
        logger.info(
            "SAGA is on: policy %s, %d blocks of %d tokens",
            saga.policy_name,
            saga.num_blocks,
            saga.block_tokens,
        )

    def _saga_can_prefetch(self, saga: KVRetention) -> bool:
        """Data-parallel engines step together: none may begin by itself."""
        parallel = self.vllm_config.parallel_config
        # What another connector would do with a request of ours is not known.
        is_ours = self.connector is None or saga.host is not None
        is_alone = parallel.data_parallel_size == 1
        return saga.index is not None and self._saga_counts_regret and is_ours and is_alone

    def _saga_attach_host(self, saga: KVRetention) -> None:
        if self.connector is None:
            return
        from gpu_backend.offload import attach_host_tier

        if attach_host_tier(self.connector, saga):
            assert saga.host is not None
            logger.info("SAGA keeps %d evicted blocks in host memory", saga.host.num_blocks)

    def _saga_guard(self, act: Callable[[KVRetention], _T], otherwise: _T) -> _T:
        if self.saga is None or self.saga.off_reason is not None:
            return otherwise
        try:
            block_pool.record_evicted(self.kv_cache_manager.block_pool)
            return act(self.saga)
        except Exception:  # noqa: BLE001 - the engine must go on as stock vLLM
            block_pool.detach(self.kv_cache_manager.block_pool, "an event failed")
            return otherwise

    def _saga_look_up(self, look_up: Callable[[Request], Any], request: Request) -> Any:
        """vLLM's search for cached blocks, with which it begins to admit a waiting request.

        The rest of the step allocates through us. Running requests come before that, and there
        are many of them.
        """
        if self._saga_allocate_slots is None:
            manager = self.kv_cache_manager
            self._saga_allocate_slots = manager.allocate_slots
            manager.allocate_slots = self._saga_allocate
        return look_up(request)

    def _saga_allocate(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """vLLM's allocate_slots; the first success for a waiting request is its admission.

        What the request lost is counted before the allocation, which caches its own blocks. A
        request with computed tokens has been admitted before, or its KV has just been loaded.
        """
        allocate = self._saga_allocate_slots
        assert allocate is not None
        if self._saga_replay is not None and self._saga_replay.is_own(request.request_id):
            return self._saga_replay.allocate(allocate, request, *args, **kwargs)
        if request.status == RequestStatus.RUNNING or request.num_computed_tokens:
            return allocate(request, *args, **kwargs)
        local = kwargs.get("num_new_computed_tokens", 0)
        host_tokens = kwargs.get("num_external_computed_tokens", 0)
        cached_tokens = local + host_tokens
        lost_blocks = self._saga_guard(
            lambda saga: self._saga_lost_blocks(saga, request, cached_tokens), None
        )
        new_blocks = allocate(request, *args, **kwargs)
        if new_blocks is not None:
            self._saga_guard(lambda saga: self._saga_admitted_to_shadow(saga, request), None)
            if request.session_id is not None:
                self._saga_guard(
                    lambda saga: saga.finished_steps.admitted(request.request_id, cached_tokens),
                    None,
                )
            self._saga_guard(
                lambda saga: saga.admitted(
                    session_id=request.session_id,
                    prompt_tokens=request.num_tokens,
                    cached_tokens=cached_tokens,
                    host_tokens=host_tokens,
                    lost_blocks=lost_blocks,
                    preempted=request.num_preemptions > 0,
                    blocks=self._saga_blocks_of(request),
                ),
                None,
            )
        return new_blocks

    def _saga_blocks_of(self, request: Request) -> Sequence[int]:
        """Ids of a session's request's blocks, where one group has them all."""
        if request.session_id is None or not self._saga_counts_regret:
            return ()
        return self.kv_cache_manager.get_block_ids(request.request_id)[0]  # type: ignore[no-any-return]

    def _saga_admitted_to_shadow(self, saga: KVRetention, request: Request) -> None:
        if saga.shadow is not None:
            saga.shadow.admitted(
                request.request_id,
                request.session_id,
                request.block_hashes,
                request.num_tokens,
                saga.clock(),
                preempted=request.num_preemptions > 0,
                reads_cache=self.kv_cache_manager.prefix_cache_lookup_enabled(request),
            )

    def _saga_lost_blocks(
        self, saga: KVRetention, request: Request, cached_tokens: int
    ) -> int | None:
        if not self._saga_counts_regret or not saga.settings.max_ghost_blocks:
            return None
        if not len(saga.ghosts) or request.num_preemptions:
            return 0
        if not self.kv_cache_manager.prefix_cache_lookup_enabled(request):
            return 0
        cache = self.kv_cache_manager.block_pool.cached_block_hash_to_block
        start = cached_tokens // saga.block_tokens
        stop = (request.num_tokens - 1) // saga.block_tokens
        hashes = (
            make_block_hash_with_group_id(block_hash, 0)
            for block_hash in itertools.islice(request.block_hashes, start, stop)
        )
        return saga.ghosts.count_lost(hashes, lambda h: cache.get_one_block(h) is not None)

    def _saga_keys(self, saga: KVRetention, request: Request) -> list[Key]:
        """Keys of the full blocks that the request has computed; only for a host tier."""
        if saga.host is None:
            return []
        full = request.num_computed_tokens // saga.block_tokens
        hashes = itertools.islice(request.block_hashes, full)
        return [make_block_hash_with_group_id(block_hash, 0) for block_hash in hashes]

    def _saga_release(self, saga: KVRetention, request: Request) -> None:
        """Record what the request leaves behind, when vLLM gives the blocks back.

        With a step in flight that may still write them that is later: until then they are nobody's
        to give up.
        """
        is_own = self._saga_replay is not None and self._saga_replay.is_own(request.request_id)
        if not is_own and request.session_id is not None and request.is_finished():
            saga.finished_steps.ended(
                request.request_id,
                request.session_id,
                prompt_tokens=request.num_prompt_tokens,
                output_tokens=len(request.output_token_ids),
                is_answered=request.status is not RequestStatus.FINISHED_ABORTED,
            )
        if saga.index is None and saga.shadow is None:
            return
        pool = self.kv_cache_manager.block_pool
        groups = self.kv_cache_manager.get_blocks(request.request_id).blocks
        blocks = _in_chain_order([group for group in groups if group and _is_of(pool, group[-1])])
        release: Callable[[KVRetention], None]
        replay = self._saga_replay
        if replay is not None and is_own:
            release = functools.partial(_ended_own, replay=replay, request=request, blocks=blocks)
        else:
            release = functools.partial(
                _released,
                session_id=request.session_id,
                blocks=blocks,
                preempted=not request.is_finished(),
                step=_step(request),
                keys=self._saga_keys(saga, request),
            )
            if replay is not None:
                replay.released(request, now_s=saga.clock())
            if saga.shadow is not None:
                saga.shadow.released(
                    request.request_id,
                    request.block_hashes[: request.num_computed_tokens // saga.block_tokens],
                    request.session_id,
                    num_blocks=len(groups[0]),
                    preempted=not request.is_finished(),
                    step=_step(request),
                    now_s=saga.clock(),
                )
        if self._request_blocks_can_be_freed(request):
            release(saga)
        else:
            self._saga_deferred.append((self.sched_step_seq, release))


def _released(
    saga: KVRetention,
    session_id: str | None,
    blocks: list[KVCacheBlock],
    preempted: bool,
    step: Step,
    keys: list[Key],
) -> None:
    saga.released(session_id, _cached(blocks), preempted=preempted, step=step, keys=keys)


def _ended_own(
    saga: KVRetention, replay: Replay, request: Request, blocks: list[KVCacheBlock]
) -> None:
    replay.ended(request, _cached(blocks), now_s=saga.clock())


def _in_chain_order(groups: Sequence[list[KVCacheBlock]]) -> list[KVCacheBlock]:
    """The blocks of all groups, those of the same depth side by side."""
    if len(groups) == 1:
        return list(groups[0])
    return [
        block
        for same_depth in itertools.zip_longest(*groups)
        for block in same_depth
        if block is not None
    ]


def _cached(blocks: list[KVCacheBlock]) -> list[int]:
    """Ids of the blocks that have content now: bad content is dropped also while it waits."""
    return [block.block_id for block in blocks if block.block_hash is not None]


def _step(request: Request) -> Step:
    """How the request went. Its last two tokens tell an answer that calls a tool from another."""
    ending: object = tuple(request.output_token_ids[-2:]) or None
    if request.status == RequestStatus.FINISHED_LENGTH_CAPPED:
        ending = "length"  # Where an answer was cut off, its last tokens tell nothing.
    return Step(
        input_tokens=request.num_prompt_tokens,
        run_s=max(0.0, time.time() - request.arrival_time),
        ending=ending,
    )


def _is_of(pool: Any, block: Any) -> bool:
    """Whether the block is one of this pool's: some models keep a group's KV in another."""
    return block.block_id < len(pool.blocks) and pool.blocks[block.block_id] is block


@functools.cache
def saga_scheduler_class(base: type) -> type:
    """The scheduler class ``base`` with the retention mixed in; one class for one base."""
    return type(f"Saga{base.__name__}", (SagaSchedulerMixin, base), {})
