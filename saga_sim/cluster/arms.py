"""What is compared: how the workers keep KV, and how requests find a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gpu_backend.shadow import STOCK_ORDER
from saga_core.errors import SettingsError
from saga_core.policies import DEFAULT_POLICY
from saga_sim.cluster.dispatch import Coordinated, Dispatcher, Fleet, Immediate
from saga_sim.cluster.routers import Affinity, LeastLoaded, RoundRobin

MakeDispatcher = Callable[[Fleet], Dispatcher]

LEAVE_RATIO = 2.0
"""A session leaves a worker with so many times the requests of the least loaded (the paper's
R_max, for a queue)."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A worker's policy with a way to dispatch.

    Attributes:
        says: what it is, in a line.
        dispatcher: made anew for each run.
        policy: value of ``--saga-policy``; None: vLLM without the plugin.
        prefix_caching: whether vLLM caches prefixes at all.
        tells_tools, tells_ends: whether the worker is told which tool an answer calls, and the
            end of a session.
        settings: more of the plugin's settings, by name.
    """

    name: str
    says: str
    dispatcher: MakeDispatcher
    policy: str | None = None
    prefix_caching: bool = True
    tells_tools: bool = False
    tells_ends: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, str] | None:
        """The environment that the plugin reads; None without it."""
        if self.policy is None:
            return None
        return {"SAGA_POLICY": self.policy} | {
            f"SAGA_{name.upper()}": value for name, value in self.settings.items()
        }


def _round_robin(fleet: Fleet) -> Dispatcher:
    return Immediate(RoundRobin())


def _least_loaded(fleet: Fleet) -> Dispatcher:
    return Immediate(LeastLoaded())


def _sticky(fleet: Fleet) -> Dispatcher:
    return Immediate(Affinity())


def _balanced(fleet: Fleet) -> Dispatcher:
    return Immediate(Affinity(LEAVE_RATIO))


def _saga(
    name: str,
    says: str,
    *,
    policy: str = DEFAULT_POLICY,
    dispatcher: MakeDispatcher = _balanced,
    tells: bool = True,
    **settings: str,
) -> Arm:
    return Arm(name, says, dispatcher, policy, True, tells, tells, settings)


_ARMS = (
    Arm("vllm", "no prefix caching, round robin", _round_robin, prefix_caching=False),
    Arm("vllm-apc", "prefix caching, round robin", _round_robin),
    Arm("least-loaded", "prefix caching, fewest requests", _least_loaded),
    Arm("vllm-apc-affinity", "prefix caching, sessions stay where they are", _sticky),
    _saga("saga", "the plugin, told tools and ends; sessions leave a worker whose queue is long"),
    _saga("saga-sticky", "saga, but sessions stay where they are", dispatcher=_sticky),
    _saga("saga-no-affinity", "saga, but fewest requests", dispatcher=_least_loaded),
    _saga("saga-coordinator", "saga, dispatched by its coordinator", dispatcher=Coordinated),
    _saga("saga-stock-retention", "saga, but vLLM's order of eviction", policy=STOCK_ORDER),
    _saga("saga-no-notices", "saga, told session ids only", tells=False),
    _saga("saga-no-ordering", "saga, but vLLM's order of admission", order_waiting="0"),
    _saga("saga-no-prefetch", "saga, but nothing is prefetched", prefetch="0"),
)
ARMS: dict[str, Arm] = {arm.name: arm for arm in _ARMS}
"""Every arm by its name."""

REFERENCE = "vllm-apc-affinity"
"""The arm that others are compared with."""

DEFAULT_ARMS = ("vllm", "vllm-apc", "least-loaded", REFERENCE, "saga")


def arms_of(names: Sequence[str]) -> list[Arm]:
    """Look up arms.

    Raises:
        SettingsError: one is unknown or named twice, or there is none.
    """
    if not names or len(set(names)) < len(names) or not set(names) <= set(ARMS):
        raise SettingsError(f"arms {','.join(names)!r}: choose, each once, from {', '.join(ARMS)}")
    return [ARMS[name] for name in names]
