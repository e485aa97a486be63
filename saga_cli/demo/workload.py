"""What both arms of the demo do: agents in a closed loop, one-off chat beside them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from openai import AsyncOpenAI

from saga_cli.demo.agents import (
    MODEL,
    AgentResult,
    build_agent,
    library_files,
    run_task,
    task_prompt,
)

AGENTS = 4
TASKS_PER_AGENT = 2
TOOL_STEPS = 3
STEPS_PER_TASK = TOOL_STEPS + 1

BLOCK_TOKENS = 32
POOL_BLOCKS = 540
MAX_MODEL_TOKENS = 6144

CHATS = 1

_CHAT_CHARS = 4_000
_CHAT_OUTPUT_TOKENS = 4
_CHAT_THINK_S = 0.75


@dataclass(slots=True)
class Progress:
    """What has happened so far in one arm; the live view reads it."""

    steps: int = 0
    tasks: int = 0
    chats: int = 0
    chat_prompt_tokens: int = 0
    task_times_s: list[float] = field(default_factory=list)
    results: list[AgentResult] = field(default_factory=list)


async def run_workload(base_url: str, seed: int, progress: Progress) -> None:
    """Run every agent's tasks, and chat until they are done. The first failure ends it all."""
    chats = {
        asyncio.create_task(_chat(base_url, number, seed, progress)) for number in range(CHATS)
    }
    agents = {
        asyncio.create_task(_agent(base_url, number, seed, progress)) for number in range(AGENTS)
    }
    pending = set(agents)
    try:
        while pending:
            done, _ = await asyncio.wait(chats | pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # Raises what failed; the chat never finishes otherwise.
            pending -= done
    finally:
        for task in chats | agents:
            task.cancel()
        await asyncio.gather(*chats, *agents, return_exceptions=True)


async def _agent(base_url: str, number: int, seed: int, progress: Progress) -> None:
    agent = build_agent(base_url, TOOL_STEPS, seed)
    for turn in range(TASKS_PER_AGENT):
        prompt = task_prompt(turn * AGENTS + number)
        started_s = monotonic()
        result = await run_task(agent, prompt, _count_step(progress))
        progress.task_times_s.append(monotonic() - started_s)
        progress.results.append(result)
        progress.tasks += 1


def _count_step(progress: Progress) -> Callable[[], None]:
    def count() -> None:
        progress.steps += 1

    return count


async def _chat(base_url: str, number: int, seed: int, progress: Progress) -> None:
    """One stranger after the other asks once, about a text of his own, and never comes back."""
    client: Any = AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=600)
    rng = random.Random(seed * CHATS + number)
    texts = library_files()
    async with client:
        while True:
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": _question(progress.chats, texts, rng)}],
                max_completion_tokens=_CHAT_OUTPUT_TOKENS,
                temperature=0,
                seed=seed,
                stream=True,
                stream_options={"include_usage": True},
            )
            async for chunk in stream:
                if chunk.usage is not None:
                    progress.chat_prompt_tokens += chunk.usage.prompt_tokens
            progress.chats += 1
            await asyncio.sleep(_CHAT_THINK_S)


def _question(number: int, texts: Sequence[Path], rng: random.Random) -> str:
    text = ""
    while len(text) < _CHAT_CHARS:
        text += rng.choice(texts).read_text(errors="replace")
    start = rng.randrange(len(text) - _CHAT_CHARS + 1)
    return f"Question {number}: what is this about?\n\n{text[start : start + _CHAT_CHARS]}"
