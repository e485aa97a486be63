"""tools/setup_system.py, with commands that are played instead of run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.setup_system import PROGRAMS, Setup, exit_code

ROOT = Path(__file__).resolve().parents[2]
ALL = {each.names[0] for each in PROGRAMS}


class System:
    """A system with these executables, on which apt has these packages."""

    def __init__(self, installed, available=(), *, is_root=True, sudo=1, install=0, update=0):
        self.installed, self.available = set(installed), set(available)
        self.is_root = is_root
        self.codes = {"sudo": sudo, "install": install, "update": update}
        self.said, self.commands = [], []

    def which(self, name):
        return f"/usr/bin/{name}" if name in self.installed else None

    def run(self, command):
        self.commands.append(list(command))
        output, code = "", 0
        if command[:3] == ["sudo", "-n", "true"]:
            code = self.codes["sudo"]
        elif command[0] == "apt-cache":
            found = "1.0" if command[-1] in self.available else "(none)"
            output = f"{command[-1]}:\n  Candidate: {found}\n"
        elif "update" in command:
            code = self.codes["update"]
        elif "install" in command:
            code = self.codes["install"]
            if not code:
                packages = [each for each in PROGRAMS if set(each.packages) & set(command)]
                self.installed |= {each.names[0] for each in packages}
        return subprocess.CompletedProcess(command, code, output, "no room" if code else "")

    def set_up(self, **environment):
        setup = Setup(self.which, self.run, self.said.append, is_root=self.is_root)
        return exit_code(setup, environment, self.said.append)

    @property
    def text(self):
        return "\n".join(self.said)


def test_nothing_is_done_where_everything_is_there():
    system = System(ALL)
    assert system.set_up(SAGA_REQUIRE_SYSTEM="1") == 0
    assert system.commands == []


def test_root_installs_what_is_missing_and_apt_has():
    system = System({"apt-get", "redis-server"}, {"chromium", "chromium-driver"})
    assert system.set_up(SAGA_REQUIRE_SYSTEM="1") == 0
    install = system.commands[-1]
    assert install[:3] == ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get"]
    assert install[-2:] == ["chromium", "chromium-driver"]
    assert "apt has no helm or kustomize" in system.text


def test_sudo_is_used_where_it_asks_for_no_password():
    system = System({"apt-get", "sudo"}, {"redis-server"}, is_root=False, sudo=0)
    assert system.set_up() == 0
    assert system.commands[-1][:2] == ["sudo", "-n"]


@pytest.mark.parametrize(
    ("installed", "why"),
    [
        ({"apt-get"}, "takes root"),
        ({"apt-get", "sudo"}, "takes root"),
        (set(), "has no apt-get"),
    ],
)
def test_where_it_may_not_it_says_why_and_what_is_to_be_done(installed, why):
    system = System(installed, is_root=False)
    assert system.set_up() == 0
    assert why in system.text
    assert "apt-get install redis-server chromium chromium-driver" in system.text
    assert not [each for each in system.commands if "install" in each]
    assert System(installed, is_root=False).set_up(SAGA_REQUIRE_SYSTEM="1") == 1


@pytest.mark.parametrize("step", ["update", "install"])
def test_a_failure_of_apt_is_one(step):
    system = System({"apt-get"}, {"redis-server"}, **{step: 100})
    assert system.set_up() == 1
    assert "failed with code 100" in system.text
    assert "no room" in system.text


def test_helm_alone_is_not_required():
    assert System(ALL - {"helm"}).set_up(SAGA_REQUIRE_SYSTEM="1") == 0
    offline = System((ALL - {"helm"}) | {"apt-get"}, update=100)
    assert offline.set_up(SAGA_REQUIRE_SYSTEM="1") == 0


@pytest.mark.parametrize(("required", "outcome"), [("", "skipped"), ("1", "failed")])
def test_a_test_without_its_program_is_not_run_or_fails(tmp_path, required, outcome):
    (tmp_path / "test_it.py").write_text(
        "from tests.system import require\n\ndef test_it():\n    require('no-such-program')\n"
    )
    environment = {**os.environ, "SAGA_REQUIRE_SYSTEM": required, "PYTHONPATH": str(ROOT)}
    options = ["-p", "no:cacheprovider", "-rsf", "--rootdir", str(tmp_path), str(tmp_path)]
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert f"1 {outcome}" in finished.stdout
    assert "not run: no-such-program is not installed (make setup-system)" in finished.stdout
