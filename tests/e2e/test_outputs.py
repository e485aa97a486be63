"""Outputs of a worker with the plugin against those of stock vLLM, token by token.

The weights are random but of the usual scale, so that an answer depends on every block of its
prompt and its tokens are not all equally likely: a wrong block would show.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from saga_cli.processes import Service
from tests.e2e.conftest import BLOCK_TOKENS, MODEL, worker_service

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

NUM_BLOCKS = 72
HOST_BLOCKS = 72
BLOCK_BYTES = 2 * 4 * 2 * 64 * 4 * BLOCK_TOKENS  # K and V, layers, KV heads, head size, float32
TIE = 1e-3
"""Gap in log-probability under which two tokens are equally likely but for rounding."""


@dataclass(frozen=True)
class Answer:
    """Token ids, and for each place the log-probabilities of the likeliest tokens there."""

    tokens: list[int]
    top: list[dict[int, float]]


@pytest.fixture(scope="module")
def arms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Service]]:
    """Stock vLLM, and the plugin with a host tier, prefetch and preemption."""
    model = _write_model(tmp_path_factory.mktemp("random-llama"))
    folder = tmp_path_factory.mktemp("engine-logs")
    words = ["--load-format", "auto", "--num-gpu-blocks-override", str(NUM_BLOCKS)]
    words += ["--scheduling-policy", "priority"]
    host_gib = str(HOST_BLOCKS * BLOCK_BYTES / 2**30)
    plugin = ["--saga-host-gib", host_gib, "--saga-preempt-waiting"]
    services = {
        "stock": worker_service("off", model, folder, *words),
        "saga": worker_service("saga", model, folder, *words, *plugin),
    }
    with ExitStack() as stack:
        for service in services.values():
            service.start()
            stack.callback(service.stop)

        async def ready() -> None:
            await asyncio.gather(*(service.wait_ready(240) for service in services.values()))

        asyncio.run(ready())
        yield services


def _write_model(folder: Path) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from gpu_backend.model_free import write_tiny_model

    write_tiny_model(folder)
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(folder, initializer_range=0.1)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


# Requests


def _tokens(rng: random.Random, blocks: float) -> list[int]:
    return [rng.randrange(3, 1000) for _ in range(round(blocks * BLOCK_TOKENS))]


def _body(prompt: list[int], output_tokens: int, priority: int = 0) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 5,
        "return_tokens_as_token_ids": True,
        "priority": priority,
    }


def _headers(session_id: str | None) -> dict[str, str]:
    return {"X-Session-ID": session_id} if session_id else {}


def _answer(data: dict[str, Any]) -> Answer:
    logprobs = data["choices"][0]["logprobs"]
    return Answer(
        tokens=[_id(token) for token in logprobs["tokens"]],
        top=[{_id(t): value for t, value in top.items()} for top in logprobs["top_logprobs"]],
    )


def _id(token: str) -> int:
    return int(token.removeprefix("token_id:"))


def _complete(
    worker: Service, prompt: list[int], session_id: str | None = None, output_tokens: int = 16
) -> Answer:
    answer = httpx.post(
        f"{worker.url}/v1/completions",
        json=_body(prompt, output_tokens),
        headers=_headers(session_id),
        timeout=120,
    )
    answer.raise_for_status()
    return _answer(answer.json())


def _counters(worker: Service) -> dict[str, Any]:
    state = _state(worker)
    assert state["enabled"], state
    counters: dict[str, Any] = state["counters"]
    return counters


def _state(worker: Service) -> dict[str, Any]:
    state: dict[str, Any] = httpx.get(f"{worker.url}/saga/v1/state", timeout=10).json()
    return state


def _assert_same_but_for_ties(stock: Answer, saga: Answer) -> None:
    """The first token that differs is as likely as the other, in both workers."""
    pairs = zip(stock.tokens, saga.tokens, strict=True)
    place = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
    if place is None:
        return
    one, other = stock.tokens[place], saga.tokens[place]
    for top in (stock.top[place], saga.top[place]):
        assert abs(top[one] - top[other]) < TIE, f"token {place}: {one} and {other} of {top}"


# One sequence at a time


def test_an_answer_depends_on_every_block_of_its_prompt(arms: dict[str, Service]) -> None:
    rng = random.Random(0)
    prompt = _tokens(rng, 20)
    answer = _complete(arms["stock"], prompt)
    assert len(set(answer.tokens)) > len(answer.tokens) // 2
    for block in (0, 7, 19):
        start = block * BLOCK_TOKENS
        changed = [*prompt[:start], *_tokens(rng, 1), *prompt[start + BLOCK_TOKENS :]]
        assert _complete(arms["stock"], changed).tokens != answer.tokens


def _play(worker: Service) -> list[list[int]]:
    """Sessions whose KV is twice the pool take turns, with strangers in between."""
    rng = random.Random(1)
    history = {f"agent{number}": _tokens(rng, 18) for number in range(6)}
    answers = []
    for _ in range(4):
        for session_id, prompt in history.items():
            answer = _complete(worker, prompt, session_id)
            answers.append(answer.tokens)
            history[session_id] = [*prompt, *answer.tokens, *_tokens(rng, 0.7)]
        answers.append(_complete(worker, _tokens(rng, 30)).tokens)
    return answers


def test_every_token_is_the_same_through_eviction_demotion_and_reload(
    arms: dict[str, Service],
) -> None:
    expected = _play(arms["stock"])
    before = _counters(arms["saga"])
    assert _play(arms["saga"]) == expected
    after = _counters(arms["saga"])
    assert after["evicted_blocks"] - before["evicted_blocks"] > 3 * NUM_BLOCKS
    assert after["chosen_blocks"] > before["chosen_blocks"]
    assert after["host_cached_tokens"] - before["host_cached_tokens"] > 10 * BLOCK_TOKENS


def _notify(worker: Service, *notices: dict[str, object]) -> None:
    body = {"version": 1, "notices": notices}
    answer = httpx.post(f"{worker.url}/saga/v1/sessions:notify", json=body, timeout=10)
    answer.raise_for_status()


def _wait_until_loaded(worker: Service, more_than: int) -> None:
    """Until prefetches have loaded more tokens than that."""
    deadline = time.monotonic() + 30
    while (state := _state(worker))["prefetch"]["loaded_tokens"] <= more_than:
        assert time.monotonic() < deadline, f"nothing was prefetched: {state}"


def test_every_token_is_the_same_through_a_prefetch(arms: dict[str, Service]) -> None:
    """Of a paused session, which a large request drives out of the pool."""
    rng = random.Random(2)
    first = _tokens(rng, 16)
    second = [*first, *_tokens(rng, 1.5)]
    prompts = [first, _tokens(rng, 62), second]
    expected = [_complete(arms["stock"], prompt).tokens for prompt in prompts]

    saga = arms["saga"]
    _notify(saga, *({"kind": "end", "session_id": f"agent{number}"} for number in range(6)))
    answers = [_complete(saga, first, "prefetched").tokens]
    pause = {"p_reuse": 0.95, "pause_p50_s": 4.0, "pause_p95_s": 20.0}
    _notify(saga, {"kind": "pause", "session_id": "prefetched", **pause})
    before = _state(saga)["prefetch"]
    answers.append(_complete(saga, prompts[1], "large").tokens)
    _notify(
        saga,
        {"kind": "end", "session_id": "large"},  # Its room is free to be taken.
        {"kind": "resume_soon", "session_id": "prefetched", "in_s": 1.0},
    )
    _wait_until_loaded(saga, before["loaded_tokens"])
    answers.append(_complete(saga, second, "prefetched").tokens)
    assert answers == expected
    assert _state(saga)["prefetch"]["useful"] > before["useful"]


async def _complete_all(worker: Service, bodies: list[dict[str, Any]]) -> list[Answer]:
    """Answers to requests that are sent together."""
    async with httpx.AsyncClient(timeout=120) as client:
        url = f"{worker.url}/v1/completions"
        answers = await asyncio.gather(*(client.post(url, json=body) for body in bodies))
    return [_answer(answer.raise_for_status().json()) for answer in answers]


async def test_a_preempted_request_is_answered_as_one_that_ran_alone(
    arms: dict[str, Service],
) -> None:
    """Both fit when they start, and not when they end: the one of lower priority gives way."""
    rng = random.Random(3)
    bodies = [_body(_tokens(rng, 32), 160, priority) for priority in (0, 5)]
    alone = [(await _complete_all(arms["stock"], [body]))[0] for body in bodies]
    before = _preemptions(arms["saga"])
    together = await _complete_all(arms["saga"], bodies)
    assert _preemptions(arms["saga"]) > before
    for one, other in zip(alone, together, strict=True):
        _assert_same_but_for_ties(one, other)


async def test_every_token_is_the_same_when_a_request_gives_way_to_a_waiting_one(
    arms: dict[str, Service],
) -> None:
    """Only one of the two fits at a time, so each runs alone, one of them in two parts."""
    rng = random.Random(4)
    low, high = (_body(_tokens(rng, 44), 256, 5), _body(_tokens(rng, 40), 16, 0))
    alone = [(await _complete_all(arms["stock"], [body]))[0].tokens for body in (low, high)]
    saga = arms["saga"]
    before = _state(saga)["scheduler"]["gave_way"]
    tokens: list[int] = []
    async with aclosing(_stream(saga, low)) as running:
        tokens += await anext(running)
        (answer,) = await _complete_all(saga, [high])
        async for some in running:
            tokens += some
    assert _state(saga)["scheduler"]["gave_way"] == before + 1
    assert [tokens, answer.tokens] == alone


async def _stream(worker: Service, body: dict[str, Any]) -> AsyncGenerator[list[int]]:
    """The tokens of an answer as they come."""
    url, body = f"{worker.url}/v1/completions", {**body, "stream": True}
    async with (
        httpx.AsyncClient(timeout=120) as client,
        client.stream("POST", url, json=body) as answer,
    ):
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            data = line.removeprefix("data: ")
            if data and data != "[DONE]":
                yield _answer(json.loads(data)).tokens


def _preemptions(worker: Service) -> int:
    """Requests that the engine has preempted so far."""
    text = httpx.get(f"{worker.url}/metrics", timeout=10).text
    (value,) = re.findall(r"^vllm:num_preemptions_total\{.*\} (\S+)$", text, re.MULTILINE)
    return int(float(value))


# Several at once: what shares a batch changes how sums are rounded


async def _play_at_once(worker: Service) -> list[Answer]:
    """Eight sessions, each with its next request as soon as it has an answer."""
    async with httpx.AsyncClient(timeout=120) as client:

        async def session(number: int) -> list[Answer]:
            rng = random.Random(100 + number)
            prompt, answers = _tokens(rng, 8 + number), []
            for _ in range(4):
                answer = await client.post(
                    f"{worker.url}/v1/completions",
                    json=_body(prompt, 24),
                    headers=_headers(f"together{number}"),
                )
                answers.append(_answer(answer.raise_for_status().json()))
                prompt = [*prompt, *_tokens(rng, 2)]
            return answers

        played = await asyncio.gather(*(session(number) for number in range(8)))
    return [answer for answers in played for answer in answers]


async def test_with_several_at_once_only_ties_are_broken_differently(
    arms: dict[str, Service],
) -> None:
    stock = await _play_at_once(arms["stock"])
    before = _counters(arms["saga"])
    saga = await _play_at_once(arms["saga"])
    assert _counters(arms["saga"])["evicted_blocks"] > before["evicted_blocks"]
    for one, other in zip(stock, saga, strict=True):
        _assert_same_but_for_ties(one, other)
