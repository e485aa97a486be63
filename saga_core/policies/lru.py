"""Least recently used: of prefixes, and of sessions."""

from __future__ import annotations

from saga_core.policies.base import Policy
from saga_core.retention import EvictionKey, Run


class PrefixLRU(Policy):
    """Least recently used first, tail of the chain first: what vLLM's own block pool does."""

    name = "prefix-lru"

    def key(self, run: Run, *, now_s: float, pressure: float) -> EvictionKey:
        return EvictionKey(0, 0.0, run.last_used_s, run.run_id)


class SessionLRU(Policy):
    """Least recently used session first: a superseded branch is as recent as its successor."""

    name = "session-lru"

    def key(self, run: Run, *, now_s: float, pressure: float) -> EvictionKey:
        used_s = max(run.last_used_s, run.idle_since_s)
        return EvictionKey(0, used_s, run.last_used_s, run.run_id)
