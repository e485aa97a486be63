"""Where graphs are drawn: for any graph, no two nodes on one another, and every edge there."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from saga_core.aeg import read_aeg, to_dict
from saga_gateway.graph_drawing import MAX_EDGES, MAX_NODES, draw
from saga_gateway.graph_layout import LAYER_HEIGHT, NODE_HEIGHT, NODE_WIDTH, lay_out

NODES = [f"n{number}" for number in range(9)]
EDGES = st.sets(st.tuples(st.sampled_from(NODES), st.sampled_from(NODES)), max_size=30)


@settings(max_examples=60, deadline=None)
@given(EDGES)
def test_nodes_keep_apart_and_edges_meet_them(edges):
    layout = lay_out(NODES, sorted(edges))
    assert set(layout.centres) == set(NODES)
    for (x, y), (other_x, other_y) in combinations(layout.centres.values(), 2):
        assert abs(x - other_x) >= NODE_WIDTH or abs(y - other_y) >= LAYER_HEIGHT - 1
    for x, y in layout.centres.values():
        assert NODE_WIDTH / 2 <= x <= layout.width - NODE_WIDTH / 2
        assert NODE_HEIGHT / 2 <= y <= layout.height - NODE_HEIGHT / 2
    assert set(layout.routes) == {edge for edge in edges if edge[0] != edge[1]}
    for (source, target), points in layout.routes.items():
        for name, (x, y) in ((source, points[0]), (target, points[-1])):
            assert abs(layout.centres[name][0] - x) <= NODE_WIDTH / 2
            assert abs(layout.centres[name][1] - y) == NODE_HEIGHT / 2


@settings(max_examples=20, deadline=None)
@given(EDGES)
def test_the_same_graph_is_drawn_the_same(edges):
    assert lay_out(NODES, sorted(edges)) == lay_out(NODES, sorted(edges))


def test_edges_lead_down_where_there_is_no_cycle():
    layout = lay_out(["a", "b", "c"], [("a", "b"), ("b", "c"), ("a", "c")])
    assert layout.centres["a"][1] < layout.centres["b"][1] < layout.centres["c"][1]
    assert len(layout.routes["a", "c"]) == 3  # Around b.


def test_two_edges_between_two_nodes_stand_side_by_side():
    layout = lay_out(["a", "b"], [("a", "b"), ("b", "a")])
    there, back = layout.routes["a", "b"], layout.routes["b", "a"]
    assert there[0][0] < back[-1][0]
    assert there[-1][0] < back[0][0]


def test_of_an_empty_graph_there_is_nothing():
    assert lay_out([], []).centres == {}


def test_a_large_graph_is_drawn_in_part_and_says_so():
    nodes = [{"id": f"n{number}", "count": number} for number in range(MAX_NODES + 20)]
    edges = [
        {"from": one["id"], "to": other["id"], "probability": 0.01}
        for one in nodes
        for other in nodes[:8]
    ]
    graph = to_dict(read_aeg({"version": 1, "workflow": "w", "nodes": nodes, "edges": edges}))
    svg, words = draw(graph)
    assert svg.count('class="node"') == MAX_NODES
    assert svg.count('class="edge ') <= MAX_EDGES
    assert words.startswith("20 nodes and ")
