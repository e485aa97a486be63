"""Every private symbol of vLLM that the plugin relies on, checked before it is switched on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from vllm.config.scheduler import SchedulerConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    FreeKVCacheBlockQueue,
    make_block_hash_with_group_id,
)
from vllm.v1.core.sched.scheduler import Scheduler

from gpu_backend import block_pool
from gpu_backend.kv_retention import KVRetention
from saga_core.settings import RetentionSettings

# The parameters that we pass or override, by position; more may follow.
_SIGNATURES: tuple[tuple[Callable[..., Any], tuple[str, ...]], ...] = (
    (BlockPool.get_new_blocks, ("self", "num_blocks")),
    (BlockPool._maybe_evict_cached_block, ("self", "block")),
    (BlockPool._insert_block_hash, ("self", "block_hash_with_group_id", "block")),
    (BlockPool.reset_prefix_cache, ("self",)),
    (FreeKVCacheBlockQueue.remove, ("self", "block")),
    (FreeKVCacheBlockQueue.prepend_n, ("self", "blocks")),
    (KVCacheManager.get_blocks, ("self", "request_id")),
    (KVCacheManager.prefix_cache_lookup_enabled, ("self", "request")),
    (
        KVCacheManager.allocate_slots,
        ("self", "request", "num_new_tokens", "num_new_computed_tokens"),
    ),
    (Scheduler.add_request, ("self", "request")),
    (Scheduler._free_request_blocks, ("self", "request")),
    (Scheduler._request_blocks_can_be_freed, ("self", "request")),
    (Scheduler._drain_deferred_frees, ("self",)),
    (SchedulerConfig.get_scheduler_cls, ("self",)),
)


def find_mismatch() -> str | None:
    """Compare this vLLM with what the plugin was written for.

    Returns a sentence that names the first symbol that has moved, or None when all is as expected.
    May raise what a vLLM that has changed raises; the caller takes that for a mismatch too.
    """
    for function, expected in _SIGNATURES:
        actual = tuple(inspect.signature(function).parameters)
        if actual[: len(expected)] != expected:
            return f"{function.__qualname__} takes {actual}, expected {expected} first"
    return _probe_pool()


def _probe_pool() -> str | None:
    """Evict and re-order on a small pool, as the plugin will, with the plugin's own pool."""
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
    if pool.get_new_blocks(1) != [blocks[3]] or blocks[3].block_hash is not None:
        return "BlockPool.get_new_blocks no longer takes and clears the front of the free queue"
    if pool.get_num_free_blocks() != 3 or len(saga.ghosts) != 1:
        return "BlockPool._maybe_evict_cached_block is no longer told of every eviction"
    if pool.get_new_blocks(2) != [blocks[2], blocks[1]]:
        return "FreeKVCacheBlockQueue.prepend_n no longer decides what is taken first"
    return saga.off_reason
