"""How well graphs foretell: what the measures say of cases whose answer is known."""

import json
import random
from itertools import pairwise

import pytest

from saga_core.graph import Node
from saga_sim.aeg.measures import auc_of, coverage, ends_of
from saga_sim.aeg.prediction import describe, evaluate, split
from saga_sim.aeg.sequences import (
    READERS,
    Run,
    Sequences,
    Step,
    draw_from_statistics,
    from_kv_cache_tester,
    from_lmcache,
    from_trace,
    kind_of_text,
)
from saga_sim.traces import Call, Trace, TraceError

STATISTICS = {
    "transitions": [
        ["<start>", "Read", 1],
        ["Read", "Bash", 3],
        ["Read", "Read", 1],
        ["Bash", "Read", 2],
        ["Bash", "<end>", 2],
    ],
    "tool_seconds": {
        "Bash": {"p10": 0.1, "p50": 1.0, "p90": 4.0, "p95": 5.0, "p99": 9.0, "max": 20.0}
    },
}


@pytest.fixture
def statistics(tmp_path):
    path = tmp_path / "statistics.json"
    path.write_text(json.dumps(STATISTICS))
    return path


def runs_of(sequences):
    return [[step.node.tool for step in run.steps] for run in sequences.runs]


def test_drawn_sessions_follow_the_counts(statistics):
    drawn = draw_from_statistics(statistics, sessions=300, seed=1)
    assert drawn == draw_from_statistics(statistics, sessions=300, seed=1)
    assert all(tools[0] == "Read" and tools[-1] == "Bash" for tools in runs_of(drawn))
    pairs = [pair for tools in runs_of(drawn) for pair in pairwise(tools)]
    after_read = [b for a, b in pairs if a == "Read"]
    assert after_read.count("Bash") / len(after_read) == pytest.approx(0.75, abs=0.05)
    pauses = [s.pause_s for r in drawn.runs for s in r.steps if s.node.tool == "Bash" and s.pause_s]
    assert sum(pause_s <= 5.0 for pause_s in pauses) / len(pauses) == pytest.approx(0.95, abs=0.03)
    assert max(pauses) <= 20.0


def test_the_ceiling_is_what_one_who_knows_the_chain_gets_right(statistics):
    drawn = draw_from_statistics(statistics, sessions=2000, seed=2)
    # A session visits the start once, Read 8/3 and Bash 2 times on average.
    best = (1.0 * 1.0 + 8 / 3 * 0.75 + 2.0 * 0.5) / (1.0 + 8 / 3 + 2.0)
    assert drawn.ceiling == pytest.approx(best)
    result = evaluate(drawn)
    assert result.frozen == pytest.approx(best, abs=0.02)
    assert result.frozen >= max(result.orders) - 0.02


def test_statistics_without_a_start_are_refused(tmp_path):
    path = tmp_path / "statistics.json"
    path.write_text(json.dumps({**STATISTICS, "transitions": [["Read", "Bash", 1]]}))
    with pytest.raises(TraceError, match="<start>"):
        draw_from_statistics(path, sessions=1)


def test_every_session_is_held_out_once():
    runs = [Run(f"s{number}", "w", (Step(Node("a")),)) for number in range(13)]
    folds = split(runs, 5, seed=3)
    held_out = [run.session_id for _, evaluated in folds for run in evaluated]
    assert sorted(held_out) == sorted(run.session_id for run in runs)
    for learned, evaluated in folds:
        assert {r.session_id for r in learned}.isdisjoint(r.session_id for r in evaluated)
        assert len(learned) + len(evaluated) == 13


def cycling(sessions=40):
    """Sessions whose next step follows from the last two, and never from one."""
    rng = random.Random(4)
    names = ["a", "b", "b", "a", "c", "c"] * 3 + ["z"]
    return Sequences(
        "cycling",
        tuple(
            Run(
                f"s{number}",
                "w",
                tuple(Step(Node(None, n), rng.expovariate(1.0)) for n in names),
            )
            for number in range(sessions)
        ),
    )


def test_what_two_steps_decide_is_foretold_and_beats_shorter_tables():
    result = evaluate(cycling())
    assert result.best_order >= 2
    assert result.frozen > result.orders[1] + 0.2
    assert result.frozen >= max(result.orders) - 0.02
    assert result.ends.auc > 0.99
    assert result.ends.brier < 0.2 * result.ends.brier_of_share
    pauses = result.pauses["graph, frozen"]
    assert pauses.pauses == 40 * 18
    assert pauses.is_met
    assert "covers" in describe(result)


def test_graphs_that_learn_on_follow_what_nobody_else_did():
    runs = [
        Run(f"s{n}", "w", tuple(Step(Node(None, f"t{n}")) for _ in range(20))) for n in range(9)
    ]
    result = evaluate(Sequences("own ways", tuple(runs)), folds=3)
    assert result.frozen < 0.1
    assert result.prequential > 0.7


def test_the_area_under_the_curve():
    assert auc_of([(0.1, False), (0.2, False), (0.9, True)]) == 1.0
    assert auc_of([(0.9, False), (0.1, True)]) == 0.0
    assert auc_of([(0.5, False), (0.5, True), (0.5, False)]) == 0.5
    assert auc_of([(0.1, False), (0.3, True), (0.3, False), (0.8, True)]) == pytest.approx(0.875)
    assert auc_of([(0.5, False)]) == 0.5


def test_calibration_is_the_gap_between_what_was_foretold_and_what_came():
    told = [(0.25, n % 4 == 0) for n in range(100)] + [(0.95, n % 2 == 0) for n in range(100)]
    ends = ends_of(told, 0.5)
    assert ends.bins == ((100, pytest.approx(0.25), 0.25), (100, pytest.approx(0.95), 0.5))
    assert ends.ece == pytest.approx(0.225)
    assert ends.brier_of_share == pytest.approx(0.25)


def test_an_interval_by_session_is_wider_than_one_by_pause():
    # In a session all pauses keep within, or none do.
    clustered = [[(0.5, 1.0)] * 50] * 19 + [[(2.0, 1.0)] * 50]
    spread = [[(0.5, 1.0)] * 19 + [(2.0, 1.0)] for _ in range(50)]
    whole, parts = coverage(clustered), coverage(spread)
    assert whole.share == parts.share == 0.95
    assert whole.low < 0.9 < whole.high
    assert (parts.low, parts.high) == (0.95, 0.95)
    assert (whole.pauses, whole.sessions, whole.median_ratio) == (1000, 20, 2.0)


def test_conversations_are_read_with_their_sub_agents(tmp_path):
    def request(t, stop, types):
        return {"t": t, "type": "n", "in": 9, "out": 1, "stop": stop, "output_types": types,
                "api_time": 2.0}  # fmt: skip

    nested = {"type": "subagent", "t": 9.0, "requests": [request(1.0, "end_turn", ["text"])]}
    calls = [request(0.0, "tool_use", ["tool_use", "text"]), nested, request(5.0, "", [])]
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"id": "c", "block_size": 64, "requests": calls}) + "\n")
    main, nested_run = from_kv_cache_tester(path).runs
    assert main.steps == (
        Step(Node(tool="tool_use:text+tool_use"), 3.0),
        Step(Node(agent="unknown:")),
    )
    assert (nested_run.workflow, nested_run.steps) == (
        "subagent",
        (Step(Node(agent="end_turn:text")),),
    )


def test_flat_recordings_are_read_by_the_kind_of_their_answers(tmp_path):
    prompt = "p" * 600
    rows = [
        (5_000_000, prompt + "more", "```bash\ncd /x && grep -r y\n```"),
        (2_000_000, prompt, ""),
    ]
    path = tmp_path / "miniswe_1.jsonl"
    with path.open("w") as file:
        for time_us, text, answer in rows:
            row = {"timestamp": time_us, "input": text, "output": answer, "session_id": "t"}
            file.write(json.dumps(row) + "\n")
    (run,) = from_lmcache([path]).runs
    assert run.workflow == "miniswe"
    assert run.steps == (Step(Node(tool="unrecorded"), 3.0), Step(Node(tool="bash:grep")))
    assert READERS["lmcache"](tmp_path) == READERS["lmcache"](path)


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ('<tool_call>{"name": "web_search", "q": 1}', Node(tool="call:web_search")),
        ('{"next_speaker": {"answer": "Coder"}}', Node(tool="speaker:Coder")),
        ("```python\nx\n```", Node(tool="code")),
        ('{"a": 1}', Node(agent="json")),
        ("Hello.", Node(agent="text")),
    ],
)
def test_the_kind_of_an_answer(text, node):
    assert kind_of_text(text) == node


def test_a_trace_says_its_tools_and_how_long_they_ran():
    def call(arrival_s, **said):
        return Call("s", arrival_s, 9, 1, (), 1.0, **said)

    calls = (call(0.0, ending="tool_use", tool="Bash", tool_s=0.4), call(5.0, ending="tool_use"),
             call(9.0, ending="end_turn"))  # fmt: skip
    (run,) = from_trace(Trace("t", 4, (calls,))).runs
    assert run.steps == (
        Step(Node(tool="Bash"), 0.4),
        Step(Node(tool="tool_use"), 3.0),
        Step(Node(agent="end_turn")),
    )


@pytest.mark.parametrize(
    ("source", "name", "above_order_0"),
    [
        ("kv_cache_tester", "claude_code_dev.jsonl.gz", 0.25),
        ("lmcache", "lmcache_dev", 0.4),
        ("drawn", "tool_statistics.json", 0.015),
    ],
)
def test_recorded_sessions_are_foretold_as_well_as_by_the_best_table(
    traces, source, name, above_order_0
):
    result = evaluate(READERS[source](traces / name))
    for accuracy in (result.frozen, result.prequential):
        assert accuracy >= max(result.orders) - 0.02
        assert accuracy >= result.orders[0] + above_order_0
    assert result.ends.brier < result.ends.brier_of_share
    assert result.pauses["graph, frozen"].is_met
    assert result.pauses["graph, goes on learning"].is_met
