"""What the overlays come to, rendered by kubectl, and the parts of it by name."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
OVERLAYS = ("one-gpu", "four-gpu")


@cache
def _render(overlay: str) -> tuple[dict, ...]:
    folder = DEPLOY / "kustomize/overlays" / overlay
    done = subprocess.run(
        ["kubectl", "kustomize", folder], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr  # Warnings of what is deprecated, among others.
    return tuple(yaml.safe_load_all(done.stdout))


def documents(overlay: str) -> tuple[dict, ...]:
    """All documents of an overlay; the test is not run where there is no kubectl."""
    if shutil.which("kubectl") is None:
        if os.environ.get("SAGA_REQUIRE_SYSTEM") == "1":
            pytest.fail("there is no kubectl, and SAGA_REQUIRE_SYSTEM=1 asks for it")
        pytest.skip("not run: there is no kubectl")
    return _render(overlay)


def of_kind(overlay: str, kind: str) -> list[dict]:
    return [each for each in documents(overlay) if each["kind"] == kind]


def named(overlay: str, kind: str, name: str) -> dict:
    """The one document of that kind and name; the hash of a generated name is left out."""
    (found,) = [
        each
        for each in of_kind(overlay, kind)
        if each["metadata"]["name"] == name
        or (kind == "ConfigMap" and each["metadata"]["name"].rpartition("-")[0] == name)
    ]
    return found


def gateway(overlay: str) -> dict:
    """The gateway's pod."""
    return named(overlay, "Deployment", "saga-gateway")["spec"]["template"]


def worker(overlay: str) -> dict:
    """A worker's pod."""
    return named(overlay, "StatefulSet", "saga-worker")["spec"]["template"]


def container(pod: dict) -> dict:
    (only,) = pod["spec"]["containers"]
    return only


def gib(quantity: str) -> float:
    """A quantity of memory, in GiB."""
    units = {"Gi": 1.0, "Mi": 2.0**-10}
    return float(quantity[:-2]) * units[quantity[-2:]]
