"""Graphs as documents: what is read, what is refused by its field, and what is written."""

import json
import re

import pytest

from saga_core.aeg import RENDERERS, Aeg, AegEdge, AegNode, read_aeg, to_dict
from saga_core.fields import StateError
from saga_core.graph import Graphs, Node, Walk
from saga_core.transitions import START

PLAN, RUN = Node("planner"), Node("coder", "bash")


def document(**changed):
    """A retry loop: plan, then run again and again."""
    return {
        "version": 1,
        "workflow": "swe",
        "nodes": [
            {"id": "plan", "agent": "planner", "output_tokens": 300},
            {"id": "run", "agent": "coder", "tool": "bash", "pause_p50_s": 2, "pause_p95_s": 13},
        ],
        "edges": [
            {"from": "plan", "to": "run", "probability": 1.0, "overlap": 0.9},
            {"from": "run", "to": "run", "probability": 0.8},
            {"from": "run", "to": "<end>", "probability": 0.2},
        ],
        **changed,
    }


def at(*nodes):
    walk = Walk("swe")
    for node in nodes:
        walk.take(node)
    return walk


def test_a_graph_with_a_cycle_is_read():
    aeg = read_aeg(json.dumps(document()))
    assert [each.node for each in aeg.nodes] == [PLAN, RUN]
    assert [each.p_end for each in aeg.nodes] == [0.0, pytest.approx(0.2)]
    edges = {(edge.source, edge.target): edge.probability for edge in aeg.edges}
    assert edges == {(START, PLAN): 1.0, (PLAN, RUN): 1.0, (RUN, RUN): 0.8}


def test_a_graph_of_cycles_only_begins_at_its_first_node():
    nodes = [{"id": "a"}, {"id": "b"}]
    edges = [{"from": x, "to": y, "probability": 1.0} for x, y in ("ab", "ba")]
    aeg = read_aeg(document(nodes=nodes, edges=edges))
    assert AegEdge(START, Node("a"), 1.0) in aeg.edges
    graphs = Graphs()
    graphs.put("swe", aeg, now_s=0.0)
    assert graphs.outlook(at(Node("a"))).next_node == Node("b")


def edge(**fields):
    return {"from": "plan", "to": "run", "probability": 0.5, **fields}


def node(**fields):
    return {"id": "other", "agent": "x", **fields}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"version": 3}, "aeg.version: is 3; expected 1"),
        ({"workflow": None}, "workflow"),
        ({"nodes": []}, "nodes: expected at least one"),
        ({"nodes": "x"}, "nodes: is 'x'; expected a list"),
        ({"nodes": [{"agent": "x"}]}, r"nodes\[0\].id"),
        ({"nodes": [node(), node()], "edges": []}, r"nodes\[1\].id"),
        ({"nodes": [node(), node(id="b")], "edges": []}, r"nodes\[1\]: agent and tool"),
        ({"nodes": [node(id="<end>")], "edges": []}, r"nodes\[0\].id"),
        ({"nodes": [node(agent=5)], "edges": []}, r"nodes\[0\].agent: is 5"),
        ({"nodes": [node(pause_p50_s=-1)], "edges": []}, r"nodes\[0\].pause_p50_s: is -1"),
        ({"nodes": [node(pause_p50_s=2, pause_p95_s=1)], "edges": []}, r"nodes\[0\].pause_p95_s"),
        ({"nodes": [node(id=f"n{i}", agent=f"n{i}") for i in range(257)]}, "more than 256"),
        ({"edges": [edge(to="nowhere")]}, r"edges\[0\].to: is 'nowhere'"),
        ({"edges": [{**edge(), "from": "<end>"}]}, r"edges\[0\].from"),
        ({"edges": [edge(probability=1.5)]}, r"edges\[0\].probability: is 1.5; .* at most 1"),
        ({"edges": [edge(probability=True)]}, r"edges\[0\].probability: is True"),
        ({"edges": [{"from": "plan", "to": "run"}]}, r"edges\[0\].probability: is None"),
        ({"edges": [edge(), edge()]}, r"edges\[1\]: leads from 'plan' to 'run' as another"),
        ({"edges": [edge(), edge(to="plan", probability=0.6)]}, "after 'plan' sum to more than 1"),
        ({"edges": [edge(probability=1), edge(to="<end>")]}, "after 'plan' sum to more than 1"),
    ],
)
def test_a_document_that_is_no_graph_is_refused_by_its_field(changed, named):
    with pytest.raises(StateError, match=named):
        read_aeg(document(**changed))


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000])
def test_text_that_is_no_json_object_is_refused(text):
    with pytest.raises(StateError, match="aeg"):
        read_aeg(text)


def test_a_declared_graph_is_acted_upon_at_once_and_learns_on():
    graphs = Graphs()
    graphs.put("swe", read_aeg(document()), now_s=0.0)
    outlook = graphs.outlook(at(PLAN))
    assert not outlook.is_cold
    assert outlook.next_node == RUN
    assert graphs.outlook(at(PLAN, RUN)).p_end == pytest.approx(0.2, abs=0.05)
    assert graphs.outlook(at(PLAN, RUN)).pause_p50_s == pytest.approx(2.0, rel=0.2)
    assert graphs.outlook(at(PLAN, RUN)).pause_p95_s == pytest.approx(13.0, rel=0.4)
    graphs.check_integrity()
    for _ in range(200):
        walk = Walk("swe")
        graphs.stepped(walk, PLAN, now_s=1.0)
        graphs.stepped(walk, PLAN, now_s=1.0)
        graphs.ended(walk, now_s=1.0)
    assert graphs.outlook(at(PLAN, RUN, PLAN)).p_end > 0.3


def test_putting_a_graph_takes_the_place_of_what_was_learned():
    graphs = Graphs()
    for _ in range(100):
        walk = Walk("swe")
        graphs.stepped(walk, RUN, now_s=0.0)
        graphs.ended(walk, now_s=0.0)
    graphs.put("swe", read_aeg(document()), now_s=0.0)
    assert graphs.graph("swe").tasks == pytest.approx(30.0)
    graphs.check_integrity()


def test_what_is_written_as_json_is_read_as_the_same_graph():
    graphs = Graphs()
    for number in range(40):
        walk = Walk("swe")
        for node in (PLAN, RUN, RUN if number % 3 else Node("a", "b/c")):
            graphs.returned(walk, 2.0)
            graphs.stepped(walk, node, now_s=0.0, output_tokens=10, overlap=0.5)
        graphs.ended(walk, now_s=0.0)
    written = to_dict(graphs.graph("swe"))
    again = to_dict(read_aeg(json.loads(json.dumps(written))))
    assert again["nodes"] == written["nodes"]
    assert again["edges"] == written["edges"]
    assert {edge["is_used"] for edge in written["edges"]} == {True, False}


def test_nodes_with_like_names_keep_apart():
    nodes = (AegNode(Node("a/b", "c")), AegNode(Node("a", "b/c")), AegNode(Node("<end>")))
    written = to_dict(Aeg("w", nodes, ()))
    assert len({node["id"] for node in written["nodes"]} | {"<end>", "<start>"}) == 5
    assert [each.node for each in read_aeg(written).nodes] == [each.node for each in nodes]


HOSTILE = 'x"]; evil --> y\\\n<script>'


@pytest.mark.parametrize("form", ["dot", "mermaid"])
def test_names_cannot_break_out_of_a_drawing(form):
    aeg = Aeg(HOSTILE, (AegNode(Node(HOSTILE, "t"), p_end=1.0),), ())
    drawn = RENDERERS[form](aeg)
    outside = re.sub(r'"(?:[^"\\]|\\.)*"', "", drawn)
    assert "evil" in drawn
    assert "evil" not in outside
    assert "script" not in outside


def test_a_drawing_shows_each_edge_and_which_are_used():
    aeg = read_aeg(document())
    dot, mermaid = RENDERERS["dot"](aeg), RENDERERS["mermaid"](aeg)
    assert 'n0 -> n1 [label="1.00"];' in dot
    assert 'n1 -> end [label="0.20", style=dashed];' in dot
    assert "begin -->|1.00| n0" in mermaid
    assert "n1 -->|0.80| n1" in mermaid
    assert "n1 -.->|0.20| finish" in mermaid
    assert "pause 2 to 13 s" in dot
