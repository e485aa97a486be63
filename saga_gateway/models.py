"""The list of models over all workers."""

from __future__ import annotations

import asyncio

import aiohttp
import orjson

from saga_gateway.headers import Headers
from saga_gateway.upstream import Upstream
from saga_gateway.workers import Worker

_TIMEOUT_S = 10.0


async def merged_models(
    upstream: Upstream, workers: list[Worker], headers: Headers
) -> tuple[int, bytes] | None:
    """Status and JSON body of ``/v1/models``: every worker's models, each id once.

    The first worker that has a model describes it. When no worker lists any, the first one's own
    answer is given; None when no worker answered.
    """
    answers = await asyncio.gather(*(_ask(upstream, worker, headers) for worker in workers))
    models: dict[str, object] = {}
    listed = False
    for answer in answers:
        found = _models(answer)
        if found is not None:
            listed = True
            for name, model in found.items():
                models.setdefault(name, model)
    if listed:
        return 200, orjson.dumps({"object": "list", "data": list(models.values())})
    return next((answer for answer in answers if answer is not None), None)


async def _ask(upstream: Upstream, worker: Worker, headers: Headers) -> tuple[int, bytes] | None:
    try:
        return await upstream.get(worker, "/v1/models", headers, _TIMEOUT_S)
    except (aiohttp.ClientError, OSError):
        return None


def _models(answer: tuple[int, bytes] | None) -> dict[str, object] | None:
    if answer is None or answer[0] != 200:
        return None
    try:
        content = orjson.loads(answer[1])
    except orjson.JSONDecodeError:
        return None
    data = content.get("data") if isinstance(content, dict) else None
    if not isinstance(data, list):
        return None
    return {
        model["id"]: model
        for model in data
        if isinstance(model, dict) and isinstance(model.get("id"), str)
    }
