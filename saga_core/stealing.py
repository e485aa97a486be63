"""Which waiting request an idle worker takes over from a crowded one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from saga_core.coordinator_settings import CoordinatorSettings
from saga_core.fleet import Fleet, Request, Worker
from saga_core.homes import Session, Sessions
from saga_core.placement import congestion_s

# So many victims, and of each so many of the longest waiting, are looked at for one theft.
_VICTIMS = 4
_OLDEST = 8


@dataclass(frozen=True, slots=True)
class Theft:
    """A request to be moved from a worker to another one."""

    request: Request
    victim: Worker
    thief: Worker


def move_s(tokens: int, to: Worker, settings: CoordinatorSettings) -> float:
    """Time until the worker has so much of a session: computed or brought, the faster of them."""
    prefill_s = tokens / to.prefill_tokens_per_s
    if not settings.transfer_tokens_per_s:
        return prefill_s
    return min(prefill_s, tokens / settings.transfer_tokens_per_s)


def is_brought(tokens: int, to: Worker, settings: CoordinatorSettings) -> bool:
    """Whether a session's KV is brought to the worker rather than computed there."""
    return tokens > 0 and move_s(tokens, to, settings) < tokens / to.prefill_tokens_per_s


def find_theft(
    fleet: Fleet, sessions: Sessions, settings: CoordinatorSettings, now_s: float
) -> Theft | None:
    """The next theft; None when there is none that is allowed and pays.

    The thief is the least loaded worker, the victim the most loaded one that has such a request,
    the request the one that waits there longest; see ``refusal``. Ties: worker id.
    """
    thief = fleet.get(fleet.least.first())
    if thief is None:
        return None
    for victim_id in fleet.most.firsts(_VICTIMS):
        victim = fleet[victim_id]
        if why_idle(victim, thief, settings, now_s) is not None:
            continue
        for request in islice(victim.waiting.values(), _OLDEST):
            session = None if request.session_id is None else sessions.get(request.session_id)
            if session is None:
                continue
            if why_stay(request, session, victim, thief, settings, now_s) is None:
                return Theft(request, victim, thief)
    return None


def examine(
    request: Request | None,
    session: Session | None,
    victim: Worker | None,
    thief: Worker | None,
    settings: CoordinatorSettings,
    now_s: float,
) -> Theft | str:
    """The theft that somebody else has found, or why it is not done: he may have been too late."""
    if request is None:
        return "it has left"
    if request.is_admitted:
        return "it has been admitted"
    if victim is None or request.worker_id != victim.worker_id:
        return "it waits elsewhere"
    if session is None or thief is None:
        return "there is no such session or worker"
    why = why_idle(victim, thief, settings, now_s)
    why = why or why_stay(request, session, victim, thief, settings, now_s)
    return why or Theft(request, victim, thief)


def why_idle(
    victim: Worker, thief: Worker, settings: CoordinatorSettings, now_s: float
) -> str | None:
    """Why the thief may not steal from the victim; None when it may.

    It may when nothing has waited at it for ``idle_s``, and the victim's load is more than
    ``steal_ratio`` times its own.
    """
    if victim is thief or thief.is_draining:
        return "it is no other worker"
    if thief.waiting or now_s - thief.empty_s < settings.idle_s:
        return "the thief is not idle"
    if victim.load() <= settings.steal_ratio * thief.load():
        return "the loads are alike"
    return None


def why_stay(
    request: Request,
    session: Session,
    victim: Worker,
    thief: Worker,
    settings: CoordinatorSettings,
    now_s: float,
) -> str | None:
    """Why the request stays; None when it is better moved.

    Its session was not moved for ``guard_s``, the thief has room now, and the wait that is saved,
    the congestion of the victim less that of the thief, exceeds the prefill lost (or the time to
    bring the KV).
    """
    if now_s - session.moved_s < settings.guard_s:
        return "it was moved lately"
    if request.only_worker == victim.worker_id:
        return "it can be served there alone"
    has_room = thief.has_room(request) and not thief.is_taken(request, settings.keep_share)
    if request.avoids == thief.worker_id or not has_room:
        return "the thief has no room"
    here = victim.load(under_way=request.is_under_way)
    saved_s = congestion_s(here, settings.theta, victim.service_s)
    saved_s -= congestion_s(thief.load(request), settings.theta, thief.service_s)
    tokens = session.cached_tokens if request.is_bound else 0
    return None if saved_s > move_s(tokens, thief, settings) else "it does not pay"
