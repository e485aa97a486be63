"""Which blocks of a workload's forest are resident in one worker's cache, and who holds them.

What is resident is always a prefix: a node has blocks only when the nodes above it are whole. A
*tip* is the last node of a chain that somebody holds, an idle run or a running call; blocks above
a tip stay until the last tip below them has gone.
"""

from __future__ import annotations

from saga_sim.workload import ROOT, Nodes


class ResidentTree:
    """Resident blocks per node, in counts: every operation works on runs of blocks."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._blocks = [0] * len(nodes.parent)
        self._children = [0] * len(nodes.parent)
        self._tips: dict[int, set[int]] = {}
        self._node_of: dict[int, int] = {}
        self.used = 0

    def tip(self, holder: int) -> int:
        """The node at which the holder's chain ends now."""
        return self._node_of[holder]

    def tips_at(self, node: int) -> frozenset[int]:
        """Holders whose chain ends in the node."""
        return frozenset(self._tips.get(node, ()))

    def hit(self, node: int) -> tuple[int, int]:
        """Resident blocks of the path to ``node``, and the last node that has some."""
        nodes = self._nodes
        while node != ROOT:
            if self._blocks[node]:
                return nodes.depth[node] - nodes.length[node] + self._blocks[node], node
            node = nodes.parent[node]
        return 0, ROOT

    def hold(self, holder: int, node: int) -> None:
        """Make the whole path to ``node`` resident and let ``holder`` hold it."""
        self._put_tip(holder, node)
        parent, length = self._nodes.parent, self._nodes.length
        while node != ROOT and self._blocks[node] < length[node]:
            if self._blocks[node] == 0 and parent[node] != ROOT:
                self._children[parent[node]] += 1
            self.used += length[node] - self._blocks[node]
            self._blocks[node] = length[node]
            node = parent[node]

    def let_go(self, holder: int) -> None:
        """Forget a holder all of whose blocks others hold."""
        node = self._node_of.pop(holder)
        self._take_tip(holder, node)

    def give_up(self, holder: int, count: int) -> list[tuple[int, int, int]]:
        """Evict up to ``count`` blocks from the tail of what only ``holder`` holds.

        Returns (node, offset of the first block, blocks) in the order of eviction. A holder that
        has nothing of its own left is forgotten.
        """
        parent = self._nodes.parent
        node = self._node_of.pop(holder)
        self._take_tip(holder, node)
        freed: list[tuple[int, int, int]] = []
        while node != ROOT and not self._children[node] and node not in self._tips:
            taken = min(self._blocks[node], count)
            self._blocks[node] -= taken
            if taken:
                freed.append((node, self._blocks[node], taken))
            count -= taken
            if self._blocks[node]:
                self._put_tip(holder, node)
                break
            node = parent[node]
            if node != ROOT:
                self._children[node] -= 1
        self.used -= sum(taken for _, _, taken in freed)
        return freed

    def is_held(self, holder: int) -> bool:
        """Whether the holder is known."""
        return holder in self._node_of

    def check_integrity(self) -> None:
        """Recompute every count; raises AssertionError on the first difference."""
        nodes = self._nodes
        assert self.used == sum(self._blocks)
        children = [0] * len(nodes.parent)
        for node, blocks in enumerate(self._blocks):
            above = nodes.parent[node]
            assert 0 <= blocks <= nodes.length[node]
            if blocks and above != ROOT:
                children[above] += 1
                assert self._blocks[above] == nodes.length[above]
        assert children == self._children
        for node, blocks in enumerate(self._blocks):
            assert not blocks or children[node] or node in self._tips, "a block that nobody holds"
        for holder, node in self._node_of.items():
            assert holder in self._tips[node]
            assert self._blocks[node]
        assert sum(map(len, self._tips.values())) == len(self._node_of)

    def _put_tip(self, holder: int, node: int) -> None:
        self._node_of[holder] = node
        self._tips.setdefault(node, set()).add(holder)

    def _take_tip(self, holder: int, node: int) -> None:
        tips = self._tips[node]
        tips.discard(holder)
        if not tips:
            del self._tips[node]
