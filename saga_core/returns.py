"""Which paused sessions are about to return, so that their KV is there in time."""

from __future__ import annotations

from saga_core.coordinator_events import Prefetch, SessionPaused
from saga_core.coordinator_settings import CoordinatorSettings
from saga_core.fleet import Fleet
from saga_core.homes import Sessions
from saga_core.lazy_heap import LazyHeap


class Returns:
    """The pauses whose end is expected, and when each is to be announced to the session's home.

    That is the time to compute its KV before the return, if the home is not congested then; whether
    anything of it has left GPU memory, the worker knows.
    """

    def __init__(self, fleet: Fleet, sessions: Sessions, settings: CoordinatorSettings) -> None:
        self._fleet = fleet
        self._sessions = sessions
        self._settings = settings
        self._announced: LazyHeap[str] = LazyHeap()
        self._returns_s: dict[str, float] = {}

    def paused(self, event: SessionPaused, now_s: float) -> None:
        """The session waits; as likely as it has to be to return, it is going to be announced."""
        session = self._sessions.get(event.session_id)
        if session is None or event.p_return < self._settings.prefetch_min_p:
            return
        home = self._fleet.open(session.home, session.life)
        if home is None or len(self._returns_s) >= self._settings.max_sessions:
            return
        returns_s = now_s + event.returns_in_s
        self._returns_s[event.session_id] = returns_s
        self._announced.set(
            event.session_id, returns_s - session.cached_tokens / home.prefill_tokens_per_s
        )

    def over(self, session_id: str) -> None:
        """The session has returned, or has ended."""
        self._announced.drop(session_id)
        self._returns_s.pop(session_id, None)

    def due(self, now_s: float, limit: int) -> list[Prefetch]:
        """Those to be announced now, of up to ``limit`` whose time has come."""
        found = []
        for session_id in self._announced.due(now_s, limit):
            returns_s = self._returns_s.pop(session_id)
            session = self._sessions.get(session_id)
            home = None if session is None else self._fleet.open(session.home, session.life)
            if home is not None and home.load() < self._settings.theta:
                in_s = max(0.0, returns_s - now_s)
                found.append(Prefetch(session_id, home.worker_id, in_s))
        return found
