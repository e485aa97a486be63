"""tools/framework_matrix.py, with commands that are played."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_tool() -> ModuleType:
    path = ROOT / "tools/framework_matrix.py"
    spec = importlib.util.spec_from_file_location("framework_matrix", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


matrix = load_tool()
SETS = {each.name: each for each in matrix.SETS}
LOCKED = [each for each in matrix.SETS if each.requires]


class Commands:
    """Stands in for ``subprocess.run``.

    Attributes:
        fails: a word of the commands that fail.
        seen: what was run, and with which SAGA_FRAMEWORKS.
    """

    def __init__(self, fails: str = "nothing") -> None:
        self.fails = fails
        self.seen: list[tuple[str, str | None]] = []

    def __call__(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        text = " ".join(command)
        self.seen.append((text, options.get("env", {}).get("SAGA_FRAMEWORKS")))
        if " venv " in text:
            python = Path(command[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True, exist_ok=True)
            python.touch()
        code = int(self.fails in text)
        return subprocess.CompletedProcess(
            command, code, "crewai 1", "PackageNotFoundError: crewai"
        )

    def count(self, word: str) -> int:
        return sum(word in text for text, _ in self.seen)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with lock files, in place of this one."""
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    (tmp_path / matrix.LOCKS).mkdir(parents=True)
    for each in LOCKED:
        (tmp_path / each.lock).write_text(f"{each.name}==1\n", encoding="utf-8")
    return tmp_path


def played(monkeypatch: pytest.MonkeyPatch, fails: str = "nothing") -> Commands:
    commands = Commands(fails)
    monkeypatch.setattr(subprocess, "run", commands)
    return commands


def test_every_set_is_locked_and_its_tests_are_known() -> None:
    from tests.frameworks.conftest import PACKAGE_OF

    for each in LOCKED:
        lock = (ROOT / each.lock).read_text(encoding="utf-8")
        assert all(f"{package}==" in lock for package in (*each.packages, "pytest")), each.name
    assert set(PACKAGE_OF.values()) <= {p for each in matrix.SETS for p in each.packages}
    files = {path.name for path in (ROOT / "tests/frameworks").glob("test_*.py")}
    assert files == set(PACKAGE_OF)


def test_every_framework_of_the_extras_has_a_set() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = pyproject["project"]["optional-dependencies"]
    required = " ".join(word for each in LOCKED for word in each.requires)
    for extra in ("langchain", "autogen", "crewai", "agents", "agent-framework"):
        name = extras[extra][0].partition(">")[0]
        assert name in required


def test_an_environment_is_built_once_and_anew_when_its_lock_changes(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = played(monkeypatch)
    for _ in range(2):
        matrix.built(SETS["crewai"])
    assert commands.count("pip sync") == 1
    (root / SETS["crewai"].lock).write_text("crewai==2\n", encoding="utf-8")
    matrix.built(SETS["crewai"])
    assert commands.count("pip sync") == 2


def test_an_installation_that_fails_is_tried_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played(monkeypatch, "pip sync")
    with pytest.raises(matrix.MatrixError, match=r"installing requirements/frameworks/crewai\.txt"):
        matrix.built(SETS["crewai"])
    commands = played(monkeypatch)
    matrix.built(SETS["crewai"])
    assert commands.count("pip sync") == 1


def test_the_main_environment_is_used_as_it_is(root: Path) -> None:
    assert matrix.built(SETS["langchain"]) == Path(sys.executable)


def test_the_tests_are_told_what_has_to_be_there(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    commands = played(monkeypatch)
    assert matrix.main(["crewai", "autogen"]) == 0
    tested = [named for text, named in commands.seen if "-m pytest" in text]
    assert tested == ["crewai openai", "autogen-agentchat openai"]
    lines = capfd.readouterr().out.splitlines()[-2:]
    assert [line.split()[:2] for line in lines] == [["crewai", "ok"], ["autogen", "ok"]]


@pytest.mark.parametrize("fails", ["-m pytest", "pip sync", "importlib.metadata"])
def test_one_set_that_fails_fails_the_whole_and_the_others_are_tested(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], fails: str
) -> None:
    monkeypatch.setattr(matrix, "built", matrix.built)
    commands = played(monkeypatch, fails)
    assert matrix.main(["crewai", "langchain"]) == 1
    assert commands.count(f"{sys.executable} -m pytest") == (fails != "importlib.metadata")
    assert "crewai     FAILED" in capfd.readouterr().out


def test_sets_are_chosen_by_name_or_by_age(capsys: pytest.CaptureFixture[str]) -> None:
    newest = [each.name for each in matrix.chosen([], newest=True)]
    assert "langchain-oldest" in newest
    assert [name for name in newest if name.endswith("oldest")] == [
        "langchain-oldest",
        "openai-oldest",
    ]
    assert [each.name for each in matrix.chosen([], newest=False)] == list(SETS)
    assert matrix.main(["crew"]) == 2
    assert "no set crew; there are langchain, " in capsys.readouterr().err
