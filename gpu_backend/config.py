"""What a worker is told: by `saga worker`, through the environment that vLLM's processes share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from gpu_backend.kv_retention import OBSERVE
from saga_core.errors import SettingsError
from saga_core.policies import DEFAULT_POLICY, POLICIES
from saga_core.settings import RetentionSettings

PLUGIN = "saga"
POLICY_VARIABLE = "SAGA_POLICY"


def policy_names() -> list[str]:
    """Every value that the policy setting takes."""
    return sorted([OBSERVE, *POLICIES])


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Settings of one worker.

    Attributes:
        policy: name of the retention policy; ``vllm`` keeps vLLM's order and only counts.
        retention: constants of the policies.
    """

    policy: str = DEFAULT_POLICY
    retention: RetentionSettings = field(default_factory=RetentionSettings)

    def __post_init__(self) -> None:
        if self.policy not in policy_names():
            raise SettingsError(
                f"{POLICY_VARIABLE}={self.policy!r}: choose one of {', '.join(policy_names())}"
            )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> WorkerConfig:
        """Read SAGA_POLICY, and SAGA_<FIELD> for each field of RetentionSettings.

        Raises:
            SettingsError: a value is not one that the setting takes.
        """
        values: dict[str, float] = {}
        for setting in fields(RetentionSettings):
            variable = f"SAGA_{setting.name.upper()}"
            text = environment.get(variable)
            if text:
                kind = int if setting.type == "int" else float
                try:
                    values[setting.name] = kind(text)
                except ValueError as error:
                    what = "a whole number" if kind is int else "a number"
                    raise SettingsError(f"{variable}={text!r} must be {what}") from error
        return cls(
            policy=environment.get(POLICY_VARIABLE) or DEFAULT_POLICY,
            retention=RetentionSettings(**values),  # type: ignore[arg-type]
        )


def is_enabled(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the operator asked for the plugin by name in VLLM_PLUGINS.

    vLLM loads every installed general plugin when that variable is unset; installing the SDK on a
    GPU host must not change how its engine evicts.
    """
    return PLUGIN in environment.get("VLLM_PLUGINS", "").split(",")
