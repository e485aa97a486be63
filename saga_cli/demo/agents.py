"""The demo's agents: LangChain's `create_agent` with two real tools of different duration."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, SecretStr

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("saga_core", "saga_sdk", "saga_gateway", "gpu_backend", "saga_cli")
MODEL = "smollm2"

_MAX_OBSERVATION_CHARS = 300
_TASK_CHARS = 11_000
_MAX_OUTPUT_TOKENS = 120
_MAX_ANSWER_TOKENS = 24

SYSTEM_PROMPT = """\
You are a software engineer who maintains a Python project. You work step by step. In each step \
you call one tool, read what it returns, and decide what to look at next. When you have seen \
enough you answer in one short sentence.

Tools:
search(query): lines of the project's source that contain the query, one word in lower \
case, with the file and the line number. Use it to find where something is defined and used.
run(snippet): runs a prepared Python program over the project and vLLM and returns what it \
prints. largest_classes lists the classes with the most methods; \
longest_functions lists the functions with the most lines; imports lists what every module imports.

Rules: read before you conclude; name files and line numbers; do not repeat a call; prefer the \
smallest change that solves the problem; never invent a file that you have not seen.
"""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Search(_Strict):
    query: Literal[
        "session", "worker", "notice", "prefix", "evict", "policy", "header", "pause", "clock"
    ]


class _Snippet(_Strict):
    snippet: Literal["largest_classes", "longest_functions", "imports"]


def _source_files() -> list[Path]:
    return sorted(file for name in PACKAGES for file in (REPOSITORY / name).rglob("*.py"))


def library_files() -> list[Path]:
    """The engine's and the models' source in vLLM, there wherever the demo runs: 1,200 files."""
    spec = find_spec("vllm")
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    parts = [Path(folder) / part for folder in folders for part in ("v1", "model_executor")]
    return sorted(file for part in parts for file in part.rglob("*.py"))


@tool("search", args_schema=_Search)
def search(query: str) -> str:
    """Find lines of the project's source that contain the query."""
    found = [
        f"{file.relative_to(REPOSITORY)}:{number}: {line.strip()}"
        for file in _source_files()
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if query in line.lower()
    ]
    return "\n".join(found)[:_MAX_OBSERVATION_CHARS] or "no line contains it"


@tool("run", args_schema=_Snippet)
def run(snippet: str) -> str:
    """Run a prepared Python program over the project's source and vLLM's."""
    done = subprocess.run(
        # Low priority: on one machine the tools must not slow the model server down.
        [
            "nice",
            "-n",
            "10",
            sys.executable,
            "-I",
            str(Path(__file__).with_name("snippets.py")),
            snippet,
        ],
        input="\n".join(map(str, [*_source_files(), *library_files()])),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return (done.stdout or done.stderr)[:_MAX_OBSERVATION_CHARS]


class PlannedTools(AgentMiddleware):
    """Forces one tool per step, in turn, and drops the tools on the last one.

    A 135M-parameter model does not decide for itself when to stop; the plan gives every run of the
    demo the same number of steps.
    """

    def __init__(self, tool_steps: int) -> None:
        super().__init__()
        self._tool_steps = tool_steps

    async def awrap_model_call(
        self,
        request: ModelRequest,
        handler: Callable[[ModelRequest], Awaitable[ModelResponse]],
    ) -> ModelResponse:
        """Called by LangChain around every LLM call."""
        step = sum(isinstance(message, AIMessage) for message in request.messages)
        if step >= self._tool_steps:
            short = {"max_completion_tokens": _MAX_ANSWER_TOKENS}
            return await handler(request.override(tools=[], tool_choice=None, model_settings=short))
        planned = (run, search)[step % 2]
        return await handler(
            request.override(tool_choice=planned.name, model_settings={"strict": True})
        )


@dataclass(frozen=True, slots=True)
class AgentResult:
    """One finished task.

    Attributes:
        steps: LLM calls.
        prompt_tokens: over all steps.
        cached_tokens: of these, found in the worker's prefix cache.
        last_prompt_tokens: prompt of the last step, the session's size.
    """

    steps: int
    prompt_tokens: int
    cached_tokens: int
    last_prompt_tokens: int


def build_agent(base_url: str, tool_steps: int, seed: int) -> Any:
    """An agent on the OpenAI-compatible endpoint at ``base_url`` (without ``/v1``)."""
    model = ChatOpenAI(
        model=MODEL,
        base_url=f"{base_url}/v1",
        api_key=SecretStr("none"),
        temperature=0,
        seed=seed,
        max_completion_tokens=_MAX_OUTPUT_TOKENS,
        max_retries=0,
        timeout=600,
    )
    return create_agent(
        model,
        tools=[search, run],
        system_prompt=SYSTEM_PROMPT,
        middleware=[PlannedTools(tool_steps)],
    )


async def run_task(agent: Any, prompt: str, on_step: Callable[[], None]) -> AgentResult:
    """Run one task to its end; ``on_step`` is called after every LLM call."""
    usages: list[dict[str, Any]] = []
    async for update in agent.astream(
        {"messages": [{"role": "user", "content": prompt}]}, stream_mode="updates"
    ):
        for node in update.values():
            for message in (node or {}).get("messages", ()):
                if isinstance(message, AIMessage):
                    usages.append(dict(message.usage_metadata or {}))
                    on_step()
    return AgentResult(
        steps=len(usages),
        prompt_tokens=sum(usage["input_tokens"] for usage in usages),
        cached_tokens=sum(
            (usage.get("input_token_details") or {}).get("cache_read") or 0 for usage in usages
        ),
        last_prompt_tokens=usages[-1]["input_tokens"],
    )


def task_prompt(number: int) -> str:
    """The text of task ``number``: a question about a part of the project, and its source."""
    files = _source_files()
    start = number * 7 % len(files)
    text = ""
    for file in [*files[start:], *files[:start]]:
        text += f"# {file.relative_to(REPOSITORY)}\n{file.read_text()}\n"
        if len(text) >= _TASK_CHARS:
            break
    return (
        f"Task {number}. A user reports that {files[start].name} surprises him when it is used "
        f"twice. Find out what it does and who depends on it. The source begins:\n\n"
        f"{text[:_TASK_CHARS]}\n"
    )
