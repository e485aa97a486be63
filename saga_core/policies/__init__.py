"""The retention policies, and how one is chosen by name."""

from __future__ import annotations

from collections.abc import Callable

from saga_core.errors import SettingsError
from saga_core.pauses import PauseModel
from saga_core.policies.baselines import FixedTTL, GreedyDualSizeFrequency, StepsToExecution
from saga_core.policies.lru import PrefixLRU, SessionLRU
from saga_core.policies.saga import Saga
from saga_core.policies.workflow_aware import Thresholds, WorkflowAwareLRU, WorkflowAwareTTL
from saga_core.retention import RetentionPolicy
from saga_core.settings import RetentionSettings

DEFAULT_POLICY = Saga.name

POLICIES: dict[str, Callable[[RetentionSettings, PauseModel], RetentionPolicy]] = {
    policy.name: policy
    for policy in (
        Saga,
        PrefixLRU,
        SessionLRU,
        WorkflowAwareLRU,
        WorkflowAwareTTL,
        Thresholds,
        FixedTTL,
        StepsToExecution,
        GreedyDualSizeFrequency,
    )
}
"""Every policy by its name."""


def make_policy(name: str, settings: RetentionSettings, model: PauseModel) -> RetentionPolicy:
    """Build a policy by name; ``model`` is what it may learn from.

    Raises:
        SettingsError: there is no such policy; the message lists those that exist.
    """
    if name not in POLICIES:
        raise SettingsError(f"unknown policy {name!r}; choose one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name](settings, model)
