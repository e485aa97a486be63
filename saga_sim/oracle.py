"""What a cache without bound would have: the reference that real caches are measured against."""

from __future__ import annotations

from collections.abc import Hashable, Iterable


class InfiniteCache:
    """Every block hash that was ever cached; nothing is evicted.

    A block hash covers its whole prefix, so equal hashes mean equal prefixes. The hit of a request
    here minus its hit in a bounded cache that has seen the same is what evictions cost: its regret.
    """

    def __init__(self) -> None:
        self._known: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._known)

    def add(self, block_hashes: Iterable[Hashable]) -> None:
        """The blocks have been computed and cached."""
        self._known.update(block_hashes)

    def hit_blocks(self, block_hashes: Iterable[Hashable]) -> int:
        """Length of the longest prefix of ``block_hashes`` that was cached before, in blocks."""
        hit = 0
        for block_hash in block_hashes:
            if block_hash not in self._known:
                break
            hit += 1
        return hit
