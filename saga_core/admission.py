"""In which order waiting requests are admitted when not all can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_LEAST_S = 1e-3


@dataclass(frozen=True, slots=True)
class WaitingPrompt:
    """A waiting request, seen as the prefill that it still needs.

    Attributes:
        request_id: unique.
        waited_s: since it arrived.
        prefill_s: to compute what of its prompt no tier holds.
    """

    request_id: str
    waited_s: float
    prefill_s: float


def admission_order(waiting: Sequence[WaitingPrompt], *, max_overtaken_s: float) -> list[int]:
    """Places in ``waiting``, the first to be admitted first.

    Highest response ratio next (Brinch Hansen 1971): (waited + prefill) ÷ prefill. A request whose
    KV is there needs little prefill and goes before one that would evict it; the other's ratio
    grows with every second, the slower the more prefill it needs. Who has waited for
    ``max_overtaken_s`` is overtaken no more. Ties: longest waiting, then request id.
    """

    def rank(place: int) -> tuple[bool, float, float, str]:
        request = waiting[place]
        overdue = request.waited_s >= max_overtaken_s
        ratio = request.waited_s / max(_LEAST_S, request.prefill_s)
        return not overdue, 0.0 if overdue else -ratio, -request.waited_s, request.request_id

    return sorted(range(len(waiting)), key=rank)
