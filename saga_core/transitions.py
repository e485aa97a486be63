"""What followed what in one workflow: decayed counts, and the probabilities they speak for."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

from saga_core.fields import StateError, fields_of, items_of, label, numbers


class Node(NamedTuple):
    """What a step was: the agent that made it, and the tool that its answer called, if any."""

    agent: str | None = None
    tool: str | None = None


START = Node("<start>")
"""Where a session stands before its first step."""

Context = tuple[Node | int, ...]
"""What an outcome is counted under: the last nodes, none to two; or the number of a stretch of
steps and the last node."""

MAX_CONTEXTS = 4096
MAX_NEXTS = 256
_KEPT_NEXTS = 192
# 30 half-lives: so much more than the oldest counts the newest, before all are scaled down.
_MAX_HALVINGS = 30.0
MAX_TIME_S = 1e12
"""No time is later, seconds: beyond it is no date."""


class Outcomes:
    """What came after a context, as decayed counts.

    Attributes:
        ended, went: sessions that ended there, and that took another step.
        nexts: of those that did, how many went to each node; they sum to ``went``.
        top: the node to which most went.
        known, reused: steps whose overlap with the one before is known, and the sum of it.
    """

    __slots__ = ("ended", "known", "nexts", "reused", "top", "top_count", "went")

    def __init__(self) -> None:
        self.ended = self.went = self.known = self.reused = self.top_count = 0.0
        self.nexts: dict[Node, float] = {}
        self.top: Node | None = None

    def add(self, node: Node, count: float) -> int:
        """Sessions went on to the node; returns by how many nodes there are more now."""
        nexts = self.nexts
        before = len(nexts)
        self.went += count
        nexts[node] = now = nexts.get(node, 0.0) + count
        if now > self.top_count:
            self.top, self.top_count = node, now
        if len(nexts) > MAX_NEXTS:
            self._prune()
        return len(self.nexts) - before

    def _prune(self) -> None:
        kept = sorted(self.nexts.items(), key=lambda item: (-item[1], str(item[0])))
        self.nexts = dict(kept[:_KEPT_NEXTS])
        self.went = sum(self.nexts.values())

    def scale(self, factor: float) -> None:
        """Multiply all counts."""
        self.ended *= factor
        self.went *= factor
        self.known *= factor
        self.reused *= factor
        self.top_count *= factor
        self.nexts = {node: factor * count for node, count in self.nexts.items()}

    def merge(self, other: Outcomes, factor: float) -> int:
        """Add the counts of ``other``, times ``factor``; returns what ``add`` does."""
        self.ended += factor * other.ended
        self.known += factor * other.known
        self.reused += factor * other.reused
        if not other.nexts:
            self.went += factor * other.went
        return sum(self.add(node, factor * count) for node, count in other.nexts.items())


class Clock:
    """Decay by weighing what is new more: a count made now weighs 2^((now - landmark)/half-life).

    Forward decay (Cormode et al. 2009): counts never have to be aged one by one, and ratios of
    counts are those of aged counts. Time never goes back: an earlier time counts as the latest.
    """

    __slots__ = ("half_life_s", "landmark_s", "now_s", "weight")

    def __init__(self, half_life_s: float) -> None:
        self.half_life_s = half_life_s
        self.landmark_s: float | None = None
        self.now_s = -math.inf
        self.weight = 1.0

    def advance(self, now_s: float) -> float:
        """Let it be ``now_s``; returns by what counts must be scaled first, 1 as a rule."""
        if not now_s > self.now_s:
            return 1.0
        self.now_s = now_s = min(max(now_s, -MAX_TIME_S), MAX_TIME_S)
        if self.landmark_s is None:
            self.landmark_s = now_s
        halvings = (now_s - self.landmark_s) / self.half_life_s
        if halvings > _MAX_HALVINGS:
            return self.move(now_s)
        self.weight = 2.0**halvings
        return 1.0

    def move(self, landmark_s: float) -> float:
        """Count from a later landmark; returns by what counts must be scaled."""
        before = landmark_s if self.landmark_s is None else self.landmark_s
        self.landmark_s = landmark_s
        self.now_s = max(self.now_s, landmark_s)
        self.weight = 2.0 ** ((self.now_s - landmark_s) / self.half_life_s)
        return float(2.0 ** ((before - landmark_s) / self.half_life_s))


class Transitions:
    """Outcomes by context, orders 0 to 2, least recently used first.

    Args:
        half_life_s: age of evidence at which it counts half, seconds; infinite: it never ages.

    Attributes:
        num_nexts: nodes that are counted after a context, over all contexts.
    """

    def __init__(self, half_life_s: float) -> None:
        self.clock = Clock(half_life_s)
        self.num_nexts = 0
        self._contexts: OrderedDict[Context, Outcomes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._contexts)

    def get(self, context: Context) -> Outcomes | None:
        """What came after the context."""
        return self._contexts.get(context)

    def touch(self, context: Context) -> Outcomes:
        """The same, to add to."""
        contexts = self._contexts
        outcomes = contexts.get(context)
        if outcomes is None:
            outcomes = contexts[context] = Outcomes()
            if len(contexts) > MAX_CONTEXTS:
                _, dropped = contexts.popitem(last=False)
                self.num_nexts -= len(dropped.nexts)
        else:
            contexts.move_to_end(context)
        return outcomes

    def items(self) -> Iterator[tuple[Context, Outcomes]]:
        """All contexts with their outcomes."""
        return iter(self._contexts.items())

    def scale(self, factor: float) -> None:
        """Multiply all counts."""
        for outcomes in self._contexts.values():
            outcomes.scale(factor)

    def merge(self, other: Transitions, factor: float) -> None:
        """Add the counts of ``other``, times ``factor``."""
        for context, theirs in other._contexts.items():
            self.num_nexts += self.touch(context).merge(theirs, factor)

    def check_integrity(self) -> None:
        """Raise AssertionError when counts contradict each other."""
        if len(self._contexts) > MAX_CONTEXTS:
            raise AssertionError("more contexts than are allowed")
        num_nexts = sum(len(seen.nexts) for seen in self._contexts.values())
        if num_nexts != self.num_nexts:
            raise AssertionError(f"{num_nexts} nexts, counted as {self.num_nexts}")
        for context, seen in self._contexts.items():
            counts = (seen.ended, seen.went, seen.known, seen.reused, *seen.nexts.values())
            if not all(0.0 <= count < math.inf for count in counts):
                raise AssertionError(f"a count after {context} is not a count: {counts}")
            if seen.reused > seen.known * (1.0 + 1e-9):
                raise AssertionError(f"more was read again after {context} than there was")
            total = sum(seen.nexts.values())
            if seen.nexts and not math.isclose(total, seen.went, rel_tol=1e-6, abs_tol=1e-200):
                raise AssertionError(f"after {context} {seen.went} went on, to nodes {total}")
            if seen.nexts and seen.top_count < max(seen.nexts.values()) * (1.0 - 1e-9):
                raise AssertionError(f"after {context} {seen.top} is not where most went")

    def state(self, nodes: dict[Node, int]) -> list[Any]:
        """All contexts as values of JSON; nodes as their numbers in ``nodes``, which grows."""

        def number(node: Node) -> int:
            return nodes.setdefault(node, len(nodes))

        return [
            {
                "after": [part if isinstance(part, int) else [number(part)] for part in context],
                "counts": [seen.ended, seen.went, seen.known, seen.reused],
                "to": [number(node) for node in seen.nexts],
                "to_counts": list(seen.nexts.values()),
                "top": None if seen.top is None else number(seen.top),
            }
            for context, seen in self._contexts.items()
        ]

    def load(self, fields: Any, nodes: list[Node], where: str) -> None:
        """Read what ``state`` gave, the list ``contexts`` of ``fields``.

        Raises:
            StateError: it is not such a list.
        """
        for item, place in items_of(fields, "contexts", f"{where}."):
            of = fields_of(item, place)
            after = of.get("after")
            if not isinstance(after, list) or len(after) > 2:
                raise StateError(f"{place}.after: expected a list of at most two")
            context = tuple(_part(part, nodes, f"{place}.after") for part in after)
            counts = numbers(of.get("counts"), 4, f"{place}.counts")
            nexts = of.get("to")
            if not isinstance(nexts, list):
                raise StateError(f"{place}.to: expected a list of numbers of nodes")
            to_counts = numbers(of.get("to_counts"), len(nexts), f"{place}.to_counts")
            seen = self.touch(context)
            for to, count in zip(nexts, to_counts, strict=True):
                self.num_nexts += seen.add(_node(to, nodes, f"{place}.to"), count)
            if not seen.nexts:
                seen.went = counts[1]
            elif of.get("top") is not None:
                # Of several that are level, the one that was so first.
                top = _node(of["top"], nodes, f"{place}.top")
                if seen.nexts.get(top, -1.0) >= seen.top_count:
                    seen.top = top
            seen.ended, seen.known, seen.reused = counts[0], counts[2], min(counts[2:])


def _part(part: Any, nodes: list[Node], where: str) -> Node | int:
    if type(part) is int and 0 <= part < 64:
        return part
    if isinstance(part, list) and len(part) == 1:
        return _node(part[0], nodes, where)
    raise StateError(f"{where}: expected the number of a stretch, or a node's in a list")


def _node(at: Any, nodes: list[Node], where: str) -> Node:
    if type(at) is int and 0 <= at < len(nodes):
        return nodes[at]
    raise StateError(f"{where}: is {at!r:.40}; expected the number of one of {len(nodes)} nodes")


def node_of(pair: Any, where: str) -> Node:
    """A node from its agent and tool in a list.

    Raises:
        StateError: it is not such a list.
    """
    if not isinstance(pair, list) or len(pair) != 2:
        raise StateError(f"{where}: expected a list of an agent and a tool")
    return Node(label(pair[0], f"{where}[0]"), label(pair[1], f"{where}[1]"))
