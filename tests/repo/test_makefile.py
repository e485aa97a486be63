"""The targets of the Makefile, read without running them."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def make(*arguments: str) -> str:
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_without_a_target_they_are_listed() -> None:
    listed = [line.split()[1] for line in make().splitlines()]
    tests = ["test", "test-vllm-matrix", "test-frameworks"]
    before = ["help", "setup", "setup-system", "demo"]
    assert listed == [*before, *tests, "fuzz", "check", "lock", "clean"]


def test_check_runs_every_tool_in_order() -> None:
    tools = ["setup_env.py", "ruff check", "ruff format --check", "bin/mypy |", "lint-imports"]
    scripts = ["setup_env", "vllm_matrix", "framework_matrix", "setup_system"]
    scripts += ["headless_chromium", "screenshots"]
    tools[4:4] = [f"mypy tools/{script}.py" for script in scripts]
    commands = make("--dry-run", "check")
    places = [commands.index(tool) for tool in tools]
    assert places == sorted(places)


def test_arguments_reach_pytest() -> None:
    assert ".venv/bin/python -m pytest -k ttl" in make("--dry-run", "test", "ARGS=-k ttl")
