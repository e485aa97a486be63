"""The `vllm.endpoint_plugins` entry point: the worker's control API on vLLM's own HTTP port."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.datastructures import State
from vllm import envs
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from gpu_backend.config import PLUGIN
from saga_core.errors import NoticeError
from saga_core.notices import decode_notices

_STATE = "saga_endpoint"


class SagaEndpoint:
    """Routes of the control API. They ask for vLLM's API key where one is set."""

    name = PLUGIN
    required_tasks: Any = ("generate",)

    def __init__(self) -> None:
        self._engine_core: Any = None
        self._authentication: AuthenticationMiddleware | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes to vLLM's app."""
        app.add_api_route("/saga/v1/sessions:notify", self.notify, methods=["POST"])
        app.add_api_route("/saga/v1/state", self.state, methods=["GET"])

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Keep what the routes need: the way to the engine, and the API keys."""
        self._engine_core = getattr(engine_client, "engine_core", None)
        keys = [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]
        if keys:
            self._authentication = AuthenticationMiddleware(state, keys)  # type: ignore[arg-type]
        setattr(state, _STATE, self)

    async def notify(self, request: Request) -> JSONResponse:
        """Take notices about sessions. 422 when the body is malformed; nothing changes then."""
        if not self._may(request):
            return _error(401, "this worker asks for an API key: send Authorization: Bearer KEY")
        try:
            body = json.loads(await request.body())
            decode_notices(body)
        except ValueError as error:
            kind = "" if isinstance(error, NoticeError) else "the body is not JSON: "
            return _error(422, f"{kind}{error}")
        return await self._ask({"notify": body})

    async def state(self, request: Request) -> JSONResponse:
        """What the worker holds, and its counters."""
        if not self._may(request):
            return _error(401, "this worker asks for an API key: send Authorization: Bearer KEY")
        return await self._ask({})

    def _may(self, request: Request) -> bool:
        return self._authentication is None or self._authentication.verify_token(request.headers)

    async def _ask(self, message: dict[str, object]) -> JSONResponse:
        if self._engine_core is None:
            return _error(503, "this server has no engine")
        try:
            answers = await self._engine_core.call_utility_all_async(
                "saga_control", json.dumps(message)
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is to be told
            return _error(503, f"the engine does not answer the SAGA plugin: {error}")
        return JSONResponse(_merge([json.loads(answer) for answer in answers]))


def _merge(states: list[dict[str, Any]]) -> dict[str, Any]:
    """One state for all data-parallel engines: numbers are summed, the rest is the first one's."""
    merged = {**states[0], "engines": len(states)}
    for name in ("counters", "held"):
        if name in merged:
            merged[name] = {key: sum(s[name][key] for s in states) for key in merged[name]}
    merged["enabled"] = all(state["enabled"] for state in states)
    return merged


def plugin() -> SagaEndpoint:
    """The factory that vLLM calls."""
    return SagaEndpoint()


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)
