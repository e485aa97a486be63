"""What the evidence says of a session at its place: the odds of an end and of each next step."""

from __future__ import annotations

from saga_core.evidence import Evidence, History
from saga_core.transitions import START, Context, Node, Outcomes

# Sessions of the next coarser context that count beside those seen in this one.
_BACKING_NEXT = 3.0
_BACKING_END = 10.0
_BACKING_OVERLAP = 2.0
_BACKING_LEFT = 10.0
_ENOUGH = 64.0
# Ends expected before anything was seen: after a step that called a tool, and after one that did
# not.
_PRIOR_END = {True: 0.1, False: 2.0 / 3.0}
_MAX_STEPS_LEFT = 150.0


class Standing:
    """Where a session stands, in its workflow's graph and in that of all workflows.

    Each probability is that of a context backed by the next coarser one: (n(x) + c P'(x)) / (n + c)
    with c = 3, for ends 10. Order 2 is backed by order 1. Order 1 of the workflow is backed by all
    workflows, as far as these know the node, else by its own order 0. Where the workflow has seen
    64 outcomes of the node, the others are not asked.

    Args:
        own: the workflow's graph; None when it has none.
        root: the graph of all workflows.
    """

    __slots__ = (
        "_evidence",
        "_last",
        "_own",
        "_own_stretch",
        "_own_weight",
        "_root",
        "_root_weight",
        "_stretch",
        "_trust",
    )

    def __init__(
        self, own: Evidence | None, root: Evidence, history: History, stretch: int
    ) -> None:
        self._last = history[-1]
        self._stretch = stretch
        self._evidence = (root,) if own is None else (root, own)
        contexts: tuple[Context, ...] = ((), history[-1:], history)[: 1 + len(history)]
        self._own: list[Outcomes | None] = []
        self._own_stretch = after = None
        self._own_weight = 1.0
        if own is not None:
            get = own.transitions.get
            self._own = [get(context) for context in contexts]
            self._own_stretch = get((stretch, self._last))
            self._own_weight = own.weight
            after = self._own[1]
        self._root: list[Outcomes] = []
        self._root_weight = root.weight
        self._trust = 0.0
        if after is None or after.ended + after.went < _ENOUGH * self._own_weight:
            get = root.transitions.get
            self._root = [seen for context in contexts if (seen := get(context))]
            if len(self._root) > 1:
                known = self._root[1].went + self._root[1].ended
                self._trust = known / (known + _BACKING_NEXT * root.weight)

    def p_end(self) -> float:
        """Probability that the session takes no further step."""
        if self._last == START:
            return 0.0
        p = _PRIOR_END[self._last.tool is not None]
        weight = _BACKING_END * self._root_weight
        for seen in self._root:
            p = (seen.ended + weight * p) / (seen.ended + seen.went + weight)
        by_all = p
        weight = _BACKING_END * self._own_weight
        for order, own in enumerate((*self._own, self._own_stretch)):
            if order == 1:
                p = self._trust * by_all + (1.0 - self._trust) * p
            if own is not None:
                p = (own.ended + weight * p) / (own.ended + own.went + weight)
        return p

    def p_next(self, node: Node) -> float:
        """Probability that the next step is ``node``, given that there is one.

        Over all nodes that ever followed they sum to less than 1: the rest is for a new one.
        """
        p = 0.0
        weight = _BACKING_NEXT * self._root_weight
        for seen in self._root:
            p = (seen.nexts.get(node, 0.0) + weight * p) / (seen.went + weight)
        by_all = p
        weight = _BACKING_NEXT * self._own_weight
        for order, other in enumerate(self._own):
            if order == 1:
                p = self._trust * by_all + (1.0 - self._trust) * p
            if other is not None:
                p = (other.nexts.get(node, 0.0) + weight * p) / (other.went + weight)
        return p

    def nexts(self) -> set[Node]:
        """Every node that ever followed, whatever came before."""
        return {
            node for seen in (*self._root, *self._own) if seen is not None for node in seen.nexts
        }

    def likeliest(self) -> tuple[Node | None, float]:
        """The likeliest next node among those that lead in one of the contexts, and its p_next."""
        best, best_p = None, 0.0
        tried = set()
        for seen in (*reversed(self._own), *reversed(self._root)):
            if seen is None or (node := seen.top) is None or node in tried:
                continue
            tried.add(node)
            p = self.p_next(node)
            if p > best_p:
                best, best_p = node, p
            if p >= 0.5:
                break
        return best, best_p

    def overlap(self) -> float:
        """Expected share of its prefix that a next step begins with; 1 where nothing is known."""
        p = 1.0
        weight = _BACKING_OVERLAP * self._root_weight
        for seen in self._root[:2]:
            p = (seen.reused + weight * p) / (seen.known + weight)
        weight = _BACKING_OVERLAP * self._own_weight
        for other in self._own[:2]:
            if other is not None:
                p = (other.reused + weight * p) / (other.known + weight)
        return p

    def steps_left(self, p_end: float) -> float:
        """Expected number of steps that are still to come."""
        left = min((1.0 - p_end) / max(p_end, 1e-9), _MAX_STEPS_LEFT)
        for evidence in self._evidence:
            mean, counted = evidence.steps_left(self._stretch)
            left = (counted * mean + _BACKING_LEFT * left) / (counted + _BACKING_LEFT)
        return left
