"""The graphs that the gateway has learned: kept over restarts, shown, and declared by clients."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import orjson

from saga_core.aeg import RENDERERS, read_aeg, to_dict
from saga_core.fields import StateError
from saga_core.graph import Graphs
from saga_core.hints import clean
from saga_gateway.asgi import (
    BodyTooLargeError,
    ClientGoneError,
    Receive,
    Scope,
    Send,
    read_body,
    send_bytes,
    send_error,
    send_json,
)
from saga_gateway.identity import Identity
from saga_gateway.sessions import WorkflowKey

logger = logging.getLogger(__name__)

WORKFLOWS_PATH = "/saga/v1/workflows"
_AEG_PATH = re.compile(WORKFLOWS_PATH + r"/([A-Za-z0-9._~:-]{1,256})/aeg")
_MAX_AEG_BYTES = 2**20
_CONTENT_TYPES = {
    "json": b"application/json",
    "dot": b"text/vnd.graphviz; charset=utf-8",
    "mermaid": b"text/plain; charset=utf-8",
}

Admit = Callable[[Scope, Send], Awaitable[Identity | None]]


class GraphFile:
    """The file in which graphs outlive the process.

    A file that cannot be read is set aside, not written over: the gateway begins anew and says so.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._saving = asyncio.Lock()

    def load(self) -> Graphs:
        """What the file holds; nothing when it is not there."""
        try:
            return Graphs.from_state(orjson.loads(self._path.read_bytes()))
        except FileNotFoundError:
            return Graphs()
        except (StateError, orjson.JSONDecodeError, OSError) as error:
            aside = self._path.with_name(self._path.name + ".unread")
            logger.warning("state_file %s: %s; set aside as %s", self._path, error, aside)
            try:
                os.replace(self._path, aside)
            except OSError as failure:
                logger.warning("state_file %s cannot be set aside: %s", self._path, failure)
            return Graphs()

    async def save(self, graphs: Graphs) -> None:
        """Write all that was learned, whole or not at all; requests are served meanwhile.

        A write that has begun is finished also when who waits for it does so no more.
        """
        await asyncio.shield(asyncio.ensure_future(self._save(graphs)))

    async def _save(self, graphs: Graphs) -> None:
        async with self._saving:
            saving = graphs.saving()
            try:
                while True:
                    next(saving)
                    await asyncio.sleep(0)
            except StopIteration as done:
                state: dict[str, Any] = done.value
            except StateError as error:
                logger.warning("state_file %s is not written: %s", self._path, error)
                return
            try:
                await asyncio.to_thread(self._write, state)
            except OSError as error:
                logger.warning("state_file %s cannot be written: %s", self._path, error)

    def _write(self, state: dict[str, Any]) -> None:
        partial = self._path.with_name(self._path.name + ".partial")
        partial.write_bytes(orjson.dumps(state))
        os.replace(partial, self._path)


class GraphRoutes:
    """What is answered under ``/saga/v1/workflows``.

    A caller sees and declares the graphs of its own tenant; an operator those of any, which the
    query names: ``?tenant=team-a``.

    Args:
        admit: who the caller is; None: it has been refused.
    """

    def __init__(self, graphs: Graphs, admit: Admit, wall_clock: Callable[[], float]) -> None:
        self._graphs = graphs
        self._admit = admit
        self._wall_clock = wall_clock

    async def list(self, scope: Scope, _receive: Receive, send: Send) -> None:
        """Every workflow that the caller may see, the most recently used first."""
        caller = await self._admit(scope, send)
        if caller is None:
            return
        shown = []
        for key in reversed(self._graphs.workflows()):
            tenant, workflow = key if isinstance(key, tuple) else (None, str(key))
            if not caller.admin and tenant != caller.tenant:
                continue
            size = self._graphs.size(key)
            if size is not None:
                named = zip(("tasks", "nodes", "edges", "is_cold"), size, strict=True)
                shown.append({"tenant": tenant, "workflow": workflow, **dict(named)})
            await asyncio.sleep(0)
        await send_json(send, 200, {"workflows": shown})

    async def show(self, scope: Scope, _receive: Receive, send: Send) -> None:
        """A workflow's graph, as JSON, or in the form that ``?format=`` names."""
        caller = await self._admit(scope, send)
        if caller is None:
            return
        query = parse_qs(scope["query_string"].decode("latin-1"))
        form = query.get("format", ["json"])[0]
        if form not in RENDERERS:
            message = f"format={form[:32]!r} must be one of {', '.join(RENDERERS)}"
            await send_error(send, 422, message, code="unknown_format")
            return
        key = await self._key(scope, caller, send)
        if key is None:
            return
        aeg = self._graphs.graph(key, key[1])
        if aeg is None:
            whose = "" if key[0] is None else f" of tenant {key[0]}"
            message = f"nothing is known of a workflow {key[1]}{whose}"
            await send_error(send, 404, message, code="not_found")
        elif form == "json":
            await send_json(send, 200, to_dict(aeg))
        else:
            text = RENDERERS[form](aeg).encode()
            await send_bytes(send, 200, text, content_type=_CONTENT_TYPES[form])

    async def declare(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take a workflow's graph in the place of what was learned of it."""
        caller = await self._admit(scope, send)
        if caller is None:
            return
        key = await self._key(scope, caller, send)
        if key is None:
            return
        try:
            document = orjson.loads(await read_body(receive, _MAX_AEG_BYTES))
            if isinstance(document, dict):
                document.setdefault("workflow", key[1])
            aeg = read_aeg(document)
        except ClientGoneError:
            return
        except BodyTooLargeError:
            message = f"the body is larger than {_MAX_AEG_BYTES} bytes"
            await send_error(send, 413, message, code="body_too_large")
            return
        except (StateError, orjson.JSONDecodeError) as error:
            await send_error(send, 422, str(error), code="malformed_aeg")
            return
        self._graphs.put(key, aeg, now_s=self._wall_clock())
        known = self._graphs.graph(key, key[1])
        await send_json(send, 200, {} if known is None else to_dict(known))

    @staticmethod
    async def _key(scope: Scope, caller: Identity, send: Send) -> WorkflowKey | None:
        """Whose graph of which workflow is meant; None: that cannot be, and it has been said."""
        workflow = workflow_of(scope["path"])
        assert workflow is not None
        named = parse_qs(scope["query_string"].decode("latin-1")).get("tenant")
        if not named or not caller.admin:
            return caller.tenant, workflow
        if clean(named[0]) != named[0]:
            message = "tenant must be 1 to 256 characters of A-Z a-z 0-9 . _ ~ : -"
            await send_error(send, 422, message, code="malformed_tenant")
            return None
        return named[0], workflow


def workflow_of(path: str) -> str | None:
    """The workflow of a path under which its graph is; None: it is no such path."""
    match = _AEG_PATH.fullmatch(path)
    return None if match is None else match[1]
