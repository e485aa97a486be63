"""Agents that know nothing of SAGA, on the real engine, beside the same agents with hints."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from saga_cli.demo.model import prepare_model
from saga_cli.processes import Service, free_port

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

WAVE, WAVES, TOOL_STEPS = 8, 4, 4
AGENTS = WAVE * WAVES
POOL_BLOCKS, BLOCK_TOKENS = 112, 32
PAUSES_S = {"look": 0.1, "build": 1.5}
WORKFLOW = "mender"
WORDS = """parser token index buffer stream module import return value error test file line path
loop queue thread socket cache block table record field string number list tree node edge graph"""


@dataclass
class Arm:
    """A worker with a gateway of its own, and whether agents say who they are."""

    worker: Service
    gateway: Service
    has_hints: bool


def _worker(model: Path, folder: Path) -> Service:
    port = free_port()
    options = {
        "--served-model-name": "m",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--block-size": str(BLOCK_TOKENS),
        "--num-gpu-blocks-override": str(POOL_BLOCKS),
        "--max-model-len": "2048",
        "--max-num-seqs": "8",
        "--chat-template": str(Path(sys.modules[prepare_model.__module__].__file__ or "").with_name(
            "chat_template.jinja"
        )),
        "--tool-call-parser": "hermes",
        "--tool-strict-level": "parameter",
        "--structured-outputs-config": '{"backend": "xgrammar", "disable_any_whitespace": true}',
    }  # fmt: skip
    command = [sys.executable, "-m", "saga_cli.main", "worker", str(model)]
    command += ["--enforce-eager", "--enable-auto-tool-choice", "--enable-prompt-tokens-details"]
    command += [word for pair in options.items() for word in pair]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return Service("worker", command, port, folder / f"worker-{port}.log", environment)


@pytest.fixture(scope="module")
def arms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Arm]]:
    """One with hints and one without, neither of which has seen anything yet."""
    folder, model = tmp_path_factory.mktemp("bare"), prepare_model()
    made = []
    with ExitStack() as stack:
        for has_hints in (True, False):
            worker, port = _worker(model, folder), free_port()
            command = [sys.executable, "-m", "saga_cli.main", "gateway", "--port", str(port)]
            command += ["--worker", worker.url]
            gateway = Service("gateway", command, port, folder / f"gateway-{port}.log")
            made.append(Arm(worker, gateway, has_hints))
            worker.start()
            stack.callback(worker.stop)
            asyncio.run(worker.wait_ready(240))
            gateway.start()
            stack.callback(gateway.stop)
            asyncio.run(gateway.wait_ready(60))
        yield made


def _tools() -> list[dict[str, Any]]:
    size = {"type": "integer", "minimum": 0, "maximum": 9}
    parameters = {"type": "object", "properties": {"n": size}, "required": ["n"]}
    schema = {**parameters, "additionalProperties": False}
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
        for name in PAUSES_S
    ]


async def _agent(client: openai.AsyncOpenAI, events: httpx.AsyncClient, arm: Arm, n: int) -> None:
    rng = random.Random(n)

    def text(count: int) -> str:
        return " ".join(rng.choices(WORDS.split(), k=count))

    messages: list[Any] = [
        {"role": "system", "content": "You are an agent that mends programs with its tools."},
        {"role": "user", "content": f"Mend this: {text(150)}"},
    ]
    session = f"agent-{n}"
    for step in range(TOOL_STEPS + 1):
        headers = {}
        if arm.has_hints:
            headers = {"X-SAGA-Session-ID": session, "X-SAGA-Workflow-ID": WORKFLOW}
            headers["X-SAGA-Step"] = str(step)
        tool = ("look", "build")[step % 2]
        calls = step < TOOL_STEPS
        choice = {"type": "function", "function": {"name": tool}} if calls else "none"
        answer = await client.chat.completions.create(
            model="m",
            messages=messages,
            tools=_tools(),  # type: ignore[arg-type]
            tool_choice=choice,  # type: ignore[arg-type]
            max_completion_tokens=64,
            temperature=0,
            extra_headers=headers,
        )
        message = answer.choices[0].message
        if not calls:
            break
        assert message.tool_calls, f"step {step} called no tool: {message}"
        messages.append(message.model_dump(exclude_none=True))
        await asyncio.sleep(PAUSES_S[tool] * rng.uniform(0.8, 1.2))
        if arm.has_hints:
            await events.post(
                "/saga/v1/events", json=[{"event": "tool_end", "session_id": session}]
            )
        call_id = message.tool_calls[0].id
        messages.append({"role": "tool", "tool_call_id": call_id, "content": text(120)})
    if arm.has_hints:
        await events.post("/saga/v1/events", json=[{"event": "session_end", "session_id": session}])


async def _play(arm: Arm) -> dict[str, Any]:
    """Agents on one worker; what it counted meanwhile."""
    url = arm.gateway.url
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=300) as client,
        httpx.AsyncClient(base_url=url) as events,
    ):
        for first in range(0, AGENTS, WAVE):
            wave = range(first, first + WAVE)
            await asyncio.gather(*(_agent(client, events, arm, n) for n in wave))
        state = (await events.get(f"{arm.worker.url}/saga/v1/state")).json()
    counters: dict[str, Any] = state["counters"]
    return counters


def _graph(arm: Arm) -> dict[str, Any]:
    """The graph of the one workflow that the gateway has learned."""
    listed = httpx.get(f"{arm.gateway.url}/saga/v1/workflows").json()["workflows"]
    (workflow,) = [each["workflow"] for each in listed]
    shown: dict[str, Any] = httpx.get(f"{arm.gateway.url}/saga/v1/workflows/{workflow}/aeg").json()
    return shown


def test_agents_without_hints_are_served_nearly_as_well(arms: list[Arm]) -> None:
    counted = []
    for arm in arms:
        began_s = time.monotonic()
        counted.append(asyncio.run(_play(arm)))
        print(f"hints {arm.has_hints}: {time.monotonic() - began_s:.1f} s, {counted[-1]}")
    hinted, bare = counted
    steps = AGENTS * (TOOL_STEPS + 1)
    graphs = {arm.has_hints: _graph(arm) for arm in arms}
    for graph in graphs.values():
        seen = {node["id"]: round(node["count"]) for node in graph["nodes"]}
        assert seen == {"look": 2 * AGENTS, "build": 2 * AGENTS, "step": AGENTS}
        after = {(edge["from"], edge["to"]): edge["probability"] for edge in graph["edges"]}
        assert after["look", "build"] == pytest.approx(1.0)
        by_tool = {node["id"]: node for node in graph["nodes"]}
        assert by_tool["look"]["pause_p50_s"] < 0.5 < 1.0 < by_tool["build"]["pause_p50_s"] < 3.0
    for arm in arms:
        stats = httpx.get(f"{arm.gateway.url}/health").json()["stats"]
        # A pause after each tool call; hints tell of ends and tools' ends besides.
        sent = stats["notices_sent"] + stats["notices_dropped"]
        assert sent >= AGENTS * TOOL_STEPS * (2 if arm.has_hints else 1)
    state = httpx.get(f"{arms[1].worker.url}/saga/v1/state").json()
    assert state["held"]["sessions"] == AGENTS, "a session for each agent, and none besides"
    prompts = hinted["prompt_tokens"]
    assert bare["prompt_tokens"] == pytest.approx(prompts, rel=0.02), steps
    # A hundredth of the prompts is what one block for each step comes to.
    assert bare["regret_tokens"] <= 1.3 * hinted["regret_tokens"] + 0.01 * prompts
