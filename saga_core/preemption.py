"""Which running requests give way to a waiting one of higher priority."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """The first of the waiting requests, and what it lacks to be admitted.

    Attributes:
        priority: lower goes first.
        missing_slots: requests that would run above the engine's limit if it were admitted now.
        missing_blocks: KV blocks that it needs above those that are free.
    """

    priority: int
    missing_slots: int
    missing_blocks: int


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request that could give way.

    Attributes:
        request_id: unique.
        priority: lower goes first.
        arrival_s: when it arrived.
        resumed_s: when it went on after it had given way the last time; None when it never has.
    """

    request_id: str
    priority: int
    arrival_s: float
    resumed_s: float | None = None


def choose_preempted(
    waiting: WaitingRequest,
    running: Iterable[RunningRequest],
    *,
    own_blocks: Callable[[str], int],
    now_s: float,
    guard_s: float,
    max_preempted: int,
) -> tuple[str, ...]:
    """Choose running requests, lowest priority first, until there is room for the waiting one.

    Only requests of strictly lower priority (a greater number) give way, and one that has done so
    before does it again only when it has run for ``guard_s`` since. When ``max_preempted`` of them
    do not make enough room, nobody gives way: work would be lost for nothing. Ties: the latest
    arrival, then the greatest id, as in vLLM.

    Args:
        own_blocks: KV blocks that are free for the waiting request when that running one has given
            way; asked of ``max_preempted`` requests at most.
        now_s: decision time, on the clock that set ``resumed_s``.
    """
    if waiting.missing_slots <= 0 and waiting.missing_blocks <= 0:
        return ()
    candidates = heapq.nlargest(
        max_preempted,
        (
            request
            for request in running
            if request.priority > waiting.priority
            and (request.resumed_s is None or now_s - request.resumed_s >= guard_s)
        ),
        key=lambda request: (request.priority, request.arrival_s, request.request_id),
    )
    chosen: list[str] = []
    blocks = 0
    for request in candidates:
        chosen.append(request.request_id)
        blocks += own_blocks(request.request_id)
        if len(chosen) >= waiting.missing_slots and blocks >= waiting.missing_blocks:
            return tuple(chosen)
    return ()
