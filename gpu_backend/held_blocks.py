"""Which runs hold which KV blocks.

A block belongs to every session whose last request contained it, its *claims*, and to at most one
run that no session waits for, the latest, its *owner*. A block that loses its content gets a new
generation, so entries of older ones are known to be stale wherever they stand.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from saga_core.pauses import Wait
from saga_core.retention import RunState
from saga_core.types import Pause

_SLACK = 16


@dataclass(slots=True)
class Held:
    """A run: blocks in chain order, each with the generation that it had when recorded.

    Attributes:
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
    generations: array[int]
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

    def entries(self) -> Iterator[tuple[int, int]]:
        """Blocks with their generations, in chain order."""
        return zip(self.blocks, self.generations, strict=True)


class BlockHolders:
    """Claims and owner of every block of the pool. Each call is linear in the blocks it is about.

    Attributes:
        session_blocks: blocks that sessions claim.
        session_entries: entries of sessions' runs, stale ones included.
    """

    def __init__(self, num_blocks: int) -> None:
        self._claims = [0] * num_blocks
        self._generation = [0] * num_blocks
        self._owner: dict[int, Held] = {}
        self.session_blocks = 0
        self.session_entries = 0

    def entries(self, blocks: Sequence[int]) -> tuple[array[int], array[int]]:
        """The blocks and the generations that they have now."""
        return array("I", blocks), array("I", (self._generation[block] for block in blocks))

    def live(self, held: Held) -> list[int]:
        """Blocks of the run that have not lost their content since it was recorded."""
        return [block for block, generation in held.entries() if self._is(block, generation)]

    def is_held(self, block: int) -> bool:
        """Whether any run holds the block."""
        return self._claims[block] > 0 or block in self._owner

    def is_claimed(self, block: int) -> bool:
        """Whether a session holds the block."""
        return self._claims[block] > 0

    def owner(self, block: int) -> Held | None:
        """The run of no session that holds the block."""
        return self._owner.get(block)

    def claim(self, held: Held) -> None:
        """A session's run holds its blocks from now on."""
        self.session_entries += len(held.blocks)
        for block in held.blocks:
            self._claims[block] += 1
            self.session_blocks += self._claims[block] == 1

    def unclaim(self, held: Held) -> list[int]:
        """A session's run gives up all that it has; returns what has not lost its content."""
        blocks = self.live(held)
        self.session_entries -= len(held.blocks)
        for block in blocks:
            self._unclaim(block)
        held.blocks, held.generations = array("I"), array("I")
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

    def lose(self, block: int) -> Held | None:
        """The block lost its content; returns its owner when that has none left by this."""
        self._generation[block] += 1
        if self._claims[block]:
            self._claims[block] = 0
            self.session_blocks -= 1
        return self.disown(block)

    def pop(self, held: Held) -> int | None:
        """Take the last block from the run; None when it is stale or somebody else holds it."""
        block, generation = held.blocks.pop(), held.generations.pop()
        self.session_entries -= held.session_id is not None
        if not self._is(block, generation):
            return None
        if held.session_id is not None:
            self._unclaim(block)
        elif self._owner.get(block) is held:
            del self._owner[block]
            self._lost_one(held)
        else:
            return None
        return None if self.is_held(block) else block

    def clear(self) -> None:
        """Every block lost its content."""
        self._generation = [generation + 1 for generation in self._generation]
        self._claims = [0] * len(self._claims)
        self._owner.clear()
        self.session_blocks = self.session_entries = 0

    def check_integrity(self, sessions: Iterable[Held], owners: Iterable[Held]) -> None:
        """Recompute every count from the runs; raises AssertionError on the first difference."""
        claims, entries = [0] * len(self._claims), 0
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

    def _is(self, block: int, generation: int) -> bool:
        return self._generation[block] == generation

    def _unclaim(self, block: int) -> None:
        self._claims[block] -= 1
        self.session_blocks -= self._claims[block] == 0

    def _lost_one(self, held: Held) -> None:
        """An owner has one block less; entries that others took over are not to pile up."""
        held.live -= 1
        if len(held.blocks) <= 2 * held.live + _SLACK:
            return
        blocks = [block for block in self.live(held) if self._owner.get(block) is held]
        held.blocks, held.generations = self.entries(blocks)
