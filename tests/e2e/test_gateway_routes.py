"""The gateway before a real vLLM engine: every route answers as the worker itself does."""

from __future__ import annotations

import json
import socket
import time
from contextlib import closing
from itertools import groupby
from typing import Any

import anthropic
import httpx
import openai
import pytest

from saga_cli.processes import Service
from tests.e2e.conftest import MODEL

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

WORDS = "<5> <6> <7> <8> <9>"
MESSAGES = [{"role": "user", "content": WORDS}]
CHAT = {"model": MODEL, "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
TEXT = {"model": MODEL, "prompt": WORDS, "max_tokens": 6, "temperature": 0}
RESPONSE = {"model": MODEL, "input": WORDS, "max_output_tokens": 6, "temperature": 0}
# Other in every answer.
OWN = frozenset({"id", "created", "created_at", "completed_at", "item_id", "response_id"})

REQUESTS: dict[str, tuple[str, Any]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat with fields of vLLM's own": (
        "/v1/chat/completions",
        {**CHAT, "min_tokens": 6, "top_k": 1, "return_token_ids": True},
    ),
    "text": ("/v1/completions", TEXT),
    "two texts": ("/v1/completions", {**TEXT, "prompt": [WORDS, "<10> <11>"]}),
    "response": ("/v1/responses", RESPONSE),
    "message": ("/v1/messages", CHAT),
    "count of tokens": ("/v1/messages/count_tokens", {"model": MODEL, "messages": MESSAGES}),
    "tokenize": ("/tokenize", {"model": MODEL, "prompt": WORDS}),
    "detokenize": ("/detokenize", {"model": MODEL, "tokens": [5, 6, 7]}),
    "no such model": ("/v1/chat/completions", {**CHAT, "model": "nobody"}),
    "no such model in a message": ("/v1/messages", {**CHAT, "model": "nobody"}),
    "a field of another kind": ("/v1/chat/completions", {**CHAT, "max_tokens": "many"}),
    "too long a prompt": ("/v1/completions", {**TEXT, "prompt": "<5> " * 3000}),
    "nothing to say": ("/v1/chat/completions", {**CHAT, "messages": []}),
    "no JSON": ("/v1/chat/completions", b"{"),
    "embeddings of a model that has none": ("/v1/embeddings", {"model": MODEL, "input": WORDS}),
    "scores of a model that has none": ("/score", {"model": MODEL, "text_1": "a", "text_2": "b"}),
}


def _post(service: Service, path: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    return httpx.post(service.url + path, content=content, headers=headers, timeout=120)


def _same(value: Any) -> Any:
    """What two answers to one question have in common."""
    if isinstance(value, dict):
        return {key: _same(each) for key, each in value.items() if key not in OWN}
    return [_same(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", REQUESTS)
def test_an_answer_is_the_workers_own(
    workers: dict[str, Service], gateway: Service, name: str
) -> None:
    path, body = REQUESTS[name]
    _post(workers["wa-lru-ttl"], path, body)  # Both that are compared find it cached.
    direct = _post(workers["wa-lru-ttl"], path, body)
    through = _post(gateway, path, body)
    assert through.status_code == direct.status_code
    assert through.headers["content-type"] == direct.headers["content-type"]
    if direct.content:
        assert _same(through.json()) == _same(direct.json())
    assert direct.status_code == 200 or not direct.is_success


def _events(response: httpx.Response) -> list[Any]:
    data = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    return [each if each == "[DONE]" else _same(json.loads(each)) for each in data]


def _kinds(events: list[Any]) -> list[str]:
    return [kind for kind, _ in groupby(event["type"] for event in events)]


@pytest.mark.parametrize("name", ["chat", "text", "response", "message"])
def test_a_stream_is_the_workers_own(
    workers: dict[str, Service], gateway: Service, name: str
) -> None:
    path, body = REQUESTS[name]
    _post(workers["wa-lru-ttl"], path, body)
    direct = _post(workers["wa-lru-ttl"], path, {**body, "stream": True})
    through = _post(gateway, path, {**body, "stream": True})
    assert through.headers["content-type"] == direct.headers["content-type"]
    events, expected = _events(through), _events(direct)
    if name == "response":
        # How many tokens a delta holds depends on the moment; events are numbered.
        assert _kinds(events) == _kinds(expected)
        assert _same(events[-1]["response"]) == _same(expected[-1]["response"])
    else:
        assert events == expected
        assert len(events) > 6


def test_models_are_the_workers_own(workers: dict[str, Service], gateway: Service) -> None:
    direct = httpx.get(f"{workers['wa-lru-ttl'].url}/v1/models", timeout=30).json()["data"]
    through = httpx.get(f"{gateway.url}/v1/models", timeout=30).json()["data"]
    assert [model["id"] for model in through] == [model["id"] for model in direct] == [MODEL]


def test_the_gateway_knows_the_worker_as_what_it_is(gateway: Service) -> None:
    deadline = time.monotonic() + 30
    while True:
        (worker,) = httpx.get(f"{gateway.url}/saga/v1/workers", timeout=30).json()["workers"]
        if worker["engine"] is not None:
            break
        assert time.monotonic() < deadline
    assert worker["engine"]["kind"] == "saga"
    assert worker["engine"]["version"].startswith("0.")
    assert worker["engine"]["takes_priority"] is False


def test_a_priority_does_not_make_a_worker_refuse(gateway: Service) -> None:
    answer = httpx.post(
        f"{gateway.url}/v1/chat/completions",
        json=CHAT,
        headers={"X-Vllm-Priority": "5"},
        timeout=120,
    )
    assert answer.status_code == 200


def _state(worker: Service) -> dict[str, Any]:
    state: dict[str, Any] = httpx.get(f"{worker.url}/saga/v1/state", timeout=30).json()
    return state


def _running(worker: Service) -> int:
    queue = _state(worker)["queue"]
    return int(queue["running"] + queue["waiting"])


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_whose_client_has_gone_is_given_up(
    workers: dict[str, Service], gateway: Service, stream: bool
) -> None:
    worker = workers["wa-lru-ttl"]
    # Four answers of 1,900 tokens take twice so many steps: the pool has no room for all at once.
    body = {**CHAT, "temperature": 1, "stream": stream, "n": 4}
    body |= {"ignore_eos": True, "max_tokens": 1900}
    before = _state(worker)["scheduler"]["steps"]
    with closing(_sent(gateway, "/v1/chat/completions", body)) as connection:
        if stream:
            assert connection.recv(12) == b"HTTP/1.1 200"
        deadline = time.monotonic() + 60
        while _state(worker)["scheduler"]["steps"] == before:
            assert time.monotonic() < deadline
    deadline = time.monotonic() + 30
    while _running(worker):
        assert time.monotonic() < deadline
    assert _state(worker)["scheduler"]["steps"] - before < 3500, "it went on for nobody"


def _sent(service: Service, path: str, body: Any) -> socket.socket:
    """A connection on which a request has been sent."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection(("127.0.0.1", service.port), timeout=60)
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def test_the_official_clients_are_served(gateway: Service) -> None:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.responses.create(**RESPONSE)
        assert answer.usage is not None
        assert answer.usage.output_tokens == 6
        events = [event.type for event in client.responses.create(**RESPONSE, stream=True)]
        assert events[0] == "response.created"
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="nobody", messages=[])
    with anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0) as claude:
        # Its own parameters have no temperature any more; a sampled answer may end early.
        question: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 6}
        question["extra_body"] = {"temperature": 0}
        message = claude.messages.create(**question)
        assert message.usage.output_tokens == 6
        with claude.messages.stream(**question) as stream:
            assert "".join(stream.text_stream)
        with pytest.raises(anthropic.NotFoundError):
            claude.messages.create(
                model="nobody", max_tokens=6, messages=[{"role": "user", "content": WORDS}]
            )
