"""The side readers read the same from every cut of the same bytes."""

import gzip
import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saga_gateway.answers import Answer, Usage
from saga_gateway.sse import MAX_BUFFERED_BYTES, SideReader


def chunk(delta, finish_reason=None, **more):
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return json.dumps({"id": "c", "choices": [choice], **more}, ensure_ascii=False).encode()


def call(index, **function):
    return {"tool_calls": [{"index": index, "function": function}]}


EVENTS = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"content": "é€😀"}),
    chunk(call(0, name="read_", arguments="")),
    chunk(call(0, name="file", arguments='{"pa')),
    chunk(call(0, arguments='th": "a\\n\\ndata: [DONE]"}')),
    chunk(call(1, name="run_tests", arguments="{}")),
    chunk({}, "tool_calls"),
    b'{"id":"c","choices":[],"usage":{"prompt_tokens":40,"completion_tokens":9,'
    b'"prompt_tokens_details":{"cached_tokens":32}}}',
]
EXPECTED = Answer(("read_file", "run_tests"), "tool_calls", Usage(40, 9, 32))


def stream(newline=b"\n", prefix=b"data: ", done=True, last_newlines=2):
    events = [*EVENTS, b"[DONE]"] if done else EVENTS
    blank = newline * 2
    text = b": a comment" + blank + b"event: x" + newline + b"id: 1" + newline
    text += blank.join(prefix + event for event in events) + newline * last_newlines
    return text


def read(pieces, content_type="text/event-stream; charset=utf-8", encoding=""):
    reader = SideReader(content_type, encoding)
    for piece in pieces:
        reader.feed(piece)
    return reader.finish()


STREAMS = {
    "lf": stream(),
    "crlf": stream(b"\r\n"),
    "cr": stream(b"\r"),
    "no space": stream(prefix=b"data:"),
    "no done": stream(done=False),
    "no final newline": stream(done=False, last_newlines=0),
    "byte order mark": b"\xef\xbb\xbf" + stream()[13:],
}


@pytest.mark.parametrize("name", STREAMS)
def test_every_cut_in_two_and_every_piece_size(name):
    text = STREAMS[name]
    for at in range(len(text) + 1):
        assert read([text[:at], text[at:]]) == EXPECTED
    for size in range(1, 20):
        assert read([text[at : at + size] for at in range(0, len(text), size)]) == EXPECTED


@given(st.sampled_from(sorted(STREAMS)), st.lists(st.integers(0, 1500)))
def test_any_cut(name, cuts):
    text = STREAMS[name]
    edges = [0, *sorted(cuts), len(text)]
    assert read([text[a:b] for a, b in pairwise(edges)]) == EXPECTED


@given(st.lists(st.binary()), st.sampled_from(["text/event-stream", "application/json", ""]))
def test_nothing_raises(pieces, content_type):
    read(pieces, content_type)
    read(pieces, content_type, "gzip")


def test_done_is_known_when_it_comes():
    reader = SideReader("text/event-stream", "")
    reader.feed(b"data: {}\n\n")
    assert not reader.done
    reader.feed(b"data: [DONE]\n\n")
    assert reader.done


def test_repeated_and_parallel_names():
    events = [
        chunk(call(0, name="a_tool")),
        chunk(call(0, name="a_tool", arguments="{}")),
        chunk({"tool_calls": [{"function": {"name": "x"}}, {"index": 1, "function": None}]}),
        chunk({"function_call": {"name": "old"}}, "function_call"),
    ]
    answer = read([b"data: " + event + b"\n\n" for event in events])
    assert answer == Answer(("old", "a_toolx"), "function_call", None)


@pytest.mark.parametrize(
    "events",
    [
        [b'{"error": {"message": "out of memory"}}'],
        [chunk({"content": "a"}), b'{"error": {"message": "out of memory"}}', b"[DONE]"],
        [b"not json"],
        [b'{"choices": 5, "usage": 7}', b"[]", b"null"],
        [],
    ],
)
def test_no_answer_from_errors_and_nonsense(events):
    assert read([b"data: " + event + b"\n\n" for event in events]) is None


def test_json_answer():
    message = {"content": None, "tool_calls": [{"function": {"name": "read_file"}}]}
    content = {
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
        "usage": {"prompt_tokens": 40, "completion_tokens": 9, "prompt_tokens_details": None},
    }
    text = json.dumps(content).encode()
    expected = Answer(("read_file",), "tool_calls", Usage(40, 9, None))
    for size in (1, 7, len(text)):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert read(pieces, "application/json") == expected
    packed = gzip.compress(text)
    assert read([packed[:9], packed[9:]], "application/json", "gzip") == expected
    assert read([text], "application/json", "br") is None
    assert read([text[:-1]], "application/json") is None


@pytest.mark.parametrize("content_type", ["text/event-stream", "application/json"])
def test_memory_is_bounded(content_type):
    reader = SideReader(content_type, "")
    for _ in range(MAX_BUFFERED_BYTES // 2**20 + 1):
        reader.feed(b"data: " + b"x" * 2**20)
    assert reader.finish() is None


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        # Of several choices one ends: not an event of text alone.
        (
            b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null},'
            b'{"index":1,"delta":{"content":"b"},"finish_reason":"length"}]}\n\n',
            "length",
        ),
        (b"", None),
    ],
)
def test_events_of_text_are_passed_over_and_no_others(last, expected):
    plain = b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}]}\n\n'
    answer = read([b": ping\n\n", plain, plain, last, b"data: [DONE]\n\n"], "text/event-stream")
    assert answer is not None
    assert answer.finish_reason == expected


def test_an_error_beside_text_is_no_answer():
    plain = b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}]}\n\n'
    error = plain.replace(b'{"choices"', b'{"error":{"message":"m"},"choices"')
    assert read([plain, plain, error, b"data: [DONE]\n\n"], "text/event-stream") is None
