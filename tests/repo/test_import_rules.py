"""The import rules hold for the tree, and a copy of it that breaks one is found out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("saga_core", "saga_sdk", "saga_gateway", "gpu_backend", "saga_sim", "saga_cli")

LAYERS = "Packages stand in layers: cli, sim, (gateway, backend, sdk), core"
SIM = "The simulator drives the gateway and the worker, not the SDK"
PURE = "saga_core has no clock, no I/O, no threads, no engine"
LIGHT = "What the SDK takes of saga_core needs a few standard modules only"
SDK = "The SDK takes only errors, hints, settings, tools and types of saga_core"
INTEGRATIONS = "The integrations do not know each other"
ENGINE = "Only gpu_backend knows vLLM and torch"
HOOKS = "In gpu_backend only the hook and transfer modules know vLLM and torch"


class Break(NamedTuple):
    """A line to add to a module (made when it is not there), and the rule that it breaks."""

    module: str
    line: str
    rule: str


BREAKS = (
    Break("saga_core/ttl.py", "import time", PURE),
    Break("saga_core/ttl.py", "from os import path", PURE),
    Break("saga_core/ttl.py", "import saga_sim", LAYERS),
    Break("saga_core/hints.py", "import aiohttp", LIGHT),
    Break("saga_core/settings.py", "import opentelemetry.trace", LIGHT),
    Break("saga_sdk/context.py", "import saga_gateway", LAYERS),
    Break("saga_sdk/context.py", "import saga_core.retention", SDK),
    Break("saga_sdk/integrations/langchain.py", "import saga_sdk.integrations.other", INTEGRATIONS),
    Break("saga_gateway/coordinator.py", "import gpu_backend", LAYERS),
    Break("saga_gateway/coordinator.py", "import vllm", ENGINE),
    Break("saga_gateway/coordinator.py", "import saga_cli", LAYERS),
    Break("saga_sim/cluster.py", "import torch", ENGINE),
    Break("saga_sim/cluster.py", "import saga_sdk", SIM),
    Break("gpu_backend/session_index.py", "from vllm.v1.core import block_pool", HOOKS),
    Break("gpu_backend/a_new_module.py", "import torch", HOOKS),
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the packages and their rules."""
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "saga_sdk/integrations/other.py").touch()
    return tmp_path


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-logo", "--no-cache"]
    return subprocess.run(
        command,
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def test_the_tree_keeps_every_rule(tree: Path) -> None:
    done = lint(tree)
    assert done.returncode == 0, done.stdout
    for rule in (LAYERS, SIM, PURE, LIGHT, SDK, INTEGRATIONS, ENGINE, HOOKS):
        assert f"{rule} KEPT" in done.stdout


@pytest.mark.parametrize("case", BREAKS, ids=lambda case: f"{case.module}: {case.line}")
def test_a_broken_rule_is_named(tree: Path, case: Break) -> None:
    module = tree / case.module
    source = module.read_text(encoding="utf-8") if module.exists() else ""
    module.write_text(f"{source}\n{case.line}\n", encoding="utf-8")

    done = lint(tree)

    assert done.returncode != 0
    assert f"{case.rule} BROKEN" in done.stdout


def test_a_hook_module_may_import_the_engine(tree: Path) -> None:
    with (tree / "gpu_backend/compat.py").open("a", encoding="utf-8") as compat:
        compat.write("\nimport torch\nfrom vllm.v1.core import block_pool\n")
    assert f"{HOOKS} KEPT" in lint(tree).stdout
