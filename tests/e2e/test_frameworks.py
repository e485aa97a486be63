"""The examples of three frameworks through the gateway to a real vLLM engine.

AutoGen and CrewAI run in the environments that ``make test-frameworks`` builds. The tiny model
calls no tools and talks nonsense; what counts is that the engine is told whose KV it holds.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from saga_cli.processes import Service, free_port
from tests.e2e.conftest import MODEL, worker_service

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
POLICY = "wa-lru-ttl"
FRAMEWORKS = ROOT / ".cache" / "frameworks"


@dataclass(frozen=True)
class Stack:
    """A gateway and the worker behind it."""

    gateway: Service
    worker: Service


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """They serve agents: tools are allowed, and answers are short."""
    from gpu_backend.model_free import write_tiny_model

    folder = tmp_path_factory.mktemp("frameworks")
    short = json.dumps({"max_new_tokens": 40, "temperature": 0})
    words = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    words += ["--override-generation-config", short]
    worker = worker_service(POLICY, write_tiny_model(folder / "model"), folder, *words)
    port = free_port()
    command = [sys.executable, "-m", "saga_cli.main", "gateway", "--port", str(port)]
    gateway = Service("gateway", [*command, "--worker", worker.url], port, folder / "gateway.log")
    with ExitStack() as stack:
        for service, timeout_s in ((worker, 240), (gateway, 60)):
            service.start()
            stack.callback(service.stop)
            asyncio.run(service.wait_ready(timeout_s))
        yield Stack(gateway, worker)


class Watcher:
    """Follows the worker's state in a thread, and keeps the sessions that it held meanwhile."""

    def __init__(self, stack: Stack) -> None:
        self.seen: set[str] = set()
        self.first: dict[str, Any] = {}
        self.last: dict[str, Any] = {}
        self._changed = threading.Condition()
        self._url = f"{stack.worker.url}/saga/v1/state:watch?interval_s=0.2&sessions=1000"
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        self.wait_until(lambda: bool(self.last))
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.set()
        self._thread.join(30)

    def wait_until(self, predicate: Any) -> None:
        with self._changed:
            assert self._changed.wait_for(predicate, 30), f"not so: {self.last}"

    def gained(self, counter: str) -> int:
        return int(self.last["counters"][counter] - self.first["counters"][counter])

    def _watch(self) -> None:
        with httpx.stream("GET", self._url, timeout=60) as response:
            for line in response.iter_lines():
                if self._stopping.is_set():
                    return
                if line.startswith("data: "):
                    with self._changed:
                        self.last = json.loads(line.removeprefix("data: "))
                        self.first = self.first or self.last
                        self.seen |= {one["session_id"] for one in self.last["sessions"]}
                        self._changed.notify_all()


@pytest.mark.parametrize(
    ("example", "environment", "requests", "sessions", "ended"),
    [
        # Two turns of a thread, of two agents each. A thread may go on, and so may a team.
        ("langgraph_multi_agent.py", None, 4, 1, 0),
        ("autogen_team.py", "autogen", 2, 2, 0),
        ("crewai_crew.py", "crewai", 2, 2, 2),
    ],
    ids=["langgraph", "autogen", "crewai"],
)
def test_the_engine_knows_the_sessions_of_an_unchanged_program(
    stack: Stack,
    tmp_path: Path,
    example: str,
    environment: str | None,
    requests: int,
    sessions: int,
    ended: int,
) -> None:
    python = (
        Path(sys.executable) if environment is None else FRAMEWORKS / environment / "bin/python"
    )
    if not python.exists():
        pytest.skip(f"`make test-frameworks ARGS={environment}` builds its environment")
    with Watcher(stack) as watcher:
        known = set(watcher.seen)
        finished = subprocess.run(
            [str(python), str(ROOT / "examples" / example)],
            env=variables(stack, tmp_path),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert finished.returncode == 0, finished.stderr
        assert finished.stdout.strip()
        assert "saga_sdk" not in finished.stderr, "it warned of something"
        watcher.wait_until(lambda: len(watcher.seen - known) >= sessions)
        # A pause after each request, and the ends.
        watcher.wait_until(lambda: watcher.gained("notices") == requests + ended)
    assert len(watcher.seen - known) == sessions
    assert watcher.gained("requests") == requests
    if environment is None:
        assert watcher.seen - known == {"chat-1"}
        # Its second turn found the first one's KV.
        assert watcher.gained("cached_tokens") > 0


def variables(stack: Stack, home: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "SAGA_BASE_URL": f"{stack.gateway.url}/v1",
        "SAGA_MODEL": MODEL,
        "NO_PROXY": "127.0.0.1,localhost",
        "HOME": str(home),
        "CREWAI_DISABLE_TELEMETRY": "true",
        "CREWAI_TRACING_ENABLED": "false",
        "CREWAI_STORAGE_DIR": str(home),
        "LITELLM_LOCAL_MODEL_COST_MAP": "true",
    }
