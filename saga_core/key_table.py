"""Who is found by which keys: a table that takes little room, bounded on both sides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class KeyTable(Generic[T]):
    """Owners by keys; most keys have one owner, and no list is made for that.

    Owners are told apart by identity. Each keeps a list of its keys, the oldest first, which is
    changed here alone.

    Args:
        most_keys: of an owner; the oldest goes.
        most_owners: of a key; any further one is not found by it.
    """

    def __init__(self, most_keys: int, most_owners: int) -> None:
        self._most_keys = most_keys
        self._most_owners = most_owners
        self._owners: dict[int, T | list[T]] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def get(self, key: int) -> Sequence[T]:
        """The key's owners, in the order in which they came."""
        owners = self._owners.get(key)
        if owners is None:
            return ()
        return owners if type(owners) is list else (owners,)  # type: ignore[return-value]

    def add(self, owner: T, own: list[int], key: int) -> None:
        """Let the owner be found by the key; ``own`` are its keys."""
        owners = self._owners.get(key)
        if owners is owner:
            return
        if owners is None:
            self._owners[key] = owner
        elif type(owners) is not list:
            self._owners[key] = [owners, owner]  # type: ignore[list-item]
        elif any(each is owner for each in owners) or len(owners) >= self._most_owners:
            return
        else:
            owners.append(owner)
        own.append(key)
        if len(own) > self._most_keys:
            self._remove(owner, own.pop(0))

    def forget(self, owner: T, own: list[int]) -> None:
        """The owner is found by none of its keys any more."""
        for key in own:
            self._remove(owner, key)
        own.clear()

    def entries(self) -> Iterator[tuple[int, T]]:
        """Every key with each of its owners."""
        for key in self._owners:
            for owner in self.get(key):
                yield key, owner

    def _remove(self, owner: T, key: int) -> None:
        owners = self._owners[key]
        if type(owners) is not list:
            del self._owners[key]
            return
        rest = [each for each in owners if each is not owner]
        self._owners[key] = rest if len(rest) > 1 else rest[0]
