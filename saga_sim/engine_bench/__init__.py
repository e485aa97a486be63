"""A closed-loop benchmark of one real engine: the load, its client, the figures."""

from saga_sim.engine_bench.closed_loop import Answer, ClosedLoop, Request
from saga_sim.engine_bench.completions import Completions
from saga_sim.engine_bench.figures import ArmRun, Measured, Paired, measure
from saga_sim.engine_bench.plan import PROFILE_SESSIONS, Load, LoadOptions, make_load
from saga_sim.engine_bench.report import print_report, summarise

__all__ = [
    "PROFILE_SESSIONS",
    "Answer",
    "ArmRun",
    "ClosedLoop",
    "Completions",
    "Load",
    "LoadOptions",
    "Measured",
    "Paired",
    "Request",
    "make_load",
    "measure",
    "print_report",
    "summarise",
]
