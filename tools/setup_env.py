#!/usr/bin/env python3
"""Make ``.venv`` and install what the project needs; do nothing when that is already done.

Standard library only, Linux on x86_64 or aarch64. A stamp in ``.venv`` holds a hash of what was
installed: while it matches, a run ends at once. A step that fails says what failed, shows the end
of its output and what to try; the next run takes it up again. A run that was cut off in the
middle of an installation starts over with a fresh ``.venv``. Runs exclude each other by a lock.

pip's settings on the machine (indexes, proxies, certificates) apply, but for its constraints:
requirements/dev.lock names every version that is installed here.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
LOCK_FILE = "requirements/dev.lock"
LOG_FILE = ".cache/setup.log"

TORCH = "torch==2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"

PYTHON_VERSIONS = ((3, 11), (3, 15))  # from, and below
MACHINES = ("x86_64", "aarch64")
FREE_DISK_BYTES = 6 * 10**9  # for a new .venv, with pip's downloads
FREE_DISK_UPDATE_BYTES = 10**9  # for changes to one that is there

TAIL_LINES = 15
QUIET_PROGRESS_S = 15  # between two lines of progress where there is no terminal

VERIFY = """\
import platform
from importlib.metadata import version
import langchain, saga_core, torch, transformers, vllm
print("versions: python", platform.python_version())
for name, number in (
    ("torch", torch.__version__),
    ("vllm", vllm.__version__),
    ("transformers", transformers.__version__),
    ("langchain", langchain.__version__),
    ("saga-sdk", version("saga-sdk")),
):
    print("versions:", name, number)
"""

NETWORK = (
    f"the network: are pip's index and {TORCH_INDEX} reachable, is a proxy needed? "
    "(What has been downloaded is kept for the next run.)"
)
DISK = "the disk: free some space here, in $TMPDIR and in pip's cache"
PYTHON = "another Python: for example `make PYTHON=python3.12 demo`"
MEMORY = "the memory: the system ended the command, other programs may need to stop first"

# What the output of a failed step shows, and what to try then; the first match counts.
SYMPTOMS = (
    (("No space left on device", "Disk quota exceeded"), DISK),
    (("Retrying (Retry", "ConnectionError", "TimeoutError", "SSLError", "ProxyError"), NETWORK),
    (("Requires-Python", "requires a different Python"), PYTHON),
    (("MemoryError", "Cannot allocate memory"), MEMORY),
)


@dataclass(frozen=True)
class Finished:
    """A command that has ended; ``code`` is negative when a signal ended it."""

    code: int
    output: str


if TYPE_CHECKING:  # Python 3.8 cannot evaluate these, and is to get as far as check_platform
    Run = Callable[[Sequence[str]], Finished]
    Say = Callable[[str], None]


class StepFailedError(Exception):
    """A step that could not be done: what failed, the output if a command ran, what to try."""

    def __init__(
        self, what: str, *, advice: Sequence[str], finished: Finished | None = None
    ) -> None:
        super().__init__(what)
        self.what = what
        self.advice = advice
        self.finished = finished

    @property
    def was_cut_off(self) -> bool:
        """Whether a signal ended the command, so that files may be half-written."""
        return self.finished is not None and self.finished.code < 0

    def report(self) -> str:
        """Return the message for the user."""
        lines = [f"Set-up failed: {self.what}"]
        if self.finished is not None:
            tail = self.finished.output.rstrip().splitlines()[-TAIL_LINES:]
            lines.append(f"The end of its output (the whole is in {LOG_FILE}):")
            lines += [f"    {line}" for line in tail or ["(nothing)"]]
        lines.append("What to try:")
        lines += [f"  - {advice}" for advice in self.advice]
        return "\n".join(lines)


def advice_for(finished: Finished) -> Sequence[str]:
    """Return what to try after a failed command, from what its output shows."""
    if finished.code < 0:
        return [MEMORY]
    for signs, advice in SYMPTOMS:
        if any(sign in finished.output for sign in signs):
            return [advice]
    return [NETWORK, DISK, PYTHON]


def fingerprint(root: Path, *, python_version: str | None = None) -> str:
    """Return the hash of all that decides what ``.venv`` holds, its place included."""
    import tomllib  # here, so that an older Python gets as far as check_platform

    pyproject = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    package = {
        "build-system": pyproject.get("build-system"),
        "project": pyproject.get("project"),  # with its entry points
        "hatch": pyproject.get("tool", {}).get("hatch"),
    }
    parts = (
        (root / LOCK_FILE).read_text(encoding="utf-8"),
        json.dumps(package, sort_keys=True),
        python_version or platform.python_version(),
        TORCH,
        str(root),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def check_platform() -> None:
    """Raise StepFailedError where the packages cannot run."""
    oldest, above = PYTHON_VERSIONS
    if not oldest <= sys.version_info[:2] < above:
        wanted = "from {}.{} to below {}.{}".format(*oldest, *above)
        raise StepFailedError(
            f"this is Python {platform.python_version()}, and vLLM's CPU build needs one {wanted}",
            advice=[PYTHON],
        )
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        raise StepFailedError(
            f"this is {sys.platform} on {platform.machine()}, "
            f"and vLLM's CPU build is made for Linux on {' and '.join(MACHINES)}",
            advice=["a Linux machine or container of one of these kinds"],
        )


def check_disk(root: Path, needed_bytes: int) -> None:
    """Raise StepFailedError when ``root`` has less room than is needed."""
    free_bytes = shutil.disk_usage(root).free
    if free_bytes < needed_bytes:
        raise StepFailedError(
            f"{free_bytes / 1e9:.1f} GB are free at {root}, {needed_bytes / 1e9:.0f} GB are needed",
            advice=[DISK],
        )


class Environment:
    """The project's ``.venv`` and the steps that fill it.

    Args:
        root: the project's folder.
        run: runs a command in ``root`` and waits for its end.
        say: shows a line to the user.
    """

    def __init__(self, root: Path, run: Run, say: Say) -> None:
        self.root = root
        self.venv = root / ".venv"
        self.python = self.venv / "bin" / "python"
        self.stamp = self.venv / "setup.stamp"
        self.running = root / ".cache" / "setup.running"
        self._run = run
        self._say = say

    def is_up_to_date(self) -> bool:
        """Whether the stamp matches what is wanted now."""
        try:
            stamp = self.stamp.read_text(encoding="utf-8")
        except OSError:
            return False
        return self.python.exists() and stamp == fingerprint(self.root)

    def set_up(self) -> None:
        """Do every step; write the stamp at the end, and only then.

        ``.cache/setup.running`` is there while files are being installed. Found at the start, it
        tells that a run was cut off.
        """
        steps = (
            (f"Python {platform.python_version()} and .venv", self._make_venv),
            (TORCH, self._install_torch),
            (f"packages of {LOCK_FILE}", self._install_packages),
            ("this project, editable", self._install_project),
            ("imports", self._verify),
        )
        self.stamp.unlink(missing_ok=True)
        for number, (title, step) in enumerate(steps, start=1):
            started_s = time.monotonic()
            self._say(f"[{number}/{len(steps)}] {title}")
            try:
                step()
            except StepFailedError as error:
                if not error.was_cut_off:
                    self.running.unlink(missing_ok=True)
                raise
            self._say(f"      done in {time.monotonic() - started_s:.1f} s")
        partial = self.stamp.with_suffix(".partial")
        partial.write_text(fingerprint(self.root), encoding="utf-8")
        partial.replace(self.stamp)

    def _make_venv(self) -> None:
        flaw = self._flaw()
        if flaw is None:
            check_disk(self.root, FREE_DISK_UPDATE_BYTES)
            self.running.touch()
            return
        if importlib.util.find_spec("ensurepip") is None:
            package = "python{}.{}-venv".format(*sys.version_info[:2])
            raise StepFailedError(
                "this Python cannot make a virtual environment: its module ensurepip is missing",
                advice=[f"on Debian and Ubuntu: `apt-get install {package}`", PYTHON],
            )
        if self.venv.exists():
            self._say(f"      making .venv anew: {flaw}")
            shutil.rmtree(self.venv)
        check_disk(self.root, FREE_DISK_BYTES)
        self.running.touch()
        self._command("making .venv", [sys.executable, "-m", "venv", str(self.venv)])

    def _flaw(self) -> str | None:
        """Return why ``.venv`` cannot be used as it is; None when it can."""
        try:
            lines = (self.venv / "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
        except OSError:
            return "there is none"
        config = {key.strip(): value.strip() for key, _, value in (s.partition("=") for s in lines)}
        if self.running.exists():
            return "a set-up was cut off"
        if not config.get("version", "").startswith("{}.{}.".format(*sys.version_info[:2])):
            return "it belongs to another Python"
        if not config.get("command", "").endswith(str(self.venv)):
            return "it was not made at this place"
        if not self.python.exists() or self._run([*self._pip, "--version"]).code != 0:
            return "it has no working pip"
        return None

    def _install_torch(self) -> None:
        install = [*self._pip, "install", "--no-deps"]
        finished = self._run([*install, TORCH])
        if "No matching distribution found" in finished.output:
            self._say(f"      not on pip's index, trying {TORCH_INDEX}")
            finished = self._run([*install, "--index-url", TORCH_INDEX, TORCH])
        self._check(f"installing {TORCH}", finished)

    def _install_packages(self) -> None:
        install = [*self._pip, "install", "--no-deps", "-r", LOCK_FILE]
        self._command(f"installing the packages of {LOCK_FILE}", install)

    def _install_project(self) -> None:
        install = [*self._pip, "install", "--no-deps", "--no-build-isolation", "-e", "."]
        self._command("installing this project", install)

    def _verify(self) -> None:
        self.running.unlink(missing_ok=True)  # all is installed
        what = "importing vllm, torch, transformers, langchain and saga_core"
        # -I: what is imported is what was installed, not what lies in the current folder.
        finished = self._command(what, [str(self.python), "-I", "-c", VERIFY])
        for line in finished.output.splitlines():
            if line.startswith("versions:"):
                self._say("      " + line.removeprefix("versions:").strip())

    @property
    def _pip(self) -> list[str]:
        return [str(self.python), "-m", "pip"]

    def _command(self, what: str, command: Sequence[str]) -> Finished:
        return self._check(what, self._run(command))

    def _check(self, what: str, finished: Finished) -> Finished:
        if finished.code != 0:
            raise StepFailedError(what, advice=advice_for(finished), finished=finished)
        return finished


class Console:
    """What the user sees: lines, and below them the progress of the running command."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._quiet_until_s = QUIET_PROGRESS_S

    def say(self, line: str) -> None:
        """Show a line."""
        self._quiet_until_s = QUIET_PROGRESS_S
        clear = "\r\033[K" if self._is_terminal else ""
        print(f"{clear}{line}", flush=True)

    def progress(self, elapsed_s: int, log: Path) -> None:
        """Show how long the command has run and the last line of its output.

        To be called about once a second. On a terminal the line is written over by the next;
        elsewhere one appears every QUIET_PROGRESS_S seconds.
        """
        line = f"      {elapsed_s} s  {last_line(log)}"
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{line[:width]}", end="", flush=True)
        elif elapsed_s >= self._quiet_until_s:
            self._quiet_until_s = elapsed_s + QUIET_PROGRESS_S
            print(line, flush=True)


def last_line(log: Path) -> str:
    """Return the last line of the log that is not empty, at most 100 characters of it."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 10_000))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip()[:100] for line in reversed(lines) if line.strip()), "")


class LoggedRun:
    """Run commands in ``root``, their output going to the log.

    The command holds the set-up's lock as well: should this process be killed, no other set-up
    starts before the command has ended too.
    """

    def __init__(self, root: Path, console: Console, lock_fd: int) -> None:
        self._root = root
        self._log = root / LOG_FILE
        self._log_mode = "wb"  # the first command starts the log anew
        self._console = console
        self._lock_fd = lock_fd

    def __call__(self, command: Sequence[str]) -> Finished:
        started_s = time.monotonic()
        with open(self._log, self._log_mode) as log:
            self._log_mode = "ab"
            log.write(f"$ {shlex.join(command)}\n".encode())
            log.flush()
            start = log.tell()
            process = subprocess.Popen(
                command,
                cwd=self._root,
                env=command_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(self._lock_fd,),
            )
            try:
                while True:
                    try:
                        code = process.wait(timeout=1)
                        break
                    except subprocess.TimeoutExpired:
                        self._console.progress(int(time.monotonic() - started_s), self._log)
            except BaseException:
                process.terminate()
                process.wait()
                raise
        output = self._log.read_bytes()[start:].decode(errors="replace")
        return Finished(code, output)


def command_environment() -> dict[str, str]:
    """Return the variables that commands run with.

    Other folders of modules would hide what is missing in ``.venv``. pip's other settings stay.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {
        "PIP_CONSTRAINT": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
        "PIP_PROGRESS_BAR": "off",
        "PIP_USER": "0",
        "PYTHONNOUSERSITE": "1",
    }
    return environment


@contextmanager
def exclusive(path: Path, say: Say) -> Iterator[int]:
    """Hold the lock file, after waiting for whoever holds it now; yield its descriptor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another set-up")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def main() -> int:
    """Bring ``.venv`` up to date; return the exit code."""
    console = Console()
    started_s = time.monotonic()
    try:
        check_platform()
        with exclusive(ROOT / ".cache" / "setup.lock", console.say) as lock_fd:
            environment = Environment(ROOT, LoggedRun(ROOT, console, lock_fd), console.say)
            if environment.is_up_to_date():
                console.say("Set-up: .venv is up to date.")
                return 0
            console.say("Setting up .venv: some minutes, about 3 GB on disk")
            environment.set_up()
    except StepFailedError as error:
        console.say(error.report())
        return 1
    except OSError as error:
        advice = ["the file named here: its permissions, and the room on its disk"]
        console.say(StepFailedError(str(error), advice=advice).report())
        return 1
    except KeyboardInterrupt:
        console.say("Set-up interrupted; the next run takes it up again.")
        return 130
    console.say(f"Set-up done in {time.monotonic() - started_s:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
