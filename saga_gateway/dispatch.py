"""The coordinator on the gateway's clock: it is told what happens, and what it decides is done."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import IO, NamedTuple

import orjson

from saga_core.coordinator import Coordinator
from saga_core.coordinator_events import (
    Admit,
    Decision,
    Event,
    Prefetch,
    RequestEnded,
    RequestReturned,
    SessionEnded,
    SessionPaused,
    TaskEnded,
    TenantWeight,
    Tick,
    WorkerDraining,
    WorkerGone,
    WorkerTold,
    WorkerUp,
    to_dict,
)
from saga_core.errors import SettingsError
from saga_core.notices import EndNotice, Notice, ResumeNotice
from saga_core.placement import Route
from saga_gateway.answers import Usage
from saga_gateway.estimates import Estimates
from saga_gateway.exchange import Choice, Exchange
from saga_gateway.sessions import Session, SessionTable
from saga_gateway.settings import GatewaySettings
from saga_gateway.worker_state import StateTold
from saga_gateway.workers import Worker, Workers

logger = logging.getLogger(__name__)

# An engine that does not say how many it runs at a time queues what it cannot run: it is given
# everything, and counts as full with as many as vLLM runs by default.
_NO_LIMIT = 1_000_000
_USUAL_LIMIT = 256
_WEIGHT_STEPS = 10
# Share of one that has asked for rest: it is the last that is chosen.
_RESTING = 0.01
_MOVED = (Route.STEAL, Route.REBALANCE)
_RECENT = 1000


class NoWorkerError(Exception):
    """No worker is up."""


class QueueFullError(Exception):
    """As many requests wait as may."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A request that the coordinator knows.

    Attributes:
        choice: where it is served; None while it waits.
        waiter: is done when it need not wait any more.
    """

    request_id: str
    session: Session | None
    choice: Choice | None = None
    waiter: asyncio.Future[None] | None = None


class Admission(NamedTuple):
    """A request that was sent to a worker, and why there.

    Attributes:
        home: where its session lived until then; None: nowhere, or it is of no session.
    """

    at_s: float
    decision: Admit
    session_id: str | None
    home: str | None


class Dispatcher:
    """Gives requests to workers as the coordinator decides.

    Args:
        put: takes a notice for a worker.
        log: is told of everything.

    Attributes:
        recent: the latest admissions, the oldest first.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        workers: Workers,
        sessions: SessionTable,
        clock: Callable[[], float],
        put: Callable[[str, Notice], None],
        log: EventLog | None = None,
    ) -> None:
        self._settings = settings
        self._workers = workers
        self._clock = clock
        self._put = put
        chosen = settings.coordinator()
        self.coordinator = Coordinator(chosen)
        self._estimates = Estimates(sessions.graphs, chosen.prefill_tokens_per_s)
        self._epoch_s = chosen.epoch_s
        self._log = log
        self._numbers = count()
        self._tickets: dict[str, Ticket] = {}
        self._waiting: dict[str, Ticket] = {}
        self._weights: dict[str, float] = {}
        self._states: dict[str, StateTold] = {}
        self._known: dict[str, tuple[Worker, Event]] = {}
        self._unsettled: set[str] = set()
        self.recent: deque[Admission] = deque(maxlen=_RECENT)
        sessions.forgotten = self._session_forgotten
        self.workers_changed()

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def weights(self) -> Mapping[str, float]:
        """Each tenant's share beside others, of those that have one of their own."""
        return self._weights

    def state(self, worker_id: str) -> StateTold | None:
        """What the worker has told last; None: nothing."""
        return self._states.get(worker_id)

    def waiting_by_session(self) -> Counter[str]:
        """How many requests of each session wait for a worker."""
        tickets = self._waiting.values()
        return Counter(each.session.session_id for each in tickets if each.session is not None)

    async def run(self) -> None:
        """Let time pass, until it is cancelled."""
        while True:
            await asyncio.sleep(self._epoch_s)
            try:
                self.workers_changed()
                self._apply(Tick(self._clock()))
            except Exception:
                logger.exception("a tick of the coordinator failed")  # The next may not.

    def close(self) -> None:
        """Nothing more is written down."""
        if self._log is not None:
            self._log.close()

    # Requests

    async def place(self, exchange: Exchange) -> Choice | None:
        """A place for a request at a worker, which is to be given to ``leave``.

        A request that had one before was not taken by that worker, and goes to another one. Its end
        is to be told in any case: ``ended``.

        Returns None when there was no place in time.

        Raises:
            NoWorkerError: no worker is up.
            QueueFullError: too many wait already.
        """
        ticket, now_s = exchange.ticket, self._clock()
        if ticket is None:
            ticket = Ticket(f"r{next(self._numbers)}", exchange.session)
            exchange.ticket = self._tickets[ticket.request_id] = ticket
            event: Event = self._estimates.arrival(exchange, ticket.request_id, now_s)
            failed = None
        else:
            event = RequestReturned(now_s, ticket.request_id)
            failed = None if ticket.choice is None else ticket.choice.worker.worker_id
            ticket.choice = None
        if not self._others_are_up(failed):
            raise NoWorkerError
        self._apply(event)
        if ticket.choice is None:
            if len(self._waiting) >= self._settings.max_queued:
                self._drop(ticket)
                raise QueueFullError
            await self._wait(ticket)
        return ticket.choice

    def leave(self, choice: Choice) -> None:
        """The place at the worker is free again; what its request has shown is learned from."""
        choice.worker.end(choice.outcome, self._clock())
        if self._workers.get(choice.worker.worker_id) is choice.worker:
            self._sync(choice.worker)

    def ended(self, exchange: Exchange, usage: Usage | None) -> None:
        """The request is over; ``usage`` are the token counts of its answer, if it said them."""
        ticket, now_s = exchange.ticket, self._clock()
        if ticket is None or self._tickets.pop(ticket.request_id, None) is None:
            return
        is_served = exchange.status is not None and exchange.status < 400
        if is_served and ticket.choice is not None:
            self._estimates.ended(exchange, usage, now_s)
        self._apply(
            RequestEnded(
                now_s,
                ticket.request_id,
                is_served=is_served,
                prompt_tokens=None if usage is None else usage.prompt_tokens,
                output_tokens=None if usage is None else usage.completion_tokens,
            )
        )

    # Sessions, tasks and tenants

    def paused(self, session_id: str, p_return: float, returns_in_s: float) -> None:
        """The session waits for a tool."""
        self._apply(SessionPaused(self._clock(), session_id, p_return, returns_in_s))

    def task_ended(self, tenant: str | None, task_id: str) -> None:
        """The task is done."""
        self._apply(TaskEnded(self._clock(), tenant or "", task_id))

    def weigh(self, tenant: str, weight: float) -> None:
        """The tenant's share beside others of the same need."""
        if self._weights.get(tenant, 1.0) != weight:
            self._weights[tenant] = weight
            self._apply(TenantWeight(self._clock(), tenant, weight))

    def _session_forgotten(self, session_id: str) -> None:
        self._apply(SessionEnded(self._clock(), session_id))

    # Workers

    def workers_changed(self) -> None:
        """There are other workers now, or something about them is different."""
        for worker in self._workers:
            self._sync(worker)
        if len(self._known) > len(self._workers):
            for worker_id in [id_ for id_ in self._known if self._workers.get(id_) is None]:
                del self._known[worker_id]
                self._unsettled.discard(worker_id)
                self._states.pop(worker_id, None)
                self._apply(WorkerGone(self._clock(), worker_id))

    def told(self, worker_id: str, state: StateTold) -> None:
        """A worker has told its state."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        self._states[worker_id] = state
        if state.prefill_tokens_per_s:
            self._estimates.prefill_tokens_per_s = state.prefill_tokens_per_s
        self._sync(worker)
        self._apply(
            WorkerTold(
                self._clock(),
                worker_id,
                state.requests,
                state.free_tokens,
                state.prefill_tokens_per_s,
            )
        )

    def _others_are_up(self, failed: str | None) -> bool:
        for worker_id in list(self._unsettled):
            self._sync(self._known[worker_id][0])  # It may be worth trying again by now.
        return any(worker_id != failed for worker_id in self.coordinator.fleet.ring)

    def _sync(self, worker: Worker) -> None:
        """Tell the coordinator of the worker what it does not know yet."""
        known, before = self._known.get(worker.worker_id, (None, None))
        if known is not None and known is not worker:
            # Another one, under the same id.
            self._apply(WorkerGone(self._clock(), worker.worker_id))
            self._states.pop(worker.worker_id, None)
            before = None
        event = self._seen(worker)
        self._known[worker.worker_id] = worker, event
        if isinstance(event, WorkerUp) and event.weight == 1.0 and not worker.breaker.probes:
            self._unsettled.discard(worker.worker_id)
        else:
            self._unsettled.add(worker.worker_id)  # Time alone changes how it is seen.
        if event != before:
            self._apply(replace(event, now_s=self._clock()))

    def _seen(self, worker: Worker) -> Event:
        """The worker as the coordinator is to see it; its time says nothing."""
        now_s = self._clock()
        load = worker.load(now_s)
        if not load.available:
            # Where nobody listens the KV is gone too.
            return (WorkerGone if worker.unreachable else WorkerDraining)(0.0, worker.worker_id)
        state = self._states.get(worker.worker_id)
        told = 0 if state is None else state.max_running
        limit = self._settings.max_worker_requests or told
        weight = load.weight if now_s >= worker.rests_until_s else min(load.weight, _RESTING)
        return WorkerUp(
            0.0,
            worker.worker_id,
            max_running=limit or _USUAL_LIMIT,
            limit=worker.breaker.probes or limit or _NO_LIMIT,
            capacity_tokens=0 if state is None else state.capacity_tokens,
            weight=max(_RESTING, int(weight * _WEIGHT_STEPS) / _WEIGHT_STEPS),
        )

    # What is decided

    def _apply(self, event: Event) -> None:
        decisions = self.coordinator.apply(event)
        if self._log is not None:
            self._log.write(event, decisions)
        for decision in decisions:
            if isinstance(decision, Admit):
                self._admit(decision)
            elif isinstance(decision, Prefetch):
                self._put(decision.worker_id, ResumeNotice(decision.session_id, decision.in_s))
        if self._waiting and not len(self.coordinator.fleet.ring):
            for ticket in self._waiting.values():
                _wake(ticket, NoWorkerError())

    def _admit(self, decision: Admit) -> None:
        ticket = self._tickets[decision.request_id]
        worker, _ = self._known[decision.worker_id]
        worker.begin()
        ticket.choice = Choice(worker, decision.route, decision.priority)
        session = ticket.session
        session_id, home = None, None
        if session is not None:
            session_id, home = session.session_id, session.home
            if decision.route in _MOVED and session.home not in (None, worker.worker_id):
                # What it has there nobody will read.
                self._put(session.home or "", EndNotice(session.session_id))
            session.home = worker.worker_id
        self.recent.append(Admission(self._clock(), decision, session_id, home))
        _wake(ticket, None)
        if worker.breaker.probes:
            self._sync(worker)  # It is being tried, and gets no more until it is known to be well.

    async def _wait(self, ticket: Ticket) -> None:
        """Wait until there is a place, but not for ever.

        Raises:
            NoWorkerError: the last worker has gone.
        """
        ticket.waiter = asyncio.get_running_loop().create_future()
        self._waiting[ticket.request_id] = ticket
        try:
            async with asyncio.timeout(self._settings.queue_wait_s):
                await ticket.waiter
        except TimeoutError:
            pass  # The place may have come in that very moment.
        except asyncio.CancelledError:
            if ticket.choice is not None:
                self.leave(ticket.choice)
            raise
        finally:
            ticket.waiter = None
            del self._waiting[ticket.request_id]
            if ticket.choice is None:
                self._drop(ticket)

    def _drop(self, ticket: Ticket) -> None:
        """Nobody waits for its place any more."""
        if self._tickets.pop(ticket.request_id, None) is not None:
            self._apply(RequestEnded(self._clock(), ticket.request_id, is_served=False))


def _wake(ticket: Ticket, error: Exception | None) -> None:
    if ticket.waiter is None or ticket.waiter.done():
        return
    if error is None:
        ticket.waiter.set_result(None)
    else:
        ticket.waiter.set_exception(error)


class EventLog:
    """A file of what the coordinator was told and what it decided, a JSON object a line.

    Raises:
        SettingsError: it cannot be written.
    """

    def __init__(self, path: str) -> None:
        self._file: IO[bytes] | None = None
        try:
            self._file = Path(path).open("wb")  # noqa: SIM115 - until ``close``
        except OSError as error:
            raise SettingsError(f"event_log: cannot write {path}: {error.strerror}") from None

    def write(self, event: Event, decisions: list[Decision]) -> None:
        """Add an event and its decisions; what cannot be written ends the log, and nothing else."""
        if self._file is None:
            return
        line = {"event": to_dict(event), "decisions": [to_dict(each) for each in decisions]}
        try:
            self._file.write(orjson.dumps(line) + b"\n")
        except OSError as error:
            logger.error("the event log ends here: %s", error)
            self.close()

    def close(self) -> None:
        """Write out what is buffered, if that can be."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None
