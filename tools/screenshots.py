#!/usr/bin/env python3
"""Write the pictures of the dashboard in docs/images: a gateway over stand-in workers, in Chromium.

The workers and their answers are scripted, and the gateway's clock is moved by hand, so that a
run takes seconds and shows about the same each time. Run it from the repository's folder:
``.venv/bin/python tools/screenshots.py``.
"""

from __future__ import annotations

import asyncio
import io
import json
import random
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import uvicorn
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from saga_gateway.app import Gateway, GatewaySettings, server_config  # noqa: E402
from saga_gateway.identity import new_key  # noqa: E402
from tests.gateway.conftest import Clock, Exchange, StandInWorker, completion  # noqa: E402
from tools.headless_chromium import headless  # noqa: E402

IMAGES = ROOT / "docs" / "images"
MAX_IMAGE_BYTES = 200_000
# Ports that look like a worker's own.
_PORTS = (8001, 8002, 8003)
_CHAT = "/v1/chat/completions"
_MOST_STEPS = 40
# Until what hangs has come to a worker or to the queue.
_SETTLE_S = 0.4

# What follows a step of the workflow, with probabilities; None: the task is done.
_Steps = dict[str | None, list[tuple[str | None, float]]]
_SWE: _Steps = {
    None: [("search", 1.0)],
    "search": [("read_file", 0.8), ("search", 0.2)],
    "read_file": [("edit", 0.55), ("search", 0.2), ("read_file", 0.25)],
    "edit": [("run_tests", 0.9), ("read_file", 0.1)],
    "run_tests": [("edit", 0.45), (None, 0.55)],
}
_WEB: _Steps = {
    None: [("web_search", 1.0)],
    "web_search": [("fetch", 0.85), (None, 0.15)],
    "fetch": [("fetch", 0.4), ("web_search", 0.25), (None, 0.35)],
}
_WORKFLOWS = {"swe-agent": ("coder", _SWE), "web-research": ("researcher", _WEB)}
_MEDIAN_S = {
    "search": 0.4,
    "read_file": 0.15,
    "edit": 0.6,
    "run_tests": 14.0,
    "web_search": 1.8,
    "fetch": 3.2,
}


@dataclass
class Scene:
    """A gateway with a past: what the pictures show."""

    url: str
    key: str


class _Worker(StandInWorker):
    """A stand-in that says what it holds of sessions; each answer takes a second and a half."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.script = self._answer_chat
        self.steps = []
        self._clock = clock
        self._held: dict[str, int] = {}

    async def _answer_chat(self, exchange: Exchange) -> None:
        """Call the tools that the request's body asks for; a request that is to hang does."""
        body = json.loads(exchange.body)
        if body.get("hangs"):
            await asyncio.Event().wait()
        self._clock.advance(1.5)
        answer = completion(*body["calls"])  # type: ignore[no-untyped-call]
        answer["usage"] = {
            "prompt_tokens": body["prompt"],
            "completion_tokens": 180,
            "total_tokens": body["prompt"] + 180,
            "prompt_tokens_details": {"cached_tokens": body["cached"]},
        }
        session_id = exchange.header("x-session-id")  # type: ignore[no-untyped-call]
        self._held[session_id] = body["prompt"] + 180
        await exchange.answer(answer)

    def _self_portrait(self, path: str) -> dict[str, Any] | None:
        portrait: dict[str, Any] | None = super()._self_portrait(path)
        if portrait is None or path != "/saga/v1/state":
            return portrait
        held = [
            {
                "session_id": session_id,
                "gpu_tokens": tokens - tokens // (3 + at % 4),
                "host_tokens": tokens // (3 + at % 4),
            }
            for at, (session_id, tokens) in enumerate(self._held.items())
        ]
        return portrait | {"sessions": held}


@asynccontextmanager
async def _workers(clock: Clock) -> AsyncIterator[list[_Worker]]:
    workers = []
    for at, port in enumerate(_PORTS):
        worker = _Worker(clock)
        worker.port = port if _is_free(port) else 0
        worker.facts = _facts(at)
        await worker.start()
        workers.append(worker)
    try:
        yield workers
    finally:
        for worker in workers:
            await worker.stop()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def _facts(at: int) -> dict[str, Any]:
    """What a worker says of itself."""
    prompt, pressure = 1_830_000 + 210_000 * at, (0.81, 0.58, 0.34)[at]
    return {
        "queue": {"running": 1, "waiting": 0},
        "max_running": 64,
        "num_blocks": 24_576,
        "block_tokens": 16,
        "free_blocks": (6_100, 11_200, 17_900)[at],
        "pressure": pressure,
        "policy": "saga",
        "prefill_tokens_per_s": 10_400.0 + 300 * at,
        "counters": {
            "prompt_tokens": prompt,
            "cached_tokens": int(prompt * (0.78, 0.83, 0.86)[at]),
            "host_cached_tokens": int(prompt * 0.06),
            "regret_tokens": int(prompt * (0.031, 0.014, 0.006)[at]),
        },
        "host": {"num_blocks": 98_304, "held_blocks": (61_000, 40_000, 17_000)[at]},
        "prefetch": {"started": 96 - 20 * at, "useful": 84 - 19 * at, "late": 4, "wasted": 8 - at},
    }


class _Traffic:
    """Sessions of two workflows of two tenants, one step after the other."""

    def __init__(self, client: httpx.AsyncClient, clock: Clock, keys: dict[str, str]) -> None:
        self._client = client
        self._clock = clock
        self._keys = keys
        self._rng = random.Random(7)
        self.hanging: list[asyncio.Task[None]] = []

    async def run(self, tenant: str, workflow: str, number: int, last: str | None = None) -> None:
        """A task to its end, or until it has called the tool ``last``, for which it waits."""
        agent, after = _WORKFLOWS[workflow]
        tool: str | None = None
        for step in range(_MOST_STEPS):
            names, weights = zip(*after[tool], strict=True)
            tool = self._rng.choices(names, weights)[0]
            if last is not None and tool is None:
                tool = last
            await self._chat(tenant, workflow, number, step, agent, tool)
            if tool is None or tool == last:
                return
            self._clock.advance(_MEDIAN_S[tool] * self._rng.lognormvariate(0.0, 0.7))

    def pass_s(self, seconds: float) -> None:
        """Let time go on."""
        self._clock.advance(seconds)

    def hang(self, tenant: str, workflow: str, number: int) -> None:
        """A request that stays."""
        agent = _WORKFLOWS[workflow][0]
        chat = self._chat(tenant, workflow, number, 0, agent, None, hangs=True)
        self.hanging.append(asyncio.create_task(chat))

    async def _chat(
        self,
        tenant: str,
        workflow: str,
        number: int,
        step: int,
        agent: str,
        tool: str | None,
        *,
        hangs: bool = False,
    ) -> None:
        prompt = 2_400 + 900 * step
        body = {
            "model": "m",
            "calls": [tool] if tool else [],
            "prompt": prompt,
            "cached": prompt - 900 if step else 1_600,
            "hangs": hangs,
        }
        headers = {
            "Authorization": f"Bearer {self._keys[tenant]}",
            "X-SAGA-Workflow-ID": workflow,
            "X-SAGA-Task-ID": f"{workflow}-{number}",
            "X-SAGA-Session-ID": f"{workflow}-{number}",
            "X-SAGA-Node": agent,
            "X-SAGA-Step": str(step),
        }
        if tool is None and not hangs:
            headers["X-SAGA-Final"] = "1"
        await self._client.post(_CHAT, json=body, headers=headers)


@asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[Scene]:
    """A gateway with traffic behind it, and some before it."""
    keys, entries = {}, []
    for tenant, weight, admin in (("team-a", 2.0, False), ("team-b", 1.0, False), ("ops", 1, True)):
        keys[tenant], entry = new_key(tenant)
        entries.append(f"{entry}weight = {float(weight)}\nadmin = {str(admin).lower()}\n")
    keys_file = folder / "keys.toml"
    keys_file.write_text("\n".join(entries))
    async with AsyncExitStack() as stack:
        clock = Clock()
        workers = await stack.enter_async_context(_workers(clock))
        settings = GatewaySettings(
            tuple(worker.url for worker in workers),
            keys_file=str(keys_file),
            max_worker_requests=4,
            slow_start_s=0.0,
            drain_s=0,
        )
        server = uvicorn.Server(server_config(Gateway(settings, clock=clock)))
        listener = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=url, trust_env=False, timeout=60)
        )
        while not all((server.started, *(each.watchers for each in workers))):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        traffic = _Traffic(client, clock, keys)
        await _live(traffic)
        try:
            yield Scene(url, keys["ops"])
        finally:
            for task in traffic.hanging:
                task.cancel()
            await asyncio.gather(*traffic.hanging, return_exceptions=True)
            server.should_exit = True
            await serving


async def _live(traffic: _Traffic) -> None:
    for number in range(40):
        await traffic.run("team-a", "swe-agent", number)
        if number % 2:
            await traffic.run("team-b", "web-research", number)
    for number in range(100, 102):
        traffic.hang("team-a", "swe-agent", number)
        traffic.hang("team-b", "web-research", number)
    await asyncio.sleep(_SETTLE_S)
    for number in range(40, 45):
        await traffic.run("team-a", "swe-agent", number, last="run_tests")
        if number % 2:
            await traffic.run("team-b", "web-research", number, last="fetch")
    for number in range(102, 105):
        traffic.hang("team-a", "swe-agent", number)
        traffic.hang("team-b", "web-research", number)
    await asyncio.sleep(_SETTLE_S)
    traffic.pass_s(1.2)


def _shoot(at: Scene, folder: Path) -> None:
    """Write the pictures."""
    pages: Sequence[tuple[str, str, int, int]] = (
        ("overview", "/dashboard", 1400, 1560),
        ("sessions", "/dashboard/sessions", 1400, 760),
        ("workflow", "/dashboard/workflows/swe-agent?tenant=team-a", 1200, 1180),
        ("decisions", "/dashboard/decisions", 1200, 560),
        ("phone", "/dashboard", 400, 900),
    )
    folder.mkdir(parents=True, exist_ok=True)
    host = at.url.removeprefix("http://")
    with headless() as browser:
        for name, path, width, height in pages:
            browser.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride",
                {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
            )
            browser.get(f"http://operator:{at.key}@{host}{path}")
            picture = folder / f"dashboard-{name}.png"
            _save(browser.get_screenshot_as_png(), picture)
            size = picture.stat().st_size
            print(f"{picture.relative_to(ROOT)}: {size / 1000:.0f} kB")
            if size > MAX_IMAGE_BYTES:
                raise SystemExit(f"{picture} is larger than {MAX_IMAGE_BYTES} bytes")


def _save(png: bytes, path: Path) -> None:
    """Write a picture with as few colours as it needs: a fifth of its size."""
    with Image.open(io.BytesIO(png)) as image:
        image.convert("RGB").quantize(128).save(path, optimize=True)


async def main() -> None:
    """Set the scene and take the pictures."""
    with TemporaryDirectory() as keys:
        async with scene(Path(keys)) as at:
            await asyncio.to_thread(_shoot, at, IMAGES)


if __name__ == "__main__":
    asyncio.run(main())
