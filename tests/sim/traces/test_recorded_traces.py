"""The loaders over recorded traces: nothing is lost, every id has one predecessor."""

from itertools import pairwise

import pytest

from saga_sim.traces import read_trace
from saga_sim.traces.chains import common_blocks
from tests.sim.traces.support import check_trace


@pytest.fixture(scope="module")
def claude_code(traces):
    return read_trace([traces / "claude_code_dev.jsonl.gz"])


def calls_of(trace):
    return [call for calls in trace.sessions for call in calls]


def test_claude_code(claude_code):
    check_trace(claude_code)
    children = [s for s in claude_code.sessions if s[0].parent_session_id is not None]
    assert len(claude_code.sessions) - len(children) == 120
    assert len(children) == 8
    assert sum(map(len, children)) == 94
    # 9,118 entries: 9,110 calls of the conversations themselves and one for each sub-agent
    assert len(calls_of(claude_code)) - 94 + len(children) == 9_118
    assert sum(call.num_blocks for call in calls_of(claude_code)) == 18_389_675
    assert {call.ending for call in calls_of(claude_code)} == {"tool_use", "end_turn", ""}


def test_sub_agents_of_claude_code_start_together(claude_code):
    starts = [s[0].arrival_s for s in claude_code.sessions if s[0].parent_session_id is not None]
    assert starts == [78.257, 78.257, 78.257, 53.02, 53.02, 53.02, 3602.124, 3602.135]


def test_openings_of_claude_code_are_shared(claude_code):
    firsts: dict[int, int] = {}
    for calls in claude_code.sessions:
        if calls[0].parent_session_id is None:
            start = calls[0].chain[0].start
            firsts[start] = firsts.get(start, 0) + 1
    assert sorted(firsts.values(), reverse=True)[:4] == [8, 5, 4, 3]


def test_lmcache(traces):
    trace = read_trace([traces / "lmcache_dev"])
    check_trace(trace)
    assert len(calls_of(trace)) == 823
    assert len({calls[0].session_id.split("/")[0] for calls in trace.sessions}) == 33
    grown = [
        common_blocks(a.chain, b.chain) >= a.num_blocks - 1
        for calls in trace.sessions
        for a, b in pairwise(calls)
    ]
    assert sum(grown) > 0.9 * len(grown)


def test_otel(traces):
    trace = read_trace([traces / "otel_dags"])
    check_trace(trace)
    assert len(calls_of(trace)) == 67
    assert trace.clock == "shared"


def test_mooncake(traces):
    trace = read_trace([traces / "mooncake_conversation_head.jsonl.gz"])
    check_trace(trace)
    assert len(calls_of(trace)) == 3_000
    assert 1_500 < len(trace.sessions) < 2_700
