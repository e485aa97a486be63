"""The tree of resident blocks against sets of blocks."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from saga_sim.resident import ResidentTree
from saga_sim.workload import ROOT, Nodes

STATEFUL = settings(
    max_examples=150,
    stateful_step_count=40,
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


class NaiveResident:
    """Resident blocks as a set of (node, offset); a holder covers those on the path to its tip."""

    def __init__(self, nodes):
        self.nodes = nodes
        self.resident = set()
        self.tips = {}

    def path(self, node):
        """Blocks from the root down."""
        blocks = []
        while node != ROOT:
            blocks[:0] = [(node, offset) for offset in range(self.nodes.length[node])]
            node = self.nodes.parent[node]
        return blocks

    def covered(self, holder):
        return [block for block in self.path(self.tips[holder]) if block in self.resident]

    def covered_by_others(self, holder):
        others = [other for other in self.tips if other != holder]
        return {block for other in others for block in self.covered(other)}

    def hold(self, holder, node):
        self.tips[holder] = node
        self.resident.update(self.path(node))

    def give_up(self, holder, count):
        """Returns the blocks evicted, in order."""
        others = self.covered_by_others(holder)
        own = [block for block in self.covered(holder) if block not in others]
        freed = own[::-1][:count]
        self.resident.difference_update(freed)
        del self.tips[holder]
        if len(freed) < len(own):
            self.tips[holder] = own[len(own) - len(freed) - 1][0]
        return freed

    def hit(self, node):
        hit, last = 0, ROOT
        for block in self.path(node):
            if block not in self.resident:
                break
            hit, last = hit + 1, block[0]
        return hit, last


class ResidentMachine(RuleBasedStateMachine):
    """Drives the tree and the sets side by side."""

    def __init__(self):
        super().__init__()
        self.num_holders = 0

    @initialize(data=st.data(), lengths=st.lists(st.integers(1, 4), min_size=1, max_size=8))
    def grow(self, data, lengths):
        parents = [data.draw(st.integers(ROOT, n - 1)) for n in range(len(lengths))]
        self.nodes = forest(*zip(parents, lengths, strict=True))
        self.tree, self.naive = ResidentTree(self.nodes), NaiveResident(self.nodes)

    def any_node(self, data):
        return data.draw(st.integers(0, len(self.nodes.parent) - 1))

    def any_holder(self, data):
        return data.draw(st.sampled_from(sorted(self.naive.tips)))

    @rule(data=st.data())
    def hold(self, data):
        self.num_holders += 1
        node = self.any_node(data)
        self.tree.hold(self.num_holders, node)
        self.naive.hold(self.num_holders, node)

    @precondition(lambda self: self.naive.tips)
    @rule(data=st.data(), count=st.integers(1, 6))
    def give_up(self, data, count):
        self._give_up(self.any_holder(data), count)

    @precondition(lambda self: self.naive.tips)
    @rule(data=st.data())
    def let_go_if_others_hold_all(self, data):
        holder = self.any_holder(data)
        if set(self.naive.covered(holder)) <= self.naive.covered_by_others(holder):
            self.tree.let_go(holder)
            del self.naive.tips[holder]

    @rule(data=st.data())
    def find(self, data):
        node = self.any_node(data)
        assert self.tree.hit(node) == self.naive.hit(node)

    @invariant()
    def is_the_same(self):
        if not hasattr(self, "tree"):
            return
        self.tree.check_integrity()
        assert self.tree.used == len(self.naive.resident)
        for holder in range(self.num_holders + 2):
            assert self.tree.is_held(holder) == (holder in self.naive.tips)
        for holder, tip in self.naive.tips.items():
            assert self.tree.tip(holder) == tip
        for node in range(len(self.nodes.parent)):
            at = {holder for holder, tip in self.naive.tips.items() if tip == node}
            assert self.tree.tips_at(node) == at

    def teardown(self):
        for holder in sorted(getattr(getattr(self, "naive", None), "tips", ())):
            self._give_up(holder, 1000)
            assert not self.tree.is_held(holder)
        if hasattr(self, "tree"):
            self.is_the_same()
            assert self.tree.used == 0

    def _give_up(self, holder, count):
        freed = self.tree.give_up(holder, count)
        assert all(blocks > 0 for _, _, blocks in freed)
        one_by_one = [
            (node, offset)
            for node, start, blocks in freed
            for offset in reversed(range(start, start + blocks))
        ]
        assert one_by_one == self.naive.give_up(holder, count)


def test_the_tree_is_what_sets_of_blocks_are():
    run_state_machine_as_test(ResidentMachine, settings=STATEFUL)


def test_a_chain_is_evicted_from_its_tail_across_nodes():
    tree = ResidentTree(forest((ROOT, 3), (0, 2), (1, 4)))
    tree.hold(1, 2)
    assert tree.give_up(1, 5) == [(2, 0, 4), (1, 1, 1)]
    assert (tree.tip(1), tree.used, tree.hit(2)) == (1, 4, (4, 1))
    assert tree.give_up(1, 9) == [(1, 0, 1), (0, 0, 3)]
    assert (tree.is_held(1), tree.used, tree.hit(2)) == (False, 0, (0, ROOT))


def test_what_another_chain_needs_stays_when_the_first_is_given_up():
    tree = ResidentTree(forest((ROOT, 3), (0, 2), (0, 4)))
    tree.hold(1, 1)
    tree.hold(2, 2)
    assert tree.give_up(1, 9) == [(1, 0, 2)]
    assert not tree.is_held(1)
    assert tree.give_up(2, 9) == [(2, 0, 4), (0, 0, 3)]


def test_a_holder_in_the_middle_of_another_chain_keeps_its_part():
    tree = ResidentTree(forest((ROOT, 3), (0, 2)))
    tree.hold(1, 1)
    tree.hold(2, 0)
    assert tree.give_up(2, 9) == []
    tree.hold(3, 0)
    assert tree.give_up(1, 9) == [(1, 0, 2)]
    assert tree.give_up(3, 9) == [(0, 0, 3)]


def test_an_evicted_tail_comes_back_when_the_path_is_held_again():
    tree = ResidentTree(forest((ROOT, 5), (0, 2)))
    tree.hold(1, 0)
    tree.give_up(1, 2)
    assert tree.hit(1) == (3, 0)
    tree.hold(2, 1)
    tree.check_integrity()
    assert (tree.hit(1), tree.used) == ((7, 1), 7)


def test_a_holder_let_go_leaves_the_blocks_of_others():
    tree = ResidentTree(forest((ROOT, 5)))
    tree.hold(1, 0)
    tree.hold(2, 0)
    tree.let_go(1)
    tree.check_integrity()
    assert (tree.tips_at(0), tree.used) == (frozenset({2}), 5)


def lose_the_middle(tree):
    tree._blocks[0] -= 1
    tree.used -= 1


def miscount(tree):
    tree.used += 1


def forget_the_holder(tree):
    tree.let_go(1)


@pytest.mark.parametrize("damage", [lose_the_middle, miscount, forget_the_holder])
def test_the_integrity_check_finds_damage(damage):
    tree = ResidentTree(forest((ROOT, 3), (0, 2)))
    tree.hold(1, 1)
    tree.check_integrity()
    damage(tree)
    with pytest.raises(AssertionError):
        tree.check_integrity()
