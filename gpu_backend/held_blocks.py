"""Which runs hold which KV blocks.

A block belongs to every session whose last request contained it, its *claims*, and to at most one
run that no session waits for, the latest, its *owner*. Losses of content are numbered: an entry
of a run is stale, wherever it stands, when its block was lost after the run was recorded.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from saga_core.pauses import Wait
from saga_core.retention import RunState
from saga_core.types import Pause

_SLACK = 16


@dataclass(slots=True)
class Held:
    """A run: blocks in chain order.

    Attributes:
        recorded_at: number of the pool's latest loss when the blocks were recorded.
        kind: "paused" for a session's; else "plain", "superseded" or "shared".
        wait: what has been learned of such waits; a session's goes on when the blocks are gone.
        idle_since_s: when it came to wait for what it waits for now.
        size: blocks when it was recorded.
        left_by: of a superseded run, the session that left it.
        uses: requests of its session so far; of an owner, those that read it.
        pause: what somebody said of its session's pause.
        resumed_s: arrival of its session's next request, until that starts.
        live: of an owner, the blocks that it still owns.
        is_branch: another request of the session was under way when this was recorded.
    """

    run_id: int
    session_id: str | None
    kind: str
    blocks: array[int]
    recorded_at: int
    last_used_s: float
    wait: Wait
    idle_since_s: float
    size: int
    left_by: str | None = None
    uses: int = 1
    state: RunState = RunState.IDLE
    pause: Pause | None = None
    resumed_s: float | None = None
    live: int = 0
    is_branch: bool = False


class BlockHolders:
    """Claims and owner of every block of the pool. Each call is linear in the blocks it is about.

    Attributes:
        session_blocks: blocks that sessions claim.
        session_entries: entries of sessions' runs, stale ones included.
    """

    def __init__(self, num_blocks: int) -> None:
        self._claims = array("I", bytes(4 * num_blocks))
        self._lost_at = array("Q", bytes(8 * num_blocks))
        self._losses = 0
        self._owner: dict[int, Held] = {}
        self.session_blocks = 0
        self.session_entries = 0

    def entries(self, blocks: Sequence[int]) -> tuple[array[int], int]:
        """The blocks as a run records them, and the number of the latest loss."""
        return array("I", blocks), self._losses

    def live(self, held: Held) -> list[int]:
        """Blocks of the run that have not lost their content since it was recorded."""
        lost_at, recorded_at = self._lost_at, held.recorded_at
        return [block for block in held.blocks if lost_at[block] <= recorded_at]

    def is_held(self, block: int) -> bool:
        """Whether any run holds the block."""
        return self._claims[block] > 0 or block in self._owner

    def is_claimed(self, block: int) -> bool:
        """Whether a session holds the block."""
        return self._claims[block] > 0

    def owner(self, block: int) -> Held | None:
        """The run of no session that holds the block."""
        return self._owner.get(block)

    def owned(self, blocks: Iterable[int]) -> list[tuple[int, Held]]:
        """Those of the blocks that a run of no session holds, each with that run."""
        owner = self._owner
        return [(block, owner[block]) for block in filter(owner.__contains__, blocks)]

    def claim(self, held: Held, after: Held | None = None) -> None:
        """A session's run holds its blocks from now on.

        What it begins with in common with the run ``after`` which it comes, it takes over from
        that one: a session grows, and only what is new costs more than a comparison.
        """
        same = 0 if after is None else self._take_over(held, after)
        self.session_entries += len(held.blocks) - same
        claims = self._claims
        for block in held.blocks[same:]:
            claims[block] += 1
            if claims[block] == 1:
                self.session_blocks += 1

    def unclaim(self, held: Held) -> list[int]:
        """A session's run gives up all that it has; returns what has not lost its content."""
        blocks = self.live(held)
        self.session_entries -= len(held.blocks)
        claims = self._claims
        for block in blocks:
            claims[block] -= 1
            if not claims[block]:
                self.session_blocks -= 1
        held.blocks = array("I")
        return blocks

    def own(self, held: Held) -> list[Held]:
        """A run of no session takes its blocks; returns the owners that have none left by this."""
        bereft = [owner for block in held.blocks if (owner := self.disown(block)) is not None]
        for block in held.blocks:
            self._owner[block] = held
        held.live = len(held.blocks)
        return bereft

    def disown(self, block: int) -> Held | None:
        """The block's owner gives it up; returns the owner when that was its last."""
        owner = self._owner.pop(block, None)
        if owner is None:
            return None
        self._lost_one(owner)
        return owner if owner.live == 0 else None

    def lose(self, blocks: Iterable[int]) -> list[Held]:
        """The blocks lost their content; returns the owners that have none left by this."""
        self._losses += 1
        losses, lost_at, claims, owner = self._losses, self._lost_at, self._claims, self._owner
        bereft: list[Held] = []
        for block in blocks:
            lost_at[block] = losses
            if claims[block]:
                claims[block] = 0
                self.session_blocks -= 1
            if block in owner and (held := self.disown(block)) is not None:
                bereft.append(held)
        return bereft

    def take(self, held: Held, count: int) -> list[int]:
        """Take blocks off the run's end, until ``count`` of them are held by nobody any more.

        Stale ones and those that somebody else holds are let go of on the way.
        """
        if held.session_id is None:
            return self._take_owned(held, count)
        taken: list[int] = []
        blocks, recorded_at = held.blocks, held.recorded_at
        claims, lost_at, owner = self._claims, self._lost_at, self._owner
        while blocks and len(taken) < count:
            block = blocks.pop()
            self.session_entries -= 1
            if lost_at[block] > recorded_at:
                continue
            claims[block] -= 1
            if not claims[block]:
                self.session_blocks -= 1
                if block not in owner:
                    taken.append(block)
        return taken

    def clear(self) -> None:
        """Every block lost its content."""
        self._losses += 1
        self._lost_at = array("Q", [self._losses]) * len(self._lost_at)
        self._claims = array("I", bytes(4 * len(self._claims)))
        self._owner.clear()
        self.session_blocks = self.session_entries = 0

    def check_integrity(self, sessions: Iterable[Held], owners: Iterable[Held]) -> None:
        """Recompute every count from the runs; raises AssertionError on the first difference."""
        claims, entries = array("I", bytes(4 * len(self._claims))), 0
        for held in sessions:
            assert held.live == 0
            entries += len(held.blocks)
            for block in self.live(held):
                claims[block] += 1
        assert claims == self._claims
        assert entries == self.session_entries
        assert self.session_blocks == sum(count > 0 for count in claims)
        owned = 0
        for held in owners:
            here = [block for block in self.live(held) if self._owner.get(block) is held]
            assert len(here) == len(set(here)) == held.live > 0
            assert held.live <= held.size
            assert len(held.blocks) <= 2 * held.live + _SLACK
            owned += held.live
        assert owned == len(self._owner)

    def _take_over(self, held: Held, before: Held) -> int:
        """Leave to ``held`` the claims on blocks with which both begin; returns their number."""
        same = _count_same(held.blocks, before.blocks)
        if same and max(map(self._lost_at.__getitem__, held.blocks[:same])) > before.recorded_at:
            return 0
        del before.blocks[:same]
        return same

    def _take_owned(self, held: Held, count: int) -> list[int]:
        taken: list[int] = []
        while held.blocks and len(taken) < count:
            block = held.blocks.pop()
            if self._lost_at[block] <= held.recorded_at and self._owner.get(block) is held:
                del self._owner[block]
                self._lost_one(held)
                if not self._claims[block]:
                    taken.append(block)
        return taken

    def _lost_one(self, held: Held) -> None:
        """An owner has one block less; entries that others took over are not to pile up."""
        held.live -= 1
        if len(held.blocks) <= 2 * held.live + _SLACK:
            return
        blocks = [block for block in self.live(held) if self._owner.get(block) is held]
        held.blocks = array("I", blocks)


def _count_same(first: array[int], second: array[int]) -> int:
    """Entries with which both begin, found by halving: comparing slices costs next to nothing."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while low + 1 < high:
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low
