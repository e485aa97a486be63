"""The host tier: what goes on from the worker's prefix, order of loss, one link, accounting."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saga_sim.host import HostTier
from saga_sim.workload import ROOT, Nodes

PROPERTY = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def forest(*nodes):
    """Nodes of (parent, length)."""
    made = Nodes()
    for parent, length in nodes:
        made.add(parent, length)
    return made


CHAIN = forest((ROOT, 4), (0, 4), (1, 2))
ROOTS = forest((ROOT, 4), (ROOT, 4), (ROOT, 4))


def host_of(nodes, capacity=100, blocks_per_s=1e9, **options):
    return HostTier(nodes, capacity, blocks_per_s, **options)


def test_what_was_evicted_tail_first_comes_back_behind_the_workers_prefix():
    host = host_of(CHAIN)
    for node, start, count in [(2, 0, 2), (1, 2, 2), (1, 0, 2), (0, 3, 1)]:
        host.put(node, start, count, now_s=0.0)
    assert host.used == 7
    assert host.take(3, 2, now_s=1.0) == 7
    assert (host.used, host.refused) == (0, 0)
    assert host.take(3, 2, now_s=2.0) == 0


def test_only_the_path_of_the_call_is_loaded():
    nodes = forest((ROOT, 4), (0, 3), (0, 2))
    host = host_of(nodes)
    for node, count in [(1, 3), (2, 2), (0, 4)]:
        host.put(node, 0, count, now_s=0.0)
    assert host.take(0, 2, now_s=1.0) == 6
    assert host.used == 3
    assert host.take(4, 1, now_s=2.0) == 3


@pytest.mark.parametrize("hit", [0, 3, 5])
def test_what_does_not_go_on_from_the_workers_prefix_stays(hit):
    host = host_of(CHAIN)
    host.put(1, 0, 4, now_s=0.0)
    assert host.take(hit, 2, now_s=1.0) == 0
    assert host.used == 4


def test_loading_stops_at_the_first_block_that_is_missing():
    host = host_of(CHAIN, 7)
    host.put(1, 0, 4, now_s=0.0)
    host.put(2, 0, 2, now_s=0.0)
    host.put(0, 0, 4, now_s=0.0)  # Drops the last three of node 1, the oldest here.
    assert host.take(0, 2, now_s=1.0) == 5
    assert host.used == 2


def test_first_in_is_first_out_from_its_tail():
    host = host_of(ROOTS, 9)
    for node in (0, 1, 2):
        host.put(node, 0, 4, now_s=0.0)
    assert host.used == 9
    assert [host.take(0, node, now_s=1.0) for node in (0, 1, 2)] == [1, 4, 4]
    for node in (0, 1, 2):
        host.put(node, 2, 2, now_s=2.0)
    assert host.used == 6


def test_what_comes_again_is_young_again():
    host = host_of(ROOTS, 8)
    host.put(0, 0, 4, now_s=0.0)
    host.put(1, 0, 4, now_s=1.0)
    assert host.take(0, 0, now_s=2.0) == 4
    host.put(0, 0, 4, now_s=3.0)
    host.put(2, 0, 4, now_s=4.0)
    assert [host.take(0, node, now_s=5.0) for node in (0, 1, 2)] == [4, 0, 4]


def test_more_than_the_whole_tier_leaves_the_front_of_the_chain():
    host = host_of(CHAIN, 3)
    host.put(0, 0, 4, now_s=0.0)
    assert host.used == 3
    assert host.take(0, 0, now_s=1.0) == 3


def test_a_link_that_is_busy_refuses_what_would_wait_too_long():
    host = host_of(ROOTS, 100, 4.0, max_queue_s=1.5)
    host.put(0, 0, 4, now_s=0.0)  # Busy until 1 s: two more may queue.
    host.put(1, 1, 3, now_s=0.0)
    assert (host.used, host.refused) == (4, 3)
    host.put(1, 0, 2, now_s=0.0)
    assert (host.used, host.refused) == (6, 3)
    host.put(2, 0, 1, now_s=0.0)
    assert (host.used, host.refused) == (6, 4)
    host.put(2, 0, 4, now_s=1.0)
    assert (host.used, host.refused) == (10, 4)
    assert host.busy_s == pytest.approx(10 / 4.0)


def test_loading_takes_the_same_link():
    host = host_of(ROOTS, 100, 4.0)
    host.put(0, 0, 4, now_s=0.0)
    assert host.take(0, 0, now_s=10.0) == 4
    host.put(1, 0, 4, now_s=10.5)
    assert host.refused == 4
    host.put(1, 0, 4, now_s=11.0)
    assert (host.used, host.refused) == (4, 4)
    assert host.busy_s == pytest.approx(3.0)


def test_a_refused_stretch_does_not_bar_the_node_for_ever():
    host = host_of(ROOTS, 100, 4.0, max_queue_s=0.5)
    host.put(0, 2, 2, now_s=0.0)
    host.put(0, 0, 2, now_s=0.0)
    assert host.refused == 2
    assert host.take(0, 0, now_s=50.0) == 0
    # The call was computed anew, and is evicted again while the link is free.
    host.put(0, 3, 1, now_s=100.0)
    host.put(0, 1, 2, now_s=101.0)
    host.put(0, 0, 1, now_s=102.0)
    assert host.take(0, 0, now_s=200.0) == 4


def test_what_replaces_a_dead_stretch_is_young():
    host = host_of(ROOTS, 8)
    host.put(0, 2, 2, now_s=0.0)
    host.put(1, 0, 4, now_s=1.0)
    host.put(0, 0, 1, now_s=2.0)  # Offset 1 never came: only this can be of use now.
    assert host.used == 5
    host.put(2, 0, 4, now_s=3.0)
    assert [host.take(0, node, now_s=4.0) for node in (0, 1, 2)] == [1, 3, 4]


@st.composite
def histories(draw):
    """A forest and what a worker may do: evict stretches, take paths up, at rising times."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    parents = [draw(st.integers(ROOT, n - 1)) for n in range(len(lengths))]
    nodes = forest(*zip(parents, lengths, strict=True))
    steps = []
    for _ in range(draw(st.integers(1, 40))):
        node = draw(st.integers(0, len(lengths) - 1))
        wait_s = draw(st.sampled_from([0.0, 0.1, 5.0]))
        if draw(st.booleans()):
            start = draw(st.integers(0, lengths[node] - 1))
            steps.append(("put", node, start, draw(st.integers(1, lengths[node] - start)), wait_s))
        else:
            steps.append(("take", node, draw(st.integers(0, nodes.depth[node])), 0, wait_s))
    return nodes, steps


def path_of(nodes, node):
    """Blocks of a path from the root down, as (node, offset)."""
    blocks = []
    while node != ROOT:
        blocks[:0] = [(node, offset) for offset in range(nodes.length[node])]
        node = nodes.parent[node]
    return blocks


@PROPERTY
@given(histories(), st.integers(1, 12), st.sampled_from([4.0, 40.0, 1e9]))
def test_accounts_are_right_and_only_what_was_evicted_is_loaded(history, capacity, blocks_per_s):
    nodes, steps = history
    host = host_of(nodes, capacity, blocks_per_s)
    evicted, now_s = set(), 0.0
    moved, offered = 0, 0
    for kind, node, at, count, wait_s in steps:
        now_s += wait_s
        before = host.refused
        if kind == "put":
            host.put(node, at, count, now_s=now_s)
            assert host.refused - before in (0, count)
            moved += count - (host.refused - before)
            offered += count
            evicted.update((node, offset) for offset in range(at, at + count))
        else:
            used = host.used
            loaded = host.take(at, node, now_s=now_s)
            blocks = path_of(nodes, node)[at : at + loaded]
            assert len(blocks) == loaded
            assert evicted.issuperset(blocks)
            evicted.difference_update(blocks)
            assert host.used == used - loaded
            moved += loaded
        assert 0 <= host.used <= min(capacity, len(evicted))
        assert host.busy_s == pytest.approx(moved / blocks_per_s)
        assert host.refused <= offered
