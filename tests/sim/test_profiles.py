"""Synthetic workloads: deterministic, well-formed traces, near the figures they stand for."""

from itertools import chain, pairwise
from statistics import mean, median

import pytest

from saga_core.errors import SettingsError
from saga_core.types import ToolType, tool_type_of
from saga_sim import profiles
from saga_sim.profiles import PROFILES, make_profile
from saga_sim.traces.model import runs_of

SESSIONS = 800
every_chain = pytest.mark.parametrize("name", sorted(PROFILES.keys() - {"tree"}))
every_profile = pytest.mark.parametrize("name", sorted(PROFILES))


@pytest.fixture(scope="module")
def traces():
    return {name: make_profile(name, sessions=SESSIONS, seed=7) for name in PROFILES}


def calls_of(trace):
    return list(chain.from_iterable(trace.sessions))


def pairs_of(trace):
    return [pair for session in trace.sessions for pair in pairwise(session)]


def ids_of(call):
    return list(chain.from_iterable(call.chain))


def common_blocks(one, other):
    ours, theirs = ids_of(one), ids_of(other)
    return next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )


def quantile(values, level):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * level))]


def lengths_of(trace):
    return [len(session) for session in trace.sessions]


def gaps_of(trace):
    return [b.arrival_s - a.arrival_s - a.duration_s for a, b in pairs_of(trace)]


def tool_seconds(trace):
    seconds = {}
    for call in calls_of(trace):
        if call.tool is not None:
            seconds.setdefault(call.tool, []).append(call.tool_s)
    return seconds


# Every profile is a well-formed trace


@every_profile
def test_a_seed_decides_all(name):
    trace = make_profile(name, sessions=5, seed=3)
    assert trace == make_profile(name, sessions=5, seed=3)
    assert trace.sessions != make_profile(name, sessions=5, seed=4).sessions


@every_profile
def test_more_sessions_only_append(name):
    few, more = (make_profile(name, sessions=n, seed=3) for n in (4, 9))
    assert more.sessions[:4] == few.sessions


@every_profile
def test_the_trace_says_what_it_is(name, traces):
    trace = traces[name]
    assert (trace.name, trace.block_tokens, trace.clock) == (name, 64, "session")
    assert len(trace.sessions) == SESSIONS
    assert all(len({call.session_id for call in session}) == 1 for session in trace.sessions)
    assert len({session[0].session_id for session in trace.sessions}) == SESSIONS
    assert "seed 7" in trace.notes[0]


@every_profile
@pytest.mark.parametrize("block_tokens", [1, 16, 100, 5_000])
def test_only_full_blocks_count_in_runs_of_consecutive_ids(name, block_tokens):
    for call in calls_of(make_profile(name, sessions=2, seed=3, block_tokens=block_tokens)):
        assert call.num_blocks == call.input_tokens // block_tokens
        assert call.chain == runs_of(ids_of(call))


@every_profile
def test_a_block_has_one_predecessor_at_one_place(name):
    seen = {}
    for call in calls_of(make_profile(name, sessions=60, seed=7)):
        before = None
        for place, block in enumerate(ids_of(call)):
            assert seen.setdefault(block, (before, place)) == (before, place)
            before = block


@every_chain
def test_sessions_share_the_system_prompt_and_nothing_else(name, traces):
    firsts = [session[0] for session in traces[name].sessions]
    shared = {"swe": 1_536, "web": 2_048, "chat": 192}[name] // 64
    assert all(common_blocks(a, b) == shared for a, b in pairwise(firsts))
    for call in calls_of(traces[name]):
        assert ids_of(call)[:shared] == list(range(shared))


@every_chain
def test_a_call_comes_after_the_answer_before_it_and_its_tool(name, traces):
    assert all(session[0].arrival_s == 0.0 for session in traces[name].sessions)
    for a, b in pairs_of(traces[name]):
        assert b.arrival_s >= a.arrival_s + a.duration_s
        overhead_s = b.arrival_s - a.arrival_s - a.duration_s - (a.tool_s or 0.0)
        assert a.tool is None or 0.0199 < overhead_s < 0.0801


@every_profile
def test_a_call_lasts_as_long_as_its_answer_takes(name, traces):
    for call in calls_of(traces[name]):
        assert call.duration_s == pytest.approx(0.5 + 0.03 * call.output_tokens)


@every_profile
def test_prompt_and_answer_fit_the_context(name, traces):
    assert all(c.input_tokens + c.output_tokens <= 131_072 for c in calls_of(traces[name]))


@pytest.mark.parametrize("name", ["swe", "web"])
def test_all_but_the_last_answer_call_a_tool(name, traces):
    for session in traces[name].sessions:
        *others, last = session
        assert all(c.ending == "tool_use" and c.tool and c.tool_s > 0 for c in others)
        assert (last.ending, last.tool, last.tool_s) == ("end_turn", None, None)


@pytest.mark.parametrize("name", ["swe", "chat"])
def test_prompts_only_grow_by_the_answer_and_more(name, traces):
    for a, b in pairs_of(traces[name]):
        assert b.input_tokens > a.input_tokens + a.output_tokens
        assert common_blocks(a, b) == a.num_blocks


def test_a_full_context_ends_a_session(monkeypatch):
    monkeypatch.setattr(profiles, "CONTEXT_TOKENS", 12_000)
    for name in ("swe", "web"):
        trace = make_profile(name, sessions=50, seed=7)
        assert all(c.input_tokens + c.output_tokens <= 12_000 for c in calls_of(trace))
        lasts = [session[-1] for session in trace.sessions]
        assert all((c.ending, c.tool, c.tool_s) == ("end_turn", None, None) for c in lasts)
        assert mean(lengths_of(trace)) < 15


# Coding agent


def test_swe_sessions_are_as_long_as_measured(traces):
    lengths = lengths_of(traces["swe"])
    tool_calls = [length - 1 for length in lengths]
    assert median(tool_calls) == pytest.approx(41, rel=0.1)
    assert quantile(tool_calls, 0.9) == pytest.approx(92, rel=0.1)
    assert mean(tool_calls) == pytest.approx(47, rel=0.1)
    assert min(tool_calls) >= 1
    assert max(lengths) <= 150


def test_swe_prompts_and_answers_have_the_stated_lengths(traces):
    firsts = [session[0].input_tokens for session in traces["swe"].sessions]
    assert min(firsts) >= 2_000
    assert max(firsts) <= 4_000
    outputs = [call.output_tokens for call in calls_of(traces["swe"])]
    assert (min(outputs), max(outputs)) == (100, 500)


def test_swe_tools_run_as_long_as_measured(traces):
    seconds = tool_seconds(traces["swe"])
    assert set(seconds) == set(profiles.SWE_TOOL_S)
    often = [tool for tool, each in seconds.items() if len(each) > 2_000]
    assert {"Bash", "Read", "Edit", "Grep", "TodoWrite"} <= set(often)
    for tool in often:
        p10, p50, p90, p95, _, most = profiles.SWE_TOOL_S[tool]
        assert quantile(seconds[tool], 0.1) == pytest.approx(p10, rel=0.1)
        assert quantile(seconds[tool], 0.5) == pytest.approx(p50, rel=0.1)
        assert quantile(seconds[tool], 0.88) <= p90 <= quantile(seconds[tool], 0.92)
        assert quantile(seconds[tool], 0.93) <= p95 <= quantile(seconds[tool], 0.97)
        assert p10 <= min(seconds[tool])
        assert max(seconds[tool]) <= most
    assert quantile(seconds["Bash"], 0.99) == pytest.approx(29.5, rel=0.25)


def test_swe_tools_follow_each_other_as_measured(traces):
    followers = [b.tool for a, b in pairs_of(traces["swe"]) if a.tool == "Bash" and b.tool]
    row = dict(zip(profiles.SWE_FOLLOWERS, profiles.SWE_FOLLOWER_COUNTS["Bash"], strict=True))
    tools = sum(row.values()) - row[profiles.END]
    for tool in ("Bash", "Read", "Edit", "TodoWrite"):
        share = followers.count(tool) / len(followers)
        assert share == pytest.approx(row[tool] / tools, abs=0.02)
    starts = [session[0].tool for session in traces["swe"].sessions]
    assert starts.count("TodoWrite") / len(starts) == pytest.approx(107 / 211, abs=0.06)
    assert "WebFetch" not in starts


# Browser agent


def test_web_sessions_are_as_long_as_stated(traces):
    lengths = lengths_of(traces["web"])
    assert mean(lengths) == pytest.approx(18, rel=0.1)
    assert max(lengths) == 60


def test_web_prompts_and_answers_have_the_stated_lengths(traces):
    firsts = [session[0].input_tokens for session in traces["web"].sessions]
    assert min(firsts) >= 4_000
    assert max(firsts) <= 8_000
    outputs = [call.output_tokens for call in calls_of(traces["web"])]
    assert (min(outputs), max(outputs)) == (50, 200)


def test_web_tools_together_have_the_latency_of_the_prior(traces):
    seconds = tool_seconds(traces["web"])
    python = seconds.pop("python")
    assert set(seconds) == {"browser_click", "browser_type", "browser_goto", "web_search"}
    pages = list(chain.from_iterable(seconds.values()))
    assert quantile(pages, 0.5) == pytest.approx(0.85, rel=0.1)
    assert quantile(pages, 0.94) <= 4.5 <= quantile(pages, 0.96)
    assert quantile(pages, 0.99) == pytest.approx(45.0, rel=0.25)
    assert quantile(python, 0.5) == pytest.approx(0.18, rel=0.1)
    assert quantile(python, 0.93) <= 2.4 <= quantile(python, 0.97)
    assert median(seconds["browser_goto"]) > 2 * median(seconds["browser_click"])


def test_a_page_that_replaces_branches_before_the_observation(traces):
    branches, others = 0, 0
    for session in traces["web"].sessions:
        for before, a, b in zip(session, session[1:], session[2:], strict=False):
            if common_blocks(a, b) == a.num_blocks:
                others += 1
                assert b.input_tokens > a.input_tokens + a.output_tokens
                continue
            branches += 1
            assert a.tool != "python"
            if common_blocks(before, a) == before.num_blocks:
                observation_at = before.input_tokens + before.output_tokens
                assert common_blocks(a, b) == observation_at // 64
                assert 1_000 <= b.input_tokens - observation_at - a.output_tokens <= 3_000
    assert branches / (branches + others) == pytest.approx(0.45, abs=0.03)


def test_tools_are_of_the_types_that_the_priors_are_of():
    types = {tool: tool_type_of(tool) for tool in profiles.WEB_TOOL_S}
    assert types.pop("python") is ToolType.CODE_EXEC
    assert set(types.values()) == {ToolType.WEB_API}


# Chat


def test_chat_calls_no_tools(traces):
    for call in calls_of(traces["chat"]):
        assert (call.ending, call.tool, call.tool_s) == ("end_turn", None, None)


def test_chat_has_a_few_turns_with_minutes_between(traces):
    lengths = lengths_of(traces["chat"])
    assert min(lengths) == 1
    assert mean(lengths) == pytest.approx(5, rel=0.15)
    assert max(lengths) <= 40
    gaps = gaps_of(traces["chat"])
    assert median(gaps) == pytest.approx(90, rel=0.15)
    assert quantile(gaps, 0.99) > 10 * median(gaps)


def test_chat_prompts_start_short_and_long(traces):
    firsts = [session[0].input_tokens for session in traces["chat"].sessions]
    assert 200 <= min(firsts) < 300
    assert 3_500 < max(firsts) <= 4_000


# Bad arguments


def test_an_unknown_profile_is_told_which_exist():
    with pytest.raises(
        SettingsError, match="unknown profile 'sew'; choose one of chat, swe, tree, web"
    ):
        make_profile("sew", sessions=1, seed=0)


@every_profile
@pytest.mark.parametrize("bad", [{"sessions": 0}, {"block_tokens": 0}])
def test_nothing_to_make_is_refused(name, bad):
    (setting,) = bad
    with pytest.raises(SettingsError, match=f"{setting}=0 must be at least 1"):
        make_profile(name, **{"sessions": 1, "seed": 0, **bad})


# tree


def searches_of(trace):
    """Sessions by search, each search in the order in which its branches opened."""
    searches = {}
    for session in trace.sessions:
        searches.setdefault(session[0].session_id.rpartition("-")[0], []).append(session)
    return list(searches.values())


def test_a_branch_begins_with_the_context_that_it_was_forked_from(traces):
    sessions = {session[0].session_id: session for session in traces["tree"].sessions}
    forks = [session[0] for session in traces["tree"].sessions if session[0].parent_session_id]
    assert len(forks) > SESSIONS // 2
    for fork in forks:
        parent = [
            call
            for call in sessions[fork.parent_session_id]
            if call.arrival_s + call.duration_s <= fork.arrival_s
        ][-1]
        context_blocks = (parent.input_tokens + parent.output_tokens) // 64
        assert ids_of(fork)[: parent.num_blocks] == ids_of(parent)
        assert fork.num_blocks >= context_blocks


def test_branches_of_a_round_part_where_they_were_forked(traces):
    search = searches_of(traces["tree"])[0]
    one, two, three = (session[0] for session in search[1:4])
    assert one.parent_session_id == two.parent_session_id == search[0][0].session_id
    context_blocks = (search[0][1].input_tokens + search[0][1].output_tokens) // 64
    assert common_blocks(one, two) == common_blocks(one, three) == context_blocks


def test_some_branches_come_back_after_others_have_worked(traces):
    back = [b for a, b in pairs_of(traces["tree"]) if b.arrival_s - a.arrival_s > 60.0]
    assert len(back) > SESSIONS // 20


def test_searches_share_the_system_prompt_and_nothing_else(traces):
    firsts = [search[0][0] for search in searches_of(traces["tree"])]
    assert len(firsts) > 20
    assert all(first.parent_session_id is None for first in firsts)
    assert all(common_blocks(a, b) == 1_024 // 64 for a, b in pairwise(firsts))
