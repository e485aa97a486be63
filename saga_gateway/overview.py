"""What the gateway and its workers are doing now, as one snapshot that JSON can hold."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any
from urllib.parse import parse_qs

from saga_core.fleet import Request
from saga_core.settings import RetentionSettings
from saga_core.transitions import START
from saga_core.ttl import ttl_s
from saga_gateway.dispatch import Dispatcher
from saga_gateway.parts import Parts
from saga_gateway.residency import Ask, Residency
from saga_gateway.sessions import Session
from saga_gateway.worker_view import described

MAX_SESSIONS = 500
MAX_DECISIONS = 1000
DEFAULT_SESSIONS = 50
DEFAULT_DECISIONS = 200

_MAX_WORKFLOWS = 200
_MAX_TENANTS = 200
# Everybody who looks within this time sees the same: ten who look cost as much as one.
_FRESH_S = 1.0
# So many sessions are counted before requests are served again.
_SLICE = 2000
_LISTED_SLICE = 50

Snapshot = dict[str, Any]


@dataclass(slots=True)
class _Table:
    """What the whole table of sessions comes to; ``waiting``: requests of each that wait."""

    waiting: Counter[str]
    latest: list[Session] = field(default_factory=list)
    states: Counter[str] = field(default_factory=Counter)
    by_workflow: Counter[Hashable] = field(default_factory=Counter)


class Overview:
    """Reads the parts of a gateway; changes nothing.

    Args:
        ask: for how much of which session a worker holds, which it says only when asked.
        wall_clock: seconds since 1970.
    """

    def __init__(
        self,
        parts: Parts,
        dispatcher: Dispatcher,
        ask: Ask,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._parts = parts
        self._dispatcher = dispatcher
        self._residency = Residency(parts.workers, ask)
        self._wall_clock = wall_clock
        self._began_s = parts.clock()
        self._taking = asyncio.Lock()
        self._taken: Snapshot | None = None
        self._taken_s = 0.0
        self._taken_sessions = 0

    async def snapshot(
        self, *, sessions: int = DEFAULT_SESSIONS, decisions: int = DEFAULT_DECISIONS
    ) -> Snapshot:
        """The state of everything; a second old at most.

        Args:
            sessions: how many are listed, the most recently used first, up to
                ``MAX_SESSIONS``.
            decisions: the same of admissions, up to ``MAX_DECISIONS``.
        """
        async with self._taking:
            loop = asyncio.get_running_loop()
            is_fresh = loop.time() - self._taken_s < _FRESH_S and sessions <= self._taken_sessions
            if self._taken is None or not is_fresh:
                await self._residency.refresh()
                self._taken = await self._take(min(sessions, MAX_SESSIONS))
                self._taken_s, self._taken_sessions = loop.time(), sessions
            taken = self._taken
        listed = taken["sessions"]["listed"][: max(0, sessions)]
        return {
            **taken,
            "sessions": {**taken["sessions"], "listed": listed},
            "decisions": taken["decisions"][: max(0, decisions)],
        }

    async def _take(self, num_sessions: int) -> Snapshot:
        table = await self._count_sessions(num_sessions)
        listed = await self._list_sessions(table)
        now_s = self._parts.clock()
        workers = [
            described(
                worker,
                self._dispatcher.coordinator.fleet.get(worker.worker_id),
                self._dispatcher.state(worker.worker_id),
                now_s,
            )
            for worker in self._parts.workers
        ]
        return {
            "version": version("saga-sdk"),
            "at_s": self._wall_clock(),
            "uptime_s": now_s - self._began_s,
            "requests": self._parts.stats.requests,
            "queued": len(self._dispatcher),
            "workers": workers,
            "sessions": {
                "total": sum(table.states.values()),
                "states": dict(table.states),
                "listed": listed,
            },
            "workflows": self._workflows(table),
            "tenants": self._tenants(),
            "savings": self._savings(workers),
            "decisions": self._decisions(now_s),
        }

    # Sessions

    async def _list_sessions(self, table: _Table) -> list[Snapshot]:
        listed: list[Snapshot] = []
        for session in table.latest:
            if len(listed) % _LISTED_SLICE == _LISTED_SLICE - 1:
                await asyncio.sleep(0)
            listed.append(self._session(session, table.waiting, self._parts.clock()))
        return listed

    async def _count_sessions(self, most: int) -> _Table:
        table = _Table(self._dispatcher.waiting_by_session())
        for number, session in enumerate(self._parts.sessions):
            if number < most:
                table.latest.append(session)
            table.states[_state(session, table.waiting)] += 1
            table.by_workflow[session.walk.workflow] += 1
            if number % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
        return table

    def _session(self, session: Session, waiting: Counter[str], now_s: float) -> Snapshot:
        walk, graphs = session.walk, self._parts.sessions.graphs
        tenant, workflow = _named(walk.workflow)
        last = walk.last[-1]
        resident = self._residency.of(session.session_id, session.home)
        shown: Snapshot = {
            "session_id": session.session_id,
            "tenant": tenant,
            "workflow": workflow,
            "is_found": session.is_found,
            "state": _state(session, waiting),
            "idle_s": max(0.0, now_s - session.last_used_s),
            "steps": walk.step + 1,
            "agent": None if last == START else last.agent,
            "tool": None if last == START else last.tool,
            "home": session.home,
            "tokens": session.tokens,
            "is_cold": None,
            "paused_for_s": None,
            "steps_left": None,
            "p_return": None,
            "returns_in_s": None,
            "ttl_left_s": None,
            "gpu_tokens": None if resident is None else resident[0],
            "host_tokens": None if resident is None else resident[1],
        }
        if walk.step < 0:
            return shown
        outlook = graphs.outlook(walk)
        shown["steps_left"] = outlook.steps_left
        shown["is_cold"] = outlook.is_cold
        if session.paused_s is None:
            return shown
        waited_s = max(0.0, now_s - session.paused_s)
        told = None if session.home is None else self._dispatcher.state(session.home)
        pressure = 0.0 if told is None or told.pressure is None else told.pressure
        settings = RetentionSettings()
        protected_s = ttl_s(outlook.pause_p95_s, pressure, settings)
        if outlook.p_reuse < settings.protect_min_p_reuse:
            protected_s = 0.0
        return shown | {
            "paused_for_s": waited_s,
            "p_return": 1.0 - outlook.p_end,
            "returns_in_s": graphs.remaining_s(walk, waited_s),
            "ttl_left_s": max(0.0, protected_s - waited_s),
        }

    # Workflows and tenants

    def _workflows(self, table: _Table) -> list[Snapshot]:
        graphs, shown = self._parts.sessions.graphs, []
        for key in list(reversed(graphs.workflows()))[:_MAX_WORKFLOWS]:
            size = graphs.size(key)
            if size is None:
                continue
            tenant, workflow = _named(key)
            tasks, nodes, edges, is_cold = size
            query = "" if tenant is None else f"?tenant={tenant}"
            shown.append(
                {
                    "tenant": tenant,
                    "workflow": workflow,
                    "sessions": table.by_workflow[key],
                    "tasks": tasks,
                    "nodes": nodes,
                    "edges": edges,
                    "is_cold": is_cold,
                    "aeg": f"/saga/v1/workflows/{workflow}/aeg{query}",
                }
            )
        return shown

    def _tenants(self) -> list[Snapshot]:
        """Tenants with requests, and others that are known; ``""`` is whoever has no key."""
        coordinator, weights = self._dispatcher.coordinator, self._dispatcher.weights
        waiting, running = Counter[str](), Counter[str]()
        tasks: dict[str, set[str]] = {}
        for worker in coordinator.fleet:
            for counted, requests in ((waiting, worker.waiting), (running, worker.running)):
                _count_tenants(requests.values(), counted, tasks)
        learned = [_named(key)[0] or "" for key in self._parts.sessions.graphs.workflows()]
        names = dict.fromkeys([*tasks, *weights, *reversed(learned)])
        needs = {
            name: coordinator.shares.afs(name) * weights.get(name, 1.0)
            for name in list(names)[:_MAX_TENANTS]
        }
        all_needs, all_running = sum(needs.values()), sum(running.values())
        return [
            {
                "tenant": name,
                "weight": weights.get(name, 1.0),
                "afs": coordinator.shares.afs(name),
                "share_due": need / all_needs if all_needs else None,
                "share_running": running[name] / all_running if all_running else None,
                "live_tasks": len(tasks.get(name, ())),
                "waiting": waiting[name],
                "running": running[name],
            }
            for name, need in needs.items()
        ]

    # Savings and decisions

    def _savings(self, workers: list[Snapshot]) -> Snapshot:
        """Prefill that caches have avoided, as answers say and as workers count."""
        counted = [each["counters"] for each in workers if each["counters"] is not None]
        rates = [each["prefill_tokens_per_s"] for each in workers if each["prefill_tokens_per_s"]]
        names = ("prompt_tokens", "cached_tokens", "host_cached_tokens", "regret_tokens")
        totals = {name: sum(int(each.get(name, 0)) for each in counted) for name in names}
        rate = sum(rates) / len(rates) if rates else None
        avoided_s = totals["cached_tokens"] / rate if rate else None
        return {
            "answers": {f"{name}_tokens": n for name, n in self._parts.metrics.tokens().items()},
            "workers": {**totals, "prefill_avoided_s": avoided_s} if counted else None,
        }

    def _decisions(self, now_s: float) -> list[Snapshot]:
        return [
            {
                "ago_s": max(0.0, now_s - at_s),
                "request": decision.request_id,
                "session_id": session_id,
                "worker_id": decision.worker_id,
                "route": decision.route.value,
                "reason": decision.reason,
                "priority": decision.priority,
                "waited_ms": decision.waited_s * 1000.0,
                "moved_from": home if home != decision.worker_id else None,
            }
            for at_s, decision, session_id, home in reversed(self._dispatcher.recent)
        ]


def counts_of(query_string: bytes) -> dict[str, int]:
    """What of ``sessions`` and ``decisions`` a query names.

    Raises:
        ValueError: a value is not a number in its range; the message says so.
    """
    counts = {}
    query = parse_qs(query_string.decode("latin-1"), keep_blank_values=True)
    for name, most in (("sessions", MAX_SESSIONS), ("decisions", MAX_DECISIONS)):
        text = query.get(name, [None])[0]
        if text is None:
            continue
        if not (text.isascii() and text.isdigit() and len(text) < 9 and int(text) <= most):
            raise ValueError(f"{name}={text[:32]!r} must be a whole number from 0 to {most}")
        counts[name] = int(text)
    return counts


def _state(session: Session, waiting: Counter[str]) -> str:
    if session.paused_s is not None:
        return "paused"
    if not session.running:
        return "idle"
    return "waiting" if waiting[session.session_id] >= session.running else "running"


def _named(key: Hashable) -> tuple[str | None, str | None]:
    """Tenant and name of a workflow's key."""
    if isinstance(key, tuple) and len(key) == 2:
        return key
    return None, None if key is None else str(key)


def _count_tenants(
    requests: Iterable[Request], counted: Counter[str], tasks: dict[str, set[str]]
) -> None:
    for request in requests:
        counted[request.tenant] += 1
        tasks.setdefault(request.tenant, set()).add(request.task)
