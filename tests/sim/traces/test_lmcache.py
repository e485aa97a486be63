"""Flat prompts of LMCache's recordings: order, blocks of text, conversations of a task."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saga_sim.traces import read_trace
from saga_sim.traces.chains import common_blocks
from tests.sim.traces.support import SAMPLES, check_trace, error_of, read_lines, write_lines

BLOCK = 8  # characters in a block of two tokens


def record(text, time_us=0, task="t", output="yes"):
    return {"timestamp": time_us, "input": text, "output": output, "session_id": task}


def text_of(*words):
    """A text of one block a word."""
    return "".join(word.ljust(BLOCK) for word in words)


def sessions_of(tmp_path, texts, **settings):
    lines = [record(text, 1000 * i) for i, text in enumerate(texts)]
    trace = read_lines(tmp_path / "a.jsonl", lines, block_tokens=2, **settings)
    return {s[0].session_id: [round(1e3 * call.arrival_s) for call in s] for s in trace.sessions}


def test_the_sample():
    trace = read_trace([SAMPLES / "lmcache.jsonl"], block_tokens=8)
    check_trace(trace)
    assert (trace.block_tokens, trace.clock) == (8, "shared")
    assert any("characters / 4" in note for note in trace.notes)
    worker, checker = trace.sessions
    assert [call.session_id for call in worker] == ["task-1/1", "task-1/1"]
    assert [call.arrival_s for call in worker] == [0.0, 3.0]
    assert [call.arrival_s for call in checker] == [1.0]
    first, last = worker
    assert (first.input_tokens, first.output_tokens) == (17, 5)
    assert (first.num_blocks, last.num_blocks) == (2, 4)
    assert common_blocks(first.chain, last.chain) == 2
    assert (first.duration_s, first.ending, first.tool, first.parent_session_id) == (
        None, "", None, None,
    )  # fmt: skip


def test_a_prompt_that_begins_with_the_last_one_goes_on(tmp_path):
    texts = ["hi", "hi you", "hi you there", "hello"]
    assert sessions_of(tmp_path, texts) == {"t/1": [0, 1, 2], "t/2": [3]}


def test_half_of_the_last_blocks_is_enough(tmp_path):
    texts = [text_of("a", "b", "c", "d"), text_of("a", "b", "x"), text_of("a", "y", "z")]
    assert sessions_of(tmp_path, texts) == {"t/1": [0, 1], "t/2": [2]}


def test_the_longest_shared_prefix_wins(tmp_path):
    texts = [
        text_of("a", "b", "c"),
        text_of("a", "x", "y", "z"),
        text_of("a", "b", "c", "d"),
        text_of("a", "x", "y", "w"),
        text_of("a", "b", "c", "e"),
    ]
    assert sessions_of(tmp_path, texts) == {"t/1": [0, 2, 4], "t/2": [1, 3]}


def test_of_equal_prefixes_the_latest_conversation_goes_on(tmp_path):
    texts = [text_of("a", "b", "c", "d"), text_of("a", "b", "x", "y"), text_of("a", "b", "z")]
    texts.insert(1, text_of("o", "p"))
    assert sessions_of(tmp_path, texts) == {"t/1": [0, 2, 3], "t/2": [1]}
    pairs = [text_of("a", "b", "c"), text_of("a", "e", "f"), text_of("a", "e")]
    assert sessions_of(tmp_path, pairs) == {"t/1": [0], "t/2": [1, 2]}


def test_empty_prompts_are_one_conversation(tmp_path):
    assert sessions_of(tmp_path, ["", "hi", "", "hi"]) == {"t/1": [0, 2], "t/2": [1, 3]}


def test_tasks_are_kept_apart_but_share_their_blocks(tmp_path):
    text = text_of("a", "b")
    lines = [record(text, 0, "t"), record(text, 5, "u"), record(text, 9, 7)]
    trace = read_lines(tmp_path / "a.jsonl", lines, block_tokens=2)
    assert [s[0].session_id for s in trace.sessions] == ["t/1", "u/1", "7/1"]
    assert len({s[0].chain for s in trace.sessions}) == 1


def test_files_share_their_blocks_and_count_their_own_time(tmp_path):
    files = [
        write_lines(tmp_path / name, [record(text_of("a", "b"), 10**12 * i + 5, name)])
        for i, name in enumerate(["a.jsonl", "b.jsonl"])
    ]
    trace = read_trace(files, block_tokens=2)
    check_trace(trace)
    a, b = (calls[0] for calls in trace.sessions)
    assert (a.chain, a.arrival_s) == (b.chain, b.arrival_s) == (a.chain, 0.0)
    assert trace.clock == "session"


def test_an_answer_may_be_missing(tmp_path):
    line = record("hi")
    del line["output"]
    trace = read_lines(tmp_path / "a.jsonl", [line])
    assert trace.sessions[0][0].output_tokens == 0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    texts=st.lists(
        st.tuples(st.text("ab", max_size=40), st.integers(0, 50), st.sampled_from("tu")),
        min_size=1,
        max_size=12,
    )
)
def test_every_id_has_one_predecessor(tmp_path_factory, texts):
    path = tmp_path_factory.getbasetemp() / "property.jsonl"
    trace = read_lines(path, [record(*item) for item in texts], block_tokens=2)
    assert sum(map(len, trace.sessions)) == len(texts)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"timestamp": None}, "'timestamp' is null"),
        ({"timestamp": -1}, "'timestamp' is -1; expected an integer of 0 or more"),
        ({"timestamp": "now"}, "'timestamp' is 'now'; expected an integer of 0 or more"),
        ({"input": ["hi"]}, "'input' is a list; expected a string"),
        ({"output": 4}, "'output' is 4; expected a string"),
        ({"session_id": True}, "'session_id' is True; expected a string or an integer"),
    ],
)
def test_what_is_wrong_with_a_line(tmp_path, fields, message):
    found = error_of(tmp_path / "a.jsonl", [record("hi"), record("hi") | fields])
    assert found == f"a.jsonl:2: {message}"
