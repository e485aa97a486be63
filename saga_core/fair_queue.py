"""A queue in which tenants, and within them tasks, are given room in proportion."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from saga_core.fairness import TaskKey
from saga_core.lazy_heap import LazyHeap

_SPARE = 16


class FairOrder:
    """Start-time fair queueing of flows (Goyal, Vin and Cheng 1996), ties by who came first.

    The flow with the least start tag is next. Being served a cost moves its tag on by cost ÷ share.
    A flow that comes, or returns, starts no earlier than virtual time: it is owed nothing for its
    absence. While two flows wait, what they are served, each ÷ its share, differs by one request
    of each at most. Virtual time goes on with every service, as if all flows that wait had the
    share of the one served, so that flows which never came before do not overtake for ever.
    """

    __slots__ = ("_ahead", "_now", "_sweep_at", "_turn", "_waiting")

    def __init__(self) -> None:
        self._now = 0.0
        self._turn = 0
        self._waiting: LazyHeap[str] = LazyHeap()
        # Of flows that have been served: where they started, the cost, and the tag that this gave.
        self._ahead: dict[str, tuple[float, float, float]] = {}
        self._sweep_at = _SPARE

    def __len__(self) -> int:
        return len(self._waiting)

    def wait(self, flow: str) -> None:
        """The flow has something that waits."""
        if flow not in self._waiting:
            ahead = self._ahead.get(flow)
            self._set(flow, self._now if ahead is None else max(self._now, ahead[2]))

    def leave(self, flow: str) -> None:
        """The flow has nothing that waits any more."""
        self._waiting.drop(flow)
        if len(self._ahead) > self._sweep_at:
            # The tag of one that does not wait is worth keeping while it is ahead of the time.
            self._ahead = {
                flow: ahead
                for flow, ahead in self._ahead.items()
                if ahead[2] > self._now or flow in self._waiting
            }
            self._sweep_at = 2 * len(self._ahead) + _SPARE

    def firsts(self, limit: int) -> list[str]:
        """Up to ``limit`` flows that wait, the next one first."""
        return self._waiting.firsts(limit)

    def served(self, flow: str, cost: float, share: float) -> None:
        """The flow, which waits, has been served so much; it waits on until it leaves."""
        start = self._waiting.rank(flow)
        tag = start + cost / share
        self._now = max(start, self._now + cost / (share * len(self._waiting)))
        self._ahead[flow] = start, cost, tag
        self._set(flow, tag)

    def renew(self, flow: str, share: float) -> None:
        """The share of a flow that waits is another one than when it was served."""
        ahead = self._ahead.get(flow)
        if ahead is None or self._waiting.rank(flow) != ahead[2]:
            return
        start, cost, before = ahead
        tag = start + cost / share
        if tag != before:
            self._ahead[flow] = start, cost, tag
            self._set(flow, tag)

    def _set(self, flow: str, tag: float) -> None:
        self._turn += 1
        self._waiting.set(flow, tag, self._turn)


class Queued(Protocol):
    """What waits."""

    @property
    def request_id(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def task(self) -> str: ...


Q = TypeVar("Q", bound=Queued)


class FairQueue(Generic[Q]):
    """Requests that wait, in fair order of their tenants, then of their tasks, then as they came.

    All requests of a task are one flow, however many sub-agents they are of.
    """

    __slots__ = ("_requests", "_size", "_tasks", "_tenants")

    def __init__(self) -> None:
        self._size = 0
        self._tenants = FairOrder()
        self._tasks: dict[str, FairOrder] = {}
        self._requests: OrderedDict[tuple[str, str], OrderedDict[str, Q]] = OrderedDict()

    def __len__(self) -> int:
        return self._size

    def add(self, request: Q) -> None:
        """The request waits behind the others of its task."""
        tenant, task = request.tenant, request.task
        order = self._tasks.get(tenant)
        if order is None:
            order = self._tasks[tenant] = FairOrder()
        own = self._requests.get((tenant, task))
        if own is None:
            own = self._requests[tenant, task] = OrderedDict()
        own[request.request_id] = request
        self._size += 1
        order.wait(task)
        self._tenants.wait(tenant)

    def firsts(self, limit: int) -> list[Q]:
        """Up to ``limit`` requests, the next one first, each the first of its task."""
        found: list[Q] = []
        for tenant in self._tenants.firsts(limit):
            for task in self._tasks[tenant].firsts(limit - len(found)):
                found.append(next(iter(self._requests[tenant, task].values())))
            if len(found) == limit:
                break
        return found

    def served(self, request: Q, cost: float, tenant_share: float, task_share: float) -> None:
        """Take out a request that is served; shares are above 0."""
        self._tasks[request.tenant].served(request.task, cost, task_share)
        self._tenants.served(request.tenant, cost, tenant_share)
        self.remove(request)

    def renew(self, limit: int, shares_of: Callable[[TaskKey], tuple[float, float]]) -> None:
        """Ask anew for the shares of up to ``limit`` tasks that wait, in turn.

        Args:
            shares_of: gives the share of a task's tenant, and of the task.
        """
        for _ in range(min(limit, len(self._requests))):
            key = next(iter(self._requests))
            self._requests.move_to_end(key)
            tenant, task = shares_of(key)
            self._tenants.renew(key[0], tenant)
            self._tasks[key[0]].renew(key[1], task)

    def remove(self, request: Q) -> None:
        """Take out a request that is in it."""
        key = request.tenant, request.task
        own = self._requests[key]
        del own[request.request_id]
        self._size -= 1
        if own:
            return
        del self._requests[key]
        order = self._tasks[request.tenant]
        order.leave(request.task)
        if not len(order):
            # Which of its tasks is ahead matters while some of them wait; then it starts anew.
            del self._tasks[request.tenant]
            self._tenants.leave(request.tenant)
