"""Regret: prompt tokens that are prefilled again because their KV had been evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable


class GhostBlocks:
    """Hashes of evicted blocks, the latest ``max_blocks`` of them.

    A block hash covers its whole prefix, so equal hashes mean equal prefixes. With an unbounded
    ghost set the count of a request equals the hit of an infinite cache minus the hit it had.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._ghosts: OrderedDict[Hashable, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ghosts)

    def evicted(self, block_hash: Hashable) -> None:
        """The last block with this hash lost its content."""
        ghosts = self._ghosts
        if block_hash in ghosts:
            ghosts.move_to_end(block_hash)
            return
        ghosts[block_hash] = None
        if len(ghosts) > self._max_blocks:
            ghosts.popitem(last=False)

    def forget(self, block_hash: Hashable) -> None:
        """The block's absence is nobody's regret, whatever was before."""
        self._ghosts.pop(block_hash, None)

    def clear(self) -> None:
        """Forget everything: the cache was reset on purpose, which is nobody's regret."""
        self._ghosts.clear()

    def count_lost(
        self, block_hashes: Iterable[Hashable], is_resident: Callable[[Hashable], bool]
    ) -> int:
        """Blocks at the start of ``block_hashes`` that were cached once and cannot be used now.

        The first of them has to be an evicted one: a resident block right behind the hit was not
        lost, the engine chose not to use it. A ghost that is resident again is none.

        Args:
            block_hashes: a request's full blocks from the end of its hit on, without the block
                that holds the last prompt token, which is computed in any case. Read only as far
                as they are lost.
            is_resident: whether a block is cached now; behind a gap it is of no use.
        """
        lost = 0
        for block_hash in block_hashes:
            if is_resident(block_hash):
                if not lost:
                    break
            elif block_hash not in self._ghosts:
                break
            lost += 1
        return lost
