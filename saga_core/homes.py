"""Where the KV of sessions and of shared prefixes is, as far as the coordinator knows."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

MOST_HOLDERS = 16
"""Workers that a prefix is looked for at; it is new to none of a fleet once so many hold it."""


@dataclass(slots=True)
class Session:
    """One growing conversation.

    Attributes:
        home: the worker that serves it; None: none does.
        life: which life of that worker it lives in: one that was down has lost its KV.
        cached_tokens: its KV there, as its last step left it.
        moved_s: when it was moved from one worker to another.
        began_s: when its first request began; infinite before.
    """

    home: str | None = None
    life: int = 0
    cached_tokens: int = 0
    moved_s: float = -math.inf
    began_s: float = math.inf

    def lives_at(self, worker_id: str, life: int) -> bool:
        """Whether that life of the worker is its home."""
        return self.home == worker_id and self.life == life

    def settle(self, worker_id: str, life: int) -> None:
        """It lives there; if that is another home, nothing of it is there yet."""
        if not self.lives_at(worker_id, life):
            self.home, self.life, self.cached_tokens = worker_id, life, 0


class Sessions:
    """A bounded table of sessions; the least recently used one is forgotten."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, session_id: str) -> Session | None:
        """The session, while it is remembered."""
        return self._sessions.get(session_id)

    def use(self, session_id: str) -> Session:
        """The session, which is new where it is not remembered."""
        session = self._sessions.get(session_id)
        if session is None:
            session = self._sessions[session_id] = Session()
            if len(self._sessions) > self._most:
                self._sessions.popitem(last=False)
        else:
            self._sessions.move_to_end(session_id)
        return session


class Prefixes:
    """Which workers hold which shared prefixes, the least recently used forgotten.

    Args:
        most: prefixes that are remembered; of each, ``MOST_HOLDERS`` workers are.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._holders: OrderedDict[str, OrderedDict[tuple[str, int], None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def held(self, prefix_id: str, worker_id: str, life: int) -> None:
        """That life of the worker has computed the prefix."""
        if not prefix_id or not self._most:
            return
        holders = self._holders.setdefault(prefix_id, OrderedDict())
        self._holders.move_to_end(prefix_id)
        holders[worker_id, life] = None
        holders.move_to_end((worker_id, life))
        if len(holders) > MOST_HOLDERS:
            holders.popitem(last=False)
        if len(self._holders) > self._most:
            self._holders.popitem(last=False)

    def holders(self, prefix_id: str) -> list[tuple[str, int]]:
        """The workers, and their lives, that hold the prefix."""
        return list(self._holders.get(prefix_id, ()))
