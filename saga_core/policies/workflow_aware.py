"""The SAGA paper's workflow-aware LRU, alone and with its TTL, and its seed's threshold rules."""

from __future__ import annotations

import math

from saga_core.policies.base import Policy
from saga_core.retention import EvictionKey, Run, RunState
from saga_core.ttl import ttl_s


class WorkflowAwareLRU(Policy):
    """WA-LRU of the SAGA paper.

    P_evict = α·R + β·(1 - P_reuse) + γ·S, highest first, R = idle time ÷ τ_max, S = share of the
    pool. τ_max is a constant and R is not capped: the order of two runs then never changes with
    time. The key holds the part of -P_evict that does not depend on now. A run whose session's
    next request is queued goes last; one whose session has ended goes first.
    """

    name = "wa-lru"

    def key(self, run: Run, *, now_s: float, pressure: float) -> EvictionKey:
        rank = RunState.IDLE if run.state is RunState.PAUSED else run.state
        return EvictionKey(int(rank), self._loss(run), run.last_used_s, run.run_id)

    def _loss(self, run: Run) -> float:
        s = self._settings
        return (
            s.alpha * run.last_used_s / s.tau_max_s
            - s.beta * (1.0 - run.p_reuse)
            - s.gamma * run.size_share
        )


class WorkflowAwareTTL(WorkflowAwareLRU):
    """WA-LRU with the paper's TTL as a soft protection.

    A paused run within its TTL that is likely to return goes only after every unprotected run.
    Nothing is pinned: when only protected runs are left they go too, in the same order.
    """

    name = "wa-lru-ttl"

    def key(self, run: Run, *, now_s: float, pressure: float) -> EvictionKey:
        key = super().key(run, now_s=now_s, pressure=pressure)
        if run.state is not RunState.PAUSED or run.p_reuse < self._settings.protect_min_p_reuse:
            return key
        protected_until_s = run.idle_since_s + ttl_s(run.pause_p95_s, pressure, self._settings)
        if now_s >= protected_until_s:
            return key
        return key._replace(rank=int(RunState.PAUSED), review_s=protected_until_s)


class Thresholds(Policy):
    """Rules by pressure alone.

    Below ``pressure_low`` nothing expires: least recently used first. From there on pauses that
    are overdue, past their P95, go before the others. Above ``pressure_high`` the least P_reuse
    goes first. Since pressure moves, keys hold for a few seconds only.
    """

    name = "thresholds"
    _REVIEW_S = 5.0

    def key(self, run: Run, *, now_s: float, pressure: float) -> EvictionKey:
        rank = RunState.IDLE if run.state is RunState.PAUSED else run.state
        loss, review_s = 0.0, now_s + self._REVIEW_S
        if pressure > self._settings.pressure_high:
            loss = run.p_reuse
        elif pressure > self._settings.pressure_low and run.state is RunState.PAUSED:
            due_s = run.idle_since_s + run.pause_p95_s
            loss = float(now_s < due_s)
            review_s = min(review_s, due_s if now_s < due_s else math.inf)
        return EvictionKey(int(rank), loss, run.last_used_s, run.run_id, review_s)
