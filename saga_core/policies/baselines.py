"""What others do, for comparison."""

from __future__ import annotations

import math

from saga_core.pauses import PauseModel
from saga_core.policies.base import Policy
from saga_core.retention import EvictionKey, Run, RunState
from saga_core.settings import RetentionSettings


class FixedTTL(Policy):
    """Every pause is protected for the same time, then least recently used first.

    As in Continuum (arXiv 2511.02230), with one TTL for all tools: ``fixed_ttl_s``.
    """

    name = "fixed-ttl"

    def key(self, run: Run, *, now_s: float, pressure: float) -> EvictionKey:
        rank, review_s = run.state, math.inf
        if run.state is RunState.PAUSED:
            review_s = run.idle_since_s + self._settings.fixed_ttl_s
            if now_s >= review_s:
                rank, review_s = RunState.IDLE, math.inf
        return EvictionKey(int(rank), 0.0, run.last_used_s, run.run_id, review_s)


class StepsToExecution(Policy):
    """The more steps until a session runs again, the sooner it goes; as in KVFlow
    (arXiv 2507.07400).

    A queued session is 0 steps away, a paused one 1 / P_reuse, one that nobody waits for is never
    run. Ties: least recently used.
    """

    name = "steps-to-execution"

    def key(self, run: Run, *, now_s: float, pressure: float) -> EvictionKey:
        steps = math.inf
        if run.state is RunState.RESUMING:
            steps = 0.0
        elif run.state is RunState.PAUSED and run.p_reuse > 0.0:
            steps = round(1.0 / run.p_reuse, 1)
        return EvictionKey(int(run.state), -steps, run.last_used_s, run.run_id)


class GreedyDualSizeFrequency(Policy):
    """GDSF: frequency × cost ÷ size, plus the value at which the last run was given up.

    Cost and size are both linear in tokens, so the quotient is 1 and the frequency, the session's
    requests so far, decides (Cherkasova 1998).
    """

    name = "gdsf"

    def __init__(self, settings: RetentionSettings, model: PauseModel) -> None:
        super().__init__(settings, model)
        self._inflation = 0.0

    def key(self, run: Run, *, now_s: float, pressure: float) -> EvictionKey:
        value = self._inflation + run.uses
        return EvictionKey(0, value, run.last_used_s, run.run_id)

    def gave_up(self, key: EvictionKey) -> None:
        self._inflation = max(self._inflation, key.loss)
