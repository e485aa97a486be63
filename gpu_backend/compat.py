"""Every symbol of vLLM that the plugin relies on, checked before it is switched on.

A symbol that has moved switches off the part that needs it. Signatures are compared where we call
or override, attributes where we read, and small probes compare behaviour. What is here is the same
in every supported release; what is not, the plugin does not touch.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from gpu_backend.symbols import Symbol, find_moved, resolve

SUPPORTED = ("0.31", "0.32")
"""Releases of vLLM that the plugin is tested on."""

_CORE = "vllm.v1.core."
_POOL = _CORE + "block_pool:BlockPool"
_MANAGER = _CORE + "kv_cache_manager:KVCacheManager"
_SCHEDULER = _CORE + "sched.scheduler:Scheduler"
_QUEUE = _CORE + "kv_cache_utils:FreeKVCacheBlockQueue"
_BLOCK = _CORE + "kv_cache_utils:KVCacheBlock"

RETENTION = (
    # The pool that we subclass, its free queue and its blocks.
    Symbol(
        _POOL,
        has="blocks enable_caching free_block_queue cached_block_hash_to_block hash_block_size",
    ),
    Symbol(f"{_POOL}.get_new_blocks", takes="self num_blocks", uses="popleft_n"),
    Symbol(f"{_POOL}.get_num_free_blocks", takes="self"),
    Symbol(f"{_POOL}.free_blocks", takes="self ordered_blocks"),
    Symbol(f"{_POOL}._insert_block_hash", takes="self block_hash_with_group_id block num_tokens"),
    Symbol(f"{_POOL}.evict_blocks", takes="self block_ids"),
    Symbol(f"{_POOL}.reset_prefix_cache", takes="self"),
    Symbol(f"{_CORE}block_pool:BlockHashToBlockMap.get_one_block", takes="self key"),
    Symbol(_QUEUE, has="fake_free_list_head fake_free_list_tail"),
    Symbol(f"{_QUEUE}.remove", takes="self block"),
    Symbol(f"{_QUEUE}.prepend_n", takes="self blocks"),
    Symbol(_BLOCK, has="block_id ref_cnt block_hash is_null next_free_block"),
    Symbol(f"{_CORE}kv_cache_utils:BlockHash"),
    Symbol(f"{_CORE}kv_cache_utils:make_block_hash_with_group_id", takes="block_hash group_id"),
    # What the scheduler calls, and when.
    Symbol(_MANAGER, has="block_pool kv_cache_config"),
    Symbol(f"{_MANAGER}.get_blocks", takes="self request_id"),
    Symbol(f"{_MANAGER}.get_block_ids", takes="self request_id"),
    Symbol(f"{_MANAGER}.get_computed_blocks", takes="self request"),
    Symbol(f"{_MANAGER}.get_computed_blocks_for_connector", takes="self request"),
    Symbol(f"{_MANAGER}.prefix_cache_lookup_enabled", takes="self request"),
    Symbol(
        f"{_MANAGER}.allocate_slots",
        takes="self request num_new_tokens num_new_computed_tokens",
        accepts="num_external_computed_tokens",
    ),
    Symbol(f"{_CORE}kv_cache_manager:KVCacheBlocks", has="blocks"),
    Symbol("vllm.v1.kv_cache_interface:KVCacheConfig", has="kv_cache_groups"),
    Symbol("vllm.v1.kv_cache_interface:KVCacheGroupSpec", has="kv_cache_spec"),
    Symbol("vllm.v1.kv_cache_interface:KVCacheSpec", has="block_size"),
    Symbol(_SCHEDULER, has="kv_cache_manager sched_step_seq processed_step_seq"),
    Symbol(
        f"{_SCHEDULER}.schedule",
        takes="self",
        uses="allocate_slots num_new_computed_tokens num_external_computed_tokens",
    ),
    Symbol(f"{_SCHEDULER}.add_request", takes="self request"),
    Symbol(f"{_SCHEDULER}.update_from_output", uses="_drain_deferred_frees"),
    Symbol(f"{_SCHEDULER}._preempt_request", uses="_free_request_blocks"),
    Symbol(f"{_SCHEDULER}._free_blocks", uses="_free_request_blocks"),
    Symbol(f"{_SCHEDULER}._free_request_blocks", takes="self request"),
    Symbol(f"{_SCHEDULER}._request_blocks_can_be_freed", takes="self request"),
    Symbol(f"{_SCHEDULER}._drain_deferred_frees", takes="self"),
    Symbol(f"{_CORE}sched.async_scheduler:AsyncScheduler"),
    Symbol(
        "vllm.v1.request:Request",
        has="request_id session_id status arrival_time block_hashes num_tokens num_prompt_tokens "
        "num_computed_tokens num_preemptions output_token_ids is_finished",
    ),
    Symbol("vllm.v1.request:RequestStatus", has="RUNNING FINISHED_LENGTH_CAPPED FINISHED_ABORTED"),
    # Where we are switched on.
    Symbol("vllm.config.scheduler:SchedulerConfig.get_scheduler_cls", takes="self"),
    Symbol("vllm.v1.engine.core:EngineCore.__init__", uses="get_scheduler_cls"),
    Symbol("vllm.v1.engine.core:EngineCore", has="scheduler"),
)

PREFETCH = (
    Symbol(_SCHEDULER, has="requests vllm_config"),
    Symbol(f"{_SCHEDULER}.get_request_counts", takes="self"),
    Symbol(f"{_SCHEDULER}.finish_requests", takes="self request_ids finished_status"),
    Symbol(f"{_CORE}sched.output:SchedulerOutput", has="num_scheduled_tokens"),
    Symbol(_MANAGER, has="usage"),
    Symbol(
        "vllm.v1.request:Request",
        takes="request_id prompt_token_ids sampling_params pooling_params",
        accepts="lora_request cache_salt priority",
        has="_all_token_ids mm_features prompt_embeds lora_request cache_salt",
    ),
    Symbol("vllm.v1.request:RequestStatus", has="RUNNING WAITING PREEMPTED FINISHED_ABORTED"),
    Symbol("vllm.sampling_params:SamplingParams", accepts="max_tokens temperature detokenize"),
    Symbol("vllm.v1.engine:EngineCoreOutputs", has="outputs"),
    Symbol("vllm.v1.engine:EngineCoreOutput", has="request_id"),
)

PREEMPTION = (
    Symbol(
        _SCHEDULER,
        has="running waiting kv_holding_waiting requests policy pause_state deferred_frees "
        "num_waiting_for_streaming_input max_num_active_reqs requires_kv_delivery "
        "prev_step_scheduled_req_ids",
    ),
    Symbol(f"{_SCHEDULER}._handle_blocked_waiting_request", takes="self request"),
    Symbol(f"{_SCHEDULER}._request_remaining_blocks", takes="self request"),
    Symbol(f"{_SCHEDULER}._preempt_request", takes="self request timestamp drop_stale_output"),
    Symbol(_MANAGER, has="watermark_blocks"),
    Symbol(f"{_MANAGER}.get_computed_blocks", takes="self request"),
    Symbol(f"{_CORE}sched.interface:PauseState", has="UNPAUSED"),
    Symbol(f"{_CORE}sched.request_queue:SchedulingPolicy", has="PRIORITY"),
    Symbol(
        "vllm.v1.request:Request",
        has="priority arrival_time num_stale_output_tokens drop_stale_output",
    ),
)

_CLIENT = "vllm.v1.engine.core_client:AsyncMPClient"
_AUTHENTICATION = "vllm.entrypoints.serve.middleware.authenticate:AuthenticationMiddleware"

ENDPOINT = (
    Symbol(_CLIENT, has="core_engines"),
    Symbol(f"{_CLIENT}._call_utility_async", takes="self method args", accepts="engine"),
    Symbol(_AUTHENTICATION, takes="app tokens"),
    Symbol(f"{_AUTHENTICATION}.verify_token", takes="self headers"),
)

_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1."
_CONNECTOR = _CONNECTORS + "offloading_connector:OffloadingConnector"
_OFFLOADING = _CONNECTORS + "offloading.scheduler:OffloadingConnectorScheduler"
_COMMON = _CONNECTORS + "offloading.common:"
_OFFLOAD = "vllm.v1.kv_offload."
_SPEC = _OFFLOAD + "cpu.spec:CPUOffloadingSpec"
_HOST = _OFFLOAD + "cpu.manager:CPUOffloadingManager"
_POLICY = _OFFLOAD + "cpu.policies.base:CachePolicy"
_WORKER = _OFFLOAD + "base:OffloadingWorker"

HOST_TIER = (
    # Where we are put in, by names in vLLM's configuration.
    Symbol("vllm.config.kv_transfer:KVTransferConfig", has="kv_connector_module_path"),
    Symbol("vllm.engine.arg_utils:EngineArgs", has="kv_transfer_config"),
    Symbol(_CONNECTOR, takes="vllm_config role kv_cache_config", has="scheduler"),
    # The connector's scheduler side, whose stores we replace.
    Symbol(_OFFLOADING, has="config manager _req_status _jobs _current_batch_jobs_to_flush"),
    Symbol(f"{_OFFLOADING}.on_new_request", takes="self request", uses="_req_status"),
    Symbol(f"{_CONNECTORS}offloading.scheduler:TransferJobStatus", has="pending_count keys"),
    Symbol(f"{_OFFLOADING}.build_connector_meta", takes="self", uses="_build_store_jobs"),
    Symbol(f"{_OFFLOADING}._build_store_jobs", takes="self scheduler_output"),
    Symbol(f"{_OFFLOADING}._generate_job_id", takes="self"),
    Symbol(f"{_OFFLOADING}.update_connector_output", takes="self connector_output"),
    Symbol(f"{_OFFLOADING}.has_pending_push_work", takes="self"),
    Symbol(f"{_OFFLOADING}.reset_cache", takes="self"),
    Symbol(
        f"{_CONNECTORS}offloading.scheduler:SchedulerOffloadConfig",
        has="kv_group_configs blocks_per_chunk num_workers",
    ),
    Symbol(f"{_COMMON}TransferJob", takes="req_id src_spec dst_spec"),
    Symbol(f"{_COMMON}OffloadingWorkerMetadata", has="completed_jobs transfer_stats"),
    Symbol(f"{_COMMON}TransferStats", has="load"),
    Symbol(f"{_COMMON}DirectionalTransferStats", has="bytes time"),
    Symbol("vllm.v1.outputs:KVConnectorOutput", has="kv_connector_worker_meta"),
    # Host memory: its manager, the policy that we are and the worker that copies.
    Symbol(_SPEC, has="num_chunks blocks_per_chunk"),
    Symbol(f"{_SPEC}.get_manager", takes="self"),
    Symbol(f"{_SPEC}.get_worker", takes="self kv_caches", uses="create_worker"),
    Symbol(f"{_OFFLOAD}base:OffloadingSpec.get_worker", takes="self kv_caches"),
    Symbol(f"{_SPEC}.create_worker", takes="self kv_caches"),
    Symbol(_HOST, has="_policy"),
    Symbol(f"{_HOST}.prepare_store", takes="self keys req_context"),
    Symbol(f"{_HOST}.complete_store", takes="self keys req_context"),
    Symbol(f"{_HOST}.lookup", takes="self key req_context"),
    Symbol(f"{_OFFLOAD}base:PrepareStoreOutput", has="keys_to_store store_spec evicted_keys"),
    Symbol(_POLICY, takes="cache_capacity", has="cache_capacity"),
    Symbol(f"{_POLICY}.get", takes="self key"),
    Symbol(f"{_POLICY}.insert", takes="self key chunk"),
    Symbol(f"{_POLICY}.remove", takes="self key"),
    Symbol(f"{_POLICY}.touch", takes="self keys req_context"),
    Symbol(f"{_POLICY}.on_store_miss", takes="self keys req_context"),
    Symbol(
        f"{_POLICY}.on_request_finished",
        takes="self key_groups insertion_only_keys reused_keys req_context",
    ),
    Symbol(f"{_POLICY}.evict", takes="self n protected"),
    Symbol(f"{_POLICY}.clear", takes="self"),
    Symbol(f"{_POLICY}.mark_evictable", takes="self key"),
    Symbol(f"{_POLICY}.mark_non_evictable", takes="self key"),
    Symbol(f"{_OFFLOAD}cpu.policies.base:ChunkStatus", has="ref_cnt chunk_id is_ready"),
    Symbol(_WORKER),
    Symbol(f"{_OFFLOAD}base:LoadStoreSpec"),
    Symbol(f"{_CORE}sched.output:SchedulerOutput"),
    Symbol(f"{_WORKER}.submit_store", takes="self job_id src_spec dst_spec"),
    Symbol(f"{_WORKER}.submit_load", takes="self job_id src_spec dst_spec"),
    Symbol(f"{_WORKER}.get_finished", takes="self"),
    Symbol(f"{_WORKER}.wait", takes="self job_ids"),
    Symbol(
        f"{_OFFLOAD}base:GPULoadStoreSpec",
        takes="block_ids group_sizes block_indices",
        has="block_ids group_sizes",
    ),
    Symbol(f"{_OFFLOAD}cpu.common:CPULoadStoreSpec", takes="block_ids", has="chunk_ids"),
    Symbol(f"{_OFFLOAD}base:CanonicalKVCaches", has="tensors group_data_refs"),
    Symbol(f"{_OFFLOAD}base:CanonicalKVCacheTensor", has="tensor"),
    Symbol(f"{_OFFLOAD}base:CanonicalKVCacheRef", has="tensor_idx"),
    Symbol(f"{_OFFLOAD}base:TransferResult", takes="job_id success transfer_size transfer_time"),
    Symbol(f"{_OFFLOAD}base:ReqContext", takes="req_id"),
    Symbol(f"{_OFFLOAD}base:OffloadKey"),
    Symbol(f"{_OFFLOAD}base:make_offload_key", takes="block_hash group_idx"),
)


def find_mismatch() -> str | None:
    """Compare this vLLM with what the retention was written for.

    Returns a sentence that names the first symbol that has moved, or None when all is as expected.
    May raise what a vLLM that has changed raises; the caller takes that for a mismatch too.
    """
    return find_moved(RETENTION) or _probe_pool() or _probe_deferral()


def find_prefetch_mismatch() -> str | None:
    """Compare this vLLM with what prefetches were written for, as :func:`find_mismatch`."""
    return find_moved(PREFETCH)


def find_preemption_mismatch() -> str | None:
    """Compare this vLLM with what the preemption was written for, as :func:`find_mismatch`."""
    return find_moved(PREEMPTION)


def find_endpoint_mismatch() -> str | None:
    """Compare this vLLM with what the control API was written for, as :func:`find_mismatch`."""
    return find_moved(ENDPOINT)


def find_offload_mismatch() -> str | None:
    """Compare this vLLM with what the host tier was written for, as :func:`find_mismatch`."""
    return find_moved(HOST_TIER) or _probe_host_memory()


def backport() -> None:
    """Add to vLLM what an older supported release lacks.

    ``AsyncMPClient.call_utility_all_async`` (0.32): one result of each engine.
    """
    client = resolve(_CLIENT)
    if hasattr(client, "call_utility_all_async"):
        return

    async def call_utility_all_async(self: Any, method: str, *args: Any) -> list[Any]:
        calls = [
            self._call_utility_async(method, *args, engine=engine) for engine in self.core_engines
        ]
        return await asyncio.gather(*calls)

    client.call_utility_all_async = call_utility_all_async


def vllm_version() -> str:
    """The release that is installed; ``unknown`` when it does not say."""
    try:
        return str(resolve("vllm:__version__"))
    except (ImportError, AttributeError):
        return "unknown"


def is_supported(version: str) -> bool:
    """Whether the plugin is tested on this release."""
    return version.startswith(tuple(f"{release}." for release in SUPPORTED))


def _probe_pool() -> str | None:
    """Evict and re-order on a small pool, as the plugin will, with the plugin's own pool."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

    from gpu_backend import block_pool
    from gpu_backend.kv_retention import KVRetention
    from saga_core.settings import RetentionSettings

    pool = BlockPool(num_gpu_blocks=5, enable_caching=True, hash_block_size=1)
    saga = KVRetention("wa-lru-ttl", 5, 1, RetentionSettings(), clock=lambda: 0.0)
    block_pool.attach(pool, saga)
    blocks = pool.get_new_blocks(4)
    hashes = [make_block_hash_with_group_id(BlockHash(bytes([i]) * 32), 0) for i in range(4)]
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool._insert_block_hash(block_hash, block, num_tokens=1)
    saga.released("kept", [block.block_id for block in blocks[:2]], preempted=False)
    saga.released(None, [block.block_id for block in blocks[2:]], preempted=False)
    pool.free_blocks(reversed(blocks))
    if pool.free_block_queue.fake_free_list_head.next_free_block is not blocks[3]:
        return "BlockPool.free_blocks no longer puts the tail of a chain first"
    pool.free_block_queue.remove(blocks[3])
    pool.free_block_queue.prepend_n([blocks[3]])
    if pool.free_block_queue.fake_free_list_head.next_free_block is not blocks[3]:
        return "FreeKVCacheBlockQueue.prepend_n no longer puts blocks at the front"
    if pool.get_new_blocks(1) != [blocks[3]] or blocks[3].block_hash is not None:
        return "BlockPool.get_new_blocks no longer takes and clears the front of the free queue"
    block_pool.record_evicted(pool)
    if pool.get_num_free_blocks() != 3 or len(saga.ghosts) != 1:
        return "BlockPool.get_new_blocks no longer evicts what it takes"
    if pool.get_new_blocks(2) != [blocks[2], blocks[1]]:
        return "BlockPool.get_new_blocks no longer takes what the policy moves to the front"
    if pool.cached_block_hash_to_block.get_one_block(hashes[0]) is not blocks[0]:
        return "BlockHashToBlockMap.get_one_block no longer finds a cached block"
    return saga.off_reason


def _probe_deferral() -> str | None:
    """Ask when blocks are given back while a step that may write them is in flight."""
    can_be_freed = resolve(f"{_SCHEDULER}._request_blocks_can_be_freed")
    scheduler: Any = SimpleNamespace(defer_block_free=True, processed_step_seq=1)
    answers = [can_be_freed(scheduler, SimpleNamespace(last_sched_seq=step)) for step in (1, 2)]
    if answers != [True, False]:
        return f"{_SCHEDULER}._request_blocks_can_be_freed no longer waits for the step in flight"
    return None


def _probe_host_memory() -> str | None:
    """Store, find and evict in a host memory of two chunks."""
    from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
    from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    if bytes(make_offload_key(b"1", 0)) != make_block_hash_with_group_id(BlockHash(b"1"), 0):
        return "make_offload_key no longer makes the key that the block pool knows"
    manager, context = CPUOffloadingManager(num_chunks=2), ReqContext(req_id="probe")
    keys = [OffloadKey(make_offload_key(bytes([i]) * 32, 0)) for i in range(3)]
    stored = manager.prepare_store(keys[:2], context)
    if stored is None or list(stored.keys_to_store) != keys[:2] or stored.evicted_keys:
        return "CPUOffloadingManager.prepare_store no longer stores where there is room"
    if manager.lookup(keys[0], context) is LookupResult.HIT:
        return "CPUOffloadingManager.lookup no longer waits for the end of a store"
    manager.complete_store(keys[:2], context)
    if manager.lookup(keys[0], context) is not LookupResult.HIT:
        return "CPUOffloadingManager.complete_store no longer makes a chunk readable"
    choose, manager._policy.evict = manager._policy.evict, lambda n, protected: None  # type: ignore[method-assign]
    if manager.prepare_store(keys[2:], context) is not None:
        return "CPUOffloadingManager.prepare_store no longer asks CachePolicy.evict"
    manager._policy.evict = choose  # type: ignore[method-assign]
    replaced = manager.prepare_store(keys[2:], context)
    if replaced is None or list(replaced.evicted_keys) != keys[:1]:
        return "CPUOffloadingManager.prepare_store no longer evicts what CachePolicy.evict chooses"
    manager.reset_cache()
    if manager._policy.get(keys[1]) is not None:
        return "CPUOffloadingManager.reset_cache no longer calls CachePolicy.clear"
    return None
