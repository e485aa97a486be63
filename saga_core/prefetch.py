"""Whether and when to bring a paused session's KV back before it is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

_SURE = 0.5


class PrefetchVerdict(Enum):
    """What to do about a session's KV that a slower tier holds."""

    START = "start"
    WAIT = "wait"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True)
class PrefetchCandidate:
    """A paused session some of whose KV has left the GPU.

    Attributes:
        p_next: probability that the session goes on, 0 to 1.
        p_soon: that it does so before its pause is twice as long.
        tokens: tokens to bring back, at least 1.
        early_end_s: when the pause may end already: a low quantile of its end.
        expected_end_s: when it is expected to end, not before ``early_end_s``.
        displaced_tokens: tokens of other idle prefixes that would give way; 0 with free room.
        displaced_worth: expected reads per second of these (``PauseModel.worth``).
        is_computed: no tier has a copy, so an engine with nothing else to do computes it.
    """

    p_next: float
    p_soon: float
    tokens: int
    early_end_s: float
    expected_end_s: float
    displaced_tokens: int = 0
    displaced_worth: float = 0.0
    is_computed: bool = False


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """How fast tokens get into the KV pool, both measured and above 0.

    Attributes:
        prefill_tokens_per_s: by computing them.
        load_tokens_per_s: from the slower tier.
    """

    prefill_tokens_per_s: float
    load_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class PrefetchAction:
    """A verdict and why.

    Attributes:
        at_s: START: now. WAIT: when to start, unless something changes. LEAVE: infinite.
        reason: for logs and counters.
    """

    verdict: PrefetchVerdict
    at_s: float
    reason: str


def plan_prefetch(
    candidate: PrefetchCandidate,
    speed: TierSpeed,
    *,
    now_s: float,
    pressure: float,
    pressure_high: float,
) -> PrefetchAction:
    """Decide on one session; asked again when pressure or the forecast changes.

    Loading is started early enough to be done when the pause may end: at ``early_end_s`` less the
    load time, or as soon after that as it pays:

        p_next · saved > displaced_tokens ÷ prefill rate · displaced_worth · held,

    seconds on both sides: saved is the load time that the request would have waited for, less what
    is still to load when it comes; held is the time from the start to the expected end, in which
    what gave way may be wanted. Both end with the pause, so a start that is too early to pay does
    so from p_next · load time ÷ price before the end on, the price being what is lost per second
    held, if it ever does: where p_next exceeds the price. A tier that is not faster than prefill
    is left alone, and so is everything while pressure is above ``pressure_high``. What is computed
    costs an idle engine as much as the request itself would have: it is left unless the session is
    more likely than not to come soon. Ties: leave.
    """
    prefill_s = candidate.tokens / speed.prefill_tokens_per_s
    load_s = candidate.tokens / speed.load_tokens_per_s
    if candidate.is_computed:
        load_s = prefill_s
        if candidate.p_soon <= _SURE:
            return _leave("nobody knows when it comes")
    elif load_s >= prefill_s:
        return _leave("prefill is as fast")
    if pressure > pressure_high:
        return _leave("pressure is high")
    price = candidate.displaced_tokens / speed.prefill_tokens_per_s * candidate.displaced_worth
    if candidate.p_next <= price:
        return _leave("the room is worth more")
    start_s = max(now_s, candidate.early_end_s - load_s)
    if price > 0.0:
        start_s = max(start_s, candidate.expected_end_s - candidate.p_next * load_s / price)
    if start_s >= candidate.expected_end_s:
        return _leave("too late")
    verdict = PrefetchVerdict.START if start_s <= now_s else PrefetchVerdict.WAIT
    return PrefetchAction(verdict, start_s, "worth its room")


def _leave(reason: str) -> PrefetchAction:
    return PrefetchAction(PrefetchVerdict.LEAVE, math.inf, reason)
