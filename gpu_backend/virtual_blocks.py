"""A block pool without the blocks: who uses them, what they hold, which are taken next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import islice

_BLOCKS_PER_AHEAD = 1000
_MAX_AHEAD = 32


def victims_ahead(num_blocks: int) -> int:
    """Victims that a pool of this size chooses ahead of need, so that a decision serves many steps.

    A thousandth of the pool at most, so that what is kept hardly changes.
    """
    return min(_MAX_AHEAD, num_blocks // _BLOCKS_PER_AHEAD)


class VirtualBlocks:
    """The bookkeeping of vLLM's block pool without the pool.

    Block 0 stands for nothing, as vLLM's null block. Several blocks may have the same hash; a
    lookup finds the one that has had it longest.
    """

    def __init__(self, num_blocks: int) -> None:
        self.hashes: list[Hashable | None] = [None] * num_blocks
        self._users = [0] * num_blocks
        self._free = OrderedDict.fromkeys(range(1, num_blocks))
        self._first: dict[Hashable, int] = {}
        self._copies: dict[Hashable, OrderedDict[int, None]] = {}

    def __contains__(self, block_hash: Hashable) -> bool:
        return block_hash in self._first

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses, cached ones included."""
        return len(self._free)

    def cached_hashes(self) -> set[Hashable]:
        """Every hash that a lookup finds."""
        return set(self._first)

    def find(self, block_hashes: Sequence[Hashable]) -> list[int]:
        """The blocks of the longest cached prefix."""
        found: list[int] = []
        for block_hash in block_hashes:
            block = self._first.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def is_evictable(self, block: int) -> bool:
        """Whether the block is cached and nobody uses it."""
        return self._users[block] == 0 and self.hashes[block] is not None

    def is_shared(self, block: int) -> bool:
        """Whether more than one request uses the block."""
        return self._users[block] > 1

    def use(self, blocks: Sequence[int]) -> None:
        """One more request uses the blocks."""
        for block in blocks:
            if self._users[block] == 0:
                del self._free[block]
            self._users[block] += 1

    def release(self, chain: Sequence[int]) -> None:
        """One request less uses the blocks: empty ones are taken next, cached ones tail first."""
        idle = []
        for block in reversed(chain):
            self._users[block] -= 1
            if self._users[block] == 0:
                idle.append(block)
                self._free[block] = None
        self.move_to_front([block for block in idle if self.hashes[block] is None])

    def move_to_front(self, blocks: Sequence[int]) -> None:
        """These free blocks are taken first, in this order."""
        for block in reversed(blocks):
            self._free.move_to_end(block, last=False)

    def count_unheld_at_front(self, limit: int, is_held: Callable[[int], bool]) -> int:
        """Blocks to be taken next that are empty or held by no run; ``limit`` at most."""
        count = 0
        for block in islice(self._free, limit):
            if self.hashes[block] is not None and is_held(block):
                break
            count += 1
        return count

    def take(self, count: int) -> list[int]:
        """The first ``count`` free blocks are in use from now on, with the hashes that they had."""
        taken = list(islice(self._free, count))
        self.use(taken)
        return taken

    def cache(self, block: int, block_hash: Hashable) -> None:
        """An empty block in use is full."""
        self.hashes[block] = block_hash
        if block_hash in self._first:
            self._copies.setdefault(block_hash, OrderedDict())[block] = None
        else:
            self._first[block_hash] = block

    def empty(self, block: int) -> Hashable | None:
        """The block loses its content; returns its hash when no other block has it."""
        block_hash, self.hashes[block] = self.hashes[block], None
        if block_hash is None:
            return None
        copies = self._copies.get(block_hash)
        if copies is None:
            del self._first[block_hash]
            return block_hash
        if self._first[block_hash] == block:
            self._first[block_hash], _ = copies.popitem(last=False)
        else:
            del copies[block]
        if not copies:
            del self._copies[block_hash]
        return None

    def clear(self) -> None:
        """Every block loses its content."""
        self.hashes = [None] * len(self.hashes)
        self._first.clear()
        self._copies.clear()

    def check_integrity(self, chains: Sequence[Sequence[int]]) -> None:
        """Recompute users and hashes; raises AssertionError on the first difference."""
        users, by_hash = [0] * len(self.hashes), dict[Hashable, set[int]]()
        for chain in chains:
            for block in chain:
                users[block] += 1
        assert users == self._users
        assert users[0] == 0
        assert self.hashes[0] is None
        assert set(self._free) == {block for block in range(1, len(users)) if users[block] == 0}
        for block, block_hash in enumerate(self.hashes):
            if block_hash is not None:
                by_hash.setdefault(block_hash, set()).add(block)
        assert by_hash == {
            block_hash: {first, *self._copies.get(block_hash, ())}
            for block_hash, first in self._first.items()
        }
        assert all(self._copies.values())
