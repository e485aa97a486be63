"""vLLM's block pool with the eviction order of a retention policy.

The free queue stays vLLM's: before blocks are taken from it, the policy's victims are moved to its
front. No block is ever withheld, so an allocation that stock vLLM can make is made here too.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

if TYPE_CHECKING:
    from gpu_backend.kv_retention import KVRetention
    from gpu_backend.session_index import SessionIndex

logger = logging.getLogger("vllm.saga")

# Victims chosen ahead of need: a thousandth of the pool, so that what is kept hardly changes.
_BLOCKS_PER_AHEAD = 1000
_MAX_AHEAD = 32


class SagaBlockPool(BlockPool):
    """A stock pool turned into this class by :func:`attach`; it adds two attributes."""

    saga: KVRetention
    # Blocks that have been evicted and not been recorded yet, with the hashes that they had.
    _saga_evicted: list[tuple[int, Any]]

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        if num_blocks > self.get_num_free_blocks():
            return BlockPool.get_new_blocks(self, num_blocks)  # It says what is wrong.
        saga, going = self.saga, []
        try:
            front = self._at_front(num_blocks)
            if saga.index is not None:
                unheld = _count_unheld(front, saga.index)
                if unheld < num_blocks:
                    self._move_victims_to_front(num_blocks - unheld)
                    front = self._at_front(num_blocks)
            going = [(block.block_id, block.block_hash) for block in front if block.block_hash]
        except Exception:  # noqa: BLE001 - the engine must go on as stock vLLM
            detach(self, "choosing victims failed")
        # Not super(): detach changes the class.
        blocks = BlockPool.get_new_blocks(self, num_blocks)
        self._saga_evicted += going
        if saga.host is not None:
            record_evicted(self)  # While it is known who held them: they may have to be copied.
            saga.leaving.clear()
        return blocks

    def _move_victims_to_front(self, wanted: int) -> None:
        index = self.saga.index
        assert index is not None
        if index.on_victim is None:
            # One decision then serves many steps. A host tier asks who held a block as it goes.
            wanted += min(_MAX_AHEAD, self.num_gpu_blocks // _BLOCKS_PER_AHEAD)
        record_evicted(self)
        blocks = self.blocks

        def is_idle(block_id: int) -> bool:
            block = blocks[block_id]
            return block.ref_cnt == 0 and block.block_hash is not None and not block.is_null

        chosen = index.victims(wanted, now_s=self.saga.clock(), is_idle=is_idle)
        moved: list[KVCacheBlock] = []
        try:
            for block_id in chosen:
                self.free_block_queue.remove(blocks[block_id])
                moved.append(blocks[block_id])
        finally:
            self.free_block_queue.prepend_n(moved)
        self.saga.counters.chosen_blocks += len(moved)

    def count_unheld_at_front(self, limit: int) -> int:
        """Blocks at the queue's front that no run holds: empty ones, and cached ones of nobody."""
        assert self.saga.index is not None
        front = self._at_front(min(limit, self.get_num_free_blocks()))
        return _count_unheld(front, self.saga.index)

    def _at_front(self, count: int) -> list[KVCacheBlock]:
        """The blocks that are taken next, of which there are enough."""
        block: Any = self.free_block_queue.fake_free_list_head
        front: list[KVCacheBlock] = []
        for _ in range(count):
            block = block.next_free_block
            front.append(block)
        return front

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Blocks whose content turned out to be bad: lost, but not for want of room."""
        hashes = [(block_id, self.blocks[block_id].block_hash) for block_id in block_ids]
        lost = [(block_id, block_hash) for block_id, block_hash in hashes if block_hash is not None]
        super().evict_blocks(block_ids)
        self._saga_evicted += lost
        record_evicted(self)
        for _, block_hash in lost:
            self.saga.ghosts.forget(block_hash)

    def reset_prefix_cache(self) -> bool:
        done = super().reset_prefix_cache()
        if done:
            try:
                self.saga.reset()
            except Exception:  # noqa: BLE001 - the engine must go on as stock vLLM
                detach(self, "resetting failed")
        return done


def _count_unheld(front: list[KVCacheBlock], index: SessionIndex) -> int:
    is_held = index.is_held
    for count, block in enumerate(front):
        if block.block_hash is not None and is_held(block.block_id):
            return count
    return len(front)


def attach(pool: BlockPool, saga: KVRetention) -> None:
    """Give a stock pool the policy's eviction order, in place.

    Raises:
        TypeError: the pool is not vLLM's own, so its order is somebody else's.
    """
    if type(pool) is not BlockPool:
        raise TypeError(f"the block pool is a {type(pool).__name__}, not vLLM's BlockPool")
    pool.__class__ = SagaBlockPool
    assert isinstance(pool, SagaBlockPool)
    pool.saga, pool._saga_evicted = saga, []


def record_evicted(pool: BlockPool) -> None:
    """Tell the retention what has been evicted since the last time.

    Many allocations of a step take a block or two: what they evict is recorded together, before
    anything is asked of the retention and at the step's end at the latest.
    """
    if not isinstance(pool, SagaBlockPool) or not pool._saga_evicted:
        return
    evicted, pool._saga_evicted = pool._saga_evicted, []
    try:
        find = pool.cached_block_hash_to_block.get_one_block
        pool.saga.evicted(
            [block_id for block_id, _ in evicted],
            [(block_id, key) for block_id, key in evicted if find(key) is None],
        )
    except Exception:  # noqa: BLE001 - the engine must go on as stock vLLM
        detach(pool, "recording evictions failed")


def detach(pool: BlockPool, reason: str) -> None:
    """Make the pool stock again, and say so with the exception that is being handled."""
    if isinstance(pool, SagaBlockPool):
        pool.saga.off_reason = reason
        pool.__class__ = BlockPool  # type: ignore[assignment]
    logger.exception("SAGA is off, vLLM goes on as stock: %s", reason)
