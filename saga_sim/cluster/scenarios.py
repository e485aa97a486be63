"""Named scenarios: what the agents do, at which pressure, and which arms that is put to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from saga_core.errors import SettingsError
from saga_sim.cluster.arms import REFERENCE
from saga_sim.cluster.families import TenantKind
from saga_sim.cluster.load import LoadOptions

_CORE = ("vllm", "vllm-apc", "least-loaded", "prefix-aware", REFERENCE)
_STYLES = ("kvflow-style", "continuum-style", "autellix-style", "thunderagent-style")
_SAGA = ("saga", "saga-coordinator")
_ALL = (*_CORE, *_STYLES, *_SAGA, "saga-pausing")
_ROBUST = ("least-loaded", REFERENCE, *_SAGA)
_FAIR = (
    "vllm-apc",
    REFERENCE,
    "autellix-style",
    *_SAGA,
    "saga-untold-deadlines",
    "saga-preempting",
)

_TENANTS = (TenantKind("heavy", 3, 100), TenantKind("medium", 4, 30), TenantKind("light", 3, 10))
"""Ten tenants and the steps of their tasks, as in the SAGA paper (arXiv 2605.00528)."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load and the arms that it is for.

    Attributes:
        says: what it is, in a line.
        load: at the scale at which arms are judged: few workers at the pressure of many.
        full: what is different at the paper's scale: 16 workers, its tasks where it says so.
        arms: names. reference: the one that others are compared with.
    """

    name: str
    says: str
    load: LoadOptions
    full: Mapping[str, Any] = field(default_factory=dict)
    arms: tuple[str, ...] = _ALL
    reference: str = REFERENCE

    @property
    def line(self) -> str:
        """Name, what it is, and its pressure."""
        load = self.load
        return (
            f"{self.name}: {self.says}; {load.workers} workers, {load.tasks} tasks, "
            f"{load.live_tasks} at a time, pressure {load.pressure:g}"
        )

    def at(self, given: Mapping[str, Any], *, is_full: bool, seed: int) -> LoadOptions:
        """The load with that seed; what is ``given`` by name stands above the scenario.

        Raises:
            SettingsError: what is given does not go with it.
        """
        return replace(self.load, **{**(self.full if is_full else {}), **given, "seed": seed})


_LIST = (
    Scenario(
        "swe",
        "coding agents, one tool a step",
        LoadOptions("swe", workers=4, tasks=64, live_tasks=32, pressure=2.0),
        {"workers": 16, "tasks": 500, "live_tasks": 128},
    ),
    Scenario(
        "web",
        "browser agents, half of whose prompts branch",
        LoadOptions("web", workers=4, tasks=96, live_tasks=32, pressure=2.0),
        {"workers": 16, "tasks": 812, "live_tasks": 128},
    ),
    Scenario(
        "tenants",
        "coding agents of ten tenants, 3 with tasks of 100 steps, 4 of 30, 3 of 10, coming at any "
        "time; deadlines are 1.5 × the task's time alone",
        LoadOptions(
            "swe",
            workers=4,
            tasks=240,
            live_tasks=24,
            pressure=0.3,
            arrivals="poisson",
            tenants=_TENANTS,
        ),
        {"workers": 16, "tasks": 960, "live_tasks": 96},
        _FAIR,
        "vllm-apc",
    ),
    Scenario(
        "tenants-crowded",
        "the same where tasks that come at any time fill all memory",
        LoadOptions(
            "swe",
            workers=4,
            tasks=160,
            live_tasks=20,
            pressure=1.0,
            arrivals="poisson",
            tenants=_TENANTS,
        ),
        {"workers": 16, "tasks": 640, "live_tasks": 80},
        (*_FAIR, "thunderagent-style", "saga-pausing"),
        "vllm-apc",
    ),
    Scenario(
        "chat",
        "people who read and think between requests, no tools",
        LoadOptions("chat", workers=4, tasks=768, live_tasks=128, pressure=1.0),
        {"workers": 16, "tasks": 3072, "live_tasks": 512},
        _ROBUST,
        "least-loaded",
    ),
    Scenario(
        "mixed",
        "coding agents, browser agents and chats, a third each",
        LoadOptions("swe+web+chat", workers=4, tasks=96, live_tasks=48, pressure=2.0),
        {"workers": 16, "tasks": 1200, "live_tasks": 192},
        ("vllm-apc", *_ROBUST),
    ),
    Scenario(
        "bursty",
        "browser agents that come in bursts, all within a quarter of the time",
        LoadOptions("web", workers=4, tasks=96, live_tasks=16, pressure=1.0, arrivals="bursts"),
        {"workers": 16, "tasks": 812, "live_tasks": 64},
        ("vllm-apc", *_ROBUST),
    ),
    Scenario(
        "worker-loss",
        "browser agents; half way one worker dies, to come back empty after 120 s",
        LoadOptions("web", workers=4, tasks=96, live_tasks=32, pressure=1.5, lost_worker_s=120.0),
        {"workers": 16, "tasks": 812, "live_tasks": 128},
        ("vllm-apc", *_ROBUST),
    ),
    Scenario(
        "wrong-hints",
        "browser agents of whom SAGA is told what is not so",
        LoadOptions("web", workers=4, tasks=96, live_tasks=32, pressure=1.2),
        {"workers": 16, "tasks": 812, "live_tasks": 128},
        (
            "saga-no-notices",
            "saga",
            "saga-random-hints",
            "saga-adversarial-hints",
            "saga-random-homes-kept",
            "saga-adversarial-homes-kept",
        ),
        "saga-no-notices",
    ),
    Scenario(
        "heavy-tails",
        "coding agents whose tools run for 1 s to 10 minutes, Pareto with α = 1.1",
        LoadOptions("swe", workers=4, tasks=64, live_tasks=32, pressure=2.0, pareto=1.1),
        {"workers": 16, "tasks": 500, "live_tasks": 128},
        ("vllm-apc", *_ROBUST, "saga-no-prefetch"),
    ),
    Scenario(
        "ablations",
        "coding agents; SAGA without each of its parts",
        LoadOptions("swe", workers=4, tasks=64, live_tasks=32, pressure=2.0),
        {"workers": 16, "tasks": 500, "live_tasks": 128},
        (
            "saga",
            "saga-no-affinity",
            "saga-stock-retention",
            "saga-wa-lru-ttl",
            "saga-wa-lru",
            "saga-no-tools",
            "saga-no-notices",
            "saga-no-ordering",
            "saga-no-prefetch",
            "saga-sticky",
            "saga-coordinator",
            "saga-no-stealing",
            "saga-no-keeping",
        ),
        "saga",
    ),
)
SCENARIOS: dict[str, Scenario] = {scenario.name: scenario for scenario in _LIST}
"""Every scenario by its name."""


def scenario_of(name: str) -> Scenario:
    """Look a scenario up.

    Raises:
        SettingsError: there is none of that name.
    """
    if name not in SCENARIOS:
        raise SettingsError(f"scenario {name!r}: choose one of {', '.join(SCENARIOS)}, or list")
    return SCENARIOS[name]
