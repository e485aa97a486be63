"""The constants of the coordinator, validated once."""

from __future__ import annotations

from dataclasses import dataclass

from saga_core.errors import SettingsError

_RANGES: dict[str, tuple[float, float]] = {
    "theta": (0.0, 10.0),
    "idle_s": (0.0, 3600.0),
    "steal_ratio": (1.0, 1e9),
    "guard_s": (0.0, 86_400.0),
    "epoch_s": (1e-3, 60.0),
    "deadline_factor": (1.0, 100.0),
    "max_tenant_fleets": (0.0, 1e9),
    "keep_share": (0.1, 1e9),
    "keep_s": (0.0, 3600.0),
    "patience_s": (0.0, 86_400.0),
    "preempt_after_s": (0.0, 3600.0),
    "max_overtaken_s": (0.0, 3600.0),
    "state_age_s": (0.0, 3600.0),
    "prefill_tokens_per_s": (1.0, 1e9),
    "transfer_tokens_per_s": (0.0, 1e12),
    "service_s": (1e-3, 3600.0),
    "prefetch_min_p": (0.0, 1.1),
    "max_sessions": (1, 1e9),
    "max_tasks": (1, 1e9),
    "max_prefixes": (0, 1e9),
}


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """Constants of the coordinator, as in the SAGA paper (arXiv 2605.00528) where it names them.

    Attributes:
        theta: load from which a worker counts as congested and may lose a session, 0 to 10 (paper:
            0.8); 0: whenever it is cheaper.
        idle_s: seconds that a worker's queue was empty before it steals, 0 to 3600 (paper: 0.1).
        steal_ratio: load of the victim ÷ load of the thief above which it steals, from 1 (paper:
            2); 1e9: never.
        guard_s: seconds in which a session is moved once at most, to 86400. Ours: a session needs
            some steps to win back what a move costs.
        epoch_s: how long an AFS holds, seconds, 0.001 to 60 (paper: 0.1).
        deadline_factor: deadline of a task that has none ÷ its expected time, 1 to 100 (paper:
            1.5).
        fair_share: whether requests wait in the order of fair shares; False: as they come, all of
            one priority.
        max_tenant_fleets: a tenant's AFS, the workers that it needs, counts up to so many times
            the fleet; 0: any (the paper). Ours: nobody can have more than all workers, and a tenant
            with very many tasks leaves room for the others.
        keep_share: share of a worker's KV pool that sessions under way, running or paused, may take
            before what has not begun yet is kept waiting, 0.1 to 1e9. Ours.
        keep_s: seconds for which the KV of a session counts as in use after its step, to 3600; one
            that is expected later, or not at all, is not waited for. 0: never. Ours: longer than
            most tools take.
        patience_s: seconds after which what has not begun waits no more for paused sessions, to
            86400. Ours.
        preempt_after_s: seconds after which a waiting request of a more urgent task makes a
            running one give way, to 3600 (paper: 0.5); 0: never.
        max_overtaken_s: seconds for which requests that need less room pass one that does not fit,
            to 3600; 0: never. Ours: about one request's time.
        state_age_s: age at which what a worker said of itself is forgotten, seconds, to 3600; 0:
            it is not used. Ours: some of the states that a worker sends each second are missing.
        prefill_tokens_per_s: of a worker that has not said its own, from 1.
        transfer_tokens_per_s: of a session's KV between workers; 0: they cannot.
        service_s: time of a request at a worker that has not served any yet, 0.001 to 3600 s.
        prefetch_min_p: probability of a return from which KV is brought back ahead of it, 0 to 1;
            1.1: never.
        max_sessions, max_tasks: how many are remembered, at least 1.
        max_prefixes: shared prefixes that are remembered; 0: none.
    """

    theta: float = 0.8
    idle_s: float = 0.1
    steal_ratio: float = 2.0
    guard_s: float = 10.0
    epoch_s: float = 0.1
    deadline_factor: float = 1.5
    fair_share: bool = True
    max_tenant_fleets: float = 1.0
    keep_share: float = 0.8
    keep_s: float = 30.0
    patience_s: float = 300.0
    preempt_after_s: float = 0.5
    max_overtaken_s: float = 5.0
    state_age_s: float = 5.0
    prefill_tokens_per_s: float = 5000.0
    transfer_tokens_per_s: float = 0.0
    service_s: float = 5.0
    prefetch_min_p: float = 0.5
    max_sessions: int = 1_000_000
    max_tasks: int = 100_000
    max_prefixes: int = 10_000

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise SettingsError(f"{name}={value} must be from {low:g} to {high:g}")
