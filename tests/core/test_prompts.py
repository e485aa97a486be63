"""Prompts as pieces: one meaning, many ways to write it, in four APIs."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saga_core.conversations import Kind
from saga_core.prompts import PromptReader

READER = PromptReader(b"a key")
ARGUMENTS = {"path": "a.py", "lines": [1, 2]}
CALL = {"id": "c1", "type": "function"}


def call(arguments):
    return {**CALL, "function": {"name": "read", "arguments": arguments}}


CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "You are careful."},
        {"role": "user", "content": "read a.py"},
        {"role": "assistant", "content": "Reading.", "tool_calls": [call(json.dumps(ARGUMENTS))]},
        {"role": "tool", "tool_call_id": "c1", "content": "x = 1"},
    ],
}
MESSAGES = {
    "model": "m",
    "system": [{"type": "text", "text": "You are careful.", "cache_control": {"type": "x"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "read a.py"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "Reading."},
                {"type": "tool_use", "id": "c1", "name": "read", "input": ARGUMENTS},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "x = 1"}],
                }
            ],
        },
    ],
}
RESPONSES = {
    "model": "m",
    "instructions": "You are careful.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "read a.py"}]},
        {"type": "reasoning", "summary": []},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Reading."}],
        },
        {"type": "function_call", "name": "read", "arguments": json.dumps(ARGUMENTS)},
        {"type": "function_call_output", "call_id": "c1", "output": "x = 1"},
    ],
}


def pieces(content, api="chat"):
    return READER.read(api, content).pieces


def test_the_apis_give_the_same_pieces_for_the_same_talk():
    expected = pieces(CHAT)
    kinds = [Kind.SYSTEM, Kind.USER, Kind.ASSISTANT, Kind.ASSISTANT, Kind.TOOL]
    assert [piece.kind for piece in expected] == kinds
    assert pieces(MESSAGES, "messages") == pieces(RESPONSES, "responses") == expected


def test_an_answer_comes_back_as_it_was_read():
    answer = READER.answer("Reading.\n", [("read", '{"lines":[1,2],"path":"a.py"}')])
    assert tuple(answer) == pieces(CHAT)[2:4]


@pytest.mark.parametrize(
    "arguments", ['{ "path" : "a.py" ,\n"lines":[1, 2]}', '{"lines": [1,2], "path": "\\u0061.py"}']
)
def test_arguments_are_the_same_however_they_are_written(arguments):
    changed = json.loads(json.dumps(CHAT))
    changed["messages"][2]["tool_calls"] = [call(arguments)]
    assert pieces(changed) == pieces(CHAT)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("It is 2026-11-30 10:15.", "It is 2025-01-02 23:59."),
        ("Today is Monday, Nov 30.", "Today is Friday, Jan 2."),
        ("Run 6f1c2f1e-9e7b-4a3f-8f8e-0a9c5f6d7e11 of 3.", "Run 0b1c2f1e-aaaa-4a3f of 14."),
    ],
)
def test_values_in_a_system_prompt_change_nothing(one, other):
    prompts = [
        READER.read("chat", {"messages": [{"role": "system", "content": f"Be kind.\n{text}"}]})
        for text in (one, other)
    ]
    assert prompts[0].pieces[0].digest == prompts[1].pieces[0].digest
    assert prompts[0].shape == prompts[1].shape


def test_words_in_a_system_prompt_and_values_elsewhere_do_change_it():
    def of(system, user):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        return pieces({"messages": messages})

    assert of("Be kind.", "1") != of("Be brief.", "1")
    assert of("Be kind.", "1")[1] != of("Be kind.", "2")[1]


def test_what_came_after_the_last_answer_is_what_was_observed():
    assert READER.read("chat", CHAT).observed_chars == len("x = 1")
    assert READER.read("chat", {"messages": CHAT["messages"][:2]}).observed_chars == 9


def test_a_response_that_is_gone_on_from_is_named():
    content = {"input": "and now?", "previous_response_id": "resp_1"}
    assert READER.read("responses", content).follows == "resp_1"
    assert READER.read("chat", {**CHAT, "previous_response_id": "resp_1"}).follows is None


def test_texts_that_extend_each_other_share_all_blocks_but_the_last():
    text = "".join(f"line {n} of a long prompt\n" for n in range(20_000))
    longer = pieces({"prompt": text + "and more\n"}, "completions")
    for length in (100, 5_000, len(text)):
        cut = pieces({"prompt": text[:length]}, "completions")
        assert cut[:-1] == longer[: len(cut) - 1]
    assert 100 < len(longer) < 600
    assert sum(piece.size for piece in longer) == len(text) + 9


def test_prompts_of_token_ids_are_read_and_batches_are_not():
    tokens = list(range(200))
    short, long = (pieces({"prompt": tokens[:n]}, "completions") for n in (128, 200))
    assert long[:2] == short
    assert READER.read("completions", {"prompt": ["one", "two"]}) is None
    assert READER.read("completions", {"prompt": ["one"]}) is not None


def test_an_image_is_told_by_its_ends():
    def of(data):
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        return pieces({"messages": [{"role": "user", "content": [image]}]})

    big = "A" * 200_000
    assert of(big) == of(big)
    assert of(big) != of(big[:-1] + "B")
    assert of(big) != of(big + "A")


def test_another_key_gives_other_digests():
    other = PromptReader(b"another key").read("chat", CHAT).pieces
    assert not {p.digest for p in other} & {p.digest for p in pieces(CHAT)}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "tool_calls", "function", "name"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.sampled_from(["chat", "completions", "responses", "messages"]),
    st.dictionaries(
        st.sampled_from(["messages", "input", "prompt", "system", "instructions", "tools"]), JSON
    ),
)
def test_no_body_raises(api, content):
    prompt = READER.read(api, content)
    assert prompt is None or prompt.pieces
    assert READER.template(api, content).lines is not None


def nested(depth, within="x"):
    for _ in range(depth):
        within = [within]
    return within


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "x", "a": {"b": {}}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": nested(900)}}]},
    ],
)
def test_odd_parts_do_no_harm(message):
    content = {"model": nested(300), "messages": [message, {"role": "user", "content": "hi"}]}
    assert READER.read("chat", content).pieces[-1].kind is Kind.USER
    assert READER.template("chat", content) is not None


def test_a_call_without_arguments_is_the_same_however_that_is_said():
    answers = [READER.answer("", [("f", text)]) for text in ("", "{}", " ")]
    asked = {"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {}}]}
    echoed = pieces({"messages": [asked]}, "messages")
    assert answers == [list(echoed)] * 3


@pytest.mark.timeout(20)
def test_masking_and_cutting_do_not_take_the_square_of_the_text():
    text = "a" * 1_000_000 + " 1"
    READER.template("completions", {"prompt": "0 " + "x" * 1_000_000})
    READER.read("chat", {"messages": [{"role": "system", "content": text}]})
    line = "x" * 400_000
    assert 50 < len(pieces({"prompt": line}, "completions")) < 1000


def test_a_conversation_of_ten_thousand_messages_is_not_looked_into():
    message = {"role": "user", "content": "x"}
    assert READER.read("chat", {"messages": [message] * 10_001}) is None
