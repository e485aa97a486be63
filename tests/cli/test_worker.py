"""`saga worker`: what its options become for vLLM."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from saga_cli.main import main


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of ours is set."""
    for name in [name for name in os.environ if name.startswith("SAGA_")]:
        monkeypatch.delenv(name)


class _ExecCalled(Exception):
    pass


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[str], dict[str, str]]]:
    """Run `saga worker m` with more words; returns vLLM's words after the model, and variables."""
    monkeypatch.setenv("VLLM_PLUGINS", "other")

    def run(*words: str) -> tuple[list[str], dict[str, str]]:
        seen: dict[str, Any] = {}

        def execve(path: str, command: list[str], environment: dict[str, str]) -> None:
            seen.update(command=command, environment=environment)
            raise _ExecCalled

        monkeypatch.setattr(os, "execve", execve)
        with pytest.raises(_ExecCalled):
            main(["worker", "m", *words])
        command, environment = seen["command"], seen["environment"]
        said = {name: environment[name] for name in environment if name.startswith("SAGA_")}
        assert ("saga" in environment["VLLM_PLUGINS"]) is (said.get("SAGA_POLICY") != "off")
        return command[command.index("m") + 1 :], said

    return run


@pytest.fixture
def refuse(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run `saga worker m` with words that are wrong; returns the message."""
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("vLLM was started"))

    def run(*words: str) -> str:
        assert main(["worker", "m", *words]) == 1
        return capsys.readouterr().err

    return run


def test_without_options_nothing_is_said(start: Any) -> None:
    assert start() == ([], {})


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (["--saga-policy", "gdsf"], {"SAGA_POLICY": "gdsf"}),
        (["--saga-prefetch"], {"SAGA_PREFETCH": "1"}),
        (["--no-saga-prefetch"], {"SAGA_PREFETCH": "0"}),
        (["--no-saga-order-waiting"], {"SAGA_ORDER_WAITING": "0"}),
        (["--saga-preempt-waiting"], {"SAGA_PREEMPT_WAITING": "1"}),
        (["--saga-shadow"], {"SAGA_SHADOW": "vllm"}),
        (["--saga-shadow", "wa-lru"], {"SAGA_SHADOW": "wa-lru"}),
        (["--saga-shadow", "--saga-host-gib=0"], {"SAGA_SHADOW": "vllm", "SAGA_HOST_GIB": "0"}),
    ],
)
def test_an_option_becomes_its_variable(
    words: list[str], variables: dict[str, str], start: Any
) -> None:
    assert start(*words, "--port", "9") == (["--port", "9"], variables)


def test_an_option_wins_over_its_variable_and_the_file_comes_last(
    start: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "saga.toml"
    file.write_text("[saga]\npolicy = 'vllm'\nhost_gib = 3")
    monkeypatch.setenv("SAGA_HOST_GIB", "2")
    words, variables = start("--saga-config", str(file), "--saga-host-gib", "1")
    assert variables == {"SAGA_CONFIG": str(file), "SAGA_HOST_GIB": "1"}
    extra = json.loads(words[1])["kv_connector_extra_config"]
    assert extra["cpu_bytes_to_use"] == 2**30
    assert "eviction_policy" not in extra  # The file's policy keeps vLLM's own order.
    words, _ = start("--saga-config", str(file))
    assert json.loads(words[1])["kv_connector_extra_config"]["cpu_bytes_to_use"] == 2**31


def test_a_host_tier_is_handed_to_vllm_behind_its_own_options(start: Any) -> None:
    words, _ = start("--saga-host-gib", "0.5", "--port", "9")
    assert words[:3] == ["--port", "9", "--kv-transfer-config"]
    config = json.loads(words[3])
    assert config["kv_connector"] == "SagaOffloadingConnector"
    assert config["kv_connector_extra_config"]["eviction_policy"] == "SagaCachePolicy"


@pytest.mark.parametrize(
    "option",
    [
        "--kv-transfer-config={}",
        "--kv_transfer_config",
        "--kv-transfer-config.kv_role",
        "--kv-offloading-size",
    ],
)
def test_a_host_tier_and_vllms_own_exclude_each_other(option: str, refuse: Any, start: Any) -> None:
    message = refuse("--saga-host-gib", "1", option, "x")
    assert "exclude each other" in message
    assert "--kv-" in message


def test_without_a_host_tier_vllms_own_stays_as_it_was_given(start: Any) -> None:
    assert start("--kv-transfer-config", "{}")[0] == ["--kv-transfer-config", "{}"]


@pytest.mark.parametrize(
    "word", ["--saga-host-gib=1", "--saga-shadow", "--no-saga-prefetch", "--saga-preempt-waiting"]
)
def test_an_option_of_the_plugin_is_refused_when_it_is_left_out(word: str, refuse: Any) -> None:
    message = refuse("--saga-policy", "off", word)
    assert word.partition("=")[0].replace("--no-", "--") in message
    assert "off" in message


def test_off_needs_no_option_and_ignores_what_the_plugin_would_have_read(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAGA_POLICY", "off")
    monkeypatch.setenv("SAGA_HOST_GIB", "1")
    assert start()[0] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--saga-host-gib", "lots"], "--saga-host-gib='lots' must be a number from 0 to 65536"),
        (["--saga-host-gib=-1"], "host_gib=-1.0 must be from 0 to 65536 (--saga-host-gib)"),
        (["--saga-shadow", "best"], "(--saga-shadow)"),
        (["--saga-config", "/no/such.toml"], "/no/such.toml cannot be read"),
    ],
)
def test_a_wrong_value_is_refused_by_its_flag(words: list[str], said: str, refuse: Any) -> None:
    assert said in refuse(*words)


def test_a_wrong_variable_is_refused_before_vllm_starts(
    refuse: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAGA_BETA", "2")
    assert "beta=2.0 must be from 0 to 1 (SAGA_BETA)" in refuse()
