"""Regret: what was lost to evictions is what an infinite cache would still have."""

from collections import OrderedDict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_backend.regret import GhostBlocks
from saga_sim.oracle import InfiniteCache

PROPERTY = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
CAPACITY = 8
UNBOUNDED = 10**9

# Prompts as tokens of one block each; few of them, so that prefixes come back.
prompts = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=CAPACITY).map(tuple), max_size=40
)


class SmallLRU:
    """A prefix cache of a few blocks, with the ghosts of what it evicted."""

    def __init__(self, max_ghosts):
        self.resident = OrderedDict()
        self.ghosts = GhostBlocks(max_ghosts)

    def serve(self, hashes):
        """Admit a request and cache its blocks. Returns its hit and its lost blocks."""
        needed = hashes[:-1]  # The last block has the last token, which is always computed.
        hit = 0
        while hit < len(needed) and needed[hit] in self.resident:
            hit += 1
        lost = self.ghosts.count_lost(needed[hit:], self.resident.__contains__)
        for block_hash in reversed(hashes):
            self.resident[block_hash] = None
            self.resident.move_to_end(block_hash)
        while len(self.resident) > CAPACITY:
            evicted, _ = self.resident.popitem(last=False)
            self.ghosts.evicted(evicted)
        return hit, lost


def hashes_of(prompt):
    """A hash covers its whole prefix."""
    return [prompt[:end] for end in range(1, len(prompt) + 1)]


def serve_all(prompts, max_ghosts):
    cache, oracle, served = SmallLRU(max_ghosts), InfiniteCache(), []
    for prompt in prompts:
        hashes = hashes_of(prompt)
        ideal = oracle.hit_blocks(hashes[:-1])
        hit, lost = cache.serve(hashes)
        oracle.add(hashes)
        served.append((ideal, hit, lost))
        assert len(cache.ghosts) <= max_ghosts
    return served


@PROPERTY
@given(prompts)
def test_lost_blocks_are_the_hit_of_an_infinite_cache_minus_the_real_one(prompts):
    for ideal, hit, lost in serve_all(prompts, UNBOUNDED):
        assert lost == ideal - hit


@PROPERTY
@given(prompts, st.integers(0, 12))
def test_with_few_ghosts_never_more_is_counted(prompts, max_ghosts):
    for ideal, hit, lost in serve_all(prompts, max_ghosts):
        assert 0 <= lost <= ideal - hit


def test_the_property_is_about_something():
    turns = [(n % 3, *[n % 2] * 6) for n in range(12)]
    assert sum(lost for _, _, lost in serve_all(turns, UNBOUNDED)) > 20
    assert sum(lost for _, _, lost in serve_all(turns, 0)) == 0


def nowhere(block_hash):
    return False


@pytest.mark.parametrize(
    ("hashes", "resident", "lost"),
    [
        ("", "", 0),
        ("ab", "", 2),
        ("abx", "", 2),
        ("xab", "", 0),
        ("arb", "r", 3),  # Behind a gap it is of no use, so it was lost too.
        ("axb", "r", 1),
        ("arr", "r", 3),
        ("ra", "r", 0),  # Right behind the hit it was not lost: the engine did not use it.
    ],
)
def test_the_count_runs_from_an_evicted_block_to_one_that_was_never_cached(hashes, resident, lost):
    ghosts = GhostBlocks(10)
    for block_hash in "ab":
        ghosts.evicted(block_hash)
    assert ghosts.count_lost(hashes, resident.__contains__) == lost


def test_the_latest_ghosts_are_kept():
    ghosts = GhostBlocks(2)
    for block_hash in "abac":
        ghosts.evicted(block_hash)
    assert len(ghosts) == 2
    counted = {block_hash: ghosts.count_lost(block_hash, nowhere) for block_hash in "abc"}
    assert counted == {"a": 1, "b": 0, "c": 1}


def test_a_bound_of_zero_counts_nothing():
    ghosts = GhostBlocks(0)
    ghosts.evicted("a")
    assert len(ghosts) == 0
    assert ghosts.count_lost("a", nowhere) == 0


def test_hashes_are_read_only_as_far_as_they_are_lost():
    ghosts = GhostBlocks(10)
    ghosts.evicted("a")
    rest = iter("axyz")
    assert ghosts.count_lost(rest, nowhere) == 1
    assert list(rest) == ["y", "z"]


def test_what_is_cached_again_is_not_lost():
    ghosts = GhostBlocks(10)
    ghosts.evicted("a")
    assert ghosts.count_lost("a", "a".__contains__) == 0


def test_what_is_gone_on_purpose_is_no_regret():
    ghosts = GhostBlocks(10)
    ghosts.evicted("a")
    ghosts.forget("a")
    ghosts.forget("never seen")
    assert len(ghosts) == 0
    assert ghosts.count_lost("a", nowhere) == 0


def test_a_reset_on_purpose_is_no_regret():
    ghosts = GhostBlocks(10)
    for block_hash in "abc":
        ghosts.evicted(block_hash)
    ghosts.clear()
    assert len(ghosts) == 0
    assert ghosts.count_lost("abc", nowhere) == 0


def test_the_infinite_cache_hits_the_longest_known_prefix():
    oracle = InfiniteCache()
    assert oracle.hit_blocks("abc") == 0
    oracle.add("abd")
    oracle.add("ab")
    assert len(oracle) == 3
    assert [oracle.hit_blocks(text) for text in ("", "abc", "abd", "abda", "xab")] == [
        0,
        2,
        3,
        4,
        0,
    ]
