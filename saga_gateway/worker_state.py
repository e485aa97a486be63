"""What SAGA's workers say of themselves all the time: the stream of their state."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from saga_gateway.answers import Usage
from saga_gateway.engines import EngineKind
from saga_gateway.workers import Worker, Workers, WorkerTasks

logger = logging.getLogger(__name__)

WATCH_PATH = "/saga/v1/state:watch?interval_s=1&steps=1"
_AGAIN_S = 1.0

Watch = Callable[[Worker, str], AsyncIterator[bytes]]
"""Opens a stream of server-sent events at a worker: the data of each event."""


@dataclass(frozen=True, slots=True)
class StepTold:
    """What a worker says of a request that it has answered."""

    session_id: str
    usage: Usage


@dataclass(frozen=True, slots=True)
class StateTold:
    """What a worker says of itself; 0 where it does not.

    Attributes:
        requests: that run and that wait in it.
        max_running: how many it runs at a time.
        capacity_tokens: of its KV pool.
        free_tokens: of these, free or evictable; None: it does not say.
        prefill_tokens_per_s: as it measures it.
        running, waiting: of its requests.
        pressure: KV that sessions hold ÷ KV pool; None: it does not say.
        host_capacity_tokens, host_held_tokens: of its host tier.
        counters: its totals since it started, by name; ``prefetch``: how its prefetches ended.
        policy: of its retention; "": it does not say.
    """

    requests: int = 0
    max_running: int = 0
    capacity_tokens: int = 0
    free_tokens: int | None = None
    prefill_tokens_per_s: float = 0.0
    running: int = 0
    waiting: int = 0
    pressure: float | None = None
    host_capacity_tokens: int = 0
    host_held_tokens: int = 0
    counters: Mapping[str, float] = field(default_factory=dict)
    prefetch: Mapping[str, float] = field(default_factory=dict)
    policy: str = ""


class WorkerStates:
    """Follows the state of every worker that has SAGA's control API.

    A stream that breaks is opened again; what was said meanwhile is lost.

    Args:
        told: is given each request that a worker has answered, with the worker's id.
        heard: is given each state that a worker tells, with the worker's id.
        ticked: is called about once a second while there is a worker.
    """

    def __init__(
        self,
        workers: Workers,
        watch: Watch,
        told: Callable[[str, StepTold], None],
        heard: Callable[[str, StateTold], None],
        ticked: Callable[[], None],
    ) -> None:
        self._watch = watch
        self._told = told
        self._heard = heard
        self._ticked = ticked
        self._followed: set[str] = set()
        self._tasks = WorkerTasks(workers, self._follow)

    def follows(self, worker_id: str) -> bool:
        """Whether the worker's stream is open."""
        return worker_id in self._followed

    async def follow(self) -> None:
        """Follow the workers that there are now, and no others."""
        await self._tasks.follow()

    async def stop(self) -> None:
        """Follow none."""
        await self._tasks.stop()

    async def _follow(self, worker: Worker) -> None:
        while True:
            if worker.engine is not None and worker.engine.kind is EngineKind.SAGA:
                try:
                    await self._follow_once(worker)
                except Exception as error:  # noqa: BLE001 - nothing that it says may end this
                    logger.debug("state of worker %s: %s", worker.worker_id, type(error).__name__)
                finally:
                    self._followed.discard(worker.worker_id)
            self._ticked()
            await asyncio.sleep(_AGAIN_S)

    async def _follow_once(self, worker: Worker) -> None:
        seen: dict[str, int] | None = None
        async for data in self._watch(worker, WATCH_PATH):
            state = orjson.loads(data)
            steps = _steps(state)
            if seen is None:
                # What it did before somebody followed is nobody's any more.
                seen = {engine: number for engine, number, _ in steps}
                self._followed.add(worker.worker_id)
            for engine, number, step in steps:
                if number > seen.get(engine, -1):
                    seen[engine] = number
                    self._told(worker.worker_id, step)
            known = _state(state)
            if known is not None:
                self._heard(worker.worker_id, known)
            self._ticked()


def _state(state: Any) -> StateTold | None:
    """What a state says of the worker as a whole; None: it is another version's."""
    try:
        block_tokens, free_blocks = state.get("block_tokens", 0), state.get("free_blocks")
        return StateTold(
            requests=int(state["queue"]["running"] + state["queue"]["waiting"]),
            max_running=int(state.get("max_running", 0)),
            capacity_tokens=int(state.get("num_blocks", 0) * block_tokens),
            free_tokens=None if free_blocks is None else int(free_blocks * block_tokens),
            prefill_tokens_per_s=float(state.get("prefill_tokens_per_s") or 0.0),
            **_details(state, block_tokens),
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _details(state: dict[str, Any], block_tokens: float) -> dict[str, Any]:
    """What is shown and nothing is decided by: a part of another version's words is left out."""
    queue, host, policy = _amounts(state, "queue"), _amounts(state, "host"), state.get("policy")
    return {
        "running": int(queue.get("running", 0)),
        "waiting": int(queue.get("waiting", 0)),
        "pressure": _numbers(state).get("pressure"),
        "host_capacity_tokens": int(host.get("num_blocks", 0) * block_tokens),
        "host_held_tokens": int(host.get("held_blocks", 0) * block_tokens),
        "counters": _amounts(state, "counters"),
        "prefetch": _amounts(state, "prefetch"),
        "policy": policy[:64] if isinstance(policy, str) else "",
    }


def _amounts(state: dict[str, Any], part: str) -> dict[str, float]:
    """The numbers of a part of the state, by name."""
    found = state.get(part)
    return _numbers(found) if isinstance(found, dict) else {}


def _numbers(of: dict[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in of.items()
        if isinstance(value, int | float) and math.isfinite(value) and value >= 0
    }


def _steps(state: Any) -> list[tuple[str, int, StepTold]]:
    """Engine, number and step of what the state lists, in the order of the numbers."""
    listed = state.get("last_steps") if isinstance(state, dict) else None
    if not isinstance(listed, list):
        return []
    steps = []
    for each in listed:
        try:
            usage = Usage(
                int(each["prompt_tokens"]), int(each["output_tokens"]), int(each["cached_tokens"])
            )
            step = StepTold(str(each["session_id"]), usage)
            steps.append((str(each["engine"]), int(each["number"]), step))
        except (KeyError, TypeError, ValueError):
            continue  # Another version's words.
    return sorted(steps, key=lambda step: step[1])
