"""What is read from the answers of every dialect, whole and streamed."""

import json

import pytest

from saga_gateway.answers import Answer, Usage
from saga_gateway.sse import SideReader


def whole(content):
    reader = SideReader("application/json", "")
    reader.feed(json.dumps(content).encode())
    return reader.finish()


def streamed(*events, cut=7):
    """Read a stream whose events name themselves, as those of OpenAI and Anthropic do."""
    text = b"".join(
        b"event: %s\ndata: %s\n\n" % (event["type"].encode(), json.dumps(event).encode())
        for event in events
    )
    reader = SideReader("text/event-stream", "")
    for start in range(0, len(text), cut):
        reader.feed(text[start : start + cut])
    return reader.done, reader.finish()


TEXT = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]}
CALL = {"type": "function_call", "name": "read_file", "arguments": "{}", "call_id": "c"}
RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "status": "completed",
    "error": None,
    "output": [TEXT, CALL],
    "usage": {
        "input_tokens": 40,
        "input_tokens_details": {"cached_tokens": 32},
        "output_tokens": 9,
    },
}
RESPONSE_ANSWER = Answer(("read_file",), "completed", Usage(40, 9, 32), "resp_1")


def test_a_response_is_read():
    assert whole(RESPONSE) == RESPONSE_ANSWER


def test_a_stream_of_response_events_is_read_and_ends_with_the_last_of_them():
    started = RESPONSE | {"status": "in_progress", "output": [], "usage": None}
    events = [
        {"type": "response.created", "response": started},
        {"type": "response.output_item.added", "output_index": 0, "item": TEXT},
        {"type": "response.output_text.delta", "output_index": 0, "delta": "x"},
        {"type": "response.output_item.added", "output_index": 1, "item": CALL},
        {"type": "response.function_call_arguments.delta", "output_index": 1, "delta": "{}"},
        {"type": "response.output_item.done", "output_index": 1, "item": CALL},
    ]
    last = {"type": "response.completed", "response": RESPONSE}
    done, answer = streamed(*events)
    assert (done, answer.tool_names, answer.usage) == (False, ("read_file",), None)
    assert streamed(*events, last) == (True, RESPONSE_ANSWER)


@pytest.mark.parametrize(
    "last",
    [
        {"type": "response.failed", "response": RESPONSE | {"error": {"message": "x"}}},
        {"type": "error", "message": "x"},
    ],
)
def test_a_response_that_failed_teaches_nothing(last):
    started = {"type": "response.created", "response": RESPONSE | {"output": []}}
    assert streamed(started, last)[1] is None


MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "content": [{"type": "text", "text": "x"}, {"type": "tool_use", "name": "bash", "input": {}}],
    "stop_reason": "tool_use",
    "usage": {"input_tokens": 8, "cache_read_input_tokens": 32, "output_tokens": 9},
}
MESSAGE_ANSWER = Answer(("bash",), "tool_use", Usage(40, 9, 32))


def test_a_message_is_read():
    assert whole(MESSAGE) == MESSAGE_ANSWER


def test_a_stream_of_message_events_is_read_and_ends_with_the_last_of_them():
    usage = {"input_tokens": 8, "cache_read_input_tokens": 32, "output_tokens": 0}
    started = MESSAGE | {"content": [], "stop_reason": None, "usage": usage}
    events = [
        {"type": "message_start", "message": started},
        {"type": "ping"},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "x"}},
        {"type": "content_block_start", "index": 1, "content_block": MESSAGE["content"][1]},
        {"type": "content_block_stop", "index": 1},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use"},
            "usage": {"output_tokens": 9},
        },
    ]
    assert streamed(*events) == (False, MESSAGE_ANSWER)
    assert streamed(*events, {"type": "message_stop"}) == (True, MESSAGE_ANSWER)
    overloaded = {"type": "error", "error": {"type": "overloaded_error", "message": "x"}}
    assert streamed(*events, overloaded)[1] is None


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"object": "list", "data": []},
        {"type": "ping"},
        {"type": "message_start", "message": 7} | {"error": "x"},
        {"object": "response", "output": 7, "usage": [], "id": 7, "error": {"message": "x"}},
        {"type": "response.output_item.added", "item": [], "response": 7},
    ],
)
def test_what_is_no_answer_is_none(content):
    assert whole(content) is None
