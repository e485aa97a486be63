"""What the gateway tells Prometheus.

No label names a session, a tenant or anything that a client chooses freely.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sized

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from saga_gateway.answers import Usage
from saga_gateway.sessions import SessionTable
from saga_gateway.stats import Stats
from saga_gateway.workers import Workers

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The gateway's series. Each method costs a few microseconds."""

    def __init__(
        self,
        stats: Stats,
        workers: Workers,
        sessions: SessionTable,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = CollectorRegistry()
        self._responses = Counter(
            "saga_gateway_responses",
            "responses by path and status; other: no path of the gateway",
            ("path", "status"),
            registry=self._registry,
        )
        self._routes = Counter(
            "saga_gateway_routes",
            "why requests went where they went",
            ("reason",),
            registry=self._registry,
        )
        self._first_byte = Histogram(
            "saga_gateway_time_to_first_byte_seconds",
            "from the end of a request's body to the first byte of a worker's answer",
            registry=self._registry,
            buckets=_SECONDS,
        )
        self._duration = Histogram(
            "saga_gateway_duration_seconds",
            "from the end of a request's body to the last byte of the answer",
            registry=self._registry,
            buckets=_SECONDS,
        )
        self._per_token = Histogram(
            "saga_gateway_time_per_output_token_seconds",
            "of a stream whose tokens are known: first to last byte ÷ tokens after the first",
            registry=self._registry,
            buckets=_TOKEN_SECONDS,
        )
        self._tokens = tokens = Counter(
            "saga_gateway_tokens",
            "tokens of the answers whose counts are known; cached are a part of prompt",
            ("kind",),
            registry=self._registry,
        )
        self._prompt_tokens = tokens.labels("prompt")
        self._cached_tokens = tokens.labels("cached")
        self._completion_tokens = tokens.labels("completion")
        self._wait = Histogram(
            "saga_gateway_queue_wait_seconds",
            "how long a request waited for a worker with room",
            registry=self._registry,
            buckets=_SECONDS,
        )
        self._queue = Gauge(
            "saga_gateway_queued", "requests that wait for a worker", registry=self._registry
        )
        # To look a series up by its labels costs more than to count.
        self._answered: dict[tuple[str, int], Counter] = {}
        self._routed: dict[str, Counter] = {}
        self._registry.register(_State(stats, workers, sessions, clock))

    def answered(self, path: str, status: int) -> None:
        """A request was answered with this status; ``path`` is one of the gateway's."""
        series = self._answered.get((path, status))
        if series is None:
            series = self._answered[path, status] = self._responses.labels(path, status)
        series.inc()

    def routed(self, reason: str) -> None:
        """A request was sent to a worker for this reason."""
        series = self._routed.get(reason)
        if series is None:
            series = self._routed[reason] = self._routes.labels(reason)
        series.inc()

    def waited(self, seconds: float) -> None:
        """A request has found a worker with room."""
        self._wait.observe(seconds)

    def watch_queue(self, queue: Sized) -> None:
        """What waits there is told of."""
        self._queue.set_function(lambda: float(len(queue)))

    def first_byte(self, seconds: float) -> None:
        """The first byte of an answer has come."""
        self._first_byte.observe(seconds)

    def finished(self, seconds: float, stream_s: float, usage: Usage | None) -> None:
        """An answer is complete.

        Args:
            seconds: from the request to its end.
            stream_s: from its first byte to its last; 0 when it came whole.
            usage: its token counts; None when nobody knows them.
        """
        self._duration.observe(seconds)
        if usage is None:
            return
        if stream_s > 0.0 and usage.completion_tokens > 1:
            self._per_token.observe(stream_s / (usage.completion_tokens - 1))
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._cached_tokens.inc(usage.cached_tokens or 0)
        self._completion_tokens.inc(usage.completion_tokens)

    def tokens(self) -> dict[str, int]:
        """Tokens of the answers so far, by kind: prompt, cached, completion."""
        return {
            sample.labels["kind"]: int(sample.value)
            for family in self._tokens.collect()
            for sample in family.samples
            if sample.name.endswith("_total")
        }

    def text(self) -> bytes:
        """All series, as Prometheus reads them."""
        return generate_latest(self._registry)


class _State(Collector):
    """Series that are read off the gateway when they are asked for."""

    def __init__(
        self, stats: Stats, workers: Workers, sessions: SessionTable, clock: Callable[[], float]
    ) -> None:
        self._stats = stats
        self._workers = workers
        self._sessions = sessions
        self._clock = clock

    def collect(self) -> Iterable[Metric]:
        yield from self._of_stats()
        yield from self._of_workers()
        yield GaugeMetricFamily(
            "saga_gateway_sessions", "sessions in the table", float(len(self._sessions))
        )
        yield GaugeMetricFamily(
            "saga_gateway_workflows", "workflows with a graph", float(len(self._sessions.graphs))
        )

    def _of_stats(self) -> Iterator[Metric]:
        for name, value in self._stats.as_dict().items():
            text = _STATS[name]
            if isinstance(value, int):
                yield CounterMetricFamily(f"saga_gateway_{name}", text, float(value))
                continue
            family = CounterMetricFamily(f"saga_gateway_{name}", text, labels=["kind"])
            for kind, count in value.items():
                family.add_metric([kind], count)
            yield family

    def _of_workers(self) -> Iterator[Metric]:
        in_flight = GaugeMetricFamily(
            "saga_gateway_worker_requests", "requests at a worker", labels=["worker"]
        )
        available = GaugeMetricFamily(
            "saga_gateway_worker_available", "1: it is given requests", labels=["worker"]
        )
        healthy = GaugeMetricFamily(
            "saga_gateway_worker_healthy", "1: its health checks succeed", labels=["worker"]
        )
        now_s = self._clock()
        for worker in self._workers:
            labels = [worker.worker_id]
            in_flight.add_metric(labels, worker.in_flight)
            available.add_metric(labels, float(worker.load(now_s).available))
            healthy.add_metric(labels, float(worker.healthy))
        yield from (in_flight, available, healthy)


_STATS = {
    "requests": "requests that were read to their end",
    "hints_dropped": "hint headers whose value was not legal",
    "stale_retries": "requests sent again because the pooled connection was dead",
    "failovers": "requests sent to another worker because the first was down",
    "clients_gone": "requests whose client left before the answer was complete",
    "answers_broken": "answers that a worker did not finish",
    "answers_unread": "successful answers that nothing could be read from",
    "notices_sent": "notices that a worker took",
    "notices_dropped": "notices given up for want of room, or after a failure",
    "notice_failures": "failed deliveries of notices, by kind",
    "events": "events received, by kind",
    "identified": "requests that named no session, by what they were found to be to theirs",
}
