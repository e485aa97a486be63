"""What a worker reads from its environment."""

import dataclasses

import pytest

from gpu_backend.config import (
    DEFAULT_POLICY,
    POLICY_VARIABLE,
    WorkerConfig,
    is_enabled,
    policy_names,
)
from gpu_backend.kv_retention import OBSERVE
from saga_cli.main import main
from saga_cli.worker import choices
from saga_core.errors import SettingsError
from saga_core.policies import POLICIES
from saga_core.settings import RetentionSettings


def test_every_policy_and_observing_can_be_named():
    assert policy_names() == sorted([*POLICIES, "vllm"])
    assert OBSERVE == "vllm"
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
def test_an_unknown_policy_is_named_with_those_that_exist(name):
    message = f"SAGA_POLICY={name!r}: choose one of {', '.join(policy_names())}"
    for build in (WorkerConfig, lambda name: WorkerConfig.from_environment({"SAGA_POLICY": name})):
        with pytest.raises(SettingsError) as caught:
            build(name)
        assert str(caught.value) == message


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
