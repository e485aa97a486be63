"""Whose turn it is at all: tasks that are under way, before those that have not begun.

When more sessions are live than the KV pools hold, each that is served takes the KV of one that
waits for a tool, and which then computes everything again: most of the time goes into that, however
well it is chosen whose KV is taken. So the KV of a session that is expected back soon counts as in
use, and what has no KV yet waits until there is room beside it. It is an order: nothing is pinned
in a worker, a worker without work takes what there is, and nobody waits for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

from saga_core.fleet import Request, Worker
from saga_core.lazy_heap import LazyHeap


@dataclass(frozen=True, slots=True)
class _Kept:
    worker: Worker
    unit: str
    tokens: int


class WorkingSet:
    """The tasks that are under way, and the paused sessions of these whose KV is kept for them.

    A task is under way while a request of it runs, or KV of it is kept.
    """

    def __init__(self) -> None:
        self._parts: dict[str, int] = {}
        self._kept: dict[str, _Kept] = {}
        self._until: LazyHeap[str] = LazyHeap()

    def __len__(self) -> int:
        """Sessions whose KV is kept."""
        return len(self._kept)

    def is_under_way(self, request: Request) -> bool:
        """Whether the request's task is."""
        return request.unit in self._parts

    def began(self, request: Request) -> Worker | None:
        """The request runs: what was kept for its session is in use. Returns where that was."""
        self._add(request.unit, 1)
        return self.release(request.session_id)

    def ended(self, request: Request) -> None:
        """The request runs no more."""
        self._add(request.unit, -1)

    def keep(
        self, request: Request, worker: Worker, tokens: int, until_s: float, began_s: float
    ) -> None:
        """The request's session waits for a tool; its KV is kept until then.

        Where not all fits any more, the sessions that began last are given up: they will wait as
        if they had not begun, and the others come to their end.

        Args:
            began_s: when the session began.
        """
        session_id = request.session_id
        if session_id is None or tokens <= 0:
            return
        self.release(session_id)
        self._add(request.unit, 1)
        self._kept[session_id] = _Kept(worker, request.unit, tokens)
        self._until.set(session_id, until_s)
        worker.kept_tokens += tokens
        worker.kept.set(session_id, -began_s)
        while worker.kept_tokens and worker.is_overgrown:
            self.release(worker.kept.first())

    def waits(self, session_id: str | None) -> None:
        """The session is back, and waits: its KV is kept until it runs."""
        if session_id is not None:
            self._until.drop(session_id)

    def release(self, session_id: str | None) -> Worker | None:
        """Nothing is kept for the session any more; returns where it was, if it was."""
        kept = self._kept.pop(session_id or "", None)
        if kept is None:
            return None
        self._until.drop(session_id or "")
        self._add(kept.unit, -1)
        kept.worker.kept_tokens -= kept.tokens
        kept.worker.kept.drop(session_id or "")
        return kept.worker

    def due(self, now_s: float, limit: int) -> list[Worker]:
        """Release up to ``limit`` sessions whose time is over; returns where they were."""
        found = []
        for session_id in self._until.due(now_s, limit):
            worker = self.release(session_id)
            if worker is not None:
                found.append(worker)
        return found

    def left(self, worker: Worker) -> None:
        """The worker is gone, and all that was kept there."""
        for session_id in [id_ for id_, kept in self._kept.items() if kept.worker is worker]:
            self.release(session_id)

    def check_integrity(self, running: dict[str, int]) -> None:
        """Raise AssertionError when what is counted contradicts itself.

        Args:
            running: requests that run, by the unit of their task.
        """
        parts, tokens = dict(running), dict[str, int]()
        for kept in self._kept.values():
            parts[kept.unit] = parts.get(kept.unit, 0) + 1
            name = kept.worker.worker_id
            tokens[name] = tokens.get(name, 0) + kept.tokens
        if parts != self._parts:
            raise AssertionError(f"under way: {parts}, counted as {self._parts}")
        for kept in self._kept.values():
            if kept.worker.kept_tokens != tokens[kept.worker.worker_id]:
                raise AssertionError(f"{kept.worker.worker_id} keeps {tokens}")

    def _add(self, unit: str, number: int) -> None:
        count = self._parts.get(unit, 0) + number
        if count:
            self._parts[unit] = count
        else:
            del self._parts[unit]
