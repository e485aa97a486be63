"""The `saga` command: words in, exit code and message out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from saga_cli import worker
from saga_cli.main import main


class _ExecCalled(Exception):
    pass


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `saga worker` would have become."""
    seen: dict[str, Any] = {}

    def execve(path: str, command: list[str], environment: dict[str, str]) -> None:
        seen.update(path=path, command=command, environment=environment)
        raise _ExecCalled

    monkeypatch.setattr(os, "execve", execve)
    return seen


def test_worker_becomes_vllms_server_with_the_plugin(
    executed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    with pytest.raises(_ExecCalled):
        main(["worker", "some/model", "--port", "9000", "--saga-policy", "prefix-lru", "-tp", "2"])
    assert executed["path"] == sys.executable
    assert executed["command"][1:] == [
        *("-m", "vllm.entrypoints.openai.api_server", "--model", "some/model"),
        *("--port", "9000", "-tp", "2"),
    ]
    assert executed["environment"]["SAGA_POLICY"] == "prefix-lru"
    plugins = executed["environment"]["VLLM_PLUGINS"].split(",")
    assert "saga" in plugins
    assert "lora_filesystem_resolver" in plugins  # vLLM's own plugins stay as they were.


def test_with_the_vllm_package_worker_becomes_vllm_serve(
    executed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "version", lambda name: "0.32.0")
    with pytest.raises(_ExecCalled):
        main(["worker", "some/model", "--headless"])
    assert executed["command"][1:] == [
        *("-m", "vllm.entrypoints.cli.main", "serve", "some/model", "--headless")
    ]


def test_with_the_cpu_package_an_option_that_would_do_nothing_is_refused(
    executed: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> str:
        raise worker.PackageNotFoundError(name)

    monkeypatch.setattr(worker, "version", missing)
    assert main(["worker", "some/model", "--headless"]) == 1
    assert "--headless" in capsys.readouterr().err
    assert executed == {}


def test_worker_off_is_stock_vllm(
    executed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "saga,other")
    with pytest.raises(_ExecCalled):
        main(["worker", "m", "--saga-policy", "off"])
    assert executed["environment"]["VLLM_PLUGINS"] == "other"


def test_an_unknown_policy_is_refused_with_the_choices(
    executed: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["worker", "m", "--saga-policy", "best"]) == 1
    message = capsys.readouterr().err
    assert all(choice in message for choice in worker.choices())
    assert executed == {}


def test_worker_without_vllm_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker, "find_spec", lambda name: None)
    assert main(["worker", "m"]) == 1
    assert "pip install" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "module", "remedy"),
    [
        (["gateway", "--worker", "http://127.0.0.1:1"], "saga_gateway.app", "saga-sdk[gateway]"),
        (["demo"], "rich.console", "make demo"),
        (["simulate", "cache", "profile:swe"], "rich.console", "saga-sdk[sim]"),
    ],
)
def test_a_command_whose_packages_are_missing_says_what_to_do(
    words: list[str],
    module: str,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    loaded = ("saga_cli.demo", "saga_cli.simulate")
    for name in [name for name in sys.modules if name.startswith(loaded)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("saga_cli.simulate", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    assert main(words) == 1
    message = capsys.readouterr().err
    assert "is missing" in message
    assert remedy in message


def test_other_commands_refuse_words_they_do_not_know(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["gateway", "--worker", "http://127.0.0.1:1", "--wrong"])
    assert stopped.value.code == 2
    assert "--wrong" in capsys.readouterr().err


def test_a_gateway_without_workers_says_how_to_name_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SAGA_GATEWAY_WORKERS", raising=False)
    assert main(["gateway"]) == 1
    assert "--worker" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("port", "NAME=VALUE"),
        ("colour=red", "NAME=VALUE"),
        ("worker_api_key=x", "NAME=VALUE"),
        ("drain_s=soon", "a whole number"),
        ("drain_s=-1", "drain_s=-1 must be from"),
    ],
)
def test_a_setting_that_is_wrong_is_refused(
    word: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gateway", "--worker", "http://127.0.0.1:1", "--set", word]) == 1
    assert says in capsys.readouterr().err


def test_the_settings_of_the_gateway_are_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway", "--help-settings"]) == 0
    told = capsys.readouterr().out
    assert "drain_s: int = 30" in told
    assert "open requests may take to finish" in told


def test_a_key_is_made_with_its_entry(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from saga_gateway.identity import KeyFile

    assert main(["key", "team-a"]) == 0
    told = capsys.readouterr().out
    key = next(line for line in told.splitlines() if line.startswith("saga-"))
    file = tmp_path / "keys.toml"
    file.write_text(told[told.index("[[key]]") :])
    identity = KeyFile(file).find(key)
    assert identity is not None
    assert identity.tenant == "team-a"
    assert main(["key", "team a"]) == 1
    assert "TENANT" in capsys.readouterr().err


def test_a_port_that_is_taken_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code = main(["gateway", "--worker", "http://127.0.0.1:1", "--port", str(port)])
    assert code == 1
    assert str(port) in capsys.readouterr().err


def test_the_demo_refuses_a_file_it_cannot_write_before_it_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["demo", "--json", "/no/such/folder/out.json"]) == 1
    assert "/no/such/folder/out.json" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_failure() -> None:
    words = f"{sys.executable} -m saga_cli.main gateway --help-settings"
    done = subprocess.run(
        ["bash", "-c", f"PYTHONUNBUFFERED=1 {words} | head -1"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Traceback" not in done.stderr
