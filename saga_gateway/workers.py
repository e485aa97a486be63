"""The workers: which there are, how busy they are, and which can be reached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

from saga_core.placement import WorkerLoad
from saga_gateway.settings import worker_address


@dataclass(slots=True)
class Worker:
    """One engine replica.

    Attributes:
        worker_id: ``host:port``.
        base_url: ``scheme://host:port``.
        in_flight: requests that are being served.
        out_until_s: the time before which it gets no requests.
        takes_notices: False once it has said that it does not know the control API.
    """

    worker_id: str
    base_url: str
    in_flight: int = 0
    out_until_s: float = -inf
    takes_notices: bool = True

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Count one request in flight while the block runs."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class Workers:
    """The workers of this gateway, in the order of the settings."""

    def __init__(self, urls: Sequence[str], backoff_s: float) -> None:
        addresses = [worker_address(url) for url in urls]
        self._by_id = {worker_id: Worker(worker_id, base) for worker_id, base in addresses}
        self._backoff_s = backoff_s

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._by_id.values())

    def __getitem__(self, worker_id: str) -> Worker:
        return self._by_id[worker_id]

    def loads(self, now_s: float, *, without: str | None = None) -> list[WorkerLoad]:
        """The workers as placement sees them; ``without`` is shown as not available."""
        return [
            WorkerLoad(
                worker.worker_id,
                worker.in_flight,
                available=worker.out_until_s <= now_s and worker.worker_id != without,
            )
            for worker in self._by_id.values()
        ]

    def mark_unreachable(self, worker_id: str, now_s: float) -> None:
        """Give a worker that took no connection no requests for the back-off."""
        self._by_id[worker_id].out_until_s = now_s + self._backoff_s
