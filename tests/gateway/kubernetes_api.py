"""A stand-in for the Kubernetes API server: EndpointSlices that are listed and watched."""

from __future__ import annotations

import asyncio
import copy
import json
from contextlib import asynccontextmanager

from aiohttp import web

from saga_gateway.discovery_kubernetes import Endpoints, KubernetesDiscovery

_GROUP = "discovery.k8s.io/v1"


def endpoint(address, *, pod=None, **conditions):
    """An endpoint; conditions that are left out are unknown, as the API allows."""
    made = {"addresses": [address], "conditions": conditions}
    if pod is not None:
        made["targetRef"] = {"kind": "Pod", "name": pod, "uid": f"uid-{pod}"}
    return made


def endpoint_slice(name, endpoints, *, ports=(("http", 8000),), family="IPv4", **labels):
    """An EndpointSlice of the Service ``workers``, as its controller writes it."""
    named = {"kubernetes.io/service-name": "workers", **labels}
    return {
        "kind": "EndpointSlice",
        "apiVersion": _GROUP,
        "metadata": {"name": name, "namespace": "saga", "uid": f"uid-{name}", "labels": named},
        "addressType": family,
        "endpoints": endpoints,
        "ports": [{"name": n, "port": p, "protocol": "TCP"} for n, p in ports],
    }


class StandInAPIServer:
    """A stand-in for the API server; the tests change its objects with ``put`` and ``delete``.

    It has one resource version for everything, keeps a history of changes from ``compact`` on,
    and sends a watch what has changed since the version that it names: as the real one does, an
    object that no longer has the labels that are asked for goes as DELETED, and a version that is
    older than the history is answered with a 410.

    Attributes:
        lists, watches: the queries of the requests, in order.
        token: bearer token that is asked for; empty: none.
        refuse: status for the verbs in it, such as ``{"watch": 403}``.
        gone_is_status: a 410 comes as status of the response, not as an event of it.
        open_watches: watches that are open now.
    """

    def __init__(self) -> None:
        self.port = 0
        self.lists: list[dict[str, str]] = []
        self.watches: list[dict[str, str]] = []
        self.token = ""
        self.refuse: dict[str, int] = {}
        self.gone_is_status = False
        self.open_watches: set[int] = set()
        self._objects: dict[tuple[str, str], dict] = {}
        self._version = 1000
        self._oldest = 1000
        self._history: list[tuple[int, dict | None, dict | None]] = []
        self._asides: list[tuple[bytes, bool]] = []
        self._changed = asyncio.Event()
        self._connections: set[asyncio.BaseTransport | None] = set()
        self._is_ending = False

    @property
    def version(self) -> str:
        return str(self._version)

    async def start(self, ssl=None) -> None:
        app = web.Application()
        app.router.add_get(f"/apis/{_GROUP}/namespaces/{{namespace}}/endpointslices", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=ssl)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self.drop()
        await self._runner.cleanup()

    # Objects

    def put(self, each: dict) -> None:
        """Add or change an object."""
        key = each["metadata"]["namespace"], each["metadata"]["name"]
        after = copy.deepcopy(each)
        self._version += 7  # Clients are to take a version as it is, not to count.
        after["metadata"]["resourceVersion"] = self.version
        self._history.append((self._version, self._objects.get(key), after))
        self._objects[key] = after
        self._wake()

    def delete(self, name: str, namespace: str = "saga") -> None:
        before = self._objects.pop((namespace, name))
        self._version += 7
        self._history.append((self._version, before, None))
        self._wake()

    def compact(self) -> None:
        """Forget the history up to now."""
        self._oldest, self._history = self._version, []

    # Watches

    def bookmark(self) -> None:
        """Objects elsewhere have changed; tell the watches how far they are."""
        self._version += 100
        metadata = {"resourceVersion": self.version}
        content = {"kind": "EndpointSlice", "apiVersion": _GROUP, "metadata": metadata}
        data = json.dumps({"type": "BOOKMARK", "object": content}).encode() + b"\n"
        self._asides.append((data, True))
        self._wake()

    def send(self, data: bytes) -> None:
        """Send all open watches these bytes."""
        self._asides.append((data, False))
        self._wake()

    def end_watches(self) -> None:
        """End the watches as when their time is over."""
        self._is_ending = True
        self._wake()

    def drop(self) -> None:
        """Cut all connections."""
        for transport in self._connections:
            if transport is not None:
                transport.abort()
        self.end_watches()  # Nobody reads what would be written to them.

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # Requests

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        transport = request.transport
        self._connections.add(transport)
        try:
            verb = "watch" if request.query.get("watch", "").lower() == "true" else "list"
            (self.watches if verb == "watch" else self.lists).append(dict(request.query))
            if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
                return _refusal(401, "Unauthorized", "Unauthorized")
            if verb in self.refuse:
                message = f'endpointslices is forbidden: User "saga" cannot {verb} resource'
                return _refusal(self.refuse[verb], "Forbidden", message)
            return await (self._watch if verb == "watch" else self._list)(request)
        finally:
            self._connections.discard(transport)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        matches = _matcher(request)
        items = [one for key, one in sorted(self._objects.items()) if matches(one)]
        metadata = {"resourceVersion": self.version}
        kind = {"kind": "EndpointSliceList", "apiVersion": _GROUP, "metadata": metadata}
        return web.json_response({**kind, "items": items})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        since, matches = int(request.query["resourceVersion"]), _matcher(request)
        if since < self._oldest and self.gone_is_status:
            return _refusal(410, "Expired", "too old resource version")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if since < self._oldest:
            status = _status(410, "Expired", f"too old resource version: {since} ({self._oldest})")
            await response.write(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
            return response
        self.open_watches.add(id(response))
        asides, self._is_ending = len(self._asides), False
        try:
            while not self._is_ending:
                changed = self._changed
                for version, before, after in self._history:
                    if version > since:
                        since = version
                        await _send(response, version, before, after, matches)
                while asides < len(self._asides):
                    data, is_bookmark = self._asides[asides]
                    asides += 1
                    since = max(since, self._version)
                    if not is_bookmark or request.query.get("allowWatchBookmarks") == "True":
                        await response.write(data)
                if changed is self._changed:
                    await changed.wait()
        except ConnectionError:
            pass
        finally:
            self.open_watches.discard(id(response))
        return response


async def _send(response, version, before, after, matches) -> None:
    was = before is not None and matches(before)
    is_now = after is not None and matches(after)
    if not was and not is_now:
        return
    kind = "DELETED" if not is_now else "MODIFIED" if was else "ADDED"
    content = copy.deepcopy(after if is_now else before)
    content["metadata"]["resourceVersion"] = str(version)
    line = json.dumps({"type": kind, "object": content}).encode() + b"\n"
    for start in range(0, len(line), 1000):  # Lines do not come in one piece.
        await response.write(line[start : start + 1000])


def _matcher(request: web.Request):
    namespace = request.match_info["namespace"]
    wanted = [word.split("=", 1) for word in request.query["labelSelector"].split(",")]

    def matches(content: dict) -> bool:
        metadata = content["metadata"]
        labels = metadata["labels"]
        return metadata["namespace"] == namespace and all(labels.get(k) == v for k, v in wanted)

    return matches


def _status(code: int, reason: str, message: str) -> dict:
    kind = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return {**kind, "message": message, "reason": reason, "code": code}


def _refusal(code: int, reason: str, message: str) -> web.Response:
    return web.json_response(_status(code, reason, message), status=code)


# What the tests use it with

SERVICE = Endpoints("saga", "kubernetes.io/service-name=workers", "")


def found(*addresses, port=8000):
    return {f"{address}:{port}": f"http://{address}:{port}" for address in addresses}


def kubeconfig(path, port, token="", scheme="http"):
    cluster = {"server": f"{scheme}://127.0.0.1:{port}"}
    context = {"cluster": "c", "user": "u", "namespace": "saga"}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "x",
        "clusters": [{"name": "c", "cluster": cluster}],
        "contexts": [{"name": "x", "context": context}],
        "users": [{"name": "u", "user": {"token": token} if token else {}}],
    }
    path.write_text(json.dumps(content))  # JSON is YAML.


@asynccontextmanager
async def serving(folder, monkeypatch):
    """A stand-in API server, which the kubeconfig names: ``kubeconfig`` of the server."""
    server = StandInAPIServer()
    await server.start()
    server.kubeconfig = folder / "kubeconfig"
    kubeconfig(server.kubeconfig, server.port)
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    try:
        yield server
    finally:
        await server.stop()


class Following:
    """A discovery that is followed: what it has found, and how long it paused, not in real time."""

    def __init__(self, endpoints=SERVICE):
        self.found, self.pauses, self.now_s = [], [], 0.0
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.discovery = KubernetesDiscovery(endpoints, pause=self._pause, clock=lambda: self.now_s)
        assert self.discovery.now() == {}
        self.task = asyncio.create_task(self._follow())

    @property
    def last(self):
        return self.found[-1] if self.found else None

    async def stop(self):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def _pause(self, seconds):
        self.pauses.append(seconds)
        await asyncio.sleep(0.001)
        await self.goes_on.wait()

    async def _follow(self):
        async for workers in self.discovery.changes():
            self.found.append(workers)
