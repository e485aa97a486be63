"""Steps of a virtual engine that only make one more token for each running request.

Such a step leaves the scheduler as it was, but for the tokens: nobody comes, goes or is refused
otherwise than in the step before. So it can be taken without the scheduler, and many at once.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.request import Request

from gpu_backend import block_pool
from gpu_backend.model_free import TOKEN

_MARGIN_S = 1e-9


@dataclass(slots=True)
class DecodeRun:
    """Steps in a row without the scheduler.

    Attributes:
        steps: that can be taken at most, at least 1.
        decodes: requests of each step. attended: tokens that these attend to in the first step;
            in each later one they are ``decodes`` more.
        changing: requests that take a block, or fill one, in the first step. In no other step one
            does.
        next_starts_before_s: after the first, only steps that start earlier can be taken so.
        ends_before_s: only steps that end earlier can.
    """

    steps: int
    decodes: int
    attended: int
    changing: Sequence[Request]
    next_starts_before_s: float = math.inf
    ends_before_s: float = math.inf


def steps_without_blocks(computed_tokens: int, block_tokens: int) -> int:
    """Decode steps, from this one on, in which a request neither takes a block nor fills one."""
    place = computed_tokens % block_tokens
    return block_tokens - 1 - place if place else 0


def plan_run(scheduler: Any, *, may_take_blocks: bool) -> DecodeRun | None:
    """The steps to come up to the next one that the scheduler has to decide about.

    None where that is the first: a prompt is computed, an answer ends, or a block is taken or
    filled and that is not for us.

    Args:
        may_take_blocks: whether blocks may be taken in the first step.
    """
    running: Sequence[Request] = scheduler.running
    if not running or len(running) > scheduler.max_num_scheduled_tokens:
        return None
    steps, attended = sys.maxsize, 0
    changing: list[Request] = []
    for request in running:
        tokens, made = request.num_tokens, request.num_output_tokens
        # The last token is not made here, nor the first: before that the prompt is computed.
        left = request.max_tokens - made - 1
        if not made or left < 1 or request.num_computed_tokens != tokens - 1:
            return None
        without = steps_without_blocks(tokens - 1, scheduler.block_size)
        if not without:
            if not may_take_blocks:
                return None
            changing.append(request)
            without = 1 + steps_without_blocks(tokens, scheduler.block_size)
        steps = min(steps, left, without)
        attended += tokens
    return DecodeRun(steps, len(running), attended, changing)


def waits_on(scheduler: Any, run: DecodeRun, now_s: float) -> bool:
    """Whether those who wait are refused in the run's steps as they were in the step before.

    So they are in the same order, since blocks only get fewer, unless a block of the first one's
    prompt is filled; with a connector somebody behind the first one may be asked, too. The plugin
    may put another one first as time passes: then the run becomes one step.
    """
    waiting = scheduler.waiting
    if not waiting:
        return True  # Those who wait for their KV have it when the connector says so.
    first = waiting.peek_request()
    for request in run.changing:
        place, rest = divmod(request.num_computed_tokens + 1, scheduler.block_size)
        if not rest and request.block_hashes[place - 1] in first.block_hashes:
            return False
    if getattr(scheduler, "saga", None) is None:
        return True
    if scheduler._saga_preemption is not None:
        return False
    if scheduler._saga_admission is None or len(waiting) < 2:
        return True
    run.steps = 1
    before = list(waiting)
    scheduler._saga_admission.before_step(now_s=now_s)
    asked = 1 if scheduler.connector is None else len(before)
    return all(a is b for a, b in zip(before[:asked], waiting, strict=False))


def take_blocks(scheduler: Any, requests: Sequence[Request]) -> bool:
    """What the scheduler does about blocks in a step.

    False: there is no room, and somebody has to be preempted. What was taken by then is taken:
    the scheduler finds that it needs no more.
    """
    manager = scheduler.kv_cache_manager
    for request in requests:
        if manager.allocate_slots(request, 1) is None:
            return False
    if requests:
        block_pool.record_evicted(manager.block_pool)
    return True


def make_tokens(scheduler: Any, steps: int) -> None:
    """The running requests have made so many tokens more, none of them the last."""
    for request in scheduler.running:
        request.append_output_token_ids([TOKEN] * steps)
        request.num_computed_tokens += steps


def prefetch_due_s(saga: Any, now_s: float) -> float:
    """Before when the plugin starts no prefetch; it starts none anyway while clients wait."""
    if saga is None or saga.prefetcher is None or saga.prefill_rate.tokens_per_s is None:
        return math.inf
    wake_in_s = saga.prefetcher.wake_in_s(now_s)
    # Rounding must not take a step too many.
    return math.inf if wake_in_s is None else float(now_s + wake_in_s - _MARGIN_S)
