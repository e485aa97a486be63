"""One relayed request: what is known of it, and the answers that the gateway itself may give it."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from saga_core.placement import Route
from saga_gateway.asgi import Send, send_error
from saga_gateway.identify import Identified
from saga_gateway.routes import Dialect
from saga_gateway.sessions import Session
from saga_gateway.settings import GatewaySettings
from saga_gateway.upstream import UpstreamRequest, WorkerTimeoutError
from saga_gateway.workers import Outcome, Worker

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from saga_gateway.dispatch import Ticket


@dataclass(slots=True)
class Exchange:
    """One request on its way: what is sent, whose step it is, and whether that is over.

    Attributes:
        session: the session that it is a step of; None for any other request.
        found: what its content told, where it named no session.
        home: the worker that alone can serve it well; None when any can.
        said_session_id: the session's id in the client's words, or as it was found.
        began_s, first_s: when its body had come, and the first byte of its answer.
        span: its span, when there is tracing.
        status, worker_id: of its response, and of the worker that it was sent to last.
        is_step: whether its answer is one of a model.
        final: it was said to be its session's last.
        task_id, deadline_ms: its task, and the time that this has left, as the client said.
        ticket: what the dispatcher knows it by; None before it was to be placed.
        over: its answer is complete, or will not be.
    """

    request: UpstreamRequest
    dialect: Dialect
    tenant: str | None = None
    session: Session | None = None
    found: Identified | None = None
    home: str | None = None
    said_session_id: str | None = None
    began_s: float = 0.0
    first_s: float | None = None
    span: Span | None = None
    status: int | None = None
    worker_id: str | None = None
    is_step: bool = False
    final: bool = False
    task_id: str | None = None
    deadline_ms: int | None = None
    ticket: Ticket | None = None
    over: bool = False

    def log_fields(self, now_s: float) -> dict[str, object]:
        """What the line of the log says of it: neither prompts nor keys."""
        fields: dict[str, object] = {
            "path": self.request.target.partition("?")[0],
            "status": self.status,
            "worker": self.worker_id,
            "session": self.said_session_id,
            "tenant": self.tenant,
            "duration_s": round(now_s - self.began_s, 4),
        }
        if self.first_s is not None:
            fields["first_byte_s"] = round(self.first_s - self.began_s, 4)
        return fields


@dataclass(slots=True)
class Choice:
    """A place at a worker.

    Attributes:
        priority: the engine's, lower first.
        outcome: what its request has shown so far.
    """

    worker: Worker
    route: Route
    priority: int = 0
    outcome: Outcome = Outcome.NOTHING


class Refusals:
    """The errors with which the gateway answers a request that no worker has."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings

    async def busy(self, exchange: Exchange, send: Send, num_waiting: int) -> None:
        """429: no worker has had room in time."""
        message = f"no worker had room for this in time, and {num_waiting} requests wait"
        await self._send(exchange, send, 429, message, "workers_busy", retry_after_s=1)

    async def unavailable(self, exchange: Exchange, send: Send, failures: list[str]) -> None:
        """502: no worker takes it; ``failures`` are of those that were tried."""
        tried = "; ".join(failures) or "all are in back-off after failures"
        retry_s = max(1, ceil(self._settings.worker_backoff_s))
        message = f"no worker is available ({tried})"
        await self._send(exchange, send, 502, message, "worker_unavailable", retry_after_s=retry_s)

    async def failed(
        self, exchange: Exchange, send: Send, worker: Worker, error: Exception
    ) -> None:
        """504 or 502: a worker has the request, and says nothing, or nothing that can be read."""
        if not isinstance(error, WorkerTimeoutError):
            message = f"worker {worker.worker_id}: {error}"
            await self._send(exchange, send, 502, message, "worker_bad_answer")
            return
        first_s, idle_s = self._settings.first_byte_timeout_s, self._settings.idle_timeout_s
        limit = f"{idle_s:g} s (idle_timeout_s)"
        if 0.0 < first_s <= idle_s:
            limit = f"{first_s:g} s (first_byte_timeout_s)"
        message = f"worker {worker.worker_id} was silent for {limit}"
        await self._send(exchange, send, 504, message, "worker_timeout")

    @staticmethod
    async def _send(
        exchange: Exchange,
        send: Send,
        status: int,
        message: str,
        code: str,
        *,
        retry_after_s: int = 0,
    ) -> None:
        exchange.status = status
        headers = [(b"retry-after", str(retry_after_s).encode())] if retry_after_s else []
        await send_error(
            send, status, message, code=code, headers=headers, dialect=exchange.dialect
        )
