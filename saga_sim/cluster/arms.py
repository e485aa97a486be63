"""What is compared: how the workers keep KV, and how requests find a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gpu_backend.shadow import STOCK_ORDER
from saga_core.coordinator_settings import CoordinatorSettings
from saga_core.errors import SettingsError
from saga_core.policies import DEFAULT_POLICY
from saga_sim.cluster.dispatch import (
    Coordinated,
    Dispatcher,
    FirstTaskFirst,
    Fleet,
    Immediate,
    LeastAttained,
)
from saga_sim.cluster.hints import Hints
from saga_sim.cluster.pausing import Pausing
from saga_sim.cluster.routers import Affinity, LeastLoaded, PrefixAware, RoundRobin

MakeDispatcher = Callable[[Fleet], Dispatcher]

LEAVE_RATIO = 2.0
"""A session leaves a worker with so many times the requests of the least loaded (the paper's
R_max, for a queue)."""

_NEVER, _MOST_THETA = 1e9, 10.0
"""Of stealing, and of the load from which a home may lose a session."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A worker's policy with a way to dispatch.

    Attributes:
        says: what it is, in a line.
        dispatcher: made anew for each run.
        policy: value of ``--saga-policy``; None: vLLM without the plugin.
        prefix_caching: whether vLLM caches prefixes at all.
        tells_tools, tells_ends: whether the worker is told which tool an answer calls, and the
            end of a session. hints: how true what it is told is, and the router, unless that
            ``keeps_homes`` of sessions which are said to be over.
        by_priority: whether vLLM's queue goes by the priorities of the dispatcher
            (``--scheduling-policy priority``).
        settings: more of the plugin's settings, by name.
    """

    name: str
    says: str
    dispatcher: MakeDispatcher
    policy: str | None = None
    prefix_caching: bool = True
    tells_tools: bool = False
    tells_ends: bool = False
    hints: Hints = Hints.TRUE
    keeps_homes: bool = False
    by_priority: bool = False
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


def _prefix_aware(fleet: Fleet) -> Dispatcher:
    return Immediate(PrefixAware(fleet.pool_tokens // fleet.block_tokens))


def _sticky(fleet: Fleet) -> Dispatcher:
    return Immediate(Affinity())


def _balanced(fleet: Fleet) -> Dispatcher:
    return Immediate(Affinity(LEAVE_RATIO))


def _least_attained(fleet: Fleet) -> Dispatcher:
    return LeastAttained(Affinity(), fleet)


def _first_task_first(fleet: Fleet) -> Dispatcher:
    return FirstTaskFirst(Affinity())


def _untold_deadlines(fleet: Fleet) -> Dispatcher:
    return Coordinated(fleet, knows_deadlines=False)


def _no_stealing(fleet: Fleet) -> Dispatcher:
    settings = CoordinatorSettings(preempt_after_s=0.0, steal_ratio=_NEVER, theta=_MOST_THETA)
    return Coordinated(fleet, settings)


def _no_keeping(fleet: Fleet) -> Dispatcher:
    return Coordinated(fleet, CoordinatorSettings(preempt_after_s=0.0, keep_s=0.0))


def _preempting(fleet: Fleet) -> Dispatcher:
    return Coordinated(fleet, CoordinatorSettings())


def _saga(
    name: str,
    says: str,
    *,
    policy: str = DEFAULT_POLICY,
    dispatcher: MakeDispatcher = _balanced,
    tells: bool = True,
    tells_tools: bool | None = None,
    hints: Hints = Hints.TRUE,
    keeps_homes: bool = False,
    by_priority: bool = False,
    **settings: str,
) -> Arm:
    return Arm(
        name,
        says,
        dispatcher,
        policy,
        tells_tools=tells if tells_tools is None else tells_tools,
        tells_ends=tells,
        hints=hints,
        keeps_homes=keeps_homes,
        by_priority=by_priority,
        settings=settings,
    )


def _style(name: str, says: str, *, policy: str, dispatcher: MakeDispatcher, **more: str) -> Arm:
    """The policy of another system, in our worker without what is only ours."""
    return Arm(
        name,
        says,
        dispatcher,
        policy,
        tells_tools=True,
        tells_ends=True,
        by_priority=dispatcher is not _sticky,
        settings={"order_waiting": "0", "prefetch": "0", **more},
    )


_STOCK = (
    Arm("vllm", "no prefix caching, round robin", _round_robin, prefix_caching=False),
    Arm("vllm-apc", "prefix caching, round robin", _round_robin),
    Arm("least-loaded", "prefix caching, fewest requests", _least_loaded),
    Arm(
        "prefix-aware",
        "prefix caching, the worker that was sent the longest prefix, as SGLang's router does",
        _prefix_aware,
    ),
    Arm("vllm-apc-affinity", "prefix caching, sessions stay where they are", _sticky),
)
_STYLES = (
    _style(
        "kvflow-style",
        "of KVFlow the order of eviction, by steps until a session runs again, on sessions that "
        "stay; not its loading ahead from host memory",
        policy="steps-to-execution",
        dispatcher=_sticky,
    ),
    _style(
        "continuum-style",
        "of Continuum that a pause keeps its KV for a fixed 30 s, softly, and that the task that "
        "came first goes first; not its choice of the time, nor its pin",
        policy="fixed-ttl",
        dispatcher=_first_task_first,
    ),
    Arm(
        "autellix-style",
        "prefix caching; of Autellix that the task with the least service so far goes first, in "
        "levels, on sessions that stay; running requests do not give way",
        _least_attained,
        by_priority=True,
    ),
    Arm(
        "thunderagent-style",
        "prefix caching; of ThunderAgent that whole tasks are let in and paused by the memory "
        "that they need; not its preparation of tools",
        Pausing,
    ),
)
_SAGA = (
    _saga("saga", "the plugin, told tools and ends; sessions leave a worker whose queue is long"),
    _saga("saga-coordinator", "saga, dispatched by its coordinator", dispatcher=Coordinated),
    _saga(
        "saga-preempting",
        "saga-coordinator, with vLLM's queue by its priorities, where the less urgent gives way",
        dispatcher=_preempting,
        by_priority=True,
        preempt_waiting="1",
    ),
    _saga(
        "saga-untold-deadlines",
        "saga-coordinator, told no deadlines",
        dispatcher=_untold_deadlines,
    ),
    _saga(
        "saga-no-stealing",
        "saga-coordinator, but sessions stay where they are",
        dispatcher=_no_stealing,
    ),
    _saga(
        "saga-no-keeping",
        "saga-coordinator, but the KV of paused sessions counts as free",
        dispatcher=_no_keeping,
    ),
    _saga(
        "saga-pausing",
        "saga, dispatched as thunderagent-style: not what ships",
        dispatcher=Pausing,
    ),
    _saga("saga-sticky", "saga, but sessions stay where they are", dispatcher=_sticky),
    _saga("saga-no-affinity", "saga, but fewest requests", dispatcher=_least_loaded),
    _saga("saga-stock-retention", "saga, but vLLM's order of eviction", policy=STOCK_ORDER),
    _saga("saga-wa-lru-ttl", "saga, but the paper's WA-LRU with its TTL", policy="wa-lru-ttl"),
    _saga("saga-wa-lru", "saga, but the paper's WA-LRU without TTL", policy="wa-lru"),
    _saga("saga-no-tools", "saga, told ends only", tells_tools=False),
    _saga("saga-no-notices", "saga, told session ids only", tells=False),
    _saga("saga-no-ordering", "saga, but vLLM's order of admission", order_waiting="0"),
    _saga("saga-no-prefetch", "saga, but nothing is prefetched", prefetch="0"),
    _saga(
        "saga-random-hints",
        "saga, told any tool, any probability of a return, and an end at any step",
        hints=Hints.RANDOM,
    ),
    _saga(
        "saga-adversarial-hints",
        "saga, told the end, or no return from another tool, of sessions that go on, and a return "
        "of those that are over",
        hints=Hints.ADVERSARIAL,
    ),
    _saga(
        "saga-random-homes-kept",
        "saga-random-hints, but the router keeps homes of sessions that are said to be over",
        hints=Hints.RANDOM,
        keeps_homes=True,
    ),
    _saga(
        "saga-adversarial-homes-kept",
        "saga-adversarial-hints, but the router keeps homes of sessions that are said to be over",
        hints=Hints.ADVERSARIAL,
        keeps_homes=True,
    ),
)
ARMS: dict[str, Arm] = {arm.name: arm for arm in (*_STOCK, *_STYLES, *_SAGA)}
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
