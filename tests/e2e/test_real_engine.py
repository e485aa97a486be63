"""SDK, gateway and a real vLLM engine together."""

from __future__ import annotations

import random
import time
from typing import Any

import httpx
import openai
import pytest

import saga_sdk as saga
from saga_cli.processes import Service
from tests.e2e.conftest import BLOCK_TOKENS, MODEL, NUM_BLOCKS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPT_BLOCKS = 30


def _words(rng: random.Random, count: int) -> str:
    return " ".join(f"<{rng.randrange(3, 1000)}>" for _ in range(count))


def _complete(url: str, prompt: str, session_id: str | None = None) -> tuple[str, int]:
    """Text at temperature 0, and the prompt tokens that were cached."""
    headers = {"X-Session-ID": session_id} if session_id else {}
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)
    answer.raise_for_status()
    data = answer.json()
    details = data["usage"].get("prompt_tokens_details") or {}
    return data["choices"][0]["text"], details.get("cached_tokens") or 0


def _play(url: str) -> tuple[list[str], int]:
    """A session's step, a flood of strangers of three times the pool, the session's next step."""
    rng = random.Random(0)
    prompt = _words(rng, PROMPT_BLOCKS * BLOCK_TOKENS)
    texts = [_complete(url, prompt, "agent")[0]]
    for _ in range(3 * NUM_BLOCKS // PROMPT_BLOCKS):
        texts.append(_complete(url, _words(rng, PROMPT_BLOCKS * BLOCK_TOKENS))[0])
    text, cached = _complete(url, f"{prompt} {_words(rng, 40)}", "agent")
    return [*texts, text], cached


def _state(worker: Service) -> dict[str, Any]:
    state: dict[str, Any] = httpx.get(f"{worker.url}/saga/v1/state", timeout=10).json()
    return state


def test_a_prefix_survives_the_flood_that_evicts_it_on_stock_vllm_and_every_token_is_the_same(
    workers: dict[str, Service],
) -> None:
    stock_texts, stock_cached = _play(workers["off"].url)
    before = _state(workers["wa-lru-ttl"])["counters"]
    texts, cached = _play(workers["wa-lru-ttl"].url)
    after = _state(workers["wa-lru-ttl"])["counters"]
    assert stock_cached == 0
    assert cached == PROMPT_BLOCKS * BLOCK_TOKENS
    assert texts == stock_texts
    assert len(set(texts)) > 1
    assert after["regret_tokens"] == before["regret_tokens"]
    assert after["cached_tokens"] - before["cached_tokens"] == cached


def test_switched_off_the_worker_is_stock_and_has_no_control_api(
    workers: dict[str, Service],
) -> None:
    assert httpx.get(f"{workers['off'].url}/saga/v1/state", timeout=10).status_code == 404


def test_the_control_api_refuses_what_it_cannot_read_and_says_why(
    workers: dict[str, Service],
) -> None:
    url = f"{workers['wa-lru-ttl'].url}/saga/v1/sessions:notify"
    before = _state(workers["wa-lru-ttl"])["counters"]["notices"]
    for body, word in (
        (b"{", "JSON"),
        (b'{"version": 9}', "version"),
        (b'{"version": 1, "notices": [{"kind": "end"}]}', "session_id"),
    ):
        answer = httpx.post(url, content=body, timeout=10)
        assert answer.status_code == 422
        assert word in answer.json()["error"]["message"]
    assert _state(workers["wa-lru-ttl"])["counters"]["notices"] == before


def test_hints_of_the_sdk_reach_the_engine_through_the_gateway(
    workers: dict[str, Service], gateway: Service
) -> None:
    before = _state(workers["wa-lru-ttl"])
    saga.instrument(base_urls=[gateway.url])
    try:
        client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
        rng = random.Random(5)
        messages: list[Any] = [{"role": "user", "content": _words(rng, 200)}]
        with client, saga.workflow("e2e", session_id="e2e-session"):
            for stream in (False, True):
                raw = client.chat.completions.with_raw_response.create(
                    model=MODEL,
                    messages=messages,
                    max_tokens=4,
                    temperature=0,
                    stream=stream,
                )
                assert raw.headers["X-SAGA-Session-ID"] == "e2e-session"
                assert raw.headers["X-SAGA-Route"] == ("affinity" if stream else "new")
                text = _text(raw.parse(), stream)
                messages += [
                    {"role": "assistant", "content": text},
                    {"role": "user", "content": _words(rng, 40)},
                ]
    finally:
        saga.uninstrument()
    deadline = time.monotonic() + 20
    while True:
        state = _state(workers["wa-lru-ttl"])
        if state["counters"]["notices"] >= before["counters"]["notices"] + 2:
            break
        assert time.monotonic() < deadline, f"the worker was not told of two pauses: {state}"
    assert state["held"]["sessions"] == before["held"]["sessions"] + 1
    cached = state["counters"]["cached_tokens"] - before["counters"]["cached_tokens"]
    assert cached >= 192 // BLOCK_TOKENS * BLOCK_TOKENS


def _text(answer: Any, stream: bool) -> str:
    if not stream:
        return str(answer.choices[0].message.content)
    parts = [chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices]
    assert parts
    return "".join(parts)
