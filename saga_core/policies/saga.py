"""SAGA's own policy: the least expected reads per block-second go first."""

from __future__ import annotations

from saga_core.policies.base import Policy
from saga_core.retention import EvictionKey, Run, RunState


class Saga(Policy):
    """Gives up the run whose blocks are least worth their room.

    What a block is worth is the rate at which such prefixes were read again at such an age,
    learned online (:class:`~saga_core.pauses.PauseModel`); a block costs the same room and the
    same prefill in every run, so size cancels. A block with a copy in a slower tier loses only
    the reload. A run whose session's next request is queued goes last. Ties: least recently used.
    """

    name = "saga"
    _REVIEW_S = 60.0
    _MIN_REVIEW_S = 0.02

    def key(self, run: Run, *, now_s: float, pressure: float) -> EvictionKey:
        if run.state is RunState.RESUMING:
            return EvictionKey(1, 0.0, run.last_used_s, run.run_id)
        if run.wait is None:
            return EvictionKey(0, 0.0, run.last_used_s, run.run_id)
        worth, until_s = self._model.worth_and_until_s(run.wait, now_s=now_s)
        review_s = max(now_s + self._MIN_REVIEW_S, min(until_s, now_s + self._REVIEW_S))
        return EvictionKey(0, run.reload_share * worth, run.last_used_s, run.run_id, review_s)
