#!/usr/bin/env python3
"""Install the programs of the system that some tests need, where that is allowed.

On Debian and Ubuntu, as root or with a sudo that asks for no password, apt installs what is
missing; anywhere else it is said what is missing and why nothing was done. Tests whose program is
missing are reported as not run. With SAGA_REQUIRE_SYSTEM=1, as in CI, a program that is missing in
the end is an error here, and so are those tests.

Standard library only. apt's own settings on the machine (sources, proxies) apply.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

REQUIRE = "SAGA_REQUIRE_SYSTEM"
TAIL_LINES = 15


@dataclass(frozen=True)
class Program:
    """A program that tests start.

    Attributes:
        names: of its executable, any of which will do.
        packages: of apt, any of which has it, the first one preferred.
        is_needed: CI does not go on without it.
    """

    names: tuple[str, ...]
    packages: tuple[str, ...]
    use: str
    is_needed: bool = True


PROGRAMS = (
    Program(("redis-server",), ("redis-server",), "state that gateways share"),
    Program(("chromium", "chromium-browser"), ("chromium", "chromium-browser"), "the dashboard"),
    Program(("chromedriver",), ("chromium-driver", "chromium-chromedriver"), "the dashboard"),
    # Not in Debian's own archives: installed where the machine's sources have one.
    Program(("helm", "kustomize"), ("helm", "kustomize"), "manifests of deploy", is_needed=False),
)

Which = Callable[[str], "str | None"]
Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]
Say = Callable[[str], None]


class Setup:
    """Finds what is missing, and installs it.

    Args:
        which: the path of an executable; None: it is not there.
        run: runs a command to its end.
        say: shows a line.
        is_root: whether this process may install by itself.
    """

    def __init__(self, which: Which, run: Run, say: Say, *, is_root: bool) -> None:
        self._which = which
        self._run = run
        self._say = say
        self._is_root = is_root

    def missing(self) -> list[Program]:
        """The programs that are not installed."""
        return [each for each in PROGRAMS if not any(map(self._which, each.names))]

    def set_up(self) -> bool:
        """Install what is missing, where that is allowed; returns whether all went well.

        That nothing may be installed here is no failure.
        """
        missing = self.missing()
        for program in PROGRAMS:
            state = "missing" if program in missing else "there"
            self._say(f"{' or '.join(program.names)}, for {program.use}: {state}")
        if not missing:
            return True
        prefix, reason = self._prefix()
        if prefix is None:
            names = " ".join(each.packages[0] for each in missing if each.is_needed)
            self._say(f"nothing is installed: {reason}")
            if names:
                self._say(f"to install by hand, on Debian: apt-get install {names}")
            return True
        is_well = self._install(missing, prefix)
        return is_well or not any(each.is_needed for each in missing)

    def _prefix(self) -> tuple[list[str] | None, str]:
        """How apt is to be called; None and why: it is not."""
        if self._which("apt-get") is None:
            return None, "this system has no apt-get; its own package manager may have them"
        if self._is_root:
            return ["env", "DEBIAN_FRONTEND=noninteractive"], ""
        if self._which("sudo") is None or self._run(["sudo", "-n", "true"]).returncode:
            return None, "that takes root, or a sudo that asks for no password"
        return ["sudo", "-n", "env", "DEBIAN_FRONTEND=noninteractive"], ""

    def _install(self, missing: Sequence[Program], prefix: Sequence[str]) -> bool:
        if not self._command([*prefix, "apt-get", "update"]):
            return False
        packages = []
        for program in missing:
            package = next(filter(self._has_candidate, program.packages), None)
            if package is not None:
                packages.append(package)
            else:
                self._say(f"apt has no {' or '.join(program.packages)}")
        if not packages:
            return True
        if "redis-server" in packages:
            self._say("Debian starts redis-server as a service; the tests start one of their own")
        install = [*prefix, "apt-get", "install", "-y", "--no-install-recommends", *packages]
        return self._command(install)

    def _has_candidate(self, package: str) -> bool:
        policy = self._run(["apt-cache", "policy", package]).stdout
        return "Candidate:" in policy and "Candidate: (none)" not in policy

    def _command(self, command: Sequence[str]) -> bool:
        self._say("$ " + " ".join(command))
        finished = self._run(command)
        if finished.returncode:
            self._say(f"failed with code {finished.returncode}; the end of its output:")
            for line in (finished.stdout + finished.stderr).rstrip().splitlines()[-TAIL_LINES:]:
                self._say(f"    {line}")
        return finished.returncode == 0


def exit_code(setup: Setup, environment: Mapping[str, str], say: Say) -> int:
    """Set up, and say how it ended: 0, or 1 where something failed, or is missing and required."""
    is_well = setup.set_up()
    lacking = [" or ".join(each.names) for each in setup.missing() if each.is_needed]
    is_required = environment.get(REQUIRE, "") not in ("", "0")
    if lacking:
        then = "is an error" if is_required else "leaves tests that are not run"
        say(f"still missing, which {then}: {', '.join(lacking)}")
    else:
        say("everything that tests need is there")
    return 0 if is_well and not (lacking and is_required) else 1


def main() -> int:
    """Set the system up; return the exit code."""

    def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)

    def say(line: str) -> None:
        print(line, flush=True)

    setup = Setup(shutil.which, run, say, is_root=os.geteuid() == 0)
    return exit_code(setup, os.environ, say)


if __name__ == "__main__":
    sys.exit(main())
