"""A worker as operators see it: health, queue, memory by tier, and its own counters."""

from __future__ import annotations

from typing import Any

from saga_core.fleet import Worker as FleetWorker
from saga_gateway.worker_state import StateTold
from saga_gateway.workers import Worker


def described(
    worker: Worker, seen: FleetWorker | None, told: StateTold | None, now_s: float
) -> dict[str, Any]:
    """The worker as values of JSON; what nobody knows is None.

    Args:
        seen: as the coordinator sees it; None: it is down.
        told: what it has told of itself last; None: nothing.
    """
    load = worker.load(now_s)
    engine = worker.engine
    return {
        "worker_id": worker.worker_id,
        "engine": None if engine is None else engine.kind.value,
        "engine_version": None if engine is None else engine.version,
        "status": _status(worker, available=load.available),
        "healthy": worker.healthy,
        "draining": worker.draining,
        "available": load.available,
        "weight": load.weight,
        "in_flight": worker.in_flight,
        **_queue(seen),
        "policy": None if told is None or not told.policy else told.policy,
        "pressure": None if told is None else told.pressure,
        "engine_running": None if told is None else told.running,
        "engine_waiting": None if told is None else told.waiting,
        "prefill_tokens_per_s": None if told is None else told.prefill_tokens_per_s or None,
        "memory": _memory(told),
        "counters": None if told is None or not told.counters else dict(told.counters),
        "prefetch": None if told is None or not told.prefetch else dict(told.prefetch),
    }


def _status(worker: Worker, *, available: bool) -> str:
    if worker.draining:
        return "draining"
    if not worker.healthy or worker.unreachable:
        return "down"
    return "up" if available else "resting"


def _queue(seen: FleetWorker | None) -> dict[str, Any]:
    """What the coordinator has given the worker, and keeps for it."""
    if seen is None:
        return {"load": None, "running": 0, "waiting": 0, "foreign": 0}
    return {
        "load": seen.load(),
        "running": len(seen.running),
        "waiting": len(seen.waiting),
        "foreign": seen.foreign_requests,
    }


def _memory(told: StateTold | None) -> dict[str, dict[str, Any]]:
    """Tokens of KV by tier; a tier that the worker says nothing of is left out."""
    tiers: dict[str, dict[str, Any]] = {}
    if told is None:
        return tiers
    if told.capacity_tokens:
        capacity, free = told.capacity_tokens, told.free_tokens
        tiers["gpu"] = {
            "capacity_tokens": capacity,
            "used_tokens": None if free is None else max(0, capacity - free),
            "free_tokens": free,
            "session_tokens": None if told.pressure is None else int(told.pressure * capacity),
        }
    if told.host_capacity_tokens:
        capacity, used = told.host_capacity_tokens, told.host_held_tokens
        tiers["host"] = {
            "capacity_tokens": capacity,
            "used_tokens": used,
            "free_tokens": max(0, capacity - used),
            "session_tokens": None,
        }
    return tiers
