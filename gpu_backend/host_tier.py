"""Which evicted KV blocks host memory keeps: those of the runs that are worth most.

Blocks are known by their hash, which covers their whole prefix. Each belongs to the run that lost
it on the GPU tier: a session's, or one that no session waits for. A run is worth here what it is
worth there, by the same policy and the same evidence. When a block is back on the GPU tier its
copy here stays, but is the first to go: the two tiers together hold as much as they can.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from saga_core.retention import EvictionOrder, RetentionPolicy, Run, RunState

Key = bytes
Holder = Hashable
"""Who holds blocks: a session by its id, any other run by its number."""


@dataclass(slots=True)
class _Held:
    """A run's keys in the order in which they go: the tail of the chain first."""

    run: Run
    keys: OrderedDict[Key, None] = field(default_factory=OrderedDict)


class HostTier:
    """Keys of the blocks in host memory, in the order of a retention policy.

    Every method that needs the time takes ``now_s`` on the clock of the GPU tier's index, and the
    GPU tier's pressure where a policy asks for it.

    Args:
        num_blocks: blocks that host memory holds.
        policy: the policy that orders the GPU tier, with the same evidence.
    """

    def __init__(self, num_blocks: int, policy: RetentionPolicy) -> None:
        self.num_blocks = num_blocks
        self.refused_blocks = 0
        self._policy = policy
        self._order = EvictionOrder(policy)
        self._held: dict[Holder, _Held] = {}
        self._holder: dict[int, Holder] = {}
        # None: the GPU tier has the block too, or nobody wants it. These go first.
        self._owner: dict[Key, Holder | None] = {}
        self._loose: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._owner)

    def __contains__(self, key: Key) -> bool:
        return key in self._owner

    def held_by(self, holder: Holder) -> int:
        """Blocks that only this tier holds for the session, or the run."""
        held = self._held.get(holder)
        return 0 if held is None else len(held.keys)

    # What is held

    def admits(self, run: Run, *, now_s: float, pressure: float) -> bool:
        """Whether a block of ``run`` is worth more than what it would take the place of."""
        if run.state is RunState.ENDED:
            return False
        if len(self._owner) < self.num_blocks or self._loose:
            return True
        least = self._order.peek(now_s=now_s, pressure=pressure)
        admitted = least is None or self._policy.key(run, now_s=now_s, pressure=pressure) >= least
        self.refused_blocks += not admitted
        return admitted

    def insert(self, key: Key, holder: Holder, run: Run, *, now_s: float, pressure: float) -> None:
        """A block of ``run`` leaves the GPU tier: it is copied here, or a copy is here already.

        It stood before those of its run that left so far.
        """
        if key in self._owner:
            self.remove(key)
        held = self._held.get(holder)
        if held is None:
            held = self._held[holder] = _Held(run)
            self._holder[run.run_id] = holder
            self._order.put(run, now_s=now_s, pressure=pressure)
        self._owner[key] = holder
        held.keys[key] = None

    def remove(self, key: Key) -> None:
        """The block is no longer held."""
        holder = self._owner.pop(key)
        if holder is None:
            del self._loose[key]
            return
        held = self._held[holder]
        del held.keys[key]
        if not held.keys:
            self._forget(holder)

    def ranked(self, holder: Holder, run: Run, *, now_s: float, pressure: float) -> None:
        """The GPU tier has ranked a run anew; so does this one when it holds blocks of it."""
        held = self._held.get(holder)
        if held is None:
            return
        self._order.discard(held.run.run_id)
        del self._holder[held.run.run_id]
        held.run = run
        self._holder[run.run_id] = holder
        self._order.put(run, now_s=now_s, pressure=pressure)

    def used(self, holder: Holder, chain: Iterable[Key]) -> None:
        """A request has ended whose full blocks are ``chain``: the GPU tier holds them all.

        What is held of them here may go first, and so may the rest of the run's: its session has
        left that branch.
        """
        before = self._held.get(holder)
        for key in (*(before.keys if before is not None else ()), *chain):
            if self._owner.get(key) is not None:
                self.remove(key)
                self._owner[key] = None
                self._loose[key] = None

    def evict(
        self, count: int, is_evictable: Callable[[Key], bool], *, now_s: float, pressure: float
    ) -> list[Key] | None:
        """Give up exactly ``count`` blocks that may go; None, and nothing changes, when there are
        not so many."""
        chosen = list(itertools.islice(filter(is_evictable, self._loose), count))
        passed_over: list[_Held] = []
        while len(chosen) < count:
            run_id = self._order.first(now_s=now_s, pressure=pressure)
            if run_id is None:
                break
            held = self._held[self._holder[run_id]]
            chosen += itertools.islice(filter(is_evictable, held.keys), count - len(chosen))
            if len(chosen) < count:
                self._order.discard(run_id)
                passed_over.append(held)
        for held in passed_over:
            self._order.put(held.run, now_s=now_s, pressure=pressure)
        if len(chosen) < count:
            return None
        for key in chosen:
            self.remove(key)
        return chosen

    def clear(self) -> None:
        """Nothing is held any more."""
        self._order = EvictionOrder(self._policy)
        for part in (self._held, self._holder, self._owner, self._loose):
            part.clear()

    def check_integrity(self) -> None:
        """Compare the parts with each other; raises AssertionError on the first difference."""
        for key, holder in self._owner.items():
            assert key in (self._loose if holder is None else self._held[holder].keys)
        total = len(self._loose) + sum(len(held.keys) for held in self._held.values())
        assert total == len(self._owner)
        assert all(held.keys for held in self._held.values())
        assert {held.run.run_id: h for h, held in self._held.items()} == self._holder
        assert len(self._order) == len(self._held)
        assert all(held.run.run_id in self._order for held in self._held.values())

    def _forget(self, holder: Holder) -> None:
        held = self._held.pop(holder)
        self._order.discard(held.run.run_id)
        del self._holder[held.run.run_id]
