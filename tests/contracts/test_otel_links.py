"""Edges inferred from recorded spans against those that a reader sees in them."""

import random

import pytest

from saga_sim.aeg.exchanges import Exchange
from saga_sim.aeg.links import EdgeScore, infer_edges, read_spans, score_edges
from tests.contracts.otel_edges import TRUE_EDGES


@pytest.fixture(scope="module")
def recorded(traces) -> dict[str, list[Exchange]]:
    folder = traces / "otel_dags"
    assert {path.stem for path in folder.glob("*.json")} == set(TRUE_EDGES)
    return {name: read_spans(folder / f"{name}.json") for name in TRUE_EDGES}


def pooled(scores):
    return sum(scores, EdgeScore())


def test_true_edges_are_possible(recorded):
    for name, edges in TRUE_EDGES.items():
        spans = {each.name: each for each in recorded[name]}
        assert all(spans[before].end_s <= spans[after].start_s for before, after in edges)
    assert sum(map(len, TRUE_EDGES.values())) == 75


@pytest.mark.parametrize("name", TRUE_EDGES)
def test_each_recording_alone(recorded, name):
    score = score_edges(infer_edges(recorded[name]), TRUE_EDGES[name])
    assert score.precision >= 0.9
    assert score.recall >= 0.9


def test_all_recordings_alone(recorded):
    score = pooled(
        score_edges(infer_edges(spans), TRUE_EDGES[name]) for name, spans in recorded.items()
    )
    assert score.true == 75
    assert score.precision >= 0.98
    assert score.recall >= 0.98


def test_recordings_that_overlap_in_one_scope(recorded):
    """Strangers do not wait for each other."""
    scores, strangers = [], 0
    for seed in range(5):
        rng = random.Random(seed)
        mixed, true = [], set()
        for name, spans in recorded.items():
            shift_s = rng.uniform(0.0, 15.0)
            mixed += [each.shifted(shift_s, f"{name} ") for each in spans]
            true |= {(f"{name} {a}", f"{name} {b}") for a, b in TRUE_EDGES[name]}
        inferred = infer_edges(mixed)
        scores.append(score_edges(inferred, true))
        strangers += sum(a.split()[0] != b.split()[0] for a, b in inferred)
    assert pooled(scores).precision >= 0.95
    assert pooled(scores).recall >= 0.95
    assert strangers <= 2


def test_specialists_one_after_another(recorded):
    """As with a client that sends one request at a time: the same edges."""
    scores = []
    for name in ("code_review_workflow", "multi_agent_research", "software_architecture_review"):
        serial: list[Exchange] = []
        for each in recorded[name]:
            start_s = max(each.start_s, serial[-1].end_s + 0.5) if serial else each.start_s
            serial.append(each.shifted(start_s - each.start_s))
        scores.append(score_edges(infer_edges(serial), TRUE_EDGES[name]))
    assert pooled(scores).precision >= 0.9
    assert pooled(scores).recall >= 0.9
