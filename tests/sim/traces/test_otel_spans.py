"""OpenTelemetry's GenAI spans: which are calls, of which session, with which tools and text."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saga_sim.traces import read_trace
from saga_sim.traces.chains import common_blocks
from saga_sim.traces.otel_messages import answer_text, called_tool, finish_reason, prompt_text
from tests.sim.traces.support import SAMPLES, check_trace, error_of, read_lines

NS = 10**9


def span(span_id, start_s=0, end_s=1, *, parent="", trace="t", **attributes):
    """A span of OTLP; ``gen_ai_`` in a name stands for ``gen_ai.``, ``__`` for a dot."""
    pairs = [
        {"key": name.replace("gen_ai_", "gen_ai.").replace("__", "."), "value": value_of(value)}
        for name, value in attributes.items()
    ]
    times = {"startTimeUnixNano": str(start_s * NS + NS), "endTimeUnixNano": str(end_s * NS + NS)}
    own = {"traceId": trace, "spanId": span_id, "parentSpanId": parent, "name": f"span {span_id}"}
    return own | times | {"attributes": pairs}


def value_of(value):
    if isinstance(value, list):
        return {"arrayValue": {"values": [value_of(item) for item in value]}}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"stringValue": value}


def chat(span_id, start_s=0, end_s=1, **fields):
    return span(span_id, start_s, end_s, **{"gen_ai_operation__name": "chat"} | fields)


def ran(name, start_s, end_s, **fields):
    operation = {"gen_ai_operation__name": "execute_tool", "gen_ai_tool__name": name}
    return span(name, start_s, end_s, **operation | fields)


def document(*spans):
    return {"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}


def read_spans(tmp_path, *spans, **settings):
    return read_lines(tmp_path / "a.jsonl", [document(*spans)], **settings)


def test_the_sample_with_spans():
    trace = read_trace([SAMPLES / "spans.json"], block_tokens=4)
    check_trace(trace)
    assert (trace.block_tokens, trace.clock) == (4, "shared")
    ((first, last),) = trace.sessions
    assert (first.session_id, first.arrival_s, first.duration_s) == ("chat-1", 0.0, 2.0)
    assert (first.tool, first.tool_s, first.ending) == ("search", 1.5, "")
    assert (last.arrival_s, last.duration_s, last.ending) == (5.0, 1.0, "end_turn")
    assert (last.tool, last.tool_s) == (None, None)
    assert first.output_tokens == len("I will search for it.") // 4
    assert common_blocks(first.chain, last.chain) == first.num_blocks > 0
    assert last.num_blocks > first.num_blocks


def test_the_sample_of_otlp():
    trace = read_trace([SAMPLES / "otlp.jsonl"])
    check_trace(trace)
    lead, helper = (calls[0] for calls in trace.sessions)
    assert (lead.session_id, lead.parent_session_id) == ("lead", None)
    assert (helper.session_id, helper.parent_session_id) == ("helper", "lead")
    assert (lead.input_tokens, lead.output_tokens, lead.duration_s) == (150, 12, 1.5)
    assert (lead.tool, lead.ending) == ("ask_helper", "tool_use")
    assert (helper.arrival_s, helper.duration_s) == (3.0, 3.0)
    assert helper.input_tokens == len("You help.\nuser: Look it up.\n") // 4


@pytest.mark.parametrize(
    ("attributes", "is_call"),
    [
        ({"gen_ai_operation__name": "chat"}, True),
        ({"gen_ai_operation__name": "text_completion"}, True),
        ({"gen_ai_operation__name": "generate_content"}, True),
        ({"gen_ai_request__model": "m"}, True),
        ({"gen_ai_operation__name": "invoke_agent", "gen_ai_request__model": "m"}, False),
        ({"gen_ai_operation__name": "embeddings", "gen_ai_request__model": "m"}, False),
        ({"http__request__method": "POST"}, False),
    ],
)
def test_which_spans_are_calls(tmp_path, attributes, is_call):
    trace = read_spans(tmp_path, chat("1", trace="known"), span("2", **attributes))
    assert ("t" in {calls[0].session_id for calls in trace.sessions}) == is_call


@pytest.mark.parametrize(
    ("attributes", "session_id"),
    [
        ({"gen_ai_conversation__id": "c", "session__id": "s"}, "c"),
        ({"langfuse__session__id": "s", "zzz__session__id": "z"}, "s"),
        ({"session__id": 7}, "7"),
        ({"mysession__id": "x"}, "t"),
        ({}, "t"),
    ],
)
def test_the_session_of_a_call(tmp_path, attributes, session_id):
    trace = read_spans(tmp_path, chat("1", **attributes))
    assert trace.sessions[0][0].session_id == session_id


def test_a_session_is_named_by_a_span_above_and_its_parent_by_the_next(tmp_path):
    trace = read_spans(
        tmp_path,
        span("top", 0, 90, session__id="outer"),
        span("agent", 1, 80, parent="top", session__id="inner"),
        span("step", 2, 70, parent="agent"),
        chat("call", 3, 60, parent="step"),
        chat("own", 4, 50, parent="top"),
        chat("far", 5, 40, trace="u", parent="top"),
    )
    found = [(c.session_id, c.parent_session_id) for calls in trace.sessions for c in calls]
    assert found == [("inner", "outer"), ("outer", None), ("u", None)]


def test_parents_that_go_round_end_somewhere(tmp_path):
    trace = read_spans(tmp_path, chat("1", parent="2"), span("2", parent="1"))
    assert trace.sessions[0][0].session_id == "t"


def test_spans_may_come_in_any_order_and_twice(tmp_path):
    spans = [chat("2", 5, 6), chat("1", 0, 1), chat("2", 5, 6)]
    lines = [document(one) for one in spans]
    trace = read_lines(tmp_path / "a.jsonl", lines)
    assert [call.arrival_s for call in trace.sessions[0]] == [0.0, 5.0]


def test_tools_belong_to_the_call_before_them(tmp_path):
    trace = read_spans(
        tmp_path,
        ran("early", 0, 1),
        chat("1", 2, 4),
        ran("one", 4, 9),
        ran("two", 5, 7),
        chat("2", 10, 12),
        chat("3", 13, 14),
        ran("three", 14, 15),
        ran("of another", 14, 20, session__id="other"),
    )
    assert [(call.tool, call.tool_s) for call in trace.sessions[0]] == [
        ("one", 5.0),
        (None, None),
        ("three", 1.0),
    ]


def test_a_tool_span_without_a_tool_name_has_its_own(tmp_path):
    step = span("9", 2, 3, gen_ai_operation__name="execute_tool")
    trace = read_spans(tmp_path, chat("1"), step)
    assert trace.sessions[0][0].tool == "span 9"


def test_a_call_that_has_not_ended_has_no_duration(tmp_path):
    unfinished = chat("1") | {"endTimeUnixNano": "0"}
    missing = {k: v for k, v in chat("2").items() if k != "endTimeUnixNano"}
    trace = read_spans(tmp_path, unfinished, missing)
    assert [call.duration_s for call in trace.sessions[0]] == [None, None]


def test_recorded_tokens_bound_the_blocks(tmp_path):
    text = "x" * 100
    trace = read_spans(
        tmp_path,
        chat("1", 0, 1, gen_ai_input__messages=text, gen_ai_usage__input_tokens=17),
        chat("2", 1, 2, gen_ai_input__messages=text, gen_ai_usage__prompt_tokens=400),
        chat("3", 2, 3, gen_ai_input__messages=text),
        block_tokens=8,
    )
    found = [(call.input_tokens, call.num_blocks) for call in trace.sessions[0]]
    assert found == [(17, 2), (400, 3), (25, 3)]


def test_prompts_without_text_share_nothing(tmp_path):
    usage = {"gen_ai_usage__input_tokens": 130, "gen_ai_usage__output_tokens": 3}
    trace = read_spans(tmp_path, chat("1", **usage), chat("2", 1, 2, **usage))
    first, second = trace.sessions[0]
    assert first.num_blocks == second.num_blocks == 2
    assert common_blocks(first.chain, second.chain) == 0
    assert "Prompts without recorded text share no blocks" in trace.notes


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}, "there"]},
    {"role": "assistant", "parts": [{"type": "text", "content": "Yes"}], "content": None},
    {"role": "tool", "parts": [{"type": "tool_call_response", "response": 4}]},
]


def test_prompts_as_text():
    expected = (
        "system: Be brief.\nuser: Hi\nthere\nassistant: Yes\n"
        'tool: {"response": 4, "type": "tool_call_response"}\n'
    )
    for value in (MESSAGES, json.dumps(MESSAGES)):
        assert prompt_text({"gen_ai.input.messages": value}) == expected
    assert prompt_text({"gen_ai.input.messages": "[not json"}) == "[not json\n"
    assert prompt_text({"gen_ai.input.messages": "42"}) == "42\n"
    assert prompt_text({}) == ""


def test_answers_as_text():
    assert answer_text({"gen_ai.output.messages": MESSAGES[:1]}) == "system: Be brief."
    assert answer_text({"gen_ai.output.messages": [], "gen_ai.output.text": "ok"}) == "ok"
    assert answer_text({}) == ""


@pytest.mark.parametrize(
    "message",
    [
        {"parts": [{"type": "text"}, {"type": "tool_call", "name": "f", "arguments": {}}]},
        {"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
        {"content": [{"type": "tool_use", "name": "f", "input": {}}]},
    ],
)
def test_the_tool_that_an_answer_calls(tmp_path, message):
    answer = [{"role": "assistant"} | message]
    assert called_tool({"gen_ai.output.messages": answer}) == "f"
    trace = read_spans(tmp_path, chat("1", gen_ai_output__messages=json.dumps(answer)))
    call = trace.sessions[0][0]
    assert (call.tool, call.tool_s, call.ending) == ("f", None, "tool_use")


@pytest.mark.parametrize(
    "answer",
    [None, "text", 7, [7], [{"parts": 7}], [{"parts": [7, {"name": "f"}]}], [{"content": "f"}]],
)
def test_an_answer_that_calls_no_tool(answer):
    assert called_tool({"gen_ai.output.messages": answer}) is None


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"gen_ai.response.finish_reasons": ["length", "stop"]}, "length"),
        ({"gen_ai.response.finish_reasons": '["stop"]'}, "stop"),
        ({"gen_ai.response.finish_reason": "stop"}, "stop"),
        ({"gen_ai.output.messages": [{"finish_reason": "tool_call"}]}, "tool_call"),
        ({"gen_ai.response.finish_reasons": [None, 3]}, ""),
        ({}, ""),
    ],
)
def test_why_an_answer_ended(attributes, reason):
    assert finish_reason(attributes) == reason


@pytest.mark.parametrize(
    ("reason", "ending"),
    [("stop", "end_turn"), ("tool_calls", "tool_use"), ("length", "length"), ("", "")],
)
def test_endings_in_the_words_of_a_trace(tmp_path, reason, ending):
    trace = read_spans(tmp_path, chat("1", gen_ai_response__finish_reasons=[reason]))
    assert trace.sessions[0][0].ending == ending


def test_times_with_and_without_a_zone(tmp_path):
    times = ["2026-01-31T12:00:00", "2026-01-31T12:00:01Z", "2026-01-31T14:00:02.000250+02:00"]
    spans = [
        {"trace_id": "t", "span_id": str(i), "start_time": time, "end_time": time}
        | {"attributes": {"gen_ai.operation.name": "chat"}}
        for i, time in enumerate(times)
    ]
    trace = read_lines(tmp_path / "a.jsonl", [{"spans": spans}])
    assert [call.arrival_s for call in trace.sessions[0]] == [0.0, 1.0, 2.00025]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    prompts=st.lists(
        st.tuples(st.none() | st.text("ab", max_size=40), st.none() | st.integers(0, 40)),
        min_size=1,
        max_size=8,
    )
)
def test_every_id_has_one_predecessor(tmp_path_factory, prompts):
    spans = []
    for i, (text, tokens) in enumerate(prompts):
        known = {"gen_ai_input__messages": text, "gen_ai_usage__input_tokens": tokens}
        known = {name: value for name, value in known.items() if value is not None}
        spans.append(chat(str(i), i, i + 1, **known))
    path = tmp_path_factory.getbasetemp() / "property.jsonl"
    trace = read_lines(path, [document(*spans)], block_tokens=2)
    assert sum(map(len, trace.sessions)) == len(prompts)


def attribute(key, value):
    return chat("1") | {"attributes": [{"key": key, "value": value}]}


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (7, "spans[0]: is 7; expected a JSON object"),
        (chat(""), "spans[0]: has no span id or no trace id; expected spanId and traceId"),
        (chat("1", trace=None), "spans[0]: has no span id or no trace id; expected spanId"),
        (chat("1") | {"startTimeUnixNano": None}, "has no start; expected startTimeUnixNano or"),
        (chat("1") | {"startTimeUnixNano": "-5"}, "'startTimeUnixNano' is '-5'; expected nanosec"),
        (chat("1", 5, 4), "spans[0]: ends before it starts"),
        (chat("1") | {"attributes": 7}, "'attributes' is 7; expected a list of objects"),
        (attribute(None, {"stringValue": "x"}), "attributes[0]: 'key' is null"),
        (attribute("x", "plain"), "'value' is not one of OTLP's; expected an object such as"),
        (attribute("x", {"intValue": "many"}), "'intValue' is 'many'; expected an integer"),
        (attribute("x", {"kvlistValue": {"values": [7]}}), "kvlistValue[0]: is 7; expected"),
        (
            chat("1", gen_ai_usage__input_tokens=-3),
            "attributes: 'gen_ai.usage.input_tokens' is -3; expected an integer of 0 or more",
        ),
        (
            {"trace_id": "t", "span_id": "1", "start_time": "noon"},
            "'start_time' is 'noon'; expected a time such as 2026-01-31T12:00:00Z",
        ),
    ],
)
def test_what_is_wrong_with_a_span(tmp_path, item, message):
    found = error_of(tmp_path / "a.jsonl", [document(chat("0")), document(item)])
    assert found.startswith("a.jsonl:2, resourceSpans[0], scopeSpans[0], spans[0]")
    assert message in found


@pytest.mark.parametrize(
    "value",
    [{"resourceSpans": []}, {"resourceSpans": [{}]}, {"resourceSpans": [{"scopeSpans": [{}]}]}],
)
def test_a_document_without_spans_holds_no_calls(tmp_path, value):
    assert error_of(tmp_path / "a.jsonl", [value]) == "a.jsonl: holds no calls"
