"""What a worker reads from its environment."""

import dataclasses
import json
from pathlib import Path

import pytest

from gpu_backend.config import (
    DEFAULT_POLICY,
    POLICY_VARIABLE,
    WorkerConfig,
    is_enabled,
    kv_transfer_config,
    policy_names,
)
from gpu_backend.shadow import STOCK_ORDER
from saga_cli.main import main
from saga_cli.worker import choices
from saga_core.errors import SettingsError
from saga_core.policies import POLICIES
from saga_core.settings import RetentionSettings


def test_every_policy_and_observing_can_be_named():
    assert policy_names() == sorted([*POLICIES, "vllm"])
    assert STOCK_ORDER == "vllm"
    assert DEFAULT_POLICY in policy_names()


def test_the_help_of_saga_worker_names_every_policy(capsys):
    with pytest.raises(SystemExit):
        main(["worker", "--help"])
    words = "".join(capsys.readouterr().out.split())  # Lines break at hyphens.
    assert f"{DEFAULT_POLICY}(default)" in words
    assert all(name in words for name in choices())


@pytest.mark.parametrize("name", policy_names())
def test_the_environment_names_the_policy(name):
    assert WorkerConfig.from_environment({"SAGA_POLICY": name}) == WorkerConfig(name)


@pytest.mark.parametrize("environment", [{}, {POLICY_VARIABLE: ""}, {"VLLM_PLUGINS": "saga"}])
def test_without_a_name_the_default_serves(environment):
    config = WorkerConfig.from_environment(environment)
    assert config == WorkerConfig("saga", RetentionSettings())


def test_the_processs_own_environment_is_read_when_asked(monkeypatch):
    monkeypatch.setenv(POLICY_VARIABLE, "prefix-lru")
    assert WorkerConfig.from_environment().policy == "prefix-lru"
    monkeypatch.delenv(POLICY_VARIABLE)
    assert WorkerConfig.from_environment().policy == DEFAULT_POLICY


@pytest.mark.parametrize("name", ["lru", "WA-LRU", " wa-lru", "wa_lru"])
def test_an_unknown_policy_is_named_with_those_that_exist_and_where_it_stands(name):
    message = f"policy={name!r}: choose one of {', '.join(policy_names())}"
    with pytest.raises(SettingsError) as caught:
        WorkerConfig(name)
    assert str(caught.value) == message
    with pytest.raises(SettingsError) as caught:
        WorkerConfig.from_environment({"SAGA_POLICY": name})
    assert str(caught.value) == f"{message} (SAGA_POLICY)"


def test_a_config_does_not_change():
    config = WorkerConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.policy = "vllm"


@pytest.mark.parametrize(
    ("plugins", "enabled"),
    [
        (None, False),
        ("", False),
        ("saga", True),
        ("other,saga", True),
        ("saga,other", True),
        ("other", False),
        ("sagas,my-saga", False),
        ("SAGA", False),
    ],
)
def test_the_plugin_is_on_only_when_named(plugins, enabled, monkeypatch):
    environment = {} if plugins is None else {"VLLM_PLUGINS": plugins}
    assert is_enabled(environment) is enabled
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_enabled() is enabled


def test_every_constant_can_be_set_by_its_variable():
    environment = {"SAGA_PROTECT_MIN_P_REUSE": "0", "SAGA_MAX_SESSIONS": "5", "SAGA_ALPHA": ""}
    retention = WorkerConfig.from_environment(environment).retention
    assert retention.protect_min_p_reuse == 0.0
    assert retention.max_sessions == 5
    assert retention.alpha == 0.3


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SAGA_ALPHA", "much"),
        ("SAGA_MAX_SESSIONS", "nan"),
        ("SAGA_MAX_SESSIONS", "5.5"),
        ("SAGA_TAU_MAX_S", "nan"),
        ("SAGA_BETA", "2"),
    ],
)
def test_a_constant_that_cannot_be_is_refused_by_name(variable, value):
    name = variable.removeprefix("SAGA_").lower()
    with pytest.raises(SettingsError, match=f"(?i){name}"):
        WorkerConfig.from_environment({variable: value})


@pytest.fixture
def write_config(tmp_path):
    def write(text):
        path = tmp_path / "worker.toml"
        path.write_text(text)
        return path

    return write


FILE = """
[saga]
policy = "wa-lru"
host_gib = 4
prefetch = false
order_waiting = false
preempt_waiting = true
shadow = "vllm"

[saga.retention]
alpha = 0.25
max_sessions = 7
"""


def test_a_file_gives_every_setting(write_config):
    config = WorkerConfig.from_environment({"SAGA_CONFIG": str(write_config(FILE))})
    retention = RetentionSettings(alpha=0.25, max_sessions=7)
    assert config == WorkerConfig("wa-lru", retention, 4.0, False, False, True, "vllm")


def test_a_variable_wins_over_the_file_and_an_empty_one_says_nothing(write_config):
    variables = {
        "SAGA_CONFIG": str(write_config(FILE)),
        "SAGA_POLICY": "gdsf",
        "SAGA_HOST_GIB": "0.5",
        "SAGA_PREFETCH": "TRUE",
        "SAGA_PREEMPT_WAITING": "0",
        "SAGA_SHADOW": "",
        "SAGA_MAX_SESSIONS": "9",
    }
    retention = RetentionSettings(alpha=0.25, max_sessions=9)
    assert WorkerConfig.from_environment(variables) == WorkerConfig(
        "gdsf", retention, 0.5, True, False, False, "vllm"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[saga", ["cannot be read as TOML"]),
        ("saga = 3", ["saga must be a table"]),
        ("[saga]\nretention = 3", ["retention must be a table"]),
        ("[sage]", ["unknown key 'sage'", "known are saga"]),
        ("[saga]\nalpha = 0.1", ["[saga] has an unknown key 'alpha'", "policy", "host_gib"]),
        ("[saga.retention]\npolicy = 'saga'", ["[saga.retention] has an unknown key 'policy'"]),
        ("[saga]\npolicy = 'best'", ["policy='best'", "gdsf", "vllm", "[saga] policy"]),
        ("[saga]\npolicy = 3", ["[saga] policy = 3 must be one of", "gdsf"]),
        ("[saga]\nshadow = 'best'", ["shadow='best'", "gdsf", "[saga] shadow"]),
        ("[saga]\nhost_gib = -1", ["host_gib=-1", "0 to 65536", "[saga] host_gib"]),
        ("[saga]\nhost_gib = nan", ["host_gib=nan", "0 to 65536"]),
        ("[saga]\nhost_gib = true", ["[saga] host_gib = True must be a number from 0 to 65536"]),
        ("[saga]\nprefetch = 'no'", ["[saga] prefetch = 'no' must be 0 or 1"]),
        ("[saga]\nprefetch = 1", ["[saga] prefetch = 1 must be 0 or 1 (false or true)"]),
        ("[saga.retention]\nbeta = 2", ["beta=2", "0 to 1", "[saga.retention] beta"]),
        (
            "[saga.retention]\nmax_sessions = 2.5",
            ["max_sessions = 2.5 must be a whole number from 1 to 1e+09"],
        ),
    ],
)
def test_what_a_file_cannot_say_is_refused_with_file_key_and_range(text, words, write_config):
    path = write_config(text)
    with pytest.raises(SettingsError) as caught:
        WorkerConfig.from_environment({"SAGA_CONFIG": str(path)})
    message = str(caught.value)
    assert str(path) in message
    assert [word for word in words if word not in message] == []


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path):
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    for path in (tmp_path / "none.toml", tmp_path, binary):
        with pytest.raises(SettingsError, match="cannot be read") as caught:
            WorkerConfig.from_environment({"SAGA_CONFIG": str(path)})
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value", "wanted"),
    [
        ("SAGA_HOST_GIB", "much", "a number from 0 to 65536"),
        ("SAGA_ALPHA", "much", "a number from 0 to 1"),
        ("SAGA_MAX_SESSIONS", "5.5", "a whole number from 1 to 1e+09"),
        ("SAGA_PREFETCH", "perhaps", "0 or 1 (false or true)"),
    ],
)
def test_a_text_of_the_wrong_kind_is_refused_by_its_flag_or_variable(variable, value, wanted):
    for flags, where in (({}, variable), ({variable: "--some-flag"}, "--some-flag")):
        with pytest.raises(SettingsError) as caught:
            WorkerConfig.from_environment({variable: value}, flags=flags)
        assert str(caught.value) == f"{where}={value!r} must be {wanted}"


def test_two_settings_that_contradict_each_other_are_both_located(write_config):
    path = write_config("[saga.retention]\npressure_low = 0.8\nalpha = 0.1")
    variables = {"SAGA_CONFIG": str(path), "SAGA_PRESSURE_HIGH": "0.75"}
    with pytest.raises(SettingsError) as caught:
        WorkerConfig.from_environment(variables)
    places = f"({path}, [saga.retention] pressure_low, SAGA_PRESSURE_HIGH)"
    assert str(caught.value).endswith(places)


def test_a_retention_constant_and_a_worker_setting_never_share_a_name():
    own = {field.name for field in dataclasses.fields(WorkerConfig)}
    assert own.isdisjoint(field.name for field in dataclasses.fields(RetentionSettings))


def test_every_setting_is_documented():
    text = Path("docs/worker.md").read_text()
    own = [field.name for field in dataclasses.fields(WorkerConfig) if field.name != "retention"]
    assert [f for f in own if f"| `{f}` | `SAGA_{f.upper()}` |" not in text] == []
    constants = [field.name for field in dataclasses.fields(RetentionSettings)]
    assert [name for name in constants if f"`{name}`" not in text] == []


def test_the_host_tier_is_described_in_vllms_words():
    config = kv_transfer_config(WorkerConfig("saga", host_gib=1.5))
    extra = config.pop("kv_connector_extra_config")
    assert config == {
        "kv_connector": "SagaOffloadingConnector",
        "kv_connector_module_path": "gpu_backend.offload",
        "kv_role": "kv_both",
    }
    assert extra["cpu_bytes_to_use"] == 3 * 2**29
    assert extra["offload_prompt_only"] is False
    assert extra["eviction_policy"] == "SagaCachePolicy"
    assert json.loads(json.dumps(extra)) == extra


def test_observing_keeps_vllms_own_order_in_the_host_tier_too():
    extra = kv_transfer_config(WorkerConfig("vllm", host_gib=1))["kv_connector_extra_config"]
    assert "eviction_policy" not in extra
    assert "cache_policy_module_path" not in extra
    assert extra["spec_name"] == "SagaOffloadingSpec"
