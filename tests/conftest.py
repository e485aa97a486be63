"""Fixtures for all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def traces() -> Path:
    """The folder of recorded traces that SAGA_TRACES names; without one the test is skipped."""
    name = os.environ.get("SAGA_TRACES")
    if not name:
        pytest.skip("SAGA_TRACES is not set: it names the folder of recorded traces")
    folder = Path(name)
    if not folder.is_dir():
        pytest.skip(f"SAGA_TRACES names {name}, which is not a folder")
    return folder
