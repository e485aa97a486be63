"""The Prometheus series that gateway and workers export, collected from their code."""

from __future__ import annotations

from prometheus_client import Histogram
from prometheus_client.metrics import MetricWrapperBase

from gpu_backend.metrics import ENABLED, GPU_SERIES, SERIES
from saga_gateway.metrics import Metrics
from saga_gateway.sessions import SessionTable
from saga_gateway.settings import GatewaySettings
from saga_gateway.stats import Stats
from saga_gateway.workers import Workers


def exported() -> dict[str, set[str]]:
    """Labels of every series, by its name."""
    return gateway() | worker()


def gateway() -> dict[str, set[str]]:
    settings = GatewaySettings(("http://worker:8000",))
    sessions = SessionTable(settings.max_sessions, settings.session_silent_s, None)
    registry = Metrics(Stats(), Workers(settings), sessions)._registry
    names: dict[str, set[str]] = {}
    for collector in registry._collector_to_names:
        if isinstance(collector, MetricWrapperBase):
            names |= _of_metric(collector)
            continue
        for family in collector.collect():
            suffix = "_total" if family.type == "counter" else ""
            names[family.name + suffix] = set(family._labelnames)
    return names


def _of_metric(metric: MetricWrapperBase) -> dict[str, set[str]]:
    labels, name = set(metric._labelnames), metric._name
    if isinstance(metric, Histogram):
        return {
            f"{name}_bucket": labels | {"le"},
            f"{name}_sum": labels,
            f"{name}_count": labels,
        }
    return {f"{name}_total" if metric._type == "counter" else name: labels}


def worker() -> dict[str, set[str]]:
    of_state = {series.name: {*series.labels, "policy"} for series in SERIES}
    return of_state | {name: {"gpu"} for name, _, _ in GPU_SERIES} | {ENABLED: set()}
