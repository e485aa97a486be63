"""Workers that Kubernetes knows: the ready endpoints of a Service, listed and then watched."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp

from saga_core.errors import SettingsError
from saga_gateway.endpoint_slices import Slice, workers_of
from saga_gateway.settings import GatewaySettings

logger = logging.getLogger(__name__)

_SERVICE_LABEL = "kubernetes.io/service-name"
_IN_CLUSTER = "KUBERNETES_SERVICE_HOST"
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_GONE = 410

_WATCH_S = (240, 300)
"""How long the API server is asked to keep a watch open; chosen anew each time, so that replicas
that started together do not come back together."""
_CONNECT_S = 10
_ANSWER_S = 30
_MAX_LINE_BYTES = 16 * 2**20
_MAX_REFUSAL_BYTES = 4096
_LEAST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 30.0
_LASTED_S = 1.0
"""A watch that has lasted so long counts as a success."""

_FAILURES_TO_SAY = 5
"""A connection that is lost now and then is nothing to tell of."""

_Ask: TypeAlias = Callable[[float, Mapping[str, Any]], Awaitable[aiohttp.ClientResponse]]
"""Asks for EndpointSlices: longest silence in seconds, and further parameters."""


class APIError(Exception):
    """The API server refuses, or what it says is not understood."""


class _GoneError(Exception):
    """What has happened since the last resource version is no longer known there."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Whose endpoints are workers.

    Attributes:
        namespace: where they are; empty: in the namespace of the gateway.
        selector: labels of their EndpointSlices, as Kubernetes writes selectors.
        port: name or number of the port; empty: the only one.
    """

    namespace: str
    selector: str
    port: str

    @classmethod
    def of(cls, settings: GatewaySettings) -> Endpoints:
        """Those that the settings name."""
        namespace, _, name = (settings.kubernetes_service or "").rpartition("/")
        labels = [f"{_SERVICE_LABEL}={name}"] if name else []
        if settings.kubernetes_selector:
            labels.append(settings.kubernetes_selector)
        return cls(namespace, ",".join(labels), settings.kubernetes_port)


class KubernetesDiscovery:
    """The ready endpoints that are not terminating, one worker each, ``address:port``.

    A list comes first, then a watch from its resource version. A watch that ends is taken up where
    it ended; when the API server no longer knows what has happened since (410), everything is
    listed anew. After a failure the pauses between attempts grow to half a minute. Each attempt
    reads the credentials again, which may have been replaced.

    Args:
        pause: waits between two attempts, for seconds.
        clock: gives monotonic seconds.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        *,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoints = endpoints
        self._pause = pause
        self._clock = clock
        self._random = random.Random()
        self._slices: dict[str, Slice] = {}
        self._version: str | None = None
        self._last: dict[str, str] = {}
        self._failures = 0
        self._said: set[str] = set()
        self._unclear: set[str] = set()

    def now(self) -> dict[str, str]:
        """None yet: the API server is asked as soon as the gateway runs.

        Raises:
            SettingsError: kubernetes-asyncio is not installed, or nothing says where the API
                server is.
        """
        _import_client()
        if not os.environ.get(_IN_CLUSTER) and not any(path.is_file() for path in _kubeconfigs()):
            raise SettingsError(
                "kubernetes_service and kubernetes_selector need the API server: run in a pod, or "
                "let KUBECONFIG name a file"
            )
        return {}

    async def changes(self) -> AsyncGenerator[dict[str, str], None]:
        """See :class:`~saga_gateway.discovery.Discovery`."""
        while True:
            try:
                async with aclosing(self._attempt()) as states:
                    async for _ in states:
                        found = self._workers()
                        if found != self._last:
                            self._last = found
                            yield found
            except _GoneError:
                self._version = None
                logger.info("Kubernetes: what was watched is gone there, it is listed anew")
            except Exception as error:  # noqa: BLE001 - nothing that it answers may end the watch
                is_told = isinstance(error, APIError)
                self._say(str(error) if is_told else f"{type(error).__name__}: {error}")
            longest_s = min(_LONGEST_PAUSE_S, _LEAST_PAUSE_S * 2.0 ** min(self._failures, 16))
            self._failures += 1
            if self._failures == _FAILURES_TO_SAY and not self._said:
                self._say("every watch ends at once")
            await self._pause(longest_s * self._random.uniform(0.5, 1.0))

    def _say(self, message: str) -> None:
        if message not in self._said:
            logger.error("the workers stay as they were: Kubernetes: %s", message)
        self._said.add(message)

    def _succeeded(self) -> None:
        if self._said:
            logger.warning("Kubernetes: the API server answers again")
        self._said.clear()
        self._failures = 0

    async def _attempt(self) -> AsyncGenerator[None, None]:
        """List, unless what is known can be watched on, and watch until that ends.

        It yields whenever the slices may be others.
        """
        async with _slices_api(self._endpoints) as ask:
            if self._version is None:
                self._slices, self._version = await _list(ask)
                yield
            began_s = self._clock()
            async with aclosing(self._watch(ask)) as lines:
                async for line in lines:
                    self._take(line)
                    self._succeeded()
                    yield
            if self._clock() - began_s >= _LASTED_S:
                self._succeeded()

    async def _watch(self, ask: _Ask) -> AsyncGenerator[bytes, None]:
        """The events of a watch; it just ends when its connection is lost."""
        watch_s = self._random.randint(*_WATCH_S)
        query = {"watch": True, "allow_watch_bookmarks": True, "timeout_seconds": watch_s}
        response = await ask(watch_s + _ANSWER_S, {**query, "resource_version": self._version})
        try:
            await _refuse(response)
            async for line in _lines(response.content.iter_any()):
                yield line
        except (aiohttp.ClientError, OSError) as error:
            logger.debug("Kubernetes: the watch is lost: %s", error)
        finally:
            response.close()

    def _take(self, line: bytes) -> None:
        try:
            event = json.loads(line)
            kind, content = event["type"], event["object"]
            if kind == "ERROR":
                raise _error(content.get("code"), content)
            metadata = content["metadata"]
            if kind in ("ADDED", "MODIFIED"):
                self._slices[metadata["name"]] = content
            elif kind == "DELETED":
                self._slices.pop(metadata["name"], None)
            # A bookmark says nothing but how far the watch has come.
            self._version = metadata["resourceVersion"]
        except Exception:
            self._version = None  # To go on from here would lead to the same event again.
            raise

    def _workers(self) -> dict[str, str]:
        found, unclear = workers_of(self._slices.values(), self._endpoints.port)
        for name in unclear - self._unclear:
            logger.warning(
                "Kubernetes: EndpointSlice %s has no port, or several, that kubernetes_port=%r "
                "can mean: its endpoints are left out",
                name,
                self._endpoints.port,
            )
        self._unclear = unclear
        return found


async def _list(ask: _Ask) -> tuple[dict[str, Slice], str]:
    response = await ask(_ANSWER_S, {})
    try:
        await _refuse(response)
        content = json.loads(await response.read())
    finally:
        response.close()
    slices = {each["metadata"]["name"]: each for each in content.get("items") or ()}
    return slices, content["metadata"]["resourceVersion"]


async def _refuse(response: aiohttp.ClientResponse) -> None:
    """Raise unless the API server does what it was asked for."""
    if response.status == 200:
        return
    text = await response.content.read(_MAX_REFUSAL_BYTES)
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    raise _error(response.status, content if isinstance(content, dict) else {})


def _error(code: int | None, status: Mapping[str, Any]) -> Exception:
    if code == _GONE:
        return _GoneError()
    said = status.get("message") or status.get("reason") or "no reason given"
    return APIError(f"HTTP {code}: {said}")


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Whole lines; what comes after the last one was cut off."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.strip():
                yield line
        if len(rest) > _MAX_LINE_BYTES:
            raise APIError(f"an event of more than {_MAX_LINE_BYTES} bytes")


@asynccontextmanager
async def _slices_api(endpoints: Endpoints) -> AsyncIterator[_Ask]:
    """A client with the credentials that there are now.

    The answers are taken as they come: the models of the client refuse slices without endpoints.
    """
    client, config = _import_client()
    configuration = client.Configuration()
    if os.environ.get(_IN_CLUSTER):
        config.load_incluster_config(client_configuration=configuration)
        namespace = _own_namespace()
    else:
        paths = os.pathsep.join(str(path) for path in _kubeconfigs() if path.is_file())
        loader = await config.load_kube_config(
            config_file=paths, client_configuration=configuration, persist_config=False
        )
        namespace = loader.current_context["context"].get("namespace") or "default"
    async with client.ApiClient(configuration) as api:
        slices = client.DiscoveryV1Api(api)

        async def ask(silence_s: float, query: Mapping[str, Any]) -> aiohttp.ClientResponse:
            response: aiohttp.ClientResponse = await slices.list_namespaced_endpoint_slice(
                endpoints.namespace or namespace,
                label_selector=endpoints.selector,
                _preload_content=False,
                _request_timeout=(_CONNECT_S, silence_s),
                **query,
            )
            return response

        yield ask


def _own_namespace() -> str:
    return _NAMESPACE_FILE.read_text(encoding="utf-8").strip()


def _kubeconfigs() -> list[Path]:
    """As kubectl looks for them."""
    named = os.environ.get("KUBECONFIG") or "~/.kube/config"
    return [Path(text).expanduser() for text in named.split(os.pathsep) if text]


def _import_client() -> tuple[Any, Any]:
    try:
        from kubernetes_asyncio import client, config
    except ImportError as error:
        raise SettingsError(
            "kubernetes_service and kubernetes_selector need pip install 'saga-sdk[kubernetes]': "
            f"{error}"
        ) from error
    return client, config
