"""The dashboard: read-only pages under ``/dashboard`` for operators."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from urllib.parse import parse_qs

from saga_core.aeg import to_dict
from saga_core.graph import Graphs
from saga_core.hints import clean
from saga_gateway.asgi import Receive, Scope, Send, send_bytes
from saga_gateway.dashboard_pages import DASHBOARD_PATH, NAMES, PAGES, workflow_page
from saga_gateway.headers import Headers, decode_headers
from saga_gateway.identity import Gatekeeper, client_of
from saga_gateway.markup import Markup, escaped, joined, markup
from saga_gateway.overview import Overview

_WORKFLOW_PREFIX = f"{DASHBOARD_PATH}/workflows/"
_STATIC_PREFIX = f"{DASHBOARD_PATH}/static/"
_TEMPLATES = Path(__file__).with_name("templates")
_STATIC = {
    "dashboard.css": b"text/css; charset=utf-8",
    "dashboard.js": b"text/javascript; charset=utf-8",
    "icon.svg": b"image/svg+xml",
}
_HTML = b"text/html; charset=utf-8"
# Listed in a page; the JSON lists more.
_SESSIONS = {DASHBOARD_PATH: 10, f"{DASHBOARD_PATH}/sessions": 200}
_HEADERS = [
    (
        b"content-security-policy",
        b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
# A browser asks for a user and a password, and sends them on under this path alone.
_CHALLENGE = (b"www-authenticate", b'Basic realm="SAGA gateway", charset="UTF-8"')

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


class Dashboard:
    """Serves the pages, their style and their script.

    With API keys an operator's is asked for: as HTTP Basic's password, whatever the user, since a
    browser sends no other kind by itself, or in the headers that the other routes take.
    """

    def __init__(self, gatekeeper: Gatekeeper, graphs: Graphs, overview: Overview) -> None:
        self._gatekeeper = gatekeeper
        self._graphs = graphs
        self._overview = overview
        self._frame = (_TEMPLATES / "page.html").read_text(encoding="utf-8")
        self._static = {
            _STATIC_PREFIX + name: ((_TEMPLATES / name).read_bytes(), kind)
            for name, kind in _STATIC.items()
        }

    def routes(self) -> dict[str, dict[str, Handler]]:
        """The paths that have a name of their own, and what serves them."""
        paths = (*PAGES, *self._static)
        return {path: {"GET": self.serve} for path in paths}

    async def serve(self, scope: Scope, _receive: Receive, send: Send) -> None:
        """Answer a GET of any path that ``is_below``."""
        headers = decode_headers(scope["headers"])
        key = _basic_password(headers)
        if key is not None:
            others = [(name, value) for name, value in headers if name != "authorization"]
            headers = [("authorization", f"Bearer {key}"), *others]
        caller = self._gatekeeper.identify(headers, client_of(scope))
        if caller is not None and caller.admin:
            await self._answer(scope, send)
        elif caller is not None and key is None:
            text = "This key may not see how the gateway is: its entry needs admin = true."
            await self._refuse(send, 403, text)
        else:
            # Also for another tenant's key: after a 403 a browser would not ask for another one.
            text = "An operator's API key is needed, as the password; the user does not matter."
            await self._refuse(send, 401, text)

    async def _answer(self, scope: Scope, send: Send) -> None:
        path = scope["path"]
        if path in self._static:
            body, kind = self._static[path]
            await send_bytes(send, 200, body, _HEADERS, content_type=kind)
            return
        query = parse_qs(scope["query_string"].decode("latin-1"))
        if path in PAGES:
            shot = await self._overview.snapshot(sessions=_SESSIONS.get(path, 0))
            title, content = NAMES[path], PAGES[path](shot)
        else:
            tenant = query.get("tenant", [None])[0]
            workflow = path.removeprefix(_WORKFLOW_PREFIX)
            graph = self._graph(path, tenant, workflow)
            if graph is None:
                await self._refuse(send, 404, "There is no such page, or no such workflow.")
                return
            title, content = f"Workflow {workflow}", graph
        if "fragment" not in query:
            content = self._framed(title, content, path)
        await send_bytes(send, 200, content.encode(), _HEADERS, content_type=_HTML)

    def _graph(self, path: str, tenant: str | None, workflow: str) -> Markup | None:
        is_legal = clean(workflow) == workflow and (tenant is None or clean(tenant) == tenant)
        if not path.startswith(_WORKFLOW_PREFIX) or not is_legal:
            return None
        aeg = self._graphs.graph((tenant, workflow), workflow)
        return None if aeg is None else workflow_page(to_dict(aeg), tenant)

    def _framed(self, title: str, content: Markup, path: str) -> Markup:
        kind = "page" if path in NAMES else "true"
        here = max((each for each in NAMES if path.startswith(each)), key=len)
        links = (
            markup(
                '<li><a href="{path}"{current}>{name}</a></li>',
                path=each,
                current=Markup(f' aria-current="{kind}"' if each == here else ""),
                name=name,
            )
            for each, name in NAMES.items()
        )
        values = {"nav": joined(links), "main": content, "version": version("saga-sdk")}
        return markup(self._frame, title=title, **values)

    async def _refuse(self, send: Send, status: int, text: str) -> None:
        headers = [*_HEADERS, _CHALLENGE] if status == 401 else _HEADERS
        body = (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{status} - SAGA</title>'
            f"<p>{escaped(text)}</p></html>\n"
        )
        await send_bytes(send, status, body.encode(), headers, content_type=_HTML)


def is_below(path: str) -> bool:
    """Whether a path is one of the dashboard's, be there something or not."""
    return path.startswith(DASHBOARD_PATH + "/") and not path.endswith("/")


def _basic_password(headers: Headers) -> str | None:
    """The password of HTTP Basic; None: the request has none."""
    said = next((value for name, value in headers if name == "authorization"), "")
    scheme, _, text = said.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        decoded = base64.b64decode(text.strip(), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return ""
    return decoded.partition(":")[2]
