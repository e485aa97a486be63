"""Where a session stands in its workflow's graph, and what is expected of it from there."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from saga_core.evidence import History
from saga_core.transitions import START, Node

Workflow = Hashable
"""The key of a graph. To be saved it must be a text or a tuple of texts."""


@dataclass(slots=True)
class Walk:
    """Where a session stands in its workflow's graph; kept by the caller, with the session.

    Attributes:
        step: number of its last step, from 0; -1 before the first.
        last: its last nodes, one or two, the latest last.
        has_returned: the request after that step has come, and the step has not ended.
        has_ended: no step follows; nothing more is learned from it.
    """

    workflow: Workflow = None
    step: int = -1
    last: History = (START,)
    has_returned: bool = False
    has_ended: bool = False

    def take(self, node: Node, number: int | None = None) -> None:
        """Stand after a step; without its number it is the next one, and steps may be missing."""
        is_next = number is None or number == self.step + 1
        self.last = _pair(self.last[-1], node) if is_next else (node,)
        self.step = self.step + 1 if number is None else number
        self.has_returned = False


@lru_cache(maxsize=4096)
def _pair(before: Node, last: Node) -> History:
    # Many walks stand at few places: one object serves all.
    return before, last


class Outlook(NamedTuple):
    """What is expected of a session after its last step.

    Attributes:
        p_end: probability that no step follows, 0 to 1.
        p_reuse: expected share of the cached prefix that is read again: Σ P(next) · overlap.
        next_node: what the next step is, where that is likelier than θ_conf; else None.
        confidence: probability of the likeliest outcome, an end or one node, 0 to 1.
        pause_p50_s, pause_p95_s: how long the pause lasts if a step follows, seconds.
        steps_left: steps that are expected to follow.
        tokens_left: tokens of their answers.
        is_cold: too few tasks of the workflow were seen: serve it as plain requests.
    """

    p_end: float
    p_reuse: float
    next_node: Node | None
    confidence: float
    pause_p50_s: float
    pause_p95_s: float
    steps_left: float
    tokens_left: float
    is_cold: bool
