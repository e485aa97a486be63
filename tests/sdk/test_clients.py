"""The hook in the HTTP clients: which requests get hints, once, and where they may not go."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import httpx
import httpx2
import openai
import pytest

import saga_sdk as saga
from saga_core.errors import SettingsError
from saga_core.hints import Hints
from saga_sdk import clients
from saga_sdk.events import sender
from saga_sdk.testing import Failure, ScriptedServer

LIBRARIES: list[Any] = [httpx, httpx2]
BODY = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
WAIT_S = 30.0


@pytest.fixture(params=LIBRARIES, ids=lambda library: library.__name__)
def library(request: pytest.FixtureRequest) -> Any:
    return request.param


def redirect_to(server: ScriptedServer) -> Failure:
    return Failure(307, headers={"location": f"{server.base_url}/chat/completions"})


def test_bare_httpx_gets_hints(server: ScriptedServer, library: Any) -> None:
    saga.instrument(server.base_url)
    url = f"{server.base_url}/chat/completions"
    with library.Client() as client, saga.workflow("swe") as block:
        client.post(url, json=BODY)
        with client.stream("POST", url, json=BODY | {"stream": True}) as response:
            response.read()
        client.get(f"{server.base_url}/models")
        client.post(f"{server.base_url}/embeddings", json={"model": "m", "input": "a"})
    by_path = [(r.path.rpartition("/v1/")[2], r.hints.step) for r in server.requests]
    assert by_path == [
        ("chat/completions", 0),
        ("chat/completions", 1),
        ("models", None),
        ("embeddings", None),
    ]
    assert {h.session_id for h in server.hints} == {block.session_id, None}


async def test_bare_async_httpx_gets_hints(server: ScriptedServer, library: Any) -> None:
    saga.instrument(server.base_url)
    async with library.AsyncClient() as client, saga.workflow("swe"):
        for _ in range(2):
            await client.post(f"{server.base_url}/chat/completions", json=BODY)
    assert [h.step for h in server.hints] == [0, 1]


def test_a_request_that_is_sent_again_repeats_its_step(
    server: ScriptedServer, library: Any
) -> None:
    saga.instrument(server.base_url)
    with library.Client() as client, saga.workflow("swe"):
        request = client.build_request("POST", f"{server.base_url}/chat/completions", json=BODY)
        client.send(request)
        client.send(request)
        client.post(f"{server.base_url}/chat/completions", json=BODY)
    assert [h.step for h in server.hints] == [0, 0, 1]


def test_headers_that_the_user_set_win(server: ScriptedServer, library: Any) -> None:
    saga.instrument(server.base_url, dialects=["saga", "vllm"])
    headers = {"x-saga-step": "7", "x-session-id": "mine"}
    with library.Client() as client, saga.workflow("swe"):
        client.post(f"{server.base_url}/chat/completions", json=BODY, headers=headers)
    (request,) = server.requests
    assert (request.hints.step, request.hints.workflow_id) == (7, "swe")
    assert request.get("x-session-id") == "mine"


ALL = ["saga", "vllm", "dynamo", "llm-d"]
FOREIGN = (
    "x-session-id",
    "x-dynamo-session-id",
    "x-dynamo-parent-session-id",
    "x-session-affinity",
    "x-gateway-inference-fairness-id",
)


def test_dialects(server: ScriptedServer) -> None:
    saga.instrument(server.base_url, dialects=ALL)
    with openai.OpenAI(base_url=server.base_url, api_key="none") as client:
        with saga.workflow("outer", task_id="t", session_id="s1"), saga.workflow("in", None, "s2"):
            client.chat.completions.create(model="m", messages=BODY["messages"])
        saga.instrument(dialects="vllm")
        with saga.workflow("outer", session_id="s3"):
            client.chat.completions.create(model="m", messages=BODY["messages"])
    every, vllm_alone = server.requests
    assert [every.get(name) for name in FOREIGN] == ["s2", "s2", "s1", "s2", "t"]
    assert every.hints.session_id == "s2"
    assert [vllm_alone.get(name) for name in FOREIGN] == ["s3", None, None, None, None]
    assert vllm_alone.hints == Hints()
    assert vllm_alone.get("baggage") is None
    # Who does not speak SAGA's dialect is told nothing else either.
    assert sender.flush(WAIT_S)
    assert {event["task_id"] for event in server.events} == {"t"}


@pytest.mark.parametrize("wrong", [["saga", "nosuch"], "nosuch", []])
def test_an_unknown_dialect_is_an_error_and_changes_nothing(wrong: Any) -> None:
    with pytest.raises(SettingsError, match="saga, vllm, dynamo, llm-d"):
        saga.instrument("http://127.0.0.1:1/v1", dialects=wrong)
    assert clients.options.dialects == ("saga",)
    assert "http://127.0.0.1:1/v1" not in clients.allowed


def test_a_redirect_to_another_host_carries_no_hints(
    server: ScriptedServer, other_server: ScriptedServer, library: Any
) -> None:
    saga.instrument(server.base_url, dialects=ALL)
    headers = {"baggage": "saga.task_id=t, user=1", "x-saga-node": "n", "x-other": "1"}
    with library.Client(follow_redirects=True) as client, saga.workflow("swe"):
        url = f"{server.base_url}/chat/completions"
        server.interject(redirect_to(other_server))
        client.post(url, json=BODY, headers=headers)
        server.interject(redirect_to(other_server))
        client.post(url, json=BODY)
        server.interject(Failure(307, headers={"location": url}))
        client.post(url, json=BODY)
    for request in other_server.requests:
        assert request.saga_headers == {}
        assert [request.get(name) for name in FOREIGN] == [None] * 5
    assert [r.get("baggage") for r in other_server.requests] == ["user=1", None]
    assert other_server.requests[0].get("x-other") == "1"
    # On the same host they go along, and are the same step.
    assert [h.step for h in server.hints] == [0, 1, 2, 2]


async def test_an_async_redirect_to_another_host_carries_no_hints(
    server: ScriptedServer, other_server: ScriptedServer
) -> None:
    saga.instrument(server.base_url)
    server.interject(redirect_to(other_server))
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none") as client:
        with saga.workflow("swe"):
            await client.chat.completions.create(model="m", messages=BODY["messages"])
    assert [h.step for h in server.hints] == [0]
    assert [r.saga_headers for r in other_server.requests] == [{}]
    assert other_server.requests[0].get("baggage") is None


def test_a_redirect_to_an_allowed_host_keeps_the_hints(
    server: ScriptedServer, other_server: ScriptedServer
) -> None:
    saga.instrument([server.base_url, other_server.base_url])
    server.interject(redirect_to(other_server))
    with (
        openai.OpenAI(base_url=server.base_url, api_key="none") as client,
        saga.workflow("swe") as block,
    ):
        client.chat.completions.create(model="m", messages=BODY["messages"])
    assert [h.session_id for h in other_server.hints] == [block.session_id]


def test_events_carry_the_key_of_the_session_they_are_about(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    for number in (1, 2):
        with (
            openai.OpenAI(base_url=server.base_url, api_key=f"key-{number}") as client,
            saga.workflow("swe", task_id=f"task-{number}"),
        ):
            client.chat.completions.create(model="m", messages=BODY["messages"])
        assert sender.flush(WAIT_S)
        assert server.events[-1]["task_id"] == f"task-{number}"
        assert server.event_requests[-1].get("authorization") == f"Bearer key-{number}"
    assert {r.get("authorization") for r in server.event_requests} == {
        "Bearer key-1",
        "Bearer key-2",
    }
    assert "secret" not in repr(block_of("secret").session.destinations)


def block_of(key: str) -> saga.WorkflowRun:
    with saga.workflow("swe") as block:
        block.session.sent_to("http://gateway:80/saga/v1/events", f"Bearer {key}")
        return block


def test_the_methods_are_restored(library: Any) -> None:
    names = ("send", "_build_redirect_request")
    owners = (library.Client, library.AsyncClient)
    before = [(vars(owner).get(name)) for owner in owners for name in names]
    saga.instrument("http://127.0.0.1:1/v1")
    changed = [(vars(owner).get(name)) for owner in owners for name in names]
    assert all(now is not then for now, then in zip(changed, before, strict=True))
    saga.uninstrument()
    assert [(vars(owner).get(name)) for owner in owners for name in names] == before


LAZY = """
import json, sys, saga_sdk as saga
names = {"openai", "httpx", "httpx2", "langchain_core"}
saga.instrument(sys.argv[1])
before = sorted(names & set(sys.modules))
import openai, langchain_core.messages
from saga_sdk.integrations import langchain
assert langchain._automatic.enabled
with openai.OpenAI(base_url=sys.argv[1], api_key="none") as client, saga.workflow("swe"):
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
saga.uninstrument()
wrapped = hasattr(openai.OpenAI._prepare_request, "__wrapped__")
print(json.dumps([before, langchain._automatic.enabled, wrapped]))
"""


def test_nothing_is_imported_before_the_program_does(server: ScriptedServer) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LAZY, server.base_url], capture_output=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout) == [[], False, False]
    assert [h.step for h in server.hints] == [0]
