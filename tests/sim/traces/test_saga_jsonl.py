"""SAGA's own format: what is written is read again, what does not fit is named."""

import gzip

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saga_sim.traces import Call, Trace, read_trace, write_trace
from saga_sim.traces.chains import by_prefix
from saga_sim.traces.model import runs_of
from tests.sim.traces.support import SAMPLES, check_trace, error_of, ids_of, read_lines

HEADER = {"saga_trace": 1, "block_tokens": 10}


def call(hash_ids=(0,), **fields):
    own = {"session_id": "a", "arrival_s": 0.5, "input_tokens": 10 * len(hash_ids)}
    return own | {"output_tokens": 2, "hash_ids": list(hash_ids)} | fields


def test_the_sample():
    trace = read_trace([SAMPLES / "saga.jsonl"])
    check_trace(trace)
    assert (trace.block_tokens, trace.clock, trace.notes) == (32, "shared", ("made by hand",))
    a, b = trace.sessions
    assert a[0] == Call("a", 0.25, 100, 20, (range(3),), 1.5, "tool_use", "search", 0.75)
    assert a[1] == Call("a", 3.0, 170, 5, (range(5),), ending="end_turn")
    assert b[0] == Call("b", 1.0, 64, 8, (range(1), range(10, 11)), parent_session_id="a")


def test_the_first_line_may_be_left_out(tmp_path):
    lines = [call([0, 1], input_tokens=128)]
    trace = read_lines(tmp_path / "a.jsonl", lines)
    assert (trace.block_tokens, trace.clock, trace.notes) == (64, "session", ())
    assert read_trace([tmp_path / "a.jsonl"], block_tokens=32).block_tokens == 32


def test_the_header_may_say_nothing_but_the_version(tmp_path):
    trace = read_lines(tmp_path / "a.jsonl", [{"saga_trace": 1}, call([0], input_tokens=64)])
    assert (trace.block_tokens, trace.clock, trace.notes) == (64, "session", ())


def test_calls_of_a_session_are_sorted_and_sessions_keep_their_order(tmp_path):
    lines = [
        HEADER,
        call(session_id="b", arrival_s=9),
        call(session_id="a"),
        call(session_id="b", arrival_s=1),
    ]
    trace = read_lines(tmp_path / "a.jsonl", lines)
    assert [[c.arrival_s for c in calls] for calls in trace.sessions] == [[1.0, 9.0], [0.5]]


def test_runs_and_ids_say_the_same(tmp_path):
    lines = [
        HEADER,
        call([0, 1, 2, 7, 8]),
        call([], runs=[[0, 2], [2, 3], [7, 9]], input_tokens=50) | {"hash_ids": None},
    ]
    first, second = read_lines(tmp_path / "a.jsonl", lines).sessions[0]
    assert first.chain == second.chain == (range(3), range(7, 9))


times = st.floats(0, 1e6) | st.integers(0, 10**6).map(float)
names = st.sampled_from(["a", "b", "c d", "é", "x/1"])


@st.composite
def traces(draw):
    block_tokens = draw(st.integers(1, 600))
    chains = by_prefix(draw(st.lists(st.lists(st.integers(0, 3), max_size=6).map(runs_of))))
    sessions = {}
    for chain in chains:
        blocks = sum(map(len, chain))
        made = Call(
            session_id=draw(names),
            arrival_s=draw(times),
            input_tokens=blocks * block_tokens + draw(st.integers(0, block_tokens - 1)),
            output_tokens=draw(st.integers(0, 9)),
            chain=chain,
            duration_s=draw(st.none() | times),
            ending=draw(st.sampled_from(["", "tool_use", "end_turn"])),
            tool=draw(st.none() | names),
            tool_s=draw(st.none() | times),
            parent_session_id=draw(st.none() | names),
        )
        sessions.setdefault(made.session_id, []).append(made)
    return Trace(
        name="property.jsonl",
        block_tokens=block_tokens,
        sessions=tuple(
            tuple(sorted(calls, key=lambda c: c.arrival_s)) for calls in sessions.values()
        ),
        clock=draw(st.sampled_from(["session", "shared"])),
        notes=tuple(draw(st.lists(names, max_size=2, unique=True))),
    )


@settings(max_examples=80, deadline=None, derandomize=True)
@given(trace=traces().filter(lambda trace: trace.sessions))
def test_what_is_written_is_read_again(tmp_path_factory, trace):
    path = tmp_path_factory.getbasetemp() / "property.jsonl"
    write_trace(trace, path)
    assert read_trace([path]) == trace
    check_trace(trace)


def test_the_name_says_whether_the_file_is_packed(tmp_path):
    trace = read_trace([SAMPLES / "saga.jsonl"])
    plain, packed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"
    for path in (plain, packed):
        write_trace(trace, path)
    data = packed.read_bytes()
    assert gzip.decompress(data) == plain.read_bytes()
    write_trace(trace, packed)
    assert packed.read_bytes() == data


def test_ids_of_a_second_file_are_moved(tmp_path):
    write_trace(read_trace([SAMPLES / "saga.jsonl"]), tmp_path / "a.jsonl")
    trace = read_trace([tmp_path / "a.jsonl", tmp_path / "a.jsonl"])
    check_trace(trace)
    assert ids_of(trace.sessions[2][0]) == [11, 12, 13]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"saga_trace": 2}, "'saga_trace' is 2; expected 1, the known version"),
        ({"saga_trace": "1"}, "'saga_trace' is '1'; expected an integer of 0 or more"),
        ({"block_tokens": 0}, "'block_tokens' is 0; expected an integer of 1 or more"),
        ({"clock": "wall"}, "'clock' is 'wall'; expected session or shared"),
        ({"notes": "x"}, "'notes' is not a list of strings"),
    ],
)
def test_what_is_wrong_with_the_header(tmp_path, header, message):
    assert error_of(tmp_path / "a.jsonl", [HEADER | header, call()]) == f"a.jsonl:1: {message}"


def test_a_header_stands_on_the_first_line(tmp_path):
    message = "a.jsonl:2: 'saga_trace' is not on the first line; expected a call"
    assert error_of(tmp_path / "a.jsonl", [call(input_tokens=64), HEADER]) == message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"session_id": None}, "'session_id' is null"),
        ({"arrival_s": -0.5}, "'arrival_s' is -0.5; expected a number of 0 or more"),
        ({"input_tokens": "9"}, "'input_tokens' is '9'; expected an integer of 0 or more"),
        ({"output_tokens": -1}, "'output_tokens' is -1; expected an integer of 0 or more"),
        ({"hash_ids": None}, "'hash_ids' is null"),
        ({"duration_s": "1"}, "'duration_s' is '1'; expected a number of 0 or more"),
        ({"ending": 1}, "'ending' is 1; expected a string"),
        ({"tool": ["x"]}, "'tool' is a list; expected a string"),
        ({"runs": [[0]]}, "'runs' is not a list of [start, stop]; expected pairs of integers"),
        ({"runs": {}}, "'runs' is not a list of [start, stop]; expected pairs of integers"),
        (
            {"runs": [[0, True]]},
            "'runs' is not a list of [start, stop]; expected pairs of integers",
        ),
        ({"runs": [[3, 3]]}, "'runs' has [3, 3]; expected 0 <= start < stop"),
        ({"runs": [[-1, 3]]}, "'runs' has [-1, 3]; expected 0 <= start < stop"),
        (
            {"input_tokens": 9},
            "has 1 blocks, but 'input_tokens' fill 0 of 10 tokens; expected full blocks only",
        ),
    ],
)
def test_what_is_wrong_with_a_call(tmp_path, fields, message):
    found = error_of(tmp_path / "a.jsonl", [HEADER, call(), call() | fields])
    assert found == f"a.jsonl:3: {message}"


def test_a_field_that_is_missing(tmp_path):
    line = call()
    del line["output_tokens"]
    assert error_of(tmp_path / "a.jsonl", [HEADER, line]) == "a.jsonl:2: 'output_tokens' is missing"


@pytest.mark.parametrize(
    ("chains", "message"),
    [
        ([[4, 5, 6], [5]], "a.jsonl:3: block 5 follows nothing, but block 4 at a.jsonl:2; "),
        ([[4, 9], [4], [3, 9]], "a.jsonl:4: block 9 follows block 3, but block 4 at a.jsonl:2; "),
        ([[4], [4, 4]], "a.jsonl:3: block 4 follows block 4, but nothing at a.jsonl:2; "),
        ([[4, 5, 4]], "a.jsonl:2: block 4 follows block 5, but nothing at a.jsonl:2; "),
    ],
)
def test_ids_that_do_not_stand_for_a_prefix(tmp_path, chains, message):
    found = error_of(tmp_path / "a.jsonl", [HEADER, *map(call, chains)])
    assert found.startswith(message)
    assert found.endswith("expected ids that stand for the whole prefix, one predecessor each")
