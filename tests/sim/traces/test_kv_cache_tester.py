"""Conversations of kv-cache-tester: local ids, shared openings, sub-agents."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saga_sim.traces import read_trace
from tests.sim.traces.support import SAMPLES, check_trace, error_of, ids_of, read_lines, write_lines


def request(hash_ids, t=0.0, **fields):
    own = {"t": t, "type": "n", "model": "m", "in": 10 * len(hash_ids), "out": 5}
    return own | {"hash_ids": hash_ids, "stop": "tool_use", "api_time": 1.0} | fields


def conversation(name, requests, *, tools=10, system=15, **fields):
    own = {"id": name, "block_size": 10, "tool_tokens": tools, "system_tokens": system}
    return own | {"requests": requests} | fields


def subagent(name, requests, t=30.0, **fields):
    own = {"type": "subagent", "t": t, "agent_id": name, "duration_ms": 20_000}
    return own | {"tool_tokens": 10, "system_tokens": 0, "requests": requests} | fields


def chains_of(trace):
    return {calls[0].session_id: [ids_of(call) for call in calls] for calls in trace.sessions}


def test_the_sample():
    trace = read_trace([SAMPLES / "kv_cache_tester.jsonl"])
    check_trace(trace)
    assert (trace.block_tokens, trace.clock) == (64, "session")
    mend, scout, test = trace.sessions
    assert [call.session_id for call in (mend[0], scout[0], test[0])] == [
        "mend", "mend/scout", "test",
    ]  # fmt: skip
    first, last = mend
    assert (first.arrival_s, first.input_tokens, first.output_tokens) == (0.0, 260, 40)
    assert (first.duration_s, first.ending, first.tool) == (2.5, "tool_use", None)
    assert (last.arrival_s, last.ending, last.parent_session_id) == (22.0, "end_turn", None)
    assert (test[0].duration_s, test[0].ending) == (None, "")
    assert {call.parent_session_id for call in scout} == {"mend"}


def test_a_sub_agent_ends_at_its_time_and_counts_from_its_start():
    scout = read_trace([SAMPLES / "kv_cache_tester.jsonl"]).sessions[1]
    assert [call.arrival_s for call in scout] == [8.5, 13.5]


def test_a_sub_agent_without_a_duration_ended_with_its_last_answer(tmp_path):
    nested = [request([8], 0.0), request([8, 9], 4.0, api_time=2.0)]
    entry = subagent("s", nested) | {"duration_ms": None}
    trace = read_lines(tmp_path / "a.jsonl", [conversation("a", [request([1]), entry])])
    assert [call.arrival_s for call in trace.sessions[1]] == [24.0, 28.0]


def test_a_sub_agent_does_not_start_before_its_conversation(tmp_path):
    entry = subagent("s", [request([8])], t=5.0)
    trace = read_lines(tmp_path / "a.jsonl", [conversation("a", [request([1]), entry])])
    assert trace.sessions[1][0].arrival_s == 0.0


def test_sub_agents_of_sub_agents(tmp_path):
    inner = subagent("in", [request([20], 1.0)], t=15.0, duration_ms=10_000)
    outer = subagent("out", [request([8]), inner])
    trace = read_lines(tmp_path / "a.jsonl", [conversation("a", [request([1]), outer])])
    assert [(s[0].session_id, s[0].parent_session_id, s[0].arrival_s) for s in trace.sessions] == [
        ("a", None, 0.0),
        ("a/out", "a", 10.0),
        ("a/out/in", "a/out", 16.0),
    ]


def test_ids_are_local_to_a_conversation_but_for_equal_openings(tmp_path):
    chains = chains_of(
        read_lines(
            tmp_path / "a.jsonl",
            [
                conversation("a", [request([1, 2, 3])]),
                conversation("b", [request([1, 2, 3])]),
                conversation("other system prompt", [request([1, 2, 3])], tools=15, system=10),
                conversation("other model", [request([1, 2, 3], model="n")]),
            ],
        )
    )
    a, b, *others = (set(of[0]) for of in chains.values())
    assert len(a & b) == 2
    assert [len(other & known) for other in others for known in (a, b)] == [0, 0, 0, 0]


def test_openings_are_shared_between_files(tmp_path):
    files = [
        write_lines(tmp_path / name, [conversation(name, [request([1, 2, 3])])])
        for name in ("a.jsonl", "b.jsonl")
    ]
    trace = read_trace(files)
    check_trace(trace)
    a, b = (of[0] for of in chains_of(trace).values())
    assert a[:2] == b[:2]
    assert a[2] != b[2]


def test_what_does_not_begin_like_the_first_request_shares_what_its_ids_say(tmp_path):
    requests = [request([1, 2, 3]), request([1, 7, 8], 1.0), request([5, 6, 9], 2.0)]
    trace = read_lines(
        tmp_path / "a.jsonl",
        [conversation("a", requests), conversation("b", [request([1, 2, 4])])],
    )
    a, b = chains_of(trace).values()
    assert a[1][0] == a[0][0] == b[0][0]
    assert a[0][1] == b[0][1]
    assert not set(a[0]) & {*a[1][1:], *a[2]}


def test_sub_agents_share_their_own_openings(tmp_path):
    def with_agents(name):
        agents = [subagent("x", [request([40, 41])]), subagent("y", [request([40, 42])])]
        return conversation(name, [request([1, 2, 3]), *agents])

    trace = read_lines(tmp_path / "a.jsonl", [with_agents("a"), with_agents("b")])
    chains = {name: of[0] for name, of in chains_of(trace).items()}
    assert len({chains[f"{name}/{agent}"][0] for name in "ab" for agent in "xy"}) == 1
    assert len({chains[f"{name}/{agent}"][1] for name in "ab" for agent in "xy"}) == 4


def test_an_opening_that_is_part_of_another_is_not_taken_for_equal(tmp_path):
    """The record says that the sub-agent begins with its conversation's blocks."""
    agent = subagent("x", [request([1, 2, 9])], tool_tokens=20, system_tokens=9)
    alone = conversation("b", [request([1, 2, 9])], tools=20, system=9)
    trace = read_lines(
        tmp_path / "a.jsonl", [conversation("a", [request([1, 2, 3]), agent]), alone]
    )
    chains = chains_of(trace)
    assert chains["a/x"][0][:2] == chains["a"][0][:2]
    assert not set(chains["b"][0]) & set(chains["a/x"][0])


def test_requests_are_sorted_and_those_at_one_time_keep_their_order(tmp_path):
    times = [5.0, 3.0, 5.0, 3.0]
    requests = [request([i], t) for i, t in enumerate(times)]
    trace = read_lines(tmp_path / "a.jsonl", [conversation("a", requests, tools=0, system=0)])
    assert [ids_of(call) for call in trace.sessions[0]] == [[1], [3], [0], [2]]


def test_ids_that_name_content_alone_become_prefixes(tmp_path):
    requests = [request([1, 2, 3]), request([1, 3, 2], 1.0)]
    trace = read_lines(tmp_path / "a.jsonl", [conversation("a", requests, tools=0, system=0)])
    first, second = chains_of(trace)["a"]
    assert first[0] == second[0]
    assert len({*first, *second}) == 5


def test_blocks_that_are_not_full_are_left_out(tmp_path):
    trace = read_lines(
        tmp_path / "a.jsonl", [conversation("a", [request([1, 2, 3], **{"in": 29})])]
    )
    assert trace.sessions[0][0].num_blocks == 2


def test_a_conversation_without_requests_is_none(tmp_path):
    trace = read_lines(
        tmp_path / "a.jsonl", [conversation("a", []), conversation("b", [request([1])])]
    )
    assert [s[0].session_id for s in trace.sessions] == ["b"]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    conversations=st.lists(
        st.tuples(
            st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5), min_size=1, max_size=4),
            st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5), max_size=2),
            st.integers(0, 40),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_every_id_has_one_predecessor(tmp_path_factory, conversations):
    lines = [
        conversation(
            str(i),
            [
                *(request(ids, float(t)) for t, ids in enumerate(parent)),
                *(subagent(str(j), [request(ids)]) for j, ids in enumerate(agents)),
            ],
            tools=tools,
            system=0,
        )
        for i, (parent, agents, tools) in enumerate(conversations)
    ]
    trace = read_lines(tmp_path_factory.getbasetemp() / "property.jsonl", lines)
    assert len(trace.sessions) == sum(1 + len(agents) for _, agents, _ in conversations)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (conversation("a", None), "'requests' is null"),
        (conversation("a", [1]), ", requests[0]: is 1; expected a JSON object"),
        (conversation("a", [request([1, -4])]), ", requests[0]: 'hash_ids' holds -4; expected"),
        (conversation("a", [request("x")]), "'hash_ids' is 'x'; expected a list of integers"),
        (conversation("a", [request([1, 2.5])]), "'hash_ids' is a list; expected a list of inte"),
        (conversation("a", [request([1], t=-1)]), "'t' is -1; expected a number of 0 or more"),
        (conversation("a", [request([1], out=None)]), "'out' is null"),
        (conversation("a", [request([1])], block_size=0), "'block_size' is 0; expected an integer"),
        (conversation("a", [request([1])], block_size=32), "has blocks of 32 tokens; expected 10"),
        (conversation("first", []), "'id' is 'first' again; expected one line a conversation"),
        (
            conversation("a", [subagent("x", []), subagent("x", [])]),
            ", requests[1]: 'agent_id' is 'x' again; expected one entry a sub-agent",
        ),
        (
            conversation("a", [subagent("x", [request([1], t="now")])]),
            ", requests[0], requests[0]: 't' is 'now'; expected a number",
        ),
    ],
)
def test_what_is_wrong_with_a_line(tmp_path, line, message):
    found = error_of(tmp_path / "a.jsonl", [conversation("first", [request([1])]), line])
    assert found.startswith("a.jsonl:2")
    assert message in found
