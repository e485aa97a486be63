"""An engine as the closed loop sees it: vLLM's `/v1/completions`, streamed, in token ids."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

from saga_core.errors import SagaError
from saga_sim.engine_bench.closed_loop import Answer


class Completions:
    """Sends prompts as token ids, so that a prefix is exact, and reads ids back.

    Args:
        client: an open HTTP client.
        url: the server's address, without a path.
        model: the name that it serves.
        with_sessions: whether ``X-Session-ID`` is sent.
    """

    def __init__(
        self,
        client: aiohttp.ClientSession,
        url: str,
        model: str,
        *,
        with_sessions: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._url = f"{url}/v1/completions"
        self._model = model
        self._with_sessions = with_sessions
        self._clock = clock

    async def __call__(self, prompt: Sequence[int], num_tokens: int, session_id: str) -> Answer:
        """Generate exactly ``num_tokens``, greedily.

        Raises:
            SagaError: the server refused, or answered with fewer tokens.
        """
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"X-Session-ID": session_id} if self._with_sessions else {}
        tokens: list[int] = []
        first_token_s = None
        usage: dict[str, Any] = {}
        async with self._client.post(self._url, json=body, headers=headers) as response:
            if response.status != 200:
                raise SagaError(f"the worker answered {response.status}: {await response.text()}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[len(b"data: ") :])
                for choice in chunk.get("choices") or ():
                    tokens += choice.get("token_ids") or ()
                if tokens and first_token_s is None:
                    first_token_s = self._clock()
                usage = chunk.get("usage") or usage
        if first_token_s is None or len(tokens) != num_tokens:
            raise SagaError(f"the worker answered {len(tokens)} tokens instead of {num_tokens}")
        details = usage.get("prompt_tokens_details") or {}
        return Answer(tokens, first_token_s, details.get("cached_tokens") or 0)
