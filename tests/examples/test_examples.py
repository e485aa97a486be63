"""The examples run as they are, each in a process of its own, against a scripted server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from saga_sdk.testing import Script, ScriptedServer, ToolCall

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
NEEDED = os.environ.get("SAGA_FRAMEWORKS", "").split()
READ = ToolCall("read_file", {"path": "hello.py"})
ANSWER = "It prints hello."


@dataclass(frozen=True)
class Example:
    """What an example needs, what it is answered and what its requests say.

    Attributes:
        package: that has to be installed.
        said: of each request in turn: its session, as a letter in the order of appearance, its
            step, and the tool whose result it carries.
        parents: the sessions that another one spawned.
    """

    package: str
    script: Script
    said: Sequence[tuple[str, int, str | None]]
    parents: dict[str, str] = field(default_factory=dict)
    printed: str = ANSWER


TWO_STEPS = (("a", 0, None), ("a", 1, "read_file"))
# One agent asks another.
ASKED = (("a", 0, None), ("b", 0, None), ("b", 1, "read_file"), ("a", 1, "ask_reader"))
RUNS = {
    "agent_framework_agent.py": Example(
        "agent-framework-core",
        [ToolCall("ask_reader", {"task": "hello.py?"}), READ, "It prints.", ANSWER],
        ASKED,
        {"b": "a"},
    ),
    "autogen_team.py": Example(
        "autogen-agentchat", [READ, "It prints.", ANSWER], (*TWO_STEPS, ("b", 0, None))
    ),
    "langchain_agent.py": Example("langchain", [READ, ANSWER], TWO_STEPS),
    "langgraph_multi_agent.py": Example(
        "langgraph",
        [READ, "It prints.", ANSWER, "It prints.", "Hello."],
        (*TWO_STEPS, ("a", 2, None), ("a", 3, None), ("a", 4, None)),
        printed="Hello.",
    ),
    "openai_loop.py": Example("openai", [READ, ANSWER], TWO_STEPS),
    "crewai_crew.py": Example("crewai", [READ, "It prints.", ANSWER], (*TWO_STEPS, ("b", 0, None))),
    "openai_agents_agent.py": Example(
        "openai-agents",
        [ToolCall("ask_reader", {"input": "hello.py?"}), READ, "It prints.", ANSWER],
        ASKED,
        {"b": "a"},
    ),
}


def is_wanted(package: str) -> bool:
    if NEEDED:
        return package in NEEDED
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def test_every_example_is_run_somewhere() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(RUNS)


def test_an_example_is_short() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 40, path.name


@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if is_wanted(run.package)])
def test_it_prints_the_answer_and_its_requests_carry_hints(name: str, tmp_path: Path) -> None:
    example = RUNS[name]
    with ScriptedServer(example.script) as server:
        finished = subprocess.run(
            [sys.executable, str(EXAMPLES / name)],
            env=environment(server, tmp_path),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert finished.returncode == 0, finished.stderr
        assert finished.stdout.strip().splitlines()[-1] == example.printed
        assert "saga_sdk" not in finished.stderr, "it warned of something"
    letters: dict[str | None, str] = {}
    for hints in server.hints:
        letters.setdefault(hints.session_id, "abcdef"[len(letters)])
    assert [(letters[h.session_id], h.step, h.tool_name) for h in server.hints] == [*example.said]
    parents = {letters[h.session_id]: letters.get(h.parent_session_id) for h in server.hints}
    assert {child: parent for child, parent in parents.items() if parent} == example.parents
    assert all(h.workflow_id and h.task_id for h in server.hints)


def environment(server: ScriptedServer, home: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "SAGA_BASE_URL": server.base_url,
        "SAGA_MODEL": "scripted",
        "NO_PROXY": "127.0.0.1,localhost",
        # Nothing may go elsewhere, nor be kept.
        "HOME": str(home),
        "CREWAI_DISABLE_TELEMETRY": "true",
        "CREWAI_TRACING_ENABLED": "false",
        "CREWAI_STORAGE_DIR": str(home),
        "LITELLM_LOCAL_MODEL_COST_MAP": "true",
    }
