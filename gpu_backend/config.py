"""What a worker is told: by one file, by the environment that vLLM's processes share, by flags."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from gpu_backend.shadow import STOCK_ORDER
from saga_core.errors import SettingsError
from saga_core.policies import DEFAULT_POLICY, POLICIES
from saga_core.settings import RetentionSettings

PLUGIN = "saga"
CONFIG_VARIABLE = "SAGA_CONFIG"
POLICY_VARIABLE = "SAGA_POLICY"
MAX_HOST_GIB = 65_536.0

_OFFLOAD_MODULE = "gpu_backend.offload"
_WORDS = {"0": False, "false": False, "1": True, "true": True}
_WANTED = {"float": "a number", "int": "a whole number", "bool": "0 or 1 (false or true)"}


def policy_names() -> list[str]:
    """Every value that the policy setting takes."""
    return sorted([STOCK_ORDER, *POLICIES])


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Settings of one worker.

    Attributes:
        policy: name of the retention policy; ``vllm`` keeps vLLM's order and only counts.
        retention: constants of the policies.
        host_gib: GiB of host memory for KV that has left the GPU, 0 to 65,536; 0 keeps none.
        prefetch: whether KV that has left the GPU is brought back before its session's request.
        order_waiting: whether waiting requests of sessions whose KV is there go before those of
            sessions that would evict it.
        preempt_waiting: whether a running request is preempted for a waiting one of higher
            priority; vLLM itself preempts only when a running request cannot grow.
        shadow: a policy that runs beside the live one, on metadata only, to count what it would
            have hit; ``vllm`` is vLLM's own order; None runs none.
    """

    policy: str = DEFAULT_POLICY
    retention: RetentionSettings = field(default_factory=RetentionSettings)
    host_gib: float = 0.0
    prefetch: bool = True
    order_waiting: bool = True
    preempt_waiting: bool = False
    shadow: str | None = None

    def __post_init__(self) -> None:
        for name in ("policy", "shadow"):
            value = getattr(self, name)
            if value not in policy_names() and (name, value) != ("shadow", None):
                names = ", ".join(policy_names())
                raise SettingsError(f"{name}={value!r}: choose one of {names}")
        if not 0 <= self.host_gib <= MAX_HOST_GIB:
            raise SettingsError(f"host_gib={self.host_gib} must be from 0 to {MAX_HOST_GIB:g}")

    @classmethod
    def from_environment(
        cls,
        environment: Mapping[str, str] = os.environ,
        *,
        flags: Mapping[str, str] | None = None,
    ) -> WorkerConfig:
        """Read the file that SAGA_CONFIG names, then SAGA_<FIELD> for each setting; later wins.

        Args:
            environment: variables; an empty one says nothing.
            flags: the flag that gave a variable its value, by variable, for messages.

        Raises:
            SettingsError: a file cannot be read, or has a key that is no setting, or a value is
                not one that its setting takes; the message names where it stands.
        """
        given: dict[str, _Given] = {}
        if path := environment.get(CONFIG_VARIABLE):
            given.update(_read_file(Path(path)))
        given.update(_read_variables(environment, flags or {}))
        values = {name: one.value for name, one in given.items()}
        try:
            constants = {name: values.pop(name) for name in _RETENTION if name in values}
            return cls(retention=RetentionSettings(**constants), **values)
        except SettingsError as error:
            named = re.findall(r"\w+", str(error))
            places = ", ".join(one.where for name, one in given.items() if name in named)
            raise SettingsError(f"{error} ({places})") from error


def kv_transfer_config(config: WorkerConfig) -> dict[str, Any]:
    """The value of vLLM's ``--kv-transfer-config`` that gives a worker its host tier.

    With the policy ``vllm`` the tier keeps vLLM's own eviction order, LRU.
    """
    extra: dict[str, Any] = {
        "cpu_bytes_to_use": int(config.host_gib * 2**30),
        "spec_name": "SagaOffloadingSpec",
        "spec_module_path": _OFFLOAD_MODULE,
        "offload_prompt_only": False,  # What a step generates is part of the next one's prefix.
    }
    if config.policy != STOCK_ORDER:
        extra["eviction_policy"] = "SagaCachePolicy"
        extra["cache_policy_module_path"] = _OFFLOAD_MODULE
    return {
        "kv_connector": "SagaOffloadingConnector",
        "kv_connector_module_path": _OFFLOAD_MODULE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def is_enabled(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the operator asked for the plugin by name in VLLM_PLUGINS.

    vLLM loads every installed general plugin when that variable is unset; installing the SDK on a
    GPU host must not change how its engine evicts.
    """
    return PLUGIN in environment.get("VLLM_PLUGINS", "").split(",")


# Reading

_RETENTION: dict[str, Any] = {one.name: one.type for one in fields(RetentionSettings)}
_OWN: dict[str, Any] = {one.name: one.type for one in fields(WorkerConfig)}
del _OWN["retention"]


@dataclass(frozen=True, slots=True)
class _Given:
    """A value, and where it stands."""

    value: Any
    where: str


def _read_variables(
    environment: Mapping[str, str], flags: Mapping[str, str]
) -> Iterator[tuple[str, _Given]]:
    for name, kind in (_OWN | _RETENTION).items():
        variable = f"SAGA_{name.upper()}"
        text = environment.get(variable)
        if text:
            where = flags.get(variable, variable)
            yield name, _Given(_parse(text, kind, name, f"{where}={text!r}"), where)


def _parse(text: str, kind: str, name: str, where: str) -> Any:
    try:
        match kind:
            case "float":
                return float(text)
            case "int":
                return int(text)
            case "bool":
                return _WORDS[text.lower()]
    except (ValueError, KeyError) as error:
        raise SettingsError(f"{where} must be {_wanted(name, kind)}") from error
    return text


def _read_file(path: Path) -> Iterator[tuple[str, _Given]]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # No such file, not UTF-8, not TOML.
        raise SettingsError(f"{path} cannot be read as TOML: {error}") from error
    own = _table(tables, "saga", path)
    retention = _table(own, "retention", path)
    _refuse_unknown(tables, ["saga"], f"{path}")
    _refuse_unknown(own, [*_OWN, "retention"], f"{path}, [saga]")
    _refuse_unknown(retention, _RETENTION, f"{path}, [saga.retention]")
    for table, kinds, head in ((own, _OWN, "saga"), (retention, _RETENTION, "saga.retention")):
        for name, value in table.items():
            if name not in kinds:
                continue  # The table of the constants.
            where = f"{path}, [{head}] {name}"
            if not _fits(value, kinds[name]):
                raise SettingsError(f"{where} = {value!r} must be {_wanted(name, kinds[name])}")
            yield name, _Given(value, where)


def _table(tables: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise SettingsError(f"{path}: {name} must be a table")
    return table


def _refuse_unknown(table: Mapping[str, Any], known: Collection[str], at: str) -> None:
    for name in table:
        if name not in known:
            raise SettingsError(f"{at} has an unknown key {name!r}; known are {', '.join(known)}")


def _fits(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "bool"
    if kind == "float":
        return isinstance(value, int | float)
    return isinstance(value, int if kind == "int" else str) and kind != "bool"


def _wanted(name: str, kind: str) -> str:
    """What a setting takes, in words, with its range."""
    if kind not in _WANTED:
        return f"one of {', '.join(policy_names())}"
    nothing: dict[str, Any] = {name: float("nan")}  # Which no range has.
    try:
        (RetentionSettings if name in _RETENTION else WorkerConfig)(**nothing)
    except SettingsError as error:
        return f"{_WANTED[kind]} {str(error).partition('must be ')[2]}"
    return _WANTED[kind]
