"""Hashed prompts of Mooncake and Bailian: full blocks, prefixes, sessions."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saga_sim.traces import read_trace
from saga_sim.traces.hash_ids import COMMON_FAN_OUT
from tests.sim.traces.support import SAMPLES, check_trace, error_of, ids_of, read_lines


def mooncake(hash_ids, time_ms=0, **fields):
    own = {"timestamp": time_ms, "input_length": 512 * len(hash_ids), "output_length": 9}
    return own | {"hash_ids": hash_ids} | fields


def bailian(chat_id, parent, time_s=0.0, hash_ids=(1,), **fields):
    own = {"chat_id": chat_id, "parent_chat_id": parent, "timestamp": time_s, "output_length": 9}
    own |= {"input_length": 16 * len(hash_ids), "hash_ids": list(hash_ids), "turn": 1}
    return own | fields


def mooncake_sessions(tmp_path, chains):
    lines = [mooncake(ids, 1000 * i) for i, ids in enumerate(chains)]
    trace = read_lines(tmp_path / "a.jsonl", lines)
    return [[round(call.arrival_s) for call in calls] for calls in trace.sessions]


def bailian_sessions(tmp_path, lines):
    trace = read_lines(tmp_path / "a.jsonl", lines)
    return {s[0].session_id: [call.arrival_s for call in s] for s in trace.sessions}


def test_the_sample_of_mooncake():
    trace = read_trace([SAMPLES / "mooncake.jsonl"])
    check_trace(trace)
    assert (trace.block_tokens, trace.clock) == (512, "shared")
    first, other = trace.sessions
    assert [call.session_id for call in (*first, *other)] == ["1", "1", "2"]
    assert [(call.arrival_s, call.input_tokens, call.output_tokens) for call in first] == [
        (0.0, 1700, 100),
        (60.0, 2700, 80),
    ]
    assert [ids_of(call) for call in first] == [[0, 1, 2], [0, 1, 2, 6, 7]]


def test_the_sample_of_bailian():
    trace = read_trace([SAMPLES / "bailian.jsonl"])
    check_trace(trace)
    assert (trace.block_tokens, trace.clock, trace.notes) == (16, "shared", ())
    ten, eleven = trace.sessions
    assert [(call.session_id, call.arrival_s, call.num_blocks) for call in ten] == [
        ("10", 0.5, 2),
        ("10", 9.0, 4),
    ]
    assert [(call.session_id, call.input_tokens) for call in eleven] == [("11", 33)]


def test_a_prompt_that_holds_the_last_one_goes_on(tmp_path):
    chains = [[0, 1, 2], [0, 1, 2], [0, 1, 2, 3, 4], [5, 6]]
    assert mooncake_sessions(tmp_path, chains) == [[0, 1, 2], [3]]


def test_the_last_block_of_the_last_prompt_may_differ(tmp_path):
    assert mooncake_sessions(tmp_path, [[0, 1, 2, 3], [0, 1, 2, 9, 10]]) == [[0, 1]]
    assert mooncake_sessions(tmp_path, [[0, 1, 2, 3], [0, 1, 8, 9, 10]]) == [[0], [1]]


def test_the_longest_prefix_wins(tmp_path):
    chains = [[0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, 3, 7], [0, 1, 8], [0, 1, 2, 3, 7, 9], [0, 1, 5]]
    assert mooncake_sessions(tmp_path, chains) == [[0, 1, 2, 4], [3, 5]]


def test_a_session_goes_on_from_its_last_prompt_only(tmp_path):
    chains = [[0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, 6]]
    assert mooncake_sessions(tmp_path, chains) == [[0, 1], [2]]


def test_a_prefix_that_is_common_to_many_makes_no_session(tmp_path):
    opening = [0, 1]
    others = [[*opening, 100 + i] for i in range(COMMON_FAN_OUT - 1)]
    again = [*opening, 50, 51]
    few, enough = others[:-1], others
    assert len(mooncake_sessions(tmp_path, [opening, *few, again])) < COMMON_FAN_OUT
    sessions = mooncake_sessions(tmp_path, [opening, *enough, again, [*again, 52]])
    assert sessions == [[i] for i in range(COMMON_FAN_OUT)] + [[COMMON_FAN_OUT, COMMON_FAN_OUT + 1]]


def test_prompts_without_a_full_block_are_sessions_of_their_own(tmp_path):
    lines = [mooncake([0], 0, input_length=100), mooncake([0], 1000, input_length=200)]
    trace = read_lines(tmp_path / "a.jsonl", lines)
    assert [calls[0].chain for calls in trace.sessions] == [(), ()]


@pytest.mark.parametrize("kind", ["mooncake", "bailian"])
def test_ids_that_name_content_alone_become_prefixes(tmp_path, kind):
    chains = [[5, 6, 7], [5, 7, 6], [6, 7]]
    if kind == "mooncake":
        lines = [mooncake(ids, 1000 * i) for i, ids in enumerate(chains)]
    else:
        lines = [bailian(i, -1, float(i), ids) for i, ids in enumerate(chains)]
    trace = read_lines(tmp_path / "a.jsonl", lines)
    found = sorted((call for calls in trace.sessions for call in calls), key=lambda c: c.arrival_s)
    assert [ids_of(call) for call in found] == [[0, 1, 2], [0, 3, 4], [5, 6]]


def test_a_session_goes_back_to_a_call_without_a_parent(tmp_path):
    lines = [
        bailian(1, -1, 0.0),
        bailian(2, 1, 1.0),
        bailian(3, -1, 2.0),
        bailian(4, 2, 3.0),
        bailian(5, 2, 4.0),
        bailian(6, None, 5.0),
    ]
    assert bailian_sessions(tmp_path, lines) == {
        "1": [0.0, 1.0, 3.0, 4.0],
        "3": [2.0],
        "6": [5.0],
    }


def test_a_session_may_go_back_to_a_parent_that_is_not_in_the_file(tmp_path):
    lines = [bailian(8, 7, 0.0), bailian(9, 8, 1.0), bailian(10, 7, 2.0)]
    assert bailian_sessions(tmp_path, lines) == {"7": [0.0, 1.0, 2.0]}


def test_lines_may_come_in_any_order(tmp_path):
    assert bailian_sessions(tmp_path, [bailian(2, 1, 1.0), bailian(1, -1, 0.0)]) == {
        "1": [0.0, 1.0]
    }


@pytest.mark.parametrize("parents", [[(1, 1)], [(1, 2), (2, 1)], [(0, 1), (1, 2), (2, 3), (3, 1)]])
def test_a_call_that_is_its_own_ancestor(tmp_path, parents):
    message = error_of(tmp_path / "a.jsonl", [bailian(own, parent) for own, parent in parents])
    assert message.startswith("a.jsonl: chat_id '")
    assert message.endswith("is its own ancestor; expected parents that lead to -1")


id_lists = st.lists(st.integers(0, 5), max_size=5)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(chains=st.lists(st.tuples(id_lists, st.integers(0, 9)), min_size=1, max_size=12))
def test_every_id_has_one_predecessor(tmp_path_factory, chains):
    path = tmp_path_factory.getbasetemp() / "property.jsonl"
    for lines in (
        [mooncake(ids, time) for ids, time in chains],
        [bailian(i, i // 2 - 1, time, ids) for i, (ids, time) in enumerate(chains)],
    ):
        trace = read_lines(path, lines)
        assert sum(map(len, trace.sessions)) == len(chains)


@pytest.mark.parametrize("make", [lambda **f: mooncake([1]) | f, lambda **f: bailian(2, -1) | f])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hash_ids": None}, "'hash_ids' is null"),
        ({"hash_ids": [True]}, "'hash_ids' is a list; expected a list of integers of 0 or more"),
        ({"hash_ids": [3, -3]}, "'hash_ids' holds -3; expected integers of 0 or more"),
        ({"input_length": -1}, "'input_length' is -1; expected an integer of 0 or more"),
        ({"output_length": 1.5}, "'output_length' is 1.5; expected an integer of 0 or more"),
        ({"timestamp": "0"}, "'timestamp' is '0'; expected a number of 0 or more"),
    ],
)
def test_what_is_wrong_with_a_line(tmp_path, make, fields, message):
    first = make() | ({"chat_id": 1} if "chat_id" in make() else {})
    found = error_of(tmp_path / "a.jsonl", [first, make(**fields)])
    assert found == f"a.jsonl:2: {message}"


def test_a_call_id_is_there_once(tmp_path):
    found = error_of(tmp_path / "a.jsonl", [bailian(1, -1), bailian(1, -1)])
    assert found == "a.jsonl:2: 'chat_id' is '1' again; expected a call an id"
