"""A task of the trace as its calls depend on each other: what each waits for and continues."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from saga_sim.traces.model import Call
from saga_sim.workload import end_s_of


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One call, in the engine's tokens and seconds.

    Attributes:
        waits_for: calls of the task, by number, that must have been answered.
        pause_s: from the last of these answers, or from the task's start, to the sending.
        base: the call whose prompt and answer it continues; None for none.
        keep_tokens: tokens of these that it keeps; what follows is new.
        chain: ids of the trace's blocks, which say where prompts of different tasks agree.
        start_s, end_s: when it ran in the trace, on the scaled clock of the task.
    """

    session_id: str
    waits_for: tuple[int, ...]
    pause_s: float
    base: int | None
    keep_tokens: int
    chain: tuple[range, ...]
    input_tokens: int
    output_tokens: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Task:
    """Calls of one task in the order of the trace.

    Attributes:
        unit_tokens: tokens of a block of the trace.
        is_cut: calls are missing at its end.
    """

    calls: tuple[PlannedCall, ...]
    unit_tokens: int
    is_cut: bool = False

    def up_to(self, max_tokens: int) -> Task:
        """The task as it ends before the first call that exceeds ``max_tokens`` with its answer."""
        for number, call in enumerate(self.calls):
            if call.input_tokens + call.output_tokens > max_tokens:
                return replace(self, calls=self.calls[:number], is_cut=True)
        return self

    @property
    def life_s(self) -> float:
        """From the first call's start to the last end."""
        return max(call.end_s for call in self.calls) - self.calls[0].start_s

    @cached_property
    def held_token_s(self) -> float:
        """Tokens that live sessions hold, integrated over the task's life.

        A session holds its latest prompt and answer until its last call ends. Blocks that several
        sessions of the task share count once.
        """
        last = {call.session_id: number for number, call in enumerate(self.calls)}
        edges = [(call.start_s, 1, number) for number, call in enumerate(self.calls)]
        edges += [(self.calls[n].end_s, 0, n) for n in last.values()]
        held: dict[str, PlannedCall] = {}
        edges.sort()
        total, before_s = 0.0, edges[0][0]
        for at_s, is_start, number in edges:
            total += (at_s - before_s) * self._held_tokens(held)
            before_s = at_s
            call = self.calls[number]
            if is_start:
                held[call.session_id] = call
            else:
                del held[call.session_id]
        return total

    def _held_tokens(self, held: dict[str, PlannedCall]) -> int:
        blocks = set[int]()
        tokens = 0
        for call in held.values():
            for run in call.chain:
                blocks.update(run)
            full_blocks = sum(map(len, call.chain))
            tokens += call.input_tokens + call.output_tokens - full_blocks * self.unit_tokens
        return tokens + len(blocks) * self.unit_tokens


def plan_task(family: Sequence[Call], scale: int, time_scale: float, unit_tokens: int) -> Task:
    """The task of a family: sessions that spawned each other, in the order of arrival.

    A call waits for the answer before it in its session, or for its parent's when it is the first
    one, and for a session of the task that has ended since: its result is what was waited for. It
    continues the earlier call of its session, else of its parent's, that leaves the longest prefix
    standing; an answer is kept when the next prompt has room for it and does not branch before it.
    """
    calls: list[PlannedCall] = []
    for number, call in enumerate(family):
        ended = [i for i in range(number) if end_s_of(family[i]) <= call.arrival_s]
        own = [i for i in ended if family[i].session_id == call.session_id]
        if not own:
            own = [i for i in ended if family[i].session_id == call.parent_session_id]
        input_tokens = _scaled_input(call, scale, unit_tokens)
        kept = {i: _keep(family[i], calls[i], call, unit_tokens) for i in own}
        base = max(own, key=lambda i: (kept[i], i), default=None)
        waits = {i for i in (_latest(own, family), _joined(family, ended, own)) if i is not None}
        ready_s = max((end_s_of(family[i]) for i in waits), default=family[0].arrival_s)
        if base is not None:
            waits.add(base)
            ready_s = max(ready_s, end_s_of(family[base]))
        calls.append(
            PlannedCall(
                call.session_id,
                tuple(sorted(waits)),
                (call.arrival_s - ready_s) / time_scale,
                base,
                min(kept[base], input_tokens - 1) if base is not None else 0,
                call.chain,
                input_tokens,
                max(1, round(call.output_tokens / scale)),
                (call.arrival_s - family[0].arrival_s) / time_scale,
                (end_s_of(call) - family[0].arrival_s) / time_scale,
            )
        )
    return Task(tuple(calls), unit_tokens)


def prompt_of(
    call: PlannedCall, context: Sequence[int], key: str, unit_tokens: int, vocabulary: int
) -> list[int]:
    """The call's prompt: what it keeps of ``context``, and tokens that its block ids decide.

    Args:
        context: prompt and answer of its base.
        key: distinguishes this call's tokens beyond its full blocks from those of all others.
    """
    prompt = list(context[: call.keep_tokens])
    ids = [block for run in call.chain for block in run]
    while len(prompt) < call.input_tokens:
        block, offset = divmod(len(prompt), unit_tokens)
        rng = random.Random(f"block {ids[block]}" if block < len(ids) else key)
        want = unit_tokens if block < len(ids) else call.input_tokens - len(prompt) + offset
        prompt += [rng.randrange(3, vocabulary) for _ in range(want)][offset:]
    return prompt[: call.input_tokens]


def _scaled_input(call: Call, scale: int, unit_tokens: int) -> int:
    """Full blocks stay full blocks; the rest shrinks."""
    rest = call.input_tokens - call.num_blocks * unit_tokens * scale
    return max(1, call.num_blocks * unit_tokens + rest // scale)


def _keep(base: Call, planned: PlannedCall, call: Call, unit_tokens: int) -> int:
    """Tokens of the base's prompt and answer with which the call's prompt begins."""
    common = common_blocks(base.chain, call.chain)
    if common < base.num_blocks:
        return common * unit_tokens
    if call.input_tokens >= base.input_tokens + base.output_tokens:
        return planned.input_tokens + planned.output_tokens
    return planned.input_tokens


def common_blocks(one: Sequence[range], other: Sequence[range]) -> int:
    """Blocks with which two chains, as longest runs, begin alike."""
    count = 0
    for ours, theirs in zip(one, other, strict=False):
        if ours.start != theirs.start:
            break
        count += min(len(ours), len(theirs))
        if len(ours) != len(theirs):
            break
    return count


def _latest(numbers: Sequence[int], family: Sequence[Call]) -> int | None:
    return max(numbers, key=lambda i: (end_s_of(family[i]), i), default=None)


def _joined(family: Sequence[Call], ended: Sequence[int], own: Sequence[int]) -> int | None:
    """The last call of another session that has ended since the call's session paused."""
    since = _latest(own, family)
    since_s = family[0].arrival_s if since is None else end_s_of(family[since])
    last = {call.session_id: i for i, call in enumerate(family)}
    return _latest(
        [i for i in ended if i == last[family[i].session_id] and end_s_of(family[i]) > since_s],
        family,
    )
