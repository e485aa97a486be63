"""Tests of agent frameworks, each in an environment that holds it.

Two frameworks seldom fit one environment. Without SAGA_FRAMEWORKS the tests of what is not
installed are left out; ``make test-frameworks`` names there what has to be tested, and then a
framework that is missing makes its tests fail.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

import saga_sdk as saga
from saga_sdk.context import calls, current_workflow
from saga_sdk.events import sender
from saga_sdk.runs import tracker
from saga_sdk.sessions import named_sessions
from saga_sdk.testing import ScriptedServer
from tests.plans import follow_plan

# What each file tests, by the name it is installed with.
PACKAGE_OF = {
    "test_agent_framework.py": "agent-framework-core",
    "test_autogen.py": "autogen-agentchat",
    "test_crewai.py": "crewai",
    "test_langchain_matrix.py": "langchain",
    "test_openai_agents.py": "openai-agents",
    "test_openai_versions.py": "openai",
}
NEEDED = os.environ.get("SAGA_FRAMEWORKS", "").split()


def is_installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the tests of a framework that is not there and is not asked for."""
    package = PACKAGE_OF.get(collection_path.name)
    if package is None or package in NEEDED or (not NEEDED and is_installed(package)):
        return None
    return True


@pytest.fixture(autouse=True)
def clean_switch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start switched off; afterwards nothing may be left of any run."""
    for name in ("SAGA_BASE_URL", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    # Named sessions go on counting for the life of a process: each test begins with none.
    named_sessions.clear()
    yield
    sender.stop()
    saga.uninstrument()
    tracker.check_integrity()
    assert (len(tracker), len(calls), current_workflow()) == (0, 0, None)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """A server that answers as each prompt plans."""
    with ScriptedServer(follow_plan) as scripted:
        yield scripted
