"""Graphs learned online: what they expect, what they forget, and that nothing corrupts them."""

import copy
import json
import math
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saga_core.evidence import MAX_NODES, stretch_of
from saga_core.fields import StateError
from saga_core.graph import Graphs, Node, Walk
from saga_core.transitions import MAX_CONTEXTS, MAX_NEXTS, Clock

PROPERTY = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
PLAN, READ, RUN, SAY = Node("plan"), Node(None, "read_file"), Node(None, "bash"), Node(None)
DAY_S = 86_400.0


def learn(graphs, nodes, workflow="w", *, now_s=0.0, pause_s=None, ends=True, **said):
    """Lead a session through the nodes."""
    walk = Walk(workflow)
    for node in nodes:
        if pause_s is not None:
            graphs.returned(walk, pause_s)
        graphs.stepped(walk, node, now_s=now_s, **said)
    if ends:
        graphs.ended(walk, now_s=now_s)
    return walk


def at(*nodes, workflow="w"):
    """A walk that stands after the nodes."""
    walk = Walk(workflow)
    for node in nodes:
        walk.take(node)
    return walk


def probabilities(aeg):
    return {(edge.source, edge.target): edge.probability for edge in aeg.edges}


def drawn(seed, sessions=60, workflow="w"):
    """Graphs that learned sessions of a random chain."""
    rng, graphs = random.Random(seed), Graphs()
    nodes = [Node(None, name) for name in "abcd"]
    for number in range(sessions):
        chosen = [rng.choice(nodes) for _ in range(rng.randint(1, 12))]
        learn(graphs, chosen, workflow, now_s=3600.0 * number, pause_s=rng.expovariate(0.1),
              overlap=rng.random(), output_tokens=rng.randint(1, 500))  # fmt: skip
    return graphs


def test_next_steps_are_as_likely_as_they_were_frequent():
    graphs = Graphs()
    for number in range(400):
        learn(graphs, [PLAN, RUN if number % 4 else READ, SAY])
    nexts = graphs.next_nodes(at(PLAN))
    assert nexts[RUN] == pytest.approx(0.75, abs=0.03)
    assert nexts[READ] == pytest.approx(0.25, abs=0.03)
    assert sum(nexts.values()) == pytest.approx(1.0 - graphs.outlook(at(PLAN)).p_end)
    assert graphs.outlook(at(PLAN)).next_node == RUN
    assert graphs.outlook(at(PLAN, READ, SAY)).p_end > 0.95
    assert graphs.outlook(Walk("w")).p_end == 0.0


def test_an_edge_below_theta_is_not_acted_upon():
    for theta_conf, expected in ((0.9, None), (0.7, RUN)):
        graphs = Graphs(theta_conf=theta_conf)
        for number in range(400):
            learn(graphs, [PLAN, RUN if number % 4 else READ], ends=False)
        assert graphs.outlook(at(PLAN)).next_node == expected


def test_two_steps_back_decide_where_one_does_not():
    graphs = Graphs()
    for _ in range(50):
        learn(graphs, [PLAN, RUN, READ])
        learn(graphs, [READ, RUN, SAY])
    assert graphs.outlook(at(PLAN, RUN)).next_node == READ
    assert graphs.outlook(at(READ, RUN)).next_node == SAY


def test_ends_are_learned_by_step_number():
    graphs = Graphs()
    for _ in range(60):
        learn(graphs, [RUN] * 7)
    early, last = graphs.outlook(at(*[RUN] * 2)), graphs.outlook(at(*[RUN] * 7))
    assert early.p_end < 0.05
    assert last.p_end > 3 * early.p_end
    assert early.steps_left == pytest.approx(4.5, abs=0.6)


def test_the_reuse_is_the_overlap_of_the_next_steps_if_there_are_any():
    graphs = Graphs()
    for _ in range(200):
        learn(graphs, [PLAN, RUN, SAY], overlap=0.6, output_tokens=100, observation_tokens=40)
    outlook = graphs.outlook(at(PLAN))
    assert outlook.p_reuse == pytest.approx(0.6 * (1.0 - outlook.p_end), abs=0.01)
    assert outlook.tokens_left == pytest.approx(100 * outlook.steps_left)
    run = next(each for each in graphs.graph("w").nodes if each.node == RUN)
    assert (run.output_tokens, run.observation_tokens) == (pytest.approx(100), pytest.approx(40))


def test_a_pause_without_a_tool_is_a_persons():
    graphs = Graphs()
    for _ in range(40):
        learn(graphs, [RUN, RUN], pause_s=2.0)
        learn(graphs, [SAY, SAY], pause_s=500.0)
    tool, person = graphs.outlook(at(RUN)), graphs.outlook(at(SAY))
    assert tool.pause_p50_s == pytest.approx(2.0, rel=0.05)
    assert person.pause_p50_s == pytest.approx(500.0, rel=0.05)
    assert graphs.remaining_s(at(RUN), 1.5) == pytest.approx(0.5, abs=0.1)


def test_a_workflow_is_cold_until_its_tasks_were_seen():
    graphs = Graphs(cold_tasks=30)
    for _ in range(29):
        learn(graphs, [PLAN, RUN])
    assert graphs.outlook(at(PLAN)).is_cold
    learn(graphs, [PLAN, RUN])
    assert not graphs.outlook(at(PLAN)).is_cold
    assert graphs.outlook(at(PLAN, workflow="other")).is_cold


def test_what_other_workflows_showed_shortens_the_cold_start():
    graphs = Graphs(cold_tasks=30)
    for _ in range(100):
        learn(graphs, [PLAN, RUN, READ], "old")
    assert graphs.outlook(at(PLAN, RUN, workflow="new")).next_node == READ
    for _ in range(7):
        learn(graphs, [PLAN, RUN, READ], "new")
        learn(graphs, [Node("x"), Node("y")], "strange")
    assert not graphs.outlook(at(PLAN, workflow="new")).is_cold
    assert graphs.outlook(at(PLAN, workflow="strange")).is_cold


def test_at_a_node_that_is_new_to_it_a_workflow_does_as_others_do():
    graphs = Graphs()
    for _ in range(100):
        learn(graphs, [PLAN, RUN], "old")
        learn(graphs, [READ] * 5, "new", ends=False)
    assert graphs.outlook(at(PLAN, workflow="new")).next_node == RUN


def test_a_workflow_that_differs_from_the_others_is_believed():
    graphs = Graphs()
    for _ in range(100):
        learn(graphs, [PLAN, RUN, READ], "old")
    for _ in range(20):
        learn(graphs, [PLAN, RUN, SAY], "new")
    assert graphs.outlook(at(PLAN, RUN, workflow="new")).next_node == SAY


def test_a_retry_counts_once_and_stands_in_the_place_of_the_first_try():
    graphs, walk = Graphs(), Walk("w")
    assert graphs.stepped(walk, PLAN, step=0, now_s=0.0)
    assert graphs.stepped(walk, RUN, step=1, now_s=0.0)
    before = copy.deepcopy(graphs.state())
    assert not graphs.stepped(walk, READ, step=1, now_s=0.0)
    assert not graphs.stepped(walk, PLAN, step=0, now_s=0.0)
    assert graphs.state() == before
    assert walk.last == (PLAN, READ)
    assert graphs.stepped(walk, SAY, step=2, now_s=0.0)
    assert graphs.next_nodes(at(READ))[SAY] > 0.2


def test_nothing_is_learned_from_steps_that_were_not_seen():
    graphs, walk = Graphs(), Walk("w")
    graphs.stepped(walk, PLAN, step=0, now_s=0.0)
    assert graphs.stepped(walk, SAY, step=7, now_s=0.0)
    assert SAY not in graphs.next_nodes(at(PLAN))
    assert walk.last == (SAY,)


def test_an_ended_session_teaches_nothing_more():
    graphs = Graphs()
    walk = learn(graphs, [PLAN, RUN])
    before = copy.deepcopy(graphs.state())
    assert not graphs.stepped(walk, SAY, now_s=9.0)
    assert not graphs.returned(walk, 3.0)
    assert not graphs.ended(walk, now_s=9.0)
    assert graphs.state() == before


def test_a_pause_counts_once_and_a_failed_request_is_no_end():
    graphs, walk = Graphs(), Walk("w")
    assert not graphs.returned(walk, 1.0)
    graphs.stepped(walk, RUN, now_s=0.0)
    assert not graphs.returned(walk, math.nan)
    assert graphs.returned(walk, 1.0)
    assert not graphs.returned(walk, 1.0)
    p_end = graphs.outlook(walk).p_end
    graphs.ended(walk, now_s=0.0)
    assert graphs.outlook(at(RUN)).p_end == p_end


@pytest.mark.parametrize("half_life_s", [DAY_S, math.inf])
def test_old_evidence_decays(half_life_s):
    graphs = Graphs(half_life_s=half_life_s)
    for _ in range(100):
        learn(graphs, [PLAN, RUN])
    for _ in range(30):
        learn(graphs, [PLAN, READ], now_s=5 * DAY_S)
    assert (graphs.outlook(at(PLAN)).next_node == READ) == (half_life_s == DAY_S)
    for _ in range(30):
        learn(graphs, [PLAN, SAY], now_s=1000 * DAY_S)
    graphs.check_integrity()
    assert (graphs.outlook(at(PLAN)).next_node == SAY) == (half_life_s == DAY_S)


def test_time_that_goes_back_does_not_count():
    clock = Clock(DAY_S)
    clock.advance(10 * DAY_S)
    weight = clock.weight
    for now_s in (0.0, -math.inf, math.nan):
        assert clock.advance(now_s) == 1.0
        assert clock.weight == weight
    assert clock.advance(11 * DAY_S) == 1.0
    assert clock.weight == pytest.approx(2 * weight)


def test_a_stretch_holds_twice_the_steps_of_the_one_before():
    assert [stretch_of(step) for step in (0, 1, 2, 3, 6, 7, 10**9)] == [0, 1, 1, 2, 2, 3, 20]


def test_bounds_are_kept():
    graphs = Graphs(max_workflows=3)
    for name in "abcad":
        learn(graphs, [PLAN], name)
    assert graphs.workflows() == ("c", "a", "d")
    for number in range(MAX_CONTEXTS):
        learn(graphs, [Node(None, f"t{number}"), Node(None, f"u{number}"), SAY], "a")
    graphs.check_integrity()
    assert len(graphs.graph("a").nodes) <= MAX_NODES
    assert len(graphs.next_nodes(Walk("a"))) <= 4 * MAX_NEXTS
    nexts = graphs.next_nodes(at(Node(None, f"u{number}"), workflow="a"))
    assert max(nexts, key=nexts.get) == SAY


def test_the_least_recently_used_workflow_goes_when_there_are_too_many_edges():
    graphs = Graphs(max_edges=20)
    for name in "abc":
        learn(graphs, [PLAN, RUN, READ], name)
    graphs.check_integrity()
    assert graphs.workflows() == ("b", "c")


def test_a_saved_state_goes_on_as_if_nothing_had_been():
    graphs = drawn(1, workflow=("tenant", "w"))
    restored = Graphs.from_state(json.loads(json.dumps(graphs.state())))
    restored.check_integrity()
    assert restored.workflows() == graphs.workflows()
    for each in (graphs, restored):
        learn(each, [Node(None, "a"), Node(None, "b")], ("tenant", "w"), now_s=9e5, pause_s=3.0)
    for nodes in ([], [Node(None, "a")], [Node(None, "c"), Node(None, "d")]):
        walk = at(*nodes, workflow=("tenant", "w"))
        assert restored.outlook(walk) == pytest.approx(graphs.outlook(walk))
        assert restored.next_nodes(walk) == pytest.approx(graphs.next_nodes(walk))
    known, again = graphs.graph(("tenant", "w")), restored.graph(("tenant", "w"))
    assert again.tasks == pytest.approx(known.tasks)
    assert probabilities(again) == pytest.approx(probabilities(known))


def test_a_state_that_is_made_while_steps_are_learned_can_be_read():
    graphs, number = drawn(1, sessions=20), 0
    learn(graphs, [PLAN, RUN], "other", pause_s=1.0)
    saving = graphs.saving()
    while True:
        try:
            next(saving)
        except StopIteration as done:
            state = done.value
            break
        number += 1
        learn(graphs, [Node(None, f"t{number}"), RUN], f"new{number}", pause_s=1.0)
        graphs.forget("other")
    assert number >= 4
    restored = Graphs.from_state(json.loads(json.dumps(state)))
    restored.check_integrity()
    assert restored.workflows() == ("w", "other")


def test_merging_knows_what_both_knew_in_either_order():
    walks = [Walk("w"), *(at(Node(None, x), Node(None, y)) for x in "abcd" for y in "ab")]
    ours, theirs = drawn(1), drawn(2, sessions=90)
    learn(theirs, [PLAN, RUN, SAY], "only theirs")
    one, other = drawn(1), drawn(2, sessions=90)
    learn(other, [PLAN, RUN, SAY], "only theirs")
    before = copy.deepcopy(theirs.state())
    ours.merge(theirs)
    assert theirs.state() == before
    other.merge(one)
    ours.check_integrity()
    assert set(ours.workflows()) == set(other.workflows())
    for walk in walks:
        assert ours.next_nodes(walk) == pytest.approx(other.next_nodes(walk), rel=1e-6)
        a, b = ours.outlook(walk), other.outlook(walk)
        assert (a.p_end, a.p_reuse, a.pause_p95_s, a.steps_left) == pytest.approx(
            (b.p_end, b.p_reuse, b.pause_p95_s, b.steps_left), rel=1e-6
        )


@pytest.mark.parametrize("first", [0, 1])
def test_merged_evidence_is_that_of_one_who_saw_it_all(first):
    rng, whole, parts = random.Random(3), Graphs(), [Graphs(), Graphs()]
    for number in range(80):
        nodes = [Node(None, rng.choice("abc")) for _ in range(rng.randint(1, 9))]
        # One has seen the first half, the other what came days later.
        learn(whole, nodes, now_s=1e4 * number)
        learn(parts[number // 40], nodes, now_s=1e4 * number)
    merged = parts[first]
    merged.merge(parts[1 - first])
    for walk in (Walk("w"), *(at(Node(None, x)) for x in "abc")):
        assert merged.next_nodes(walk) == pytest.approx(whole.next_nodes(walk))


def broken(change):
    state = drawn(1, sessions=3).state()
    change(state)
    return state


@pytest.mark.parametrize(
    ("state", "named"),
    [
        (None, "state"),
        ([], "state"),
        ({}, "version"),
        (broken(lambda s: s.update(version=2)), "state.version: is 2; expected 1"),
        (broken(lambda s: s.pop("root")), "root"),
        (broken(lambda s: s.update(graphs={})), "graphs"),
        (broken(lambda s: s["graphs"][0].update(workflow=7)), r"graphs\[0\].workflow"),
        (broken(lambda s: s["graphs"][0]["graph"].update(tasks=-1)), r"graph.tasks"),
        (broken(lambda s: s["root"].update(now_s=math.nan)), "root.now_s"),
        (broken(lambda s: s["root"]["left"].__setitem__(0, [1])), r"root.left\[0\]"),
        (broken(lambda s: s["root"]["nodes"].__setitem__(0, "x")), r"root.nodes\[0\]"),
        (broken(lambda s: s["root"]["contexts"][0].update(to=[999])), r"contexts\[0\].to"),
        (broken(lambda s: s["root"]["contexts"][0].update(after=[[0]] * 3)), "after"),
        (broken(lambda s: s["root"]["contexts"][0].update(counts=["1"] * 4)), r"counts\[0\]"),
        (broken(lambda s: s["durations"]["levels"][0].update(key=3)), r"levels\[0\].key"),
        (broken(lambda s: s["durations"]["levels"][0].update(pauses=3)), r"levels\[0\].pauses"),
    ],
)
def test_a_state_that_cannot_be_read_is_refused_by_its_field(state, named):
    with pytest.raises(StateError, match=named):
        Graphs.from_state(state)


def test_a_workflow_that_is_no_text_cannot_be_saved():
    graphs = Graphs()
    learn(graphs, [PLAN], object())
    with pytest.raises(StateError, match="not made of texts"):
        graphs.state()


NODES = st.builds(Node, st.sampled_from([None, "a", "b"]), st.sampled_from([None, "bash", "x"]))
TIMES = st.one_of(st.floats(), st.floats(0.0, 1e7))
CALLS = st.lists(
    st.tuples(
        st.sampled_from(
            ["step", "step", "step", "return", "end", "new", "forget", "save", "merge"]
        ),
        st.integers(0, 3),
        NODES,
        TIMES,
        st.one_of(st.none(), st.integers(-2, 12), st.just(2**70)),
        st.one_of(st.none(), st.floats()),
    ),
    max_size=60,
)


@PROPERTY
@given(CALLS, st.sampled_from([60.0, 7 * DAY_S, math.inf]))
def test_no_order_of_calls_corrupts_the_graphs(calls, half_life_s):
    graphs = Graphs(max_workflows=2, half_life_s=half_life_s)
    walks = [Walk(f"w{number}") for number in range(4)]
    for kind, which, node, now_s, step, number in calls:
        walk = walks[which]
        if kind == "step":
            graphs.stepped(walk, node, now_s=now_s, step=step, overlap=number, output_tokens=step,
                           observation_tokens=step)  # fmt: skip
        elif kind == "return":
            graphs.returned(walk, now_s)
        elif kind == "end":
            graphs.ended(walk, now_s=now_s)
        elif kind == "new":
            walks[which] = Walk(f"w{which}")
        elif kind == "forget":
            graphs.forget(walk.workflow)
        else:
            saved = Graphs.from_state(
                json.loads(json.dumps(graphs.state(), allow_nan=False)),
                max_workflows=2,
                half_life_s=half_life_s,
            )
            if kind == "merge":
                saved.merge(graphs)
            graphs = saved
        graphs.check_integrity()
    for walk in (*walks, Walk("unknown")):
        outlook, nexts = graphs.outlook(walk), graphs.next_nodes(walk)
        assert outlook.p_end + sum(nexts.values()) == pytest.approx(1.0, abs=1e-6)
        assert all(0.0 <= p <= 1.0 + 1e-9 for p in nexts.values())
        assert 0.0 <= outlook.p_reuse <= 1.0
        assert 0.0 <= outlook.pause_p50_s <= outlook.pause_p95_s < math.inf
        assert 0.0 <= outlook.steps_left < math.inf
        assert 0.0 <= graphs.remaining_s(walk, 1.0) < math.inf
