"""What a gateway is made of before it opens a connection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from saga_gateway.dispatch import EventLog
from saga_gateway.graphs import GraphFile
from saga_gateway.identify import Identifier
from saga_gateway.identity import Gatekeeper, KeyFile, networks
from saga_gateway.metrics import Metrics
from saga_gateway.sessions import SessionTable
from saga_gateway.settings import GatewaySettings
from saga_gateway.stats import Stats
from saga_gateway.tracing import Tracing, make_provider
from saga_gateway.workers import Workers


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts that outlive every request; ``clock`` gives monotonic seconds."""

    settings: GatewaySettings
    clock: Callable[[], float]
    workers: Workers
    sessions: SessionTable
    identifier: Identifier
    gatekeeper: Gatekeeper
    stats: Stats
    metrics: Metrics
    tracing: Tracing
    graph_file: GraphFile | None
    event_log: EventLog | None

    @classmethod
    def make(cls, settings: GatewaySettings, clock: Callable[[], float]) -> Parts:
        """As the settings say.

        Raises:
            SettingsError: a file that they name is wrong, or a package that they need is missing.
        """
        workers, stats = Workers(settings), Stats()
        graph_file = None if settings.state_file is None else GraphFile(Path(settings.state_file))
        graphs = None if graph_file is None else graph_file.load()
        sessions = SessionTable(settings.max_sessions, settings.session_silent_s, graphs)
        secret = settings.session_secret.encode()
        keys = None if settings.keys_file is None else KeyFile(Path(settings.keys_file))
        gatekeeper = Gatekeeper(keys, networks(settings.trusted_proxies), secret)
        return cls(
            settings,
            clock,
            workers,
            sessions,
            Identifier(secret, settings.max_sessions),
            gatekeeper,
            stats,
            Metrics(stats, workers, sessions, clock),
            Tracing(make_provider(settings)),
            graph_file,
            None if settings.event_log is None else EventLog(settings.event_log),
        )
