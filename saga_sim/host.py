"""A slower tier, such as host memory, that takes what the worker evicts."""

from __future__ import annotations

from collections import OrderedDict

from saga_sim.workload import ROOT, Nodes


class HostTier:
    """Blocks demoted from the worker's KV memory, first in, first out.

    A worker evicts chains tail first, so the oldest are the deepest and what is left continues the
    worker's own prefix. Both directions share one link; a block that would wait for it for more
    than ``max_queue_s`` is not demoted.

    Args:
        capacity_blocks: blocks that it holds.
        blocks_per_s: bandwidth of the link.
    """

    def __init__(
        self, nodes: Nodes, capacity_blocks: int, blocks_per_s: float, *, max_queue_s: float = 1.0
    ) -> None:
        self._nodes = nodes
        self._capacity = capacity_blocks
        self._blocks_per_s = blocks_per_s
        self._max_queue_s = max_queue_s
        # Per node the offsets [start, stop) of its blocks held here; the oldest node first.
        self._held: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._busy_until_s = 0.0
        self.used = 0
        self.busy_s = 0.0
        self.refused = 0

    def put(self, node: int, start: int, count: int, *, now_s: float) -> None:
        """``count`` blocks of ``node`` from offset ``start`` on were evicted."""
        queue_s = max(0.0, self._busy_until_s - now_s)
        room = int((self._max_queue_s - queue_s) * self._blocks_per_s)
        if room < count:
            self.refused += count
            return
        self._move(count, now_s)
        first, stop = self._held.get(node, (start + count, start + count))
        if first != start + count:
            # What was refused between the two parts the node: the later part continues nothing.
            self.used -= stop - first
            self._held.pop(node)
            stop = start + count
        self._held[node] = (start, stop)
        self.used += count
        while self.used > self._capacity:
            self._drop_oldest()

    def take(self, hit: int, node: int, *, now_s: float) -> int:
        """Load what follows the first ``hit`` blocks of the path to ``node``; returns the blocks.

        They leave this tier.
        """
        path = []
        while node != ROOT and self._nodes.depth[node] > hit:
            path.append(node)
            node = self._nodes.parent[node]
        loaded = 0
        for node in reversed(path):
            above = self._nodes.depth[node] - self._nodes.length[node]
            start, stop = self._held.get(node, (0, 0))
            if stop == 0 or above + start != hit + loaded:
                break
            del self._held[node]
            self.used -= stop - start
            loaded += stop - start
            if stop < self._nodes.length[node]:
                break
        self._move(loaded, now_s)
        return loaded

    def _move(self, count: int, now_s: float) -> None:
        seconds = count / self._blocks_per_s
        self._busy_until_s = max(self._busy_until_s, now_s) + seconds
        self.busy_s += seconds

    def _drop_oldest(self) -> None:
        node, (start, stop) = next(iter(self._held.items()))
        dropped = min(stop - start, self.used - self._capacity)
        self.used -= dropped
        if dropped == stop - start:
            del self._held[node]
        else:
            self._held[node] = (start, stop - dropped)
