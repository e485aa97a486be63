"""How much of a chain of blocks is where."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from gpu_backend.host_tier import HostTier


def count_on_gpu(pool: BlockPool, hashes: Sequence[BlockHash]) -> int:
    """Leading blocks of the chain that are cached in the pool.

    The pool gives up a chain's tail first, so that what is there is a prefix: its end is found by
    halving, in O(log n). Where a chain has a hole, some block behind which one is missing.
    """
    find = pool.cached_block_hash_to_block.get_one_block
    low, high = 0, len(hashes)
    while low < high:
        middle = (low + high) // 2
        if find(make_block_hash_with_group_id(hashes[middle], 0)) is None:
            high = middle
        else:
            low = middle + 1
    return low


def count_in_host(host: HostTier | None, hashes: Sequence[BlockHash], start: int) -> int:
    """Blocks of the chain from ``start`` on that host memory holds without a gap."""
    if host is None:
        return 0
    rest = itertools.islice(hashes, start, None)
    keys = (make_block_hash_with_group_id(block_hash, 0) for block_hash in rest)
    return sum(1 for _ in itertools.takewhile(host.__contains__, keys))
