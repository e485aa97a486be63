"""Sessions and workflows of clients that name none, told over the wire."""

import json

import pytest

from saga_gateway.identity import new_key

ARGUMENTS = {"command": 'ls "a b"', "timeout": 3}
TEXT = 'Looking at it é "first" the\nparser.'


def chat_body(turns, stream):
    messages = [{"role": "system", "content": "You fix bugs. It is 10:15."}]
    for number, turn in enumerate(turns):
        if number % 2 == 0:
            messages.append({"role": "user", "content": turn})
            continue
        # As other libraries write it: in parts, and the arguments with other spaces.
        function = {"name": "bash", "arguments": json.dumps(ARGUMENTS, indent=1)}
        call = {"id": "c1", "type": "function", "function": function}
        content = [{"type": "text", "text": turn}]
        messages.append({"role": "assistant", "content": content, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": "c1", "content": "a b: x"})
    return {"model": "m", "messages": messages, "stream": stream}


def chat_answer(wire, text):
    function = {"name": "bash", "arguments": json.dumps(ARGUMENTS)}
    call = {"id": "c1", "type": "function", "function": function}
    message = {"role": "assistant", "content": text, "tool_calls": [call]}
    return {**wire.completion(), "choices": [{"index": 0, "message": message}]}


def chat_events(wire, text):
    arguments = json.dumps(ARGUMENTS)
    yield wire.delta(role="assistant", content="")
    for start in range(0, len(text), 3):
        yield wire.delta(content=text[start : start + 3])
    first = {"index": 0, "id": "c1", "function": {"name": "bash", "arguments": ""}}
    yield wire.delta(tool_calls=[first])
    for start in range(0, len(arguments), 5):
        part = {"index": 0, "function": {"arguments": arguments[start : start + 5]}}
        yield wire.delta(tool_calls=[part])
    yield wire.delta("tool_calls")


def text_body(turns, stream):
    text = "".join(f"{turn}\n\n" for turn in turns)
    return {"model": "m", "prompt": text, "stream": stream}


def text_answer(wire, text):
    return {"object": "text_completion", "choices": [{"index": 0, "text": text}]}


def text_events(wire, text):
    for start in range(0, len(text), 3):
        choice = {"index": 0, "text": text[start : start + 3], "finish_reason": None}
        yield {"object": "text_completion", "choices": [choice]}


def messages_body(turns, stream):
    messages = []
    for number, turn in enumerate(turns):
        if number % 2 == 0:
            result = {"type": "tool_result", "tool_use_id": "t", "content": "a b: x"}
            said = {"type": "text", "text": turn}
            messages.append({"role": "user", "content": [result, said] if number else turn})
        else:
            used = {"type": "tool_use", "id": "t", "name": "bash", "input": ARGUMENTS}
            content = [{"type": "text", "text": turn}, used]
            messages.append({"role": "assistant", "content": content})
    return {"model": "m", "max_tokens": 9, "messages": messages, "stream": stream}


def messages_answer(wire, text):
    used = {"type": "tool_use", "id": "t", "name": "bash", "input": ARGUMENTS}
    content = [{"type": "text", "text": text}, used]
    return {"type": "message", "role": "assistant", "content": content, "stop_reason": "tool_use"}


def messages_events(wire, text):
    arguments = json.dumps(ARGUMENTS)
    yield {"type": "message_start", "message": {"type": "message", "content": []}}
    block = {"type": "text", "text": ""}
    yield {"type": "content_block_start", "index": 0, "content_block": block}
    for start in range(0, len(text), 3):
        piece = {"type": "text_delta", "text": text[start : start + 3]}
        yield {"type": "content_block_delta", "index": 0, "delta": piece}
    block = {"type": "tool_use", "id": "t", "name": "bash", "input": {}}
    yield {"type": "content_block_start", "index": 1, "content_block": block}
    for start in range(0, len(arguments), 5):
        piece = {"type": "input_json_delta", "partial_json": arguments[start : start + 5]}
        yield {"type": "content_block_delta", "index": 1, "delta": piece}
    yield {"type": "message_delta", "delta": {"stop_reason": "tool_use"}}
    yield {"type": "message_stop"}


def responses_body(turns, stream):
    items = []
    for number, turn in enumerate(turns):
        role = "assistant" if number % 2 else "user"
        items.append({"role": role, "content": turn})
        if number % 2:
            call = {"type": "function_call", "name": "bash", "arguments": json.dumps(ARGUMENTS)}
            result = {"type": "function_call_output", "call_id": "c", "output": "a b: x"}
            items += [call, result]
    return {"model": "m", "input": items, "stream": stream}


def responses_answer(wire, text):
    said = {"type": "message", "content": [{"type": "output_text", "text": text}]}
    call = {"type": "function_call", "name": "bash", "arguments": json.dumps(ARGUMENTS)}
    return {"object": "response", "id": "resp_1", "status": "completed", "output": [said, call]}


def responses_events(wire, text):
    made = responses_answer(wire, text)
    for number, item in enumerate(made["output"]):
        begun = {**item, "content": []} if "content" in item else {**item, "arguments": ""}
        added = {"type": "response.output_item.added", "output_index": number, "item": begun}
        yield added
        yield {**added, "type": "response.output_item.done", "item": item}
    yield {"type": "response.completed", "response": made}


APIS = {
    "/v1/chat/completions": (chat_body, chat_answer, chat_events),
    "/v1/messages": (messages_body, messages_answer, messages_events),
    "/v1/responses": (responses_body, responses_answer, responses_events),
}


def answer_with(worker, wire, path, text, apis=APIS):
    """Let the worker say this, in a stream where one is asked for."""
    _, whole, events = apis[path]

    async def script(exchange):
        if json.loads(exchange.body)["stream"]:
            await exchange.stream(*map(wire.event, events(wire, text)), b"data: [DONE]\n\n")
        else:
            await exchange.answer(whole(wire, text))

    worker.script = script


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", APIS)
async def test_two_who_open_alike_are_told_apart_by_what_they_were_answered(
    gateway, worker, wire, path, stream
):
    body = APIS[path][0]
    ids = []
    for text in (TEXT, f"No. {TEXT}"):
        answer_with(worker, wire, path, text)
        response = await gateway.client.post(path, json=body(["fix it"], stream))
        ids.append(response.headers["x-saga-session-id"])
        assert response.headers["x-saga-route"] == "new"
    assert ids[0] != ids[1]
    answer_with(worker, wire, path, "Done.")
    for session_id, text in zip(ids, (TEXT, f"No. {TEXT}"), strict=True):
        response = await gateway.client.post(path, json=body(["fix it", text, "go on"], stream))
        assert response.headers["x-saga-session-id"] == session_id
        assert response.headers["x-saga-route"] == "affinity"
        assert worker.chats[-1].header("x-session-id") == session_id
    gateway.app.sessions.check_integrity()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_plain_text_goes_on_where_one_session_alone_has_been(gateway, worker, wire, stream):
    path = "/v1/completions"
    plain = {path: (text_body, text_answer, text_events)}
    ids = {}
    for task in ("one", "two"):
        answer_with(worker, wire, path, f"ls {task}", plain)
        response = await gateway.client.post(path, json=text_body([f"Do {task}."], stream))
        ids[task] = response.headers["x-saga-session-id"]
    for task, session_id in ids.items():
        turns = [f"Do {task}.", f"ls {task}", "a b c"]
        response = await gateway.client.post(path, json=text_body(turns, stream))
        assert response.headers["x-saga-session-id"] == session_id
    assert len(set(ids.values())) == 2


async def test_the_session_of_a_response_goes_on_under_its_id(gateway, worker, wire):
    path = "/v1/responses"
    answer_with(worker, wire, path, TEXT)
    first = await gateway.client.post(path, json=responses_body(["fix it"], False))
    follow = {"input": "and?", "previous_response_id": "resp_1", "stream": False}
    second = await gateway.client.post(path, json=follow)
    assert second.headers["x-saga-session-id"] == first.headers["x-saga-session-id"]


async def test_a_session_that_is_named_is_not_looked_for(gateway, worker, wire):
    path = "/v1/chat/completions"
    answer_with(worker, wire, path, TEXT)
    body = chat_body(["fix it"], False)
    named = await gateway.client.post(path, json=body, headers={"X-Session-ID": "mine"})
    assert named.headers["x-saga-session-id"] == "mine"
    other = await gateway.client.post(path, json=chat_body(["fix it", TEXT, "go on"], False))
    assert other.headers["x-saga-session-id"] != "mine"


async def test_it_can_be_switched_off(start_gateway, worker):
    gateway = await start_gateway(worker, identify_sessions=False)
    for _ in range(2):
        response = await gateway.client.post(
            "/v1/chat/completions", json=chat_body(["fix it"], False)
        )
        assert "x-saga-session-id" not in response.headers
    assert len(gateway.app.sessions) == 0


async def test_a_retry_after_a_failure_is_the_same_session_and_teaches_nothing(
    gateway, worker, wire
):
    path, turns = "/v1/chat/completions", ["fix it", TEXT, "go on"]
    answer_with(worker, wire, path, TEXT)
    first = await gateway.client.post(path, json=chat_body(turns[:1], False))
    works = worker.script

    async def refuse(exchange):
        await exchange.answer({"error": {"message": "full"}}, status=500)

    worker.script = refuse
    failed = await gateway.client.post(path, json=chat_body(turns, False))
    worker.script = works
    again = await gateway.client.post(path, json=chat_body(turns, False))
    ids = {r.headers["x-saga-session-id"] for r in (first, failed, again)}
    assert len(ids) == 1
    assert gateway.app.stats.identified == {"new": 1, "continues": 1, "retry": 1}
    shown = (await gateway.client.get("/metrics")).text
    assert 'saga_gateway_identified_total{kind="retry"} 1.0' in shown
    assert "saga_gateway_workflows 1.0" in shown


async def test_one_conversation_of_two_tenants_is_two(start_gateway, worker, wire, tmp_path):
    gateway = await start_gateway(worker, trusted_proxies=("127.0.0.1",))
    path = "/v1/chat/completions"
    answer_with(worker, wire, path, TEXT)
    ids = []
    for tenant in ("a", "b"):
        headers = {"X-SAGA-Tenant-ID": tenant}
        for turns in (["fix it"], ["fix it", TEXT, "go on"]):
            response = await gateway.client.post(
                path, json=chat_body(turns, False), headers=headers
            )
            ids.append(response.headers["x-saga-session-id"])
    assert ids[0] == ids[1] != ids[2] == ids[3]


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"messages": 3}', b'{"messages": [{}]}'])
async def test_a_body_that_tells_nothing_is_relayed_as_it_is(gateway, worker, content):
    response = await gateway.client.post("/v1/chat/completions", content=content)
    assert response.status_code == 200
    assert worker.chats[0].body == content
    assert "x-saga-session-id" not in response.headers


DEEP = "[" * 300 + "]" * 300


@pytest.mark.parametrize(
    "content",
    [
        b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", '
        b'"arguments": "%s"}}]}]}' % DEEP.encode(),
        b'{"messages": [{"role": "user", "content": [%s]}]}' % DEEP.encode(),
        b'{"model": %s, "messages": [{"role": "user", "content": "hi"}]}' % DEEP.encode(),
        b'{"messages": [{"role": "user", "content": [{"a": %s1%s}]}]}'
        % (b'{"a":' * 900, b"}" * 900),
    ],
)
async def test_content_fails_no_request_and_keeps_no_place(
    start_gateway, worker, content, tmp_path
):
    key, entry = new_key("a")
    keys = tmp_path / "keys.toml"
    keys.write_text(f"{entry}max_in_flight = 1\n")
    gateway = await start_gateway(worker, keys_file=str(keys))
    headers = {"Authorization": f"Bearer {key}"}
    for _ in range(2):
        response = await gateway.client.post(
            "/v1/chat/completions", content=content, headers=headers
        )
        assert response.status_code == 200
    assert worker.chats[0].body == content


@pytest.mark.parametrize("text", [b"tab\there", b"bad \xff byte"])
async def test_a_stream_that_is_no_json_is_relayed_and_ends_its_session_s_step(
    gateway, worker, wire, text
):
    good = wire.event(wire.delta(content="first"))
    bad = good.replace(b'"content": "first"', b'"content":"' + text + b'"')

    async def script(exchange):
        for_each = [good, bad, b"data: [DONE]\n\n"]
        await exchange.stream_head()
        for piece in for_each:
            await exchange.chunk(piece)
        await exchange.send(b"0\r\n\r\n")

    worker.script = script
    response = await gateway.client.post("/v1/chat/completions", json=chat_body(["fix it"], True))
    assert text in response.content
    session = gateway.app.sessions.get(response.headers["x-saga-session-id"])
    assert session.running == 0


async def test_a_session_that_was_found_can_be_named_by_a_tenant(start_gateway, worker, wire):
    gateway = await start_gateway(worker, trusted_proxies=("127.0.0.1",))
    path, tenant = "/v1/chat/completions", {"X-SAGA-Tenant-ID": "a"}
    answer_with(worker, wire, path, TEXT)
    first = await gateway.client.post(path, json=chat_body(["fix it"], False), headers=tenant)
    named = {**tenant, "X-SAGA-Session-ID": first.headers["x-saga-session-id"]}
    await gateway.client.post(path, json=chat_body(["other words"], False), headers=named)
    assert len(gateway.app.sessions) == 1
    assert worker.chats[0].header("x-session-id") == worker.chats[1].header("x-session-id")


@pytest.mark.parametrize(
    "content",
    [
        b'{"input": "y", "previous_response\\u005fid": "resp_1"}',
        b'{"input": "y", "temperature": NaN, "previous_response_id": "resp_1"}',
        json.dumps({"input": "y", "previous_response_id": "resp_1"}).encode("utf-16"),
    ],
)
async def test_no_spelling_lets_a_tenant_go_on_from_another_s_response(
    start_gateway, worker, wire, content
):
    gateway = await start_gateway(worker, trusted_proxies=("127.0.0.1",))
    path = "/v1/responses"
    answer_with(worker, wire, path, TEXT)
    made = await gateway.client.post(
        path, json=responses_body(["fix it"], False), headers={"X-SAGA-Tenant-ID": "a"}
    )
    assert made.status_code == 200
    stolen = await gateway.client.post(path, content=content, headers={"X-SAGA-Tenant-ID": "b"})
    assert stolen.status_code in (400, 404)
    assert len(worker.chats) == 1


async def test_a_step_that_holds_only_what_is_new_says_nothing_of_overlap(gateway, worker, wire):
    path = "/v1/responses"
    answer_with(worker, wire, path, TEXT)
    first = await gateway.client.post(path, json=responses_body(["fix it"], False))
    for _ in range(3):
        follow = {"input": "and?", "previous_response_id": "resp_1", "stream": False}
        await gateway.client.post(path, json=follow)
    session = gateway.app.sessions.get(first.headers["x-saga-session-id"])
    outlook = gateway.app.sessions.graphs.outlook(session.walk)
    assert outlook.p_reuse > 0.5


async def test_calls_that_a_worker_does_not_number_are_told_apart(
    gateway, worker, wire, eventually
):
    async def script(exchange):
        calls = [("c1", "weather", '{"a"'), (None, None, ": 1}"), ("c2", "time", "{}")]
        await exchange.stream_head()
        for call_id, name, arguments in calls:
            function = {"name": name, "arguments": arguments}
            call = {"index": 0, "id": call_id, "function": function}
            await exchange.chunk(wire.event(wire.delta(tool_calls=[call])))
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.send(b"0\r\n\r\n")

    worker.script = script
    await gateway.client.post("/v1/chat/completions", json=chat_body(["fix it"], True))
    await eventually(lambda: worker.notices)
    assert worker.notices[0]["tool_name"] in ("weather", "time")
