"""The scripted server, seen through the clients that agents use."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import Any

import httpx
import openai
import pytest

from saga_sdk.testing import (
    Dropped,
    Failure,
    Held,
    Malformed,
    Reply,
    Request,
    Script,
    ScriptedServer,
    ScriptError,
    ToolCall,
)

MESSAGES: list[Any] = [{"role": "user", "content": "What does a.py do?"}]
READ = ToolCall("read_file", {"path": "a.py"})
RUN = ToolCall("run_python", {"code": "1"})


class Client(openai.OpenAI):
    """A client with short ways to ask."""

    def __init__(self, server: ScriptedServer, max_retries: int = 0) -> None:
        http = httpx_of_openai().Client(trust_env=False)
        super().__init__(
            base_url=server.base_url, api_key="none", http_client=http, max_retries=max_retries
        )

    def ask(self, text: str = "What does a.py do?", **options: Any) -> Any:
        messages: list[Any] = [{"role": "user", "content": text}]
        return self.chat.completions.create(model="m", messages=messages, **options)


def httpx_of_openai() -> Any:
    """The HTTP library that the installed OpenAI client is built on."""
    return __import__(openai.DefaultHttpxClient.__mro__[1].__module__.partition(".")[0])


def test_texts_and_tool_calls_are_played_in_order() -> None:
    with ScriptedServer([READ, [READ, RUN], "It prints 1."]) as server, Client(server) as client:
        one, two, last = (client.ask().choices[0] for _ in range(3))
    assert [call.function.name for call in one.message.tool_calls] == ["read_file"]
    assert json.loads(one.message.tool_calls[0].function.arguments) == {"path": "a.py"}
    assert (one.message.content, one.finish_reason) == (None, "tool_calls")
    assert [call.function.name for call in two.message.tool_calls] == ["read_file", "run_python"]
    assert len({c.id for c in one.message.tool_calls + two.message.tool_calls}) == 3
    assert (last.message.content, last.message.tool_calls) == ("It prints 1.", None)
    assert last.finish_reason == "stop"


def test_a_stream_comes_in_pieces_with_its_usage() -> None:
    script = [Reply("Two tools,  then.", (READ, RUN))]
    with ScriptedServer(script) as server, Client(server) as client:
        chunks = list(client.ask(stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    texts = [delta.content for delta in deltas if delta.content]
    assert len(texts) == 3
    assert "".join(texts) == "Two tools,  then."
    arguments: dict[int, list[str]] = {}
    for call in (call for delta in deltas for call in delta.tool_calls or ()):
        arguments.setdefault(call.index, []).append(call.function.arguments)
    assert [json.loads("".join(parts)) for parts in arguments.values()] == [
        READ.arguments,
        RUN.arguments,
    ]
    assert all(len(parts) == 3 for parts in arguments.values())
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + 5


def test_a_stream_without_asking_has_no_usage() -> None:
    with ScriptedServer() as server, Client(server) as client:
        assert all(chunk.choices for chunk in client.ask(stream=True))


@pytest.mark.parametrize("stream", [False, True])
def test_completions(stream: bool) -> None:
    with ScriptedServer(["a b"]) as server, Client(server) as client:
        answer: Any = client.completions.create(model="m", prompt="p", stream=stream)
        pieces = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    assert "".join(piece.text for piece in pieces) == "a b"
    assert pieces[-1].finish_reason == "stop"
    assert server.requests[0].user_text == "p"


def test_a_response_holds_text_and_calls() -> None:
    with ScriptedServer([Reply("Reading.", [READ])]) as server, Client(server) as client:
        answer = client.responses.create(model="m", input="Read", instructions="Be brief")
    assert answer.output_text == "Reading."
    call: Any = answer.output[1]
    assert (call.name, json.loads(call.arguments)) == ("read_file", READ.arguments)
    assert answer.usage is not None
    assert answer.usage.total_tokens > 0
    assert server.requests[0].text == "Be brief\nRead"


def test_a_streamed_response_ends_with_the_whole() -> None:
    with ScriptedServer([Reply("Two words", [READ])]) as server, Client(server) as client:
        events: list[Any] = list(client.responses.create(model="m", input="Read", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert texts == ["Two ", "words"]
    parts = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(parts)) == READ.arguments
    assert events[-1].type == "response.completed"
    assert [item.type for item in events[-1].response.output] == ["message", "function_call"]


def test_embeddings_and_models_need_no_script() -> None:
    with ScriptedServer([], model="tiny") as server, Client(server) as client:
        vectors = client.embeddings.create(model="e", input=["a", "b"]).data
        assert [model.id for model in client.models.list()] == ["tiny"]
    assert [vector.index for vector in vectors] == [0, 1]
    assert [request.path for request in server.requests] == ["/v1/embeddings", "/v1/models"]


def test_failures_say_when_to_try_again() -> None:
    script = [Failure(429, "slow down", retry_after_s=2), Failure(500), "done"]
    with ScriptedServer(script) as server:
        with Client(server) as client:
            with pytest.raises(openai.RateLimitError, match="slow down") as limited:
                client.ask()
            assert limited.value.response.headers["retry-after"] == "2"
            assert limited.value.response.headers["retry-after-ms"] == "2000"
        with Client(server, max_retries=1) as client:
            assert client.ask().choices[0].message.content == "done"
    assert [request.status for request in server.requests] == [429, 500, 200]
    assert [r.get("X-Stainless-Retry-Count") for r in server.requests] == ["0", "0", "1"]


def test_a_dropped_connection_is_one_also_in_mid_stream() -> None:
    script = [Dropped(), Dropped("one two three", after_events=2)]
    with ScriptedServer(script) as server, Client(server) as client:
        with pytest.raises(openai.APIConnectionError):
            client.ask()
        chunks = client.ask(stream=True)
        assert [next(chunks).choices[0].delta.content for _ in range(2)] == ["", "one "]
        # The second is what the 2.x client lets through.
        cut_short = (openai.APIConnectionError, httpx_of_openai().RemoteProtocolError)
        with pytest.raises(cut_short):
            next(chunks)
    assert [request.status for request in server.requests] == [0, 200]


@pytest.mark.parametrize("stream", [False, True])
def test_malformed_answers(stream: bool) -> None:
    with ScriptedServer([Malformed("{no")]) as server:
        answer = httpx.post(
            f"{server.base_url}/chat/completions",
            json={"messages": MESSAGES, "stream": stream},
            trust_env=False,
        )
    assert (answer.status_code, "{no" in answer.text) == (200, True)
    with pytest.raises(json.JSONDecodeError):
        json.loads(answer.text.removeprefix("data: "))


@pytest.mark.parametrize("after_events", [0, 2])
def test_a_held_answer_waits(after_events: int) -> None:
    until = threading.Event()
    with (
        ScriptedServer([Held("one two", until, after_events)]) as server,
        Client(server) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        seen: list[str] = []
        began = threading.Event()

        def read() -> None:
            for chunk in client.ask(stream=True):
                seen.append(chunk.choices[0].delta.content or "")
                began.set()

        reading = pool.submit(read)
        server.wait_for_requests(1)
        assert began.wait(30) if after_events else not seen
        assert not reading.done()
        assert "two" not in seen
        until.set()
        reading.result(30)
    assert "".join(seen) == "one two"


def test_a_held_answer_does_not_hold_up_the_end() -> None:
    with ThreadPoolExecutor(1) as pool:
        with ScriptedServer([Held("never", threading.Event())]) as server:
            client = Client(server)
            asking = pool.submit(client.ask)
            server.wait_for_requests(1)
        assert isinstance(asking.exception(30), openai.APIConnectionError)
        client.close()


def test_the_gate_holds_all_answers() -> None:
    with ScriptedServer() as server, Client(server) as client, ThreadPoolExecutor(1) as pool:
        server.gate.clear()
        asking = pool.submit(client.ask)
        server.wait_for_requests(1)
        assert not asking.done()
        server.gate.set()
        assert asking.result(30).choices[0].message.content == "done"


def test_interjected_steps_come_before_the_script() -> None:
    with ScriptedServer(["from the script"]) as server, Client(server, max_retries=2) as client:
        server.interject(Failure(503), Failure(500))
        assert client.ask().choices[0].message.content == "from the script"
    assert [request.status for request in server.requests] == [503, 500, 200]


def test_marks_tell_agents_apart() -> None:
    script = {f"agent-{number}": [READ, f"done {number}"] for number in range(60)}
    with ScriptedServer(script) as server, Client(server) as client:
        together = threading.Barrier(60)

        def run(number: int) -> str:
            together.wait(30)
            assert client.ask(f"You are agent-{number}").choices[0].message.tool_calls
            return str(client.ask(f"You are agent-{number}").choices[0].message.content)

        with ThreadPoolExecutor(60) as pool:
            answers = list(pool.map(run, range(60)))
    assert answers == [f"done {number}" for number in range(60)]
    assert [request.number for request in server.requests] == list(range(1, 121))


def test_a_function_may_look_at_the_request() -> None:
    def script(request: Request) -> Any:
        if request.turn == 0:
            return [ToolCall(name) for name in request.tool_names]
        return f"{request.turn} turns since {request.user_text}"

    tools: list[Any] = [
        {"type": "function", "function": {"name": name}} for name in ("read_file", "run_python")
    ]
    with ScriptedServer(script) as server, Client(server) as client:
        message = client.ask("Go", tools=tools).choices[0].message
        history: list[Any] = [
            {"role": "user", "content": [{"type": "text", "text": "Go"}]},
            message.model_dump(exclude_none=True),
            *({"role": "tool", "tool_call_id": c.id, "content": "x"} for c in message.tool_calls),
        ]
        last = client.chat.completions.create(model="m", messages=history)
        call = {"type": "function_call", "name": "read_file", "arguments": "{}"}
        responses: list[Any] = [
            {"role": "user", "content": "Go"},
            *({**call, "call_id": call_id} for call_id in ("a", "b")),
            {"type": "function_call_output", "call_id": "a", "output": "x"},
        ]
        response = client.responses.create(model="m", input=responses)
    assert [call.function.name for call in message.tool_calls] == ["read_file", "run_python"]
    assert last.choices[0].message.content == "1 turns since Go"
    assert response.output_text == "1 turns since Go"


def test_hints_and_events_are_read() -> None:
    headers = {"X-SAGA-Session-ID": "s", "X-SAGA-Step": "3"}
    events = [{"event": "session_end", "session_id": "s"}]
    with ScriptedServer() as server, httpx.Client(trust_env=False) as client:
        client.post(f"{server.base_url}/chat/completions", json={}, headers=headers)
        root = server.base_url.removesuffix("/v1")
        assert client.post(f"{root}/saga/v1/events", json=events).status_code == 202
        server.wait_for_events(1)
        server.events_status = 404
        assert client.post(f"{root}/saga/v1/events", json=events).status_code == 404
        bad = {"X-SAGA-Step": "three"}
        client.post(f"{server.base_url}/chat/completions", json={}, headers=bad)
    assert (server.requests[0].hints.session_id, server.requests[0].hints.step) == ("s", 3)
    assert server.requests[0].saga_headers == {"x-saga-session-id": "s", "x-saga-step": "3"}
    assert (server.events, len(server.event_requests)) == (events, 2)
    with pytest.raises(ValueError, match=r"request 2 .*X-SAGA-Step"):
        print(server.hints)


def endless() -> Iterator[str]:
    yield from cycle(["a", "b"])


@pytest.mark.parametrize(
    ("script", "answers"),
    [("a", "aaa"), (Reply("a"), "aaa"), (["a", "b", "c"], "abc"), (endless(), "aba")],
    ids=["text", "reply", "list", "generator"],
)
def test_scripts(script: Script, answers: str) -> None:
    with ScriptedServer(script) as server, Client(server) as client:
        assert [client.ask().choices[0].message.content for _ in answers] == list(answers)


def broken(request: Request) -> str:
    raise LookupError("the script's own")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ([], r"at its end: request 1 \(POST /v1/chat/completions\) asked 'What does"),
        ({"agent-1": ["a"]}, r"no mark of the script \(agent-1\)"),
        ([42], "no step of a script: 42"),
        (broken, "the script's own"),
    ],
    ids=["end", "mark", "step", "function"],
)
def test_what_the_script_does_not_say_fails_with_the_reason(script: Any, reason: str) -> None:
    with pytest.raises((ScriptError, LookupError), match=reason):
        ask_once(script, reason)


def ask_once(script: Any, reason: str) -> None:
    with ScriptedServer(script) as server, Client(server, max_retries=2) as client:
        with pytest.raises(openai.InternalServerError, match=reason):
            client.ask()
        assert len(server.requests) == 1, "the client does not try again"


def test_the_tests_own_failure_wins_over_the_scripts() -> None:
    def fail() -> None:
        with ScriptedServer([]) as server, Client(server) as client:
            client.ask()

    with pytest.raises(openai.InternalServerError):
        fail()


def test_connections_are_kept_and_closed_with_the_server() -> None:
    with ScriptedServer() as server, httpx.Client(trust_env=False) as client:
        url = f"{server.base_url}/chat/completions"
        peers = {
            client.post(url, json={}).extensions["network_stream"].get_extra_info("client_addr")
            for _ in range(3)
        }
    assert len(peers) == 1
    assert not [thread for thread in threading.enumerate() if "process_request" in thread.name]


def test_waiting_for_what_does_not_come_ends() -> None:
    with (
        ScriptedServer() as server,
        pytest.raises(TimeoutError, match=r"not in 0\.01 s; there were 0 requests"),
    ):
        server.wait_for_requests(1, timeout_s=0.01)
