"""Which worker serves a request."""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b


class Route(StrEnum):
    """Why a worker was chosen."""

    AFFINITY = "affinity"
    NEW = "new"
    STEAL = "steal"
    REBALANCE = "rebalance"
    FAILOVER = "failover"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that may serve a request, as the coordinator sees it.

    Attributes:
        load: work in flight and queued ÷ capacity, with the request; 1 is full.
        service_s: time of a request there, in which what is full turns over once.
        prefill_s: to compute what another worker has of the prompt and this one has not, or to
            bring it here, whichever is faster.
        has_room: it can begin with the request now.
    """

    worker_id: str
    load: float
    service_s: float
    prefill_s: float = 0.0
    has_room: bool = True


def congestion_s(load: float, theta: float, service_s: float) -> float:
    """How long a worker keeps a request waiting: as much load as is above θ has to be served."""
    return max(0.0, load - theta) * service_s


def place_new(key: str, candidates: Sequence[Candidate]) -> str:
    """Choose a worker for a session that has its KV nowhere.

    Where there is room now is preferred; then the least load · service time + prefill that the
    prefix needs there, seconds; the service time is the mean over the workers, so that workers of
    one load are alike. Ties: rendezvous hashing of ``key``.
    """
    service_s = sum(each.service_s for each in candidates) / len(candidates)
    costs = {
        each.worker_id: (not each.has_room, each.load * service_s + each.prefill_s)
        for each in candidates
    }
    least = min(costs.values())
    tied = [worker_id for worker_id, cost in costs.items() if cost == least]
    return tied[0] if len(tied) == 1 else rendezvous(key, tied)


def place_again(key: str, home: Candidate, others: Sequence[Candidate], theta: float) -> str:
    """Choose a worker for a session whose home has its KV: to stay there or to leave.

    It leaves a home that is congested, with a load above θ, for the worker with the least
    congestion + prefill lost, if that is less than the congestion at home. Ties: to stay, then
    rendezvous hashing of ``key``.
    """
    here_s = congestion_s(home.load, theta, home.service_s)
    if here_s == 0.0 or not others:
        return home.worker_id
    costs = {
        each.worker_id: congestion_s(each.load, theta, each.service_s) + each.prefill_s
        for each in others
    }
    least_s = min(costs.values())
    if least_s >= here_s:
        return home.worker_id
    return rendezvous(key, [worker_id for worker_id, cost in costs.items() if cost == least_s])


class Ring:
    """A few workers for each key, the same ones in every process: a hash ring.

    Of a thousand workers it would take a thousand hashes to find the one of the highest weight.
    Here a key is given some neighbours, of which load, then rendezvous hashing chooses. With no
    more workers than are asked for these are all of them. A worker that leaves is replaced in the
    neighbourhoods that it was in; no other changes.
    """

    _POINTS = 16

    def __init__(self) -> None:
        self._points: list[tuple[int, str]] = []
        self._workers: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[str]:
        return iter(self._workers)

    def add(self, worker_id: str) -> None:
        """The worker is there."""
        if worker_id not in self._workers:
            self._workers[worker_id] = None
            for number in range(self._POINTS):
                insort(self._points, (_weight(str(number), worker_id), worker_id))

    def remove(self, worker_id: str) -> None:
        """The worker is not there any more."""
        if worker_id in self._workers:
            del self._workers[worker_id]
            self._points = [point for point in self._points if point[1] != worker_id]

    def near(self, key: str, count: int) -> list[str]:
        """The first ``count`` workers from the key's place on the ring onwards."""
        if len(self._workers) <= count:
            return list(self._workers)
        found: dict[str, None] = {}
        at, points = bisect(self._points, (_weight(key, ""), "")), self._points
        while len(found) < count:
            found[points[at % len(points)][1]] = None
            at += 1
        return list(found)


def rendezvous(key: str, worker_ids: Sequence[str]) -> str:
    """The worker with the highest hash of (key, worker id); ties go to the greater id.

    Every process chooses the same, and the loss of a worker moves only its own keys.
    """
    return max(worker_ids, key=lambda worker_id: (_weight(key, worker_id), worker_id))


def _weight(key: str, worker_id: str) -> int:
    digest = blake2b(f"{len(key)}:{key}{worker_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
