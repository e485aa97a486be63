"""Chains of block ids: cut, moved, compared, and brought to one predecessor an id."""

from hypothesis import given, settings
from hypothesis import strategies as st

from saga_sim.traces.chains import (
    BlockIds,
    ambiguous_id,
    by_prefix,
    common_blocks,
    end_of_ids,
    head,
    joined,
    moved,
    predecessors,
    prefix_ids,
    tokens_of,
)
from saga_sim.traces.model import runs_of

PROPERTY = settings(max_examples=150, deadline=None, derandomize=True)

id_lists = st.lists(st.integers(0, 12), max_size=8)


def flat(chain):
    return [block_id for run in chain for block_id in run]


def all_predecessors(chains):
    before = {}
    for chain in chains:
        last = -1
        for block_id in flat(chain):
            before.setdefault(block_id, set()).add(last)
            last = block_id
    return before


@PROPERTY
@given(ids=id_lists, num_blocks=st.integers(-1, 10))
def test_head(ids, num_blocks):
    assert head(runs_of(ids), num_blocks) == runs_of(ids[: max(num_blocks, 0)])


@PROPERTY
@given(ids=id_lists, cut=st.sets(st.integers(0, 13), min_size=2, max_size=6), by=st.integers(0, 9))
def test_moved(ids, cut, by):
    ends = sorted(cut)
    pieces = [
        (range(start, stop), 100 * i)
        for i, (start, stop) in enumerate(zip(ends[::2], ends[1::2], strict=False), 1)
    ]
    shift = {block_id: extra for piece, extra in pieces for block_id in piece}
    expected = [block_id + shift.get(block_id, by) for block_id in ids]
    assert moved(runs_of(ids), by, pieces) == runs_of(expected)


@PROPERTY
@given(chains=st.lists(id_lists, max_size=6))
def test_ambiguous_id(chains):
    runs = [runs_of(ids) for ids in chains]
    several = {block_id for block_id, of in all_predecessors(runs).items() if len(of) > 1}
    found = ambiguous_id(runs)
    assert (found in several) if several else (found is None)


@PROPERTY
@given(chains=st.lists(id_lists, max_size=6))
def test_new_ids_stand_for_prefixes(chains):
    old = [runs_of(ids) for ids in chains]
    new = by_prefix(old)
    assert ambiguous_id(new) is None
    assert end_of_ids(new) == len(all_predecessors(new))
    for i, ids in enumerate(chains):
        for j, others in enumerate(chains):
            same = 0
            while same < min(len(ids), len(others)) and ids[same] == others[same]:
                same += 1
            assert common_blocks(new[i], new[j]) == same
            shared = set(flat(new[i])) & set(flat(new[j]))
            assert len(shared) == same


def test_ids_that_are_prefixes_already_are_kept():
    good = [runs_of([5, 6, 9]), runs_of([5, 6, 7])]
    assert prefix_ids(good) == good
    assert prefix_ids([runs_of([5, 6]), runs_of([6])]) == [runs_of([0, 1]), runs_of([2])]


def test_predecessors():
    chain = runs_of([4, 5, 9, 5])
    assert [list(predecessors(chain, i)) for i in (4, 5, 9, 6)] == [[-1], [4, 9], [5], []]


def test_joined():
    assert joined([range(0), range(2), range(2, 4), range(7, 8)]) == (range(4), range(7, 8))


@PROPERTY
@given(
    texts=st.lists(st.text("ab\ud800é", max_size=30), min_size=2, max_size=5),
    block_tokens=st.integers(1, 3),
)
def test_text_with_an_equal_prefix_has_equal_blocks(texts, block_tokens):
    ids = BlockIds()
    chains = [ids.of_text(text, block_tokens) for text in texts]
    size = 4 * block_tokens
    assert ambiguous_id(chains) is None
    for a, of_a in zip(texts, chains, strict=True):
        assert len(flat(of_a)) == len(a) // size
        for b, of_b in zip(texts, chains, strict=True):
            same = 0
            while (end := size * (same + 1)) <= min(len(a), len(b)) and a[:end] == b[:end]:
                same += 1
            assert common_blocks(of_a, of_b) == same


def test_tokens_of_text():
    assert [tokens_of("x" * n) for n in (0, 1, 4, 7, 8)] == [0, 1, 1, 1, 2]
