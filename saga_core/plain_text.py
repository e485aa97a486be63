"""Where prompts of plain text end, and which of them another text begins with.

A text and one that begins with it have all blocks in common but the shorter one's last. What the
longer one says up to the shorter one's end is hashed when there is something to compare it with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

_MAX_ENDS = 8
_MAX_SHARING = 64

DigestOf = Callable[[int, int], int]
"""Keyed hash of a text from one character up to another."""


class Ending(NamedTuple):
    """The end of an owner's prompt: its last block, from character ``start`` to ``end``.

    Attributes:
        stem: chain key of the blocks before it.
    """

    owner: str
    stem: int
    start: int
    end: int
    digest: int


class Endings:
    """The last prompts of owners, such as sessions; a few each."""

    def __init__(self) -> None:
        self._by_stem: dict[int, list[Ending]] = {}
        self._by_owner: dict[str, deque[Ending]] = {}

    def of(self, owner: str) -> Sequence[Ending]:
        """Ends of its last prompts, the oldest first; of equal prompts one."""
        return self._by_owner.get(owner, ())

    def add(self, owner: str, stem: int, start: int, end: int, digest: int) -> None:
        """An owner has had a prompt."""
        ending = Ending(owner, stem, start, end, digest)
        own = self._by_owner.setdefault(owner, deque())
        if ending in own:
            return
        sharing = self._by_stem.setdefault(stem, [])
        if len(sharing) >= _MAX_SHARING:
            sharing[:] = sharing[1:]
        sharing.append(ending)
        own.append(ending)
        if len(own) > _MAX_ENDS:
            self._remove(own.popleft())

    def forget(self, owner: str) -> None:
        """The owner is no more."""
        for ending in self._by_owner.pop(owner, ()):
            self._remove(ending)

    def longest(
        self, keys: Sequence[int], length: int, digest_of: DigestOf
    ) -> tuple[list[Ending], int]:
        """The longest prompts that a text begins with, all of one length; in how many blocks.

        Args:
            keys: chain keys of the text before its first block and after each.
            length: characters of the text.
        """
        for count in range(len(keys) - 1, -1, -1):
            found: list[Ending] = []
            for ending in self._by_stem.get(keys[count], ()):
                most = found[0].end if found else 0
                if not most <= ending.end <= length:
                    continue
                if digest_of(ending.start, ending.end) == ending.digest:
                    found = [*found, ending] if ending.end == most else [ending]
            if found:
                return found, count
        return [], 0

    def check_integrity(self) -> None:
        """Raise AssertionError when the tables contradict each other."""
        listed = [ending for sharing in self._by_stem.values() for ending in sharing]
        own = {ending for of in self._by_owner.values() for ending in of}
        assert len(listed) == len(set(listed))
        assert set(listed) <= own
        assert all(self._by_stem.values())
        assert all(self._by_owner.values())

    def _remove(self, ending: Ending) -> None:
        sharing = self._by_stem.get(ending.stem, [])
        if ending in sharing:
            sharing.remove(ending)
        if not sharing:
            self._by_stem.pop(ending.stem, None)
