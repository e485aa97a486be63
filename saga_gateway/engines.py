"""What kind of engine a worker is, and in which words it takes what the gateway has to say."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from saga_gateway.headers import Headers

Get = Callable[[str], Awaitable[tuple[int, bytes]]]
"""Asks the worker for a path; returns the status and the body of the answer."""


class EngineKind(StrEnum):
    """Who serves: SAGA is vLLM with SAGA's plugin; OTHER takes OpenAI's requests and says no more.

    Sessions: vLLM reads ``X-Session-ID``, SGLang ``X-SMG-Routing-Key``. Priorities: vLLM reads
    ``X-Vllm-Priority``; SGLang only a field of the body, which is passed on as it came. Pauses and
    ends of sessions: only SAGA's control API takes them.
    """

    SAGA = "saga"
    VLLM = "vllm"
    SGLANG = "sglang"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Engine:
    """What a worker has said of itself.

    Attributes:
        version: of the engine; None: it does not say.
        takes_priority: it is known to serve in the order of priorities.
    """

    kind: EngineKind
    version: str | None = None
    takes_priority: bool = False

    @property
    def takes_notices(self) -> bool:
        """Whether it has SAGA's control API."""
        return self.kind is EngineKind.SAGA


def engine_headers(engine: Engine | None, session_id: str | None, priority: int | None) -> Headers:
    """The headers that tell an engine, None for one not known yet, what there is to say."""
    headers: Headers = []
    if session_id is not None:
        is_sglang = engine is not None and engine.kind is EngineKind.SGLANG
        headers.append(("X-SMG-Routing-Key" if is_sglang else "X-Session-ID", session_id))
    if priority is not None and engine is not None and engine.takes_priority:
        headers.append(("X-Vllm-Priority", str(priority)))
    return headers


async def detect(get: Get) -> Engine:
    """Find out what a worker is from what it says of itself.

    Raises:
        Exception: whatever ``get`` raises; nothing is known then.
    """
    state = await _json(get, "/saga/v1/state")
    if "scheduling_policy" in state:
        version = _text((await _json(get, "/version")).get("version"))
        return Engine(EngineKind.SAGA, version, state["scheduling_policy"] == "priority")
    # SGLang's since 0.5 and before; vLLM has the first of them in its development mode.
    for path in ("/server_info?config_format=json", "/get_server_info"):
        info = await _json(get, path)
        if "schedule_policy" in info:
            return Engine(EngineKind.SGLANG, _text(info.get("version")))
        scheduler = _dict(_dict(info.get("vllm_config")).get("scheduler_config"))
        if scheduler:
            version = _text((await _json(get, "/version")).get("version"))
            return Engine(EngineKind.VLLM, version, scheduler.get("policy") == "priority")
    version = _text((await _json(get, "/version")).get("version"))
    models = (await _json(get, "/v1/models")).get("data")
    listed = models if isinstance(models, list) else []
    owners = {_text(_dict(model).get("owned_by")) for model in listed}
    if "sglang" in owners:
        return Engine(EngineKind.SGLANG, version)
    if "vllm" in owners:
        return Engine(EngineKind.VLLM, version)
    return Engine(EngineKind.OTHER, version)


async def _json(get: Get, path: str) -> dict[str, Any]:
    """What a worker answers there; empty when that is no JSON object."""
    status, body = await get(path)
    if status != 200:
        return {}
    try:
        return _dict(orjson.loads(body))
    except orjson.JSONDecodeError:
        return {}


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str | None:
    return value[:64] if isinstance(value, str) else None
