"""Whose turn it is: how urgent tasks are, what share of the fleet that gives, in which order.

    AFS_i = Σ_{t ∈ tasks(i)} work_remain(t) ÷ (deadline(t) - now)

is how many workers tenant i needs from now on to be on time (SAGA paper, arXiv 2605.00528). A
tenant is given capacity ∝ AFS × weight, and of that each of its tasks ∝ its own term of the sum.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from saga_core.errors import SettingsError

MAX_WEIGHT = 1e6
# A task that is on time needs 2/3 of a worker by the paper's deadline. Nothing is worth less than
# about a third of it, so that nothing starves, nor more than thirty times as much.
MIN_AFS = 0.2
MAX_AFS = 20.0
# The time left counts as a tenth of the task's budget at least: urgency rises tenfold, not to ∞.
_LEAST_LEFT = 0.1
# A late task becomes more urgent until it is late by its whole budget: twice what it was.
_MOST_AGED = 1.0
_LEAST_S = 1e-3
# An octave of AFS × weight has four engine priorities: closer ones count as equal.
_PRIORITIES_PER_OCTAVE = 4


def task_afs(work_s: float, left_s: float, budget_s: float) -> float:
    """Workers that a task needs to be on time, ``MIN_AFS`` to ``MAX_AFS``.

    work ÷ left, where the time left counts as a tenth of the budget at least. Past the deadline
    this rises with the lateness, to twice as much when the task is late by its budget.

    Args:
        work_s: GPU-seconds of the steps that are pending.
        left_s: until its deadline, negative past it.
        budget_s: from its first request to its deadline.
    """
    budget_s = max(_LEAST_S, budget_s)
    afs = work_s / max(left_s, _LEAST_LEFT * budget_s)
    if left_s < 0.0:
        afs *= 1.0 + min(_MOST_AGED, -left_s / budget_s)
    return min(MAX_AFS, max(MIN_AFS, afs))


def priority_of(share: float) -> int:
    """The engine's priority of a request whose task has that share, lower first.

    0 is a share of 1; twice the share is 4 less.
    """
    return -round(_PRIORITIES_PER_OCTAVE * math.log2(share))


@dataclass(slots=True)
class Task:
    """One run of a workflow, with all of its sessions and sub-agents.

    Attributes:
        began_s: its first request.
        work_s: GPU-seconds that it still needs, as last said, less what was served since.
        deadline_s: when it should be done.
        live: its requests that wait or run.
        afs: see ``task_afs``, as of ``epoch``; 0 while it has none.
    """

    began_s: float
    work_s: float
    deadline_s: float
    live: int = 0
    afs: float = 0.0
    epoch: int = -1


@dataclass(slots=True)
class _Tenant:
    """A tenant with requests: the sum over its live tasks, and how many these are."""

    afs: float = 0.0
    live_tasks: int = 0


TaskKey = tuple[str, str]
"""Tenant and task."""


class Shares:
    """The tenants and their tasks, and the share that each has now.

    A task's AFS is worked out when it is asked for, once an epoch at most; ``refresh`` does so for
    the others in turn. Tasks without requests count for nothing. The one that is least recently
    used is forgotten beyond ``max_tasks``; tasks with requests are not.

    Args:
        epoch_s: how long an AFS holds, seconds, above 0.
        max_tasks: see above, at least 1.

    Attributes:
        max_tenant_afs: no tenant counts for more.
    """

    def __init__(self, *, epoch_s: float, max_tasks: int) -> None:
        self._epoch_s = epoch_s
        self._max_tasks = max_tasks
        self.max_tenant_afs = math.inf
        self._weights: dict[str, float] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._tasks: OrderedDict[TaskKey, Task] = OrderedDict()
        self._live: OrderedDict[TaskKey, Task] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tasks)

    def set_weight(self, tenant: str, weight: float) -> None:
        """Give the tenant that weight; without it is 1.

        Raises:
            SettingsError: it is not above 0, or above a million.
        """
        check_weight(weight)
        self._weights[tenant] = weight

    def afs(self, tenant: str) -> float:
        """The tenant's AFS: workers that it needs to be on time."""
        found = self._tenants.get(tenant)
        return 0.0 if found is None else found.afs

    def arrived(
        self,
        key: TaskKey,
        *,
        work_s: float,
        deadline_s: float | None,
        budget_s: float,
        now_s: float,
    ) -> None:
        """A request of the task has come; it is live until ``ended``.

        Args:
            work_s: GPU-seconds that the task still needs, this request included.
            deadline_s: when it should be done; None: as said before, at first ``budget_s`` from
                now.
        """
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = Task(now_s, work_s, now_s + budget_s)
        else:
            self._tasks.move_to_end(key)
        task.work_s = max(0.0, work_s)
        if deadline_s is not None:
            task.deadline_s = deadline_s
        task.live += 1
        if task.live == 1:
            self._live[key] = task
            self._tenants.setdefault(key[0], _Tenant()).live_tasks += 1
        task.epoch = -1
        self._update(key[0], task, now_s)
        self._keep_bound()

    def ended(self, key: TaskKey, served_s: float) -> None:
        """A request of the task is over; ``served_s`` GPU-seconds of its work are done."""
        task = self._tasks[key]
        task.work_s = max(0.0, task.work_s - served_s)
        task.live -= 1
        if task.live:
            return
        del self._live[key]
        tenant = self._tenants[key[0]]
        tenant.live_tasks -= 1
        tenant.afs -= task.afs
        task.afs = 0.0
        if not tenant.live_tasks:
            del self._tenants[key[0]]
        self._keep_bound()

    def forget(self, key: TaskKey) -> None:
        """The task is over; while it has requests it is kept, and forgotten as others are."""
        if key not in self._live:
            self._tasks.pop(key, None)

    def shares(self, key: TaskKey, now_s: float) -> tuple[float, float]:
        """AFS × weight of the tenant and of the task, which has requests; both above 0."""
        task = self._live[key]
        self._update(key[0], task, now_s)
        weight = self._weights.get(key[0], 1.0)
        # Sums of what was added and taken away drift.
        afs = max(task.afs, self._tenants[key[0]].afs)
        return weight * min(self.max_tenant_afs, afs), weight * task.afs

    def refresh(self, now_s: float, limit: int) -> None:
        """Bring up to ``limit`` tasks with requests up to date, those that have waited longest."""
        for _ in range(min(limit, len(self._live))):
            key, task = next(iter(self._live.items()))
            self._live.move_to_end(key)
            self._update(key[0], task, now_s)

    def check_integrity(self) -> None:
        """Raise AssertionError when what is counted contradicts itself."""
        sums: dict[str, list[float]] = {}
        for key, task in self._live.items():
            if task.live < 1 or self._tasks.get(key) is not task:
                raise AssertionError(f"{key} is not live: {task}")
            sums.setdefault(key[0], []).append(task.afs)
        if sums.keys() != self._tenants.keys():
            raise AssertionError("the tenants are not those of the live tasks")
        for name, tenant in self._tenants.items():
            if len(sums[name]) != tenant.live_tasks or not math.isclose(
                sum(sums[name]), tenant.afs, rel_tol=1e-6, abs_tol=1e-6
            ):
                raise AssertionError(f"{name}: {tenant} is not the sum of {sums[name]}")

    def _keep_bound(self) -> None:
        while len(self._tasks) > self._max_tasks and len(self._tasks) > len(self._live):
            oldest = next(iter(self._tasks))
            if oldest in self._live:
                self._tasks.move_to_end(oldest)
            else:
                del self._tasks[oldest]

    def _update(self, tenant: str, task: Task, now_s: float) -> None:
        epoch = int(now_s // self._epoch_s)
        if task.epoch == epoch:
            return
        left_s, budget_s = task.deadline_s - now_s, task.deadline_s - task.began_s
        afs = task_afs(task.work_s, left_s, budget_s)
        self._tenants[tenant].afs += afs - task.afs
        task.afs, task.epoch = afs, epoch


def check_weight(weight: float) -> None:
    """Refuse a weight that is not above 0, or above a million.

    Raises:
        SettingsError: it is such a weight.
    """
    if not 0.0 < weight <= MAX_WEIGHT:
        raise SettingsError(f"weight={weight} must be above 0, at most {MAX_WEIGHT:g}")
