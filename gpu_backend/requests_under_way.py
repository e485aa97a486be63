"""How many requests of each session are under way."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestsUnderWay:
    """Requests of sessions that have arrived and not ended, and the ends that wait for them.

    Which of a session's requests an event is about is not known, only how many there are.
    """

    _outstanding: dict[str, int] = field(default_factory=dict)
    # Of these, the ones that have not started. Only sessions that have some.
    _queued: dict[str, int] = field(default_factory=dict)
    # Sessions said to be over while a request of theirs had not ended.
    _ending: set[str] = field(default_factory=set)

    def __contains__(self, session_id: str) -> bool:
        """Whether any request of the session is under way."""
        return session_id in self._outstanding

    def count(self, session_id: str) -> int:
        """Requests of the session that are under way."""
        return self._outstanding.get(session_id, 0)

    def is_queued(self, session_id: str) -> bool:
        """Whether a request of the session has not started."""
        return session_id in self._queued

    def arrived(self, session_id: str) -> None:
        """One more, and it waits: the session is not over."""
        self._set_outstanding(session_id, self.count(session_id) + 1)
        self.queued(session_id)
        self._ending.discard(session_id)

    def queued(self, session_id: str) -> None:
        """One of them waits: it has arrived, or was preempted."""
        self._set_queued(session_id, self._queued.get(session_id, 0) + 1)

    def started(self, session_id: str) -> None:
        """One of them has begun to run."""
        self._set_queued(session_id, self._queued.get(session_id, 0) - 1)

    def ended(self, session_id: str) -> None:
        """One of them has ended."""
        self._set_outstanding(session_id, self.count(session_id) - 1)

    def end_later(self, session_id: str) -> None:
        """The session is over as soon as none is under way."""
        self._ending.add(session_id)

    def take_end(self, session_id: str) -> bool:
        """Whether an end has waited for the last of them; it is told once."""
        if session_id not in self._ending or session_id in self._outstanding:
            return False
        self._ending.remove(session_id)
        return True

    def check_integrity(self) -> None:
        """Raises AssertionError when the counts contradict each other."""
        assert all(count > 0 for count in self._outstanding.values())
        for session_id, count in self._queued.items():
            assert 0 < count <= self._outstanding[session_id]
        assert self._ending <= self._outstanding.keys()

    def _set_outstanding(self, session_id: str, count: int) -> None:
        _set_count(self._outstanding, session_id, count)
        self._set_queued(session_id, self._queued.get(session_id, 0))

    def _set_queued(self, session_id: str, count: int) -> None:
        # At most all that are outstanding: which of them was aborted is not known.
        _set_count(self._queued, session_id, min(count, self.count(session_id)))


def _set_count(counts: dict[str, int], key: str, count: int) -> None:
    """Keep only counts above 0."""
    if count > 0:
        counts[key] = count
    else:
        counts.pop(key, None)
