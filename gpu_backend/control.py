"""Messages from a worker's HTTP server to its engines' schedulers."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from saga_core.errors import SagaError

logger = logging.getLogger("vllm.saga")

Answer: TypeAlias = dict[str, Any]
Ask: TypeAlias = Callable[[dict[str, Any]], Awaitable[list[Answer]]]
Sleep: TypeAlias = Callable[[float], Awaitable[object]]

MIN_TICK_S = 0.01
MAX_TICK_S = 1.0


class EngineSilent(SagaError):
    """The engine gives no answer; the message says why."""


class EngineControl:
    """The way to every data-parallel engine of a worker.

    Args:
        engine_core: vLLM's client of the engine processes; None: the server has no engine.
    """

    def __init__(self, engine_core: Any) -> None:
        self._engine_core = engine_core

    async def ask(self, message: dict[str, Any]) -> list[Answer]:
        """Send a message to each engine, between two of its steps; returns an answer of each.

        Raises:
            EngineSilent: there is no engine, it has died, or it does not know the plugin.
        """
        if self._engine_core is None:
            raise EngineSilent("this server has no engine")
        try:
            answers = await self._engine_core.call_utility_all_async(
                "saga_control", json.dumps(message)
            )
        except Exception as error:  # Whatever it is, the client is to be told.
            raise EngineSilent(f"the engine does not answer the SAGA plugin: {error}") from error
        return [json.loads(answer) for answer in answers]


async def keep_ticking(
    ask: Ask, stopping: Callable[[], bool], sleep: Sleep = asyncio.sleep
) -> None:
    """Let idle engines act in time, as a prefetch must; a busy one acts by itself at each step.

    Each answer says in how many seconds something is due. Ends when the server stops, when no
    engine has the plugin on, and for good when an engine does not answer.
    """
    while not stopping():
        try:
            answers = await ask({"tick": True})
        except EngineSilent as error:
            if not stopping():
                logger.error("SAGA starts no more prefetches on an idle engine: %s", error)
            return
        if not any(answer.get("enabled", True) for answer in answers):
            logger.warning("SAGA starts no prefetches: the plugin is off")
            return
        due_s = [answer.get("wake_in_s") for answer in answers]
        wake_in_s = min((due for due in due_s if due is not None), default=MAX_TICK_S)
        await sleep(min(max(wake_in_s, MIN_TICK_S), MAX_TICK_S))
