#!/usr/bin/env python3
"""Run the SDK's tests with each agent framework, in an environment of its own.

Frameworks pin different versions of the OpenAI client and of one another, so one environment
cannot hold them all. Each set of SETS has a lock file under requirements/frameworks, from which
uv builds an environment under .cache/frameworks, anew only when the lock changes. The newest
LangChain is a part of ``.venv`` and needs none.

    framework_matrix.py                    every set
    framework_matrix.py crewai autogen     some
    framework_matrix.py --newest           the newest of each framework, and the oldest LangChain
    framework_matrix.py --lock [crewai]    write the lock files anew, with the newest versions
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parent.parent
LOCKS = Path("requirements/frameworks")
CACHE = Path(".cache/frameworks")
TESTS = ("tests/frameworks", "tests/examples")
# Most tests of the SDK use LangChain.
LANGCHAIN_TESTS = (*TESTS, "tests/sdk")
PYTHON = "3.11"

TOOLS = ("pytest>=8.3", "pytest-asyncio>=1.0", "pytest-timeout>=2.3")
SDK_TEST_TOOLS = ("httpx>=0.28,<1", "hypothesis>=6.130", "opentelemetry-sdk>=1.30,<2")

# Of the environment that the tests run in: the versions of the named packages.
VERSIONS = (
    "import sys; from importlib.metadata import version;"
    "print(', '.join(f'{name} {version(name)}' for name in sys.argv[1:]))"
)
# What frameworks deprecate inside themselves is not ours to mend.
PYTEST = ("-q", "-W", "default", "-p", "no:cacheprovider")


def project() -> dict[str, Any]:
    """What pyproject.toml says of the project."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return cast(dict[str, Any], content["project"])


class MatrixError(Exception):
    """A set that cannot be tested, and why."""


@dataclass(frozen=True)
class FrameworkSet:
    """Packages that are installed and tested together.

    Attributes:
        packages: what has to be there, by installed name; their tests are run.
        requires: what the lock file is made from; none for the main environment.
        newest: one of those that ``--newest`` picks.
    """

    name: str
    packages: tuple[str, ...]
    requires: tuple[str, ...] = ()
    tests: tuple[str, ...] = TESTS
    newest: bool = True

    @property
    def lock(self) -> Path:
        return LOCKS / f"{self.name}.txt"


SETS = (
    FrameworkSet("langchain", ("langchain", "langgraph", "openai")),
    FrameworkSet(
        "langchain-oldest",
        ("langchain", "langgraph", "openai"),
        (
            "langchain==1.0.0",
            "langchain-core==1.0.0",
            "langchain-openai==1.0.0",
            "langgraph==1.0.0",
            "openai==2.0.0",
            *SDK_TEST_TOOLS,
        ),
        LANGCHAIN_TESTS,
    ),
    FrameworkSet(
        "openai-oldest",
        ("openai", "anthropic"),
        (
            "openai==2.0.0",
            "anthropic==1.0.0",
            *project()["optional-dependencies"]["gateway"],
            *SDK_TEST_TOOLS,
        ),
        ("tests/gateway/test_openai_client.py", "tests/gateway/test_anthropic_client.py"),
    ),
    FrameworkSet("openai-agents", ("openai-agents", "openai"), ("openai-agents>=0.24,<1",)),
    FrameworkSet(
        "openai-agents-oldest",
        ("openai-agents", "openai"),
        ("openai-agents==0.20.0",),
        newest=False,
    ),
    FrameworkSet("crewai", ("crewai", "openai"), ("crewai[litellm]>=1.15,<2",)),
    FrameworkSet("crewai-oldest", ("crewai", "openai"), ("crewai[litellm]==1.15.0",), newest=False),
    FrameworkSet(
        "autogen",
        ("autogen-agentchat", "openai"),
        ("autogen-agentchat>=0.7.5,<0.8", "autogen-ext[openai]>=0.7.5,<0.8"),
    ),
    FrameworkSet(
        "agent-framework",
        ("agent-framework-core", "openai"),
        (
            "agent-framework-core>=1.0,<2",
            "agent-framework-openai>=1.0,<2",
            "agent-framework-orchestrations>=1.0,<2",
        ),
    ),
    FrameworkSet(
        "agent-framework-oldest",
        ("agent-framework-core", "openai"),
        (
            "agent-framework-core==1.0.0",
            "agent-framework-openai==1.0.0",
            "agent-framework-orchestrations==1.0.0b260402",
        ),
        newest=False,
    ),
)


def chosen(names: Sequence[str], *, newest: bool) -> list[FrameworkSet]:
    """The sets that were named; without names all, or the newest.

    Raises:
        MatrixError: there is no set of that name.
    """
    by_name = {each.name: each for each in SETS}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise MatrixError(f"no set {', '.join(unknown)}; there are {', '.join(by_name)}")
    if names:
        return [by_name[name] for name in names]
    return [each for each in SETS if each.newest or not newest]


def uv() -> list[str]:
    """The command of uv, which is installed into this environment if need be."""
    command = [sys.executable, "-m", "uv"]
    if subprocess.run([*command, "--version"], capture_output=True).returncode != 0:
        _run([sys.executable, "-m", "pip", "install", "--quiet", "uv"], "installing uv")
    return command


def _run(command: Sequence[str], what: str, given: str | None = None) -> None:
    finished = subprocess.run(command, cwd=ROOT, input=given, text=True)
    if finished.returncode != 0:
        raise MatrixError(f"{what} failed: its message is above")


def write_lock(each: FrameworkSet) -> None:
    """Write the set's lock file: the newest versions of all that it requires."""
    (ROOT / each.lock).parent.mkdir(parents=True, exist_ok=True)
    requires = (*each.requires, *TOOLS, *project()["dependencies"])
    command = [*uv(), "pip", "compile", "--quiet", "--no-config", "--upgrade", "--universal"]
    command += ["--python-version", PYTHON, "--no-annotate"]
    command += ["--custom-compile-command", f"make test-frameworks ARGS='--lock {each.name}'"]
    command += ["--output-file", str(each.lock), "-"]
    _run(command, f"locking {each.name}", "\n".join(requires))


def built(each: FrameworkSet) -> Path:
    """Return the interpreter of the set's environment, which is built now if need be.

    Raises:
        MatrixError: uv cannot install what the lock file says.
    """
    if not each.requires:
        return Path(sys.executable)
    folder = ROOT / CACHE / each.name
    python, stamp = folder / "bin" / "python", folder / "locked"
    with exclusive(ROOT / CACHE / f"{each.name}.lock"):
        wanted = fingerprint(each)
        if not (python.exists() and stamp.is_file() and stamp.read_text() == wanted):
            print(f"{each.name}: installing {each.lock}", flush=True)
            make = [*uv(), "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)]
            _run(make, f"making {folder}")
            sync = [*uv(), "pip", "sync", "--quiet", "--python", str(python), str(each.lock)]
            _run(sync, f"installing {each.lock}")
            stamp.write_text(wanted)
    return python


def fingerprint(each: FrameworkSet) -> str:
    """Of all that decides what the set's environment holds."""
    parts = ((ROOT / each.lock).read_text(encoding="utf-8"), platform.python_version())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file, so that two runs do not build one environment at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def versions(each: FrameworkSet, python: Path) -> str:
    """The versions of the set's packages as they are installed.

    Raises:
        MatrixError: one is not.
    """
    command = [str(python), "-c", VERSIONS, *each.packages]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode != 0:
        raise MatrixError(f"{each.name}: {finished.stderr.strip().splitlines()[-1]}")
    return finished.stdout.strip()


def test(each: FrameworkSet, python: Path) -> int:
    """Run the tests of the set's packages; return pytest's exit code."""
    variables = {**os.environ, "SAGA_FRAMEWORKS": " ".join(each.packages)}
    variables.pop("PYTHONPATH", None)  # other folders of modules would hide what is missing
    command = [str(python), "-m", "pytest", *PYTEST, *each.tests]
    return subprocess.run(command, cwd=ROOT, env=variables).returncode


@dataclass(frozen=True)
class Result:
    """How a set did; ``code`` is 0 when all its tests passed."""

    name: str
    code: int
    seconds: float
    what: str


def run(each: FrameworkSet) -> Result:
    """Build the set's environment and run its tests there."""
    started_s = time.monotonic()
    try:
        python = built(each)
        what = versions(each, python)
        print(f"{each.name}: {what}", flush=True)
        code = test(each, python)
    except MatrixError as error:
        print(error, file=sys.stderr)
        code, what = 1, str(error)
    return Result(each.name, code, time.monotonic() - started_s, what)


def table(results: Sequence[Result]) -> str:
    """The results, a line each."""
    width = max(len(result.name) for result in results)
    return "\n".join(
        f"{result.name:{width}}  {'ok    ' if result.code == 0 else 'FAILED'}"
        f"  {result.seconds:5.0f} s  {result.what}"
        for result in results
    )


def main(arguments: Sequence[str]) -> int:
    """Test the sets that are named; return 1 when one of them failed."""
    parser = argparse.ArgumentParser(description="Run the SDK's tests with each agent framework.")
    parser.add_argument("names", nargs="*", metavar="SET", help=", ".join(s.name for s in SETS))
    parser.add_argument(
        "--newest", action="store_true", help="the newest of each, and the oldest LangChain"
    )
    parser.add_argument("--lock", action="store_true", help="write the lock files, test nothing")
    options = parser.parse_args(arguments)
    try:
        sets = chosen(options.names, newest=options.newest)
        if options.lock:
            for each in sets:
                if each.requires:
                    write_lock(each)
            return 0
    except MatrixError as error:
        print(error, file=sys.stderr)
        return 2
    results = [run(each) for each in sets]
    print(table(results))
    return max(min(result.code, 1) for result in results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
