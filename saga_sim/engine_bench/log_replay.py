"""A run's own requests replayed offline: what no cache could have saved, and what Bélády would.

A request counts as arriving when its first token is there and holds the blocks of its prompt and
answer until its end: the queue holds nothing, so the optimum gets, if anything, too much room.
The last token of a prompt is computed in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from saga_sim.belady import make_schedule, optimal_hits
from saga_sim.engine_bench.closed_loop import Request
from saga_sim.workload import MIN_DURATION_S, ROOT, Nodes, SimCall, Workload


@dataclass(frozen=True, slots=True)
class LogReplay:
    """Prompt tokens of all requests of a run.

    Attributes:
        prompt_tokens: all of them.
        known_tokens: of these, those that a cache without bound would have had.
        belady_tokens: those that Bélády's optimum would have had, knowing all to come, in the same
            memory and with the same order of requests.
        regret_tokens: those known that the engine computed again.
    """

    prompt_tokens: int
    known_tokens: int
    belady_tokens: int
    regret_tokens: int

    @property
    def belady_regret_tokens(self) -> int:
        """Tokens computed again that no policy can avoid."""
        return self.known_tokens - self.belady_tokens


def replay(requests: Sequence[Request], capacity_blocks: int, block_tokens: int) -> LogReplay:
    """Replay a run's requests.

    Args:
        capacity_blocks: memory of all tiers together: no policy can do better in either of them.
    """
    workload = _workload(requests, block_tokens)
    schedule = make_schedule(workload)
    depth = workload.nodes.depth
    best = optimal_hits(workload, schedule, capacity_blocks)
    known = belady = regret = 0
    for i, (request, call) in enumerate(zip(requests, workload.calls, strict=True)):
        limit = (len(request.prompt) - 1) // block_tokens
        blocks = depth[call.node] if call.node != ROOT else 0
        had = min(limit, blocks - schedule.fresh[i])
        known += had
        belady += min(limit, best[i])
        regret += max(0, had * block_tokens - request.cached_tokens)
    return LogReplay(
        prompt_tokens=sum(len(request.prompt) for request in requests),
        known_tokens=known * block_tokens,
        belady_tokens=belady * block_tokens,
        regret_tokens=regret,
    )


def _workload(requests: Sequence[Request], block_tokens: int) -> Workload:
    """A node for each block; the path of a request is that of its prompt with its answer.

    The last token of an answer is never computed on, so its KV does not exist.
    """
    nodes = Nodes()
    known: dict[tuple[int, tuple[int, ...]], int] = {}
    calls = []
    for request in requests:
        context = [*request.prompt, *request.answer][:-1]
        node = ROOT
        for start in range(0, len(context) - block_tokens + 1, block_tokens):
            block = (node, tuple(context[start : start + block_tokens]))
            if block not in known:
                known[block] = nodes.add(node, 1)
            node = known[block]
        calls.append(
            SimCall(
                arrival_s=request.first_token_s,
                end_s=max(request.end_s, request.first_token_s + MIN_DURATION_S),
                session_id=request.session_id,
                node=node,
                input_tokens=len(request.prompt),
                output_tokens=len(request.answer),
                extra_blocks=int(len(context) % block_tokens > 0),
                ending="",
                tool=None,
                tool_end_s=None,
                next_s=None,
            )
        )
    return Workload("requests", block_tokens, nodes, calls, 0.0, max(c.end_s for c in calls))
