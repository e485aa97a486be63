"""How long a task takes that has a worker to itself, from which its deadline follows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from saga_sim.cluster.cost import StepCost
from saga_sim.cluster.load import AgentCall


def alone_s(
    task: Sequence[AgentCall], cost: StepCost, *, batched_tokens: int, block_tokens: int
) -> float:
    """Seconds from the task's first request to its last answer on an empty worker.

    Nothing waits, nothing is evicted, and no other request is in a step: a prompt is computed in
    chunks of ``batched_tokens`` beyond the full blocks that earlier calls of the task left, and
    each further token of the answer takes a step. Pauses count. Calls of the task that overlap
    are taken as if each had a worker of its own.
    """
    computed: set[bytes] = set()
    ends_s: list[float] = []
    for call in task:
        ready_s = max((ends_s[before] for before in call.waits_for), default=0.0)
        full = (call.input_tokens - 1) // block_tokens
        known = bisect_left(call.hashes, True, 0, full, key=lambda h: h not in computed)
        took_s = _prefill_s(known * block_tokens, call.input_tokens, cost, batched_tokens)
        took_s += _decode_s(call, cost)
        computed.update(call.hashes[: (call.input_tokens + call.output_tokens - 1) // block_tokens])
        ends_s.append(ready_s + call.pause_s + took_s)
    return max(ends_s) - min(call.pause_s for call in task if not call.waits_for)


def _prefill_s(start: int, end: int, cost: StepCost, batched_tokens: int) -> float:
    """Time of the steps that compute a prompt's tokens from ``start`` on."""
    total_s = 0.0
    while start < end:
        tokens = min(batched_tokens, end - start)
        total_s += cost.step_s(tokens, tokens * start + tokens * (tokens + 1) // 2, 0, 0)
        start += tokens
    return total_s


def _decode_s(call: AgentCall, cost: StepCost) -> float:
    """Time of the steps after the first token: each costs linearly more than the one before."""
    steps = call.output_tokens - 1
    if not steps:
        return 0.0
    first_s = cost.step_s(0, 0, 1, call.input_tokens + 1)
    return steps * (first_s + cost.step_s(0, 0, 1, call.input_tokens + steps)) / 2
