"""tools/setup_env.py, with commands that are played instead of run."""

from __future__ import annotations

import fcntl
import importlib.util
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import requires
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_setup_env() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "tools/setup_env.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


setup_env: Any = load_setup_env()

Answer = Callable[[], Any]


class Commands:
    """Plays the commands of a set-up; ``answers`` maps a piece of a command to its end."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ran: list[str] = []
        self.answers: dict[str, Answer] = {}

    def __call__(self, command: Sequence[str]) -> Any:
        line = " ".join(command)
        self.ran.append(line)
        for piece, answer in self.answers.items():
            if piece in line:
                return answer()
        if "-m venv" in line:
            self._make_venv()
        output = "noise\nversions: vllm 0.32.0\n" if "import langchain" in line else ""
        return setup_env.Finished(0, output)

    def _make_venv(self) -> None:
        venv = self.root / ".venv"
        (venv / "bin").mkdir(parents=True)
        (venv / "bin/python").touch()
        version = "{}.{}.{}".format(*sys.version_info)
        config = f"version = {version}\ncommand = {sys.executable} -m venv {venv}\n"
        (venv / "pyvenv.cfg").write_text(config)

    def end(self, piece: str, code: int, output: str) -> None:
        self.answers[piece] = lambda: setup_env.Finished(code, output)


class SetUp:
    """A project's folder, the commands played in it and what was said."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.commands = Commands(root)
        self.said: list[str] = []
        self.environment = setup_env.Environment(root, self.commands, self.said.append)

    def ran(self, piece: str) -> bool:
        return any(piece in line for line in self.commands.ran)


@pytest.fixture
def set_up(tmp_path: Path) -> SetUp:
    (tmp_path / "requirements").mkdir()
    (tmp_path / ".cache").mkdir()
    (tmp_path / "requirements/dev.lock").write_text("aiohttp==3.14.5\n")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "a"\n[tool.ruff]\n')
    return SetUp(tmp_path)


def failure(set_up: SetUp) -> Any:
    with pytest.raises(setup_env.StepFailedError) as caught:
        set_up.environment.set_up()
    return caught.value


def test_the_steps_come_in_order_and_leave_a_stamp(set_up: SetUp) -> None:
    assert not set_up.environment.is_up_to_date()
    set_up.environment.set_up()

    pip = f"{set_up.root}/.venv/bin/python -m pip install --no-deps"
    assert set_up.commands.ran[:-1] == [
        f"{sys.executable} -m venv {set_up.root}/.venv",
        f"{pip} torch==2.13.0+cpu",
        f"{pip} -r requirements/dev.lock",
        f"{pip} --no-build-isolation -e .",
    ]
    assert [line[:5] for line in set_up.said if line.startswith("[")] == [
        f"[{number}/5]" for number in range(1, 6)
    ]
    assert "      vllm 0.32.0" in set_up.said
    assert set_up.environment.is_up_to_date()
    assert not set_up.environment.running.exists()


def test_another_lock_or_package_needs_a_set_up_again(set_up: SetUp) -> None:
    set_up.environment.set_up()
    project = set_up.root / "pyproject.toml"

    project.write_text('[project]\nname = "a"\n[tool.ruff]\nline-length = 100\n')
    assert set_up.environment.is_up_to_date()
    project.write_text('[project]\nname = "b"\n')
    assert not set_up.environment.is_up_to_date()

    set_up.environment.set_up()
    assert set_up.environment.is_up_to_date()
    (set_up.root / "requirements/dev.lock").write_text("aiohttp==3.14.6\n")
    assert not set_up.environment.is_up_to_date()


def test_the_fingerprint_knows_python_and_place(set_up: SetUp) -> None:
    moved = set_up.root / "moved"
    shutil.copytree(set_up.root / "requirements", moved / "requirements")
    shutil.copy(set_up.root / "pyproject.toml", moved)
    here = setup_env.fingerprint(set_up.root, python_version="3.11.7")
    assert here == setup_env.fingerprint(set_up.root, python_version="3.11.7")
    assert here != setup_env.fingerprint(set_up.root, python_version="3.12.1")
    assert here != setup_env.fingerprint(moved, python_version="3.11.7")


def test_a_missing_build_of_torch_is_taken_from_its_own_index(set_up: SetUp) -> None:
    missing = "ERROR: No matching distribution found for torch==2.13.0+cpu"
    set_up.commands.end("--no-deps torch==", 1, missing)
    set_up.environment.set_up()
    assert set_up.ran("--index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu")
    assert any("not on pip's index, trying https://download" in line for line in set_up.said)


def test_another_failure_of_torch_is_not_tried_elsewhere(set_up: SetUp) -> None:
    set_up.commands.end("--no-deps torch==", 1, "OSError: [Errno 28] No space left on device")
    error = failure(set_up)
    assert "What to try:\n  - the disk:" in error.report()
    assert not set_up.ran("--index-url")


def test_a_failed_step_is_reported_and_done_again(set_up: SetUp) -> None:
    output = "\n".join(f"line {number}" for number in range(100))
    set_up.commands.end("-r requirements/dev.lock", 1, output)
    report = failure(set_up).report()

    assert report.startswith("Set-up failed: installing the packages of requirements/dev.lock\n")
    assert "(the whole is in .cache/setup.log)" in report
    assert "line 99" in report
    assert "line 85" in report
    assert "line 84" not in report
    for cause in ("the network: ", "the disk: ", "another Python: "):
        assert f"\n  - {cause}" in report
    assert not set_up.environment.stamp.exists()

    set_up.commands.answers.clear()
    set_up.commands.ran.clear()
    set_up.environment.set_up()
    assert set_up.environment.is_up_to_date()
    assert set_up.ran("-r requirements/dev.lock")
    assert not set_up.ran("-m venv")


def test_a_failure_takes_the_old_stamp_away(set_up: SetUp) -> None:
    set_up.environment.set_up()
    set_up.commands.end("import langchain", 1, "ImportError")
    failure(set_up)
    assert not set_up.environment.is_up_to_date()


@pytest.mark.parametrize("how", ["interrupt", "killed"])
def test_after_a_cut_off_the_venv_is_made_anew(set_up: SetUp, how: str) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    if how == "interrupt":
        set_up.commands.answers["-r requirements"] = interrupt
        with pytest.raises(KeyboardInterrupt):
            set_up.environment.set_up()
    else:
        set_up.commands.end("-r requirements", -signal.SIGKILL, "")
        assert "What to try:\n  - the memory" in failure(set_up).report()
    assert not set_up.environment.stamp.exists()

    set_up.commands.answers.clear()
    set_up.commands.ran.clear()
    set_up.environment.set_up()
    assert "      making .venv anew: a set-up was cut off" in set_up.said
    assert set_up.ran("-m venv")
    assert set_up.environment.is_up_to_date()


@pytest.mark.parametrize(
    ("old", "new", "flaw"),
    [
        ("version = 3.", "version = 2.", "it belongs to another Python"),
        ("/.venv", "/elsewhere", "it was not made at this place"),
    ],
)
def test_a_venv_that_does_not_fit_is_made_anew(
    set_up: SetUp, old: str, new: str, flaw: str
) -> None:
    set_up.environment.set_up()
    config = set_up.root / ".venv/pyvenv.cfg"
    config.write_text(config.read_text().replace(old, new))
    set_up.environment.set_up()
    assert f"      making .venv anew: {flaw}" in set_up.said


def test_a_python_without_ensurepip_is_told_what_to_install(
    set_up: SetUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    package = "python{}.{}-venv".format(*sys.version_info)
    assert f"`apt-get install {package}`" in failure(set_up).report()
    assert not set_up.commands.ran


def test_too_little_disk_is_told_before_anything_is_made(
    set_up: SetUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 2 * 10**9

    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage)
    report = failure(set_up).report()
    assert "2.0 GB are free" in report
    assert "6 GB are needed" in report
    assert not set_up.commands.ran


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("version_info", (3, 10, 13), "from 3.11 to below 3.15"),
        ("version_info", (3, 15, 0), "from 3.11 to below 3.15"),
        ("platform", "darwin", "Linux on x86_64 and aarch64"),
    ],
)
def test_a_platform_without_packages_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object, told: str
) -> None:
    monkeypatch.setattr(setup_env, "sys", FakeSys(**{name: value}))
    with pytest.raises(setup_env.StepFailedError, match=told):
        setup_env.check_platform()


class FakeSys:
    version_info: tuple[int, ...] = (3, 11, 7)
    platform: str = "linux"

    def __init__(self, **changes: object) -> None:
        self.__dict__.update(changes)


@pytest.mark.parametrize(
    ("output", "advice"),
    [
        ("WARNING: Retrying (Retry(total=4)) after NewConnectionError", setup_env.NETWORK),
        ("ERROR: Ignored versions that require: Requires-Python >=3.12", setup_env.PYTHON),
        ("Collecting pytest-timeout\nNo space left on device", setup_env.DISK),
        ("Collecting async-timeout\nerror: something else", None),
    ],
)
def test_the_advice_follows_the_output(output: str, advice: str | None) -> None:
    everything = [setup_env.NETWORK, setup_env.DISK, setup_env.PYTHON]
    expected = [advice] if advice else everything
    assert setup_env.advice_for(setup_env.Finished(1, output)) == expected


def test_two_set_ups_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "setup.lock"
    waiting, entered = threading.Event(), threading.Event()

    def second() -> None:
        with setup_env.exclusive(path, lambda line: waiting.set()):
            entered.set()

    with path.open("ab") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(timeout=10)
        assert not entered.is_set()
        fcntl.flock(first, fcntl.LOCK_UN)
        thread.join(timeout=10)
    assert entered.is_set()


def test_a_command_runs_without_constraints_and_foreign_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONSTRAINT", "/somewhere/else.txt")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    (tmp_path / ".cache").mkdir()
    print_both = "import os; print(os.environ['PIP_CONSTRAINT'], os.environ.get('PYTHONPATH'))"
    with setup_env.exclusive(tmp_path / ".cache/lock", print) as lock_fd:
        run = setup_env.LoggedRun(tmp_path, setup_env.Console(), lock_fd)
        assert run([sys.executable, "-c", "print('first')"]).output == "first\n"
        finished = run([sys.executable, "-c", print_both])
        assert run([sys.executable, "-c", "raise SystemExit(3)"]).code == 3
    assert finished == setup_env.Finished(0, "/dev/null None\n")
    log = (tmp_path / ".cache/setup.log").read_text()
    assert "first\n$ " in log


def test_the_lock_file_holds_what_torch_needs() -> None:
    """torch is installed without its dependencies: they are the lock file's."""
    lock = (ROOT / "requirements/dev.lock").read_text()
    names = {
        re.split(r"[ <>=!~;\[]", line)[0] for line in requires("torch") or [] if "extra" not in line
    }
    assert names
    for name in names:
        assert re.search(rf"^{re.escape(name)}==", lock, re.MULTILINE), name
