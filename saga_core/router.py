"""Where a request is to be served: by its session's KV, by its prefix, by load."""

from __future__ import annotations

from saga_core.coordinator_events import Move
from saga_core.coordinator_settings import CoordinatorSettings
from saga_core.fleet import Fleet, Request, Worker
from saga_core.homes import MOST_HOLDERS, Prefixes, Session, Sessions
from saga_core.placement import Candidate, Route, place_again, place_new
from saga_core.stealing import is_brought, move_s

_NEIGHBOURS = 8


class Router:
    """Chooses workers, and keeps where sessions and prefixes are.

    A session stays at home, where its KV is, while that is not congested; it leaves a congested
    home when that is worth the prefill lost, and was not moved lately. Any other request goes
    where there is room, by load and prefix. Of a large fleet some workers are looked at: the
    neighbours of the session's key, those that hold its prefix, and the least loaded.
    """

    def __init__(self, fleet: Fleet, settings: CoordinatorSettings) -> None:
        self._fleet = fleet
        self._settings = settings
        self.sessions = Sessions(settings.max_sessions)
        self.prefixes = Prefixes(settings.max_prefixes)

    def place(self, request: Request, now_s: float) -> tuple[Worker | None, Move | None]:
        """The worker for a request, and the move if its session leaves its KV behind.

        The request is told its route, the reason, and whether its KV binds it; its session lives
        there from now on. Without a worker nothing is changed but that.
        """
        request.is_bound = False
        only = None if request.only_worker == request.avoids else request.only_worker
        asked = self._fleet.open(only)
        if asked is not None:
            request.is_bound, request.route = True, Route.AFFINITY
            request.reason = "it can be served there alone"
            if request.session_id is not None:
                self.sessions.use(request.session_id).settle(asked.worker_id, asked.life)
            return asked, None
        if request.session_id is None:
            return self._place_new(request, None, Route.NEW), None
        session = self.sessions.use(request.session_id)
        home = self._fleet.open(session.home, session.life)
        if home is not None and home.worker_id == request.avoids and len(self._fleet.ring) > 1:
            home = None
        if home is not None and session.cached_tokens:
            worker = self._place_again(request, session, home, now_s)
            if worker is home:
                return home, None
            return worker, self.move(request, session, worker, Route.REBALANCE, now_s)
        route = Route.NEW if session.home is None else Route.FAILOVER
        chosen = self._place_new(request, home, route if home is None else Route.REBALANCE)
        if chosen is not None:
            session.settle(chosen.worker_id, chosen.life)
        return chosen, None

    def move(
        self, request: Request, session: Session, worker: Worker, route: Route, now_s: float
    ) -> Move:
        """The session goes to live at another worker, with its KV where that can be brought."""
        tokens = session.cached_tokens if request.is_bound else 0
        if not is_brought(tokens, worker, self._settings):
            tokens = 0
        left = session.home
        session.settle(worker.worker_id, worker.life)
        session.cached_tokens, session.moved_s = tokens, now_s
        request.is_bound, request.route = tokens > 0, route
        return Move(request.request_id, request.session_id, left, worker.worker_id, route, tokens)

    def admitted(self, request: Request, worker: Worker, now_s: float) -> None:
        """The worker computes the request's prompt, or has it."""
        self.prefixes.held(request.prefix_id, worker.worker_id, worker.life)
        session = self._session_at(request, worker)
        if session is not None:
            session.began_s = min(session.began_s, now_s)
            session.cached_tokens = max(session.cached_tokens, request.prompt_tokens)

    def ended(self, request: Request, worker: Worker, tokens: int) -> None:
        """The request was answered; the worker has so much of its session now."""
        session = self._session_at(request, worker)
        if session is not None:
            session.cached_tokens = max(1, tokens)  # However little: it was served there.

    def told(self, session_id: str, worker: Worker, tokens: int) -> None:
        """The worker says that it has so much of the session."""
        session = self.sessions.use(session_id)
        if self._fleet.open(session.home, session.life) is None:
            session.settle(worker.worker_id, worker.life)
        if session.lives_at(worker.worker_id, worker.life):
            session.cached_tokens = tokens

    def _session_at(self, request: Request, worker: Worker) -> Session | None:
        """The request's session, if it lives at the worker."""
        if request.session_id is None:
            return None
        session = self.sessions.use(request.session_id)
        if session.home is None:  # It was forgotten meanwhile.
            session.settle(worker.worker_id, worker.life)
        return session if session.lives_at(worker.worker_id, worker.life) else None

    def _place_again(
        self, request: Request, session: Session, home: Worker, now_s: float
    ) -> Worker:
        settings = self._settings
        request.route, request.is_bound = Route.AFFINITY, True
        here = self._candidate(home, request, 0.0, under_way=request.is_under_way)
        if here.load <= settings.theta:
            request.reason = "home is not congested"
            return home
        if now_s - session.moved_s < settings.guard_s:
            request.reason = "it was moved lately"
            return home
        others = [
            self._candidate(
                each,
                request,
                move_s(session.cached_tokens, each, settings),
            )
            for each in self._candidates(request)
            if each is not home
        ]
        chosen = place_again(_key(request), here, others, settings.theta)
        is_home = chosen == home.worker_id
        request.reason = "to leave costs more" if is_home else "home is congested"
        return home if is_home else self._fleet[chosen]

    def _place_new(self, request: Request, home: Worker | None, route: Route) -> Worker | None:
        request.route = Route.FAILOVER if request.has_failed else route
        request.reason = "no worker was up"
        workers = self._candidates(request)
        if home is not None and home not in workers:
            workers.append(home)
        if not workers:
            return None
        holders = self._holders(request.prefix_id)
        # What the fleet shares draws to none of its workers.
        shared = len(holders) / min(len(self._fleet.ring), MOST_HOLDERS)
        drawn = max(0.0, 1.0 - shared) * request.prefix_tokens if holders else 0.0
        candidates = []
        for each in workers:
            lacks = 0.0 if each.worker_id in holders else drawn
            candidates.append(self._candidate(each, request, lacks / each.prefill_tokens_per_s))
        chosen = place_new(_key(request), candidates)
        request.reason = "it has the prefix" if drawn and chosen in holders else "least load"
        if home is not None and chosen == home.worker_id:
            request.route = Route.AFFINITY
        return self._fleet[chosen]

    def _candidates(self, request: Request) -> list[Worker]:
        names = dict.fromkeys(self._fleet.ring.near(_key(request), _NEIGHBOURS))
        names.update(self._holders(request.prefix_id))
        least = self._fleet.least.first()
        if least is not None:
            names[least] = None
        if len(names) > 1 and request.avoids is not None:
            names.pop(request.avoids, None)
        return [self._fleet[name] for name in names]

    def _holders(self, prefix_id: str) -> dict[str, None]:
        return {
            worker_id: None
            for worker_id, life in self.prefixes.holders(prefix_id)
            if self._fleet.open(worker_id, life) is not None
        }

    def _candidate(
        self, worker: Worker, request: Request, prefill_s: float, *, under_way: bool = False
    ) -> Candidate:
        has_room = not worker.waiting and worker.has_room(request)
        if not under_way:
            has_room = has_room and not worker.is_taken(request, self._settings.keep_share)
        load = worker.load(request, under_way=under_way)
        return Candidate(worker.worker_id, load, worker.service_s, prefill_s, has_room)


def _key(request: Request) -> str:
    return request.request_id if request.session_id is None else request.session_id
