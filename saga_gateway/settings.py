"""The gateway's settings, validated once."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from saga_core.breaker import BreakerSettings
from saga_core.coordinator_settings import CoordinatorSettings
from saga_core.errors import SettingsError

_MAX_SECRET_BYTES = 64
_PATH = re.compile(r"(/[A-Za-z0-9._~:@-]+)+")
_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_EQUALS = r"([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?=[A-Za-z0-9._-]{0,63}"
_KUBERNETES = {
    "kubernetes_service": (re.compile(rf"({_LABEL}/)?{_LABEL}"), "namespace/name"),
    "kubernetes_selector": (re.compile(rf"{_EQUALS}(,{_EQUALS})*"), "app=worker,tier=gpu"),
    "kubernetes_port": (re.compile(rf"({_LABEL})?"), "http or 8000"),
}


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """What a gateway is started with.

    Attributes:
        workers: base URLs of the workers, ``http://host:port`` each, no duplicates; at least one,
            unless ``workers_file`` or Kubernetes says which there are.
        workers_file: further workers, one URL a line, read again when it changes.
        kubernetes_service: Service whose ready endpoints are further workers, ``namespace/name``,
            or ``name`` in the gateway's own namespace; None: none.
        kubernetes_selector: labels, ``label=value`` with commas between, of Services whose ready
            endpoints are further workers; beside ``kubernetes_service`` both must hold; None: none.
        kubernetes_port: name or number of the workers' port in their Service; empty: its only one.
        host: address to listen on.
        port: port to listen on, 0 to 65535; 0 takes any free one.
        max_body_bytes: largest request body that is taken, bytes, above 0.
        max_head_bytes: largest request line and headers that are taken, bytes; 0: no limit.
        connect_timeout_s: longest wait for a connection to a worker, seconds, above 0.
        first_byte_timeout_s: longest wait for the head of a worker's answer, seconds; 0: as long as
            ``idle_timeout_s``.
        idle_timeout_s: longest silence of a worker during its answer, seconds, above 0.
        pool_idle_s: how long an idle connection to a worker is kept, seconds; above 0 and below
            the five seconds after which a worker closes it.
        worker_backoff_s: how long a worker gets no requests when it could not be reached, or when
            its breaker has opened, seconds; 0 tries it at every request.
        breaker_failures: failures of a worker's own (no connection, silence, a broken answer, 502,
            503, 504) within ``breaker_window_s`` that open its breaker; 0: it never opens.
        breaker_window_s: seconds over which they are counted, above 0.
        health_interval_s: seconds between two health checks of a worker; 0: none.
        health_timeout_s: longest wait for the answer to one, seconds, above 0.
        slow_start_s: over how long a worker that comes back gets its full share of new sessions,
            seconds; 0: at once.
        max_worker_requests: requests that a worker is given at a time; more wait with the gateway,
            in fair order. 0: as many as it says that it runs at a time, or all, where it does not
            say.
        max_queued: requests that may wait, at least 0; any more are refused with 429.
        queue_wait_s: longest wait, seconds, above 0; then the request is refused with 429.
        theta: load of a worker, work ÷ capacity, from which a session may leave it for another; 0:
            whenever that is cheaper.
        steal_ratio: load of a worker ÷ load of an idle one above which the idle one takes over a
            session that waits, from 1; 1e9: never.
        preempt_after_s: seconds after which a waiting request of a much more urgent task is sent
            although there is no room: its engine may let another one give way (`saga worker
            --saga-preempt-waiting`); 0: never.
        deadline_factor: when a task should be done that has no deadline ÷ the time that such tasks
            take, from 1.
        fair_share: let requests wait in the order of fair shares; without it as they come.
        keep_share: share of a worker's KV pool that sessions under way may take before others,
            which have not begun, wait.
        keep_s: for how many seconds after a step the KV of a session counts as in use; 0: never.
        patience_s: after how many seconds nobody waits for paused sessions any more.
        event_log: file that takes what the coordinator is told and decides, for debugging: it grows
            by a kilobyte a request; None: no file.
        max_sessions: sessions remembered, at least 1; the least recently used one goes first.
        session_silent_s: silence after which a session counts as ended, seconds, up to a day.
        identify_sessions: tell by its content which session a request is of when it names none.
        state_file: file in which what is learned of workflows outlives the gateway; None: in none.
        state_save_s: how often it is written, seconds, above 0; also at a shutdown.
        max_queued_notices: notices waiting per worker, at least 1; the oldest is dropped.
        notice_timeout_s: longest wait for a worker to take a batch of notices, seconds, above 0.
        keys_file: TOML file with the API keys of callers (see ``saga key``), read again when it
            changes; None: everybody may call.
        open: listen to other hosts although there is no ``keys_file``.
        trusted_proxies: networks, such as ``10.0.0.0/8``, of proxies that may name a tenant in
            ``X-SAGA-Tenant-ID``; from anybody else it is dropped.
        session_secret: key of the hash that keeps the session ids of tenants apart; the same in all
            replicas of a gateway.
        worker_api_key: what the workers ask for (``vllm serve --api-key``); it takes the place of
            the caller's own ``Authorization``.
        otlp_endpoint: where spans go, such as ``http://collector:4318/v1/traces``; empty: nowhere.
        log_format: ``text`` or ``json``.
        log_requests: write a line for each relayed request.
        cors_origins: origins of web pages that may call the gateway, such as
            ``https://app.example``; ``*`` for any, none by default.
        pass_paths: further paths of the workers that are relayed as they are, such as
            ``/invocations``; each begins with a slash and has none at its end.
        reload_s: how often files are looked at for changes, seconds, above 0.
        drain_s: at a shutdown, how long open requests may take to finish, whole seconds.
    """

    workers: tuple[str, ...] = ()
    workers_file: str | None = None
    kubernetes_service: str | None = None
    kubernetes_selector: str | None = None
    kubernetes_port: str = ""
    host: str = "127.0.0.1"
    port: int = 8800
    max_body_bytes: int = 64 * 2**20
    max_head_bytes: int = 64 * 2**10
    connect_timeout_s: float = 5.0
    first_byte_timeout_s: float = 0.0
    idle_timeout_s: float = 600.0
    pool_idle_s: float = 4.0
    worker_backoff_s: float = 2.0
    breaker_failures: int = 10
    breaker_window_s: float = 120.0
    health_interval_s: float = 2.0
    health_timeout_s: float = 2.0
    slow_start_s: float = 10.0
    max_worker_requests: int = 0
    max_queued: int = 4096
    queue_wait_s: float = 600.0
    theta: float = 0.8
    steal_ratio: float = 2.0
    preempt_after_s: float = 0.0
    deadline_factor: float = 1.5
    fair_share: bool = True
    keep_share: float = 0.8
    keep_s: float = 30.0
    patience_s: float = 300.0
    event_log: str | None = None
    max_sessions: int = 100_000
    session_silent_s: float = 7200.0
    identify_sessions: bool = True
    state_file: str | None = None
    state_save_s: float = 300.0
    max_queued_notices: int = 10_000
    notice_timeout_s: float = 2.0
    keys_file: str | None = None
    open: bool = False
    trusted_proxies: tuple[str, ...] = ()
    session_secret: str = field(default="", repr=False)
    worker_api_key: str = field(default="", repr=False)
    otlp_endpoint: str = ""
    log_format: str = "text"
    log_requests: bool = False
    cors_origins: tuple[str, ...] = ()
    pass_paths: tuple[str, ...] = ()
    reload_s: float = 2.0
    drain_s: int = 30

    def __post_init__(self) -> None:
        ranges: dict[str, tuple[float, float]] = {
            "port": (0, 65535),
            "max_body_bytes": (1, 2**40),
            "max_head_bytes": (0, 2**30),
            "connect_timeout_s": (1e-3, 3600.0),
            "first_byte_timeout_s": (0.0, 86_400.0),
            "idle_timeout_s": (1e-3, 86_400.0),
            "pool_idle_s": (1e-3, 4.9),
            "worker_backoff_s": (0.0, 3600.0),
            "breaker_failures": (0, 1e6),
            "breaker_window_s": (1e-3, 86_400.0),
            "health_interval_s": (0.0, 3600.0),
            "health_timeout_s": (1e-3, 3600.0),
            "slow_start_s": (0.0, 3600.0),
            "max_worker_requests": (0, 1e6),
            "max_queued": (0, 1e6),
            "queue_wait_s": (1e-3, 86_400.0),
            "max_sessions": (1, 1e9),
            "session_silent_s": (1e-3, 86_400.0),
            "state_save_s": (1e-3, 86_400.0),
            "max_queued_notices": (1, 1e9),
            "notice_timeout_s": (1e-3, 3600.0),
            "reload_s": (1e-3, 3600.0),
            "drain_s": (0, 86_400),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise SettingsError(f"{name}={value} must be from {low:g} to {high:g}")
        if not self.host:
            raise SettingsError("host must not be empty; 0.0.0.0 listens on every address")
        if len(self.session_secret.encode()) > _MAX_SECRET_BYTES:
            raise SettingsError(f"session_secret must be at most {_MAX_SECRET_BYTES} bytes long")
        if self.log_format not in ("text", "json"):
            raise SettingsError(f"log_format={self.log_format!r} must be text or json")
        for path in self.pass_paths:
            if not _PATH.fullmatch(path):
                raise SettingsError(f"pass_paths: {path!r} must be like /invocations")
        for name, (pattern, example) in _KUBERNETES.items():
            text = getattr(self, name)
            if text is not None and not pattern.fullmatch(text):
                raise SettingsError(f"{name}={text!r} must be like {example}")
        if not (self.workers or self.workers_file or self.uses_kubernetes):
            raise SettingsError("workers must name at least one worker, such as http://host:8000")
        self.coordinator()
        ids = [worker_address(url)[0] for url in self.workers]
        for worker_id in ids:
            if ids.count(worker_id) > 1:
                raise SettingsError(f"workers names {worker_id} more than once")

    @property
    def uses_kubernetes(self) -> bool:
        """Whether Kubernetes is asked for workers."""
        return self.kubernetes_service is not None or self.kubernetes_selector is not None

    def coordinator(self) -> CoordinatorSettings:
        """What the coordinator is to go by.

        Raises:
            SettingsError: a value is out of its range.
        """
        return CoordinatorSettings(
            theta=self.theta,
            steal_ratio=self.steal_ratio,
            preempt_after_s=self.preempt_after_s,
            deadline_factor=self.deadline_factor,
            fair_share=self.fair_share,
            keep_share=self.keep_share,
            keep_s=self.keep_s,
            patience_s=self.patience_s,
            max_sessions=self.max_sessions,
        )

    def breaker(self) -> BreakerSettings:
        """When a worker's breaker opens and closes."""
        return BreakerSettings(
            failures=self.breaker_failures,
            window_s=self.breaker_window_s,
            open_s=self.worker_backoff_s,
        )


def worker_address(url: str) -> tuple[str, str]:
    """A worker's id (``host:port``) and base URL (``scheme://host:port``), from its URL.

    Without a scheme the worker speaks http; without a port the scheme's own is meant.

    Raises:
        SettingsError: the text is not the URL of a host, or has more than scheme, host and port.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise SettingsError(f"worker {url!r} is not a URL: {error}") from None
    extra = parts.path not in ("", "/") or parts.query or parts.fragment or parts.username
    if parts.scheme not in ("http", "https") or not host or extra:
        raise SettingsError(
            f"worker {url!r} must be http(s)://host:port, without a path such as /v1"
        )
    if port is None:
        port = 443 if parts.scheme == "https" else 80
    worker_id = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return worker_id, f"{parts.scheme}://{worker_id}"
