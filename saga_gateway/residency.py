"""How much of which session the workers hold, asked when somebody wants to see it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from saga_gateway.engines import EngineKind
from saga_gateway.workers import Worker, Workers

_PATH = "/saga/v1/state?sessions=1000"
_TIMEOUT_S = 0.5
_FRESH_S = 1.5

Ask = Callable[[Worker, str, float], Awaitable[tuple[int, bytes]]]
"""Asks a worker for a path, for so many seconds at most; returns the status and the body."""


class Residency:
    """The sessions that SAGA's workers hold most of, with their tokens by tier.

    What is known is up to ``_FRESH_S`` old. A worker that says nothing in time counts as unknown.
    """

    def __init__(self, workers: Workers, ask: Ask) -> None:
        self._workers = workers
        self._ask = ask
        self._held: dict[str, dict[str, tuple[int, int]]] = {}
        self._asked_s = float("-inf")

    def of(self, session_id: str, worker_id: str | None) -> tuple[int, int] | None:
        """Tokens of the session in the worker's GPU and host memory; None: it has not said."""
        held = self._held.get(worker_id or "")
        return held.get(session_id, (0, 0)) if held else None

    async def refresh(self) -> None:
        """Ask the workers, unless that was done a moment ago."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._asked_s < _FRESH_S:
            return
        asked = [worker for worker in self._workers if _can_say(worker)]
        answers = await asyncio.gather(*(self._held_by(worker) for worker in asked))
        pairs = zip(asked, answers, strict=True)
        self._held = {worker.worker_id: held for worker, held in pairs}
        self._asked_s = loop.time()

    async def _held_by(self, worker: Worker) -> dict[str, tuple[int, int]]:
        try:
            status, body = await self._ask(worker, _PATH, _TIMEOUT_S)
            return _read(orjson.loads(body)) if status == 200 else {}
        except Exception:  # noqa: BLE001 - whatever a worker answers, the rest is shown
            return {}


def _can_say(worker: Worker) -> bool:
    is_saga = worker.engine is not None and worker.engine.kind is EngineKind.SAGA
    return is_saga and worker.healthy and not worker.unreachable


def _read(state: Any) -> dict[str, tuple[int, int]]:
    return {
        str(each["session_id"]): (int(each.get("gpu_tokens", 0)), int(each.get("host_tokens", 0)))
        for each in state.get("sessions", ())
    }
