"""A heap whose ranks change gives what sorting gives."""

from hypothesis import given, settings
from hypothesis import strategies as st

from saga_core.lazy_heap import LazyHeap

keys = st.sampled_from("abcdef")
steps = st.lists(
    st.tuples(st.just("set"), keys, st.integers(0, 4))
    | st.tuples(st.just("drop"), keys, st.just(0))
    | st.tuples(st.just("due"), keys, st.integers(0, 4)),
    max_size=200,
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(steps, st.integers(1, 7))
def test_it_orders_as_sorting_does(steps, limit):
    heap, model = LazyHeap(), {}
    for kind, key, rank in steps:
        if kind == "set":
            heap.set(key, rank)
            model[key] = rank
        elif kind == "drop":
            heap.drop(key)
            model.pop(key, None)
        else:
            due = [k for k in sorted(model, key=lambda k: (model[k], k)) if model[k] <= rank]
            assert heap.due(rank, limit) == due[:limit]
            for k in due[:limit]:
                del model[k]
        ordered = sorted(model, key=lambda k: (model[k], k))
        assert heap.firsts(limit) == ordered[:limit]
        assert heap.first() == (ordered[0] if ordered else None)
        assert len(heap) == len(model)


def test_it_stays_small_when_ranks_keep_changing():
    heap = LazyHeap()
    for number in range(10_000):
        heap.set("a", number)
    assert len(heap._heap) < 100
    assert heap.first() == "a"
