"""Which worker serves a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b


class Route(StrEnum):
    """Why a worker was chosen."""

    AFFINITY = "affinity"
    NEW = "new"
    FAILOVER = "failover"


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker as placement sees it.

    Attributes:
        in_flight: requests that it serves now.
        available: whether it can take one more.
        weight: share of what an equal worker would be given, above 0, at most 1.
    """

    worker_id: str
    in_flight: int
    available: bool = True
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Placement:
    """The chosen worker and the reason."""

    worker_id: str
    route: Route


def place(
    session_id: str | None, home: str | None, workers: Sequence[WorkerLoad]
) -> Placement | None:
    """Choose a worker for a request.

    A session goes to ``home``, the worker that served it last, while that is available. A new
    session goes to the least loaded worker, by requests ÷ weight, ties broken by rendezvous hashing
    of the session id, so that gateways which know nothing of each other agree. A session whose home
    is not available is placed like a new one, as a failover. Requests without a session go to the
    least loaded worker, ties to the least worker id.

    Returns None when no worker is available.
    """
    candidates = [worker for worker in workers if worker.available]
    if not candidates:
        return None
    if home is not None and any(worker.worker_id == home for worker in candidates):
        return Placement(home, Route.AFFINITY)
    loads = {worker.worker_id: (worker.in_flight + 1) / worker.weight for worker in candidates}
    least = min(loads.values())
    idle = [worker_id for worker_id, load in loads.items() if load == least]
    chosen = rendezvous(session_id, idle) if session_id is not None else min(idle)
    return Placement(chosen, Route.NEW if home is None else Route.FAILOVER)


def rendezvous(key: str, worker_ids: Sequence[str]) -> str:
    """The worker with the highest hash of (key, worker id); ties go to the greater id.

    Every process chooses the same, and the loss of a worker moves only its own keys.
    """
    return max(worker_ids, key=lambda worker_id: (_weight(key, worker_id), worker_id))


def _weight(key: str, worker_id: str) -> int:
    digest = blake2b(f"{len(key)}:{key}{worker_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
