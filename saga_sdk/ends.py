"""The ends that only the program knows. Nothing here waits, so it may be used in async code."""

from __future__ import annotations

import time
from collections.abc import Iterator

from saga_sdk.context import WorkflowRun, current_workflow
from saga_sdk.events import Destination, Event, EventKind, sender
from saga_sdk.guard import Guard
from saga_sdk.hosts import allowed
from saga_sdk.sessions import named_sessions, wire_id

_GUARD = Guard("said end")


def end_session(session_id: str | None = None) -> None:
    """Say that a conversation has ended: the gateways that saw it may drop its KV cache at once.

    Args:
        session_id: as it was given to ``saga.workflow``, or as LangGraph's ``thread_id`` and the
            like; by default the session of the innermost ``saga.workflow`` block. A session that
            this process has sent no calls of is said to the gateways behind all base URLs.
    """
    with _GUARD:
        wanted = None if session_id is None else wire_id(session_id)
        for block in _blocks():
            if wanted in (None, block.session.id):
                block.end_session()
                return
        if wanted is None:
            return
        known = named_sessions.get(wanted)
        destinations = () if known is None else known.destinations
        if known is not None:
            known.forget_gateways()
        _say(EventKind.SESSION_END, destinations, session_id=wanted)


def end_task(task_id: str | None = None) -> None:
    """Say that a task has ended, and with it the sessions of its blocks that were not named.

    Args:
        task_id: as it was given to ``saga.workflow``; by default the task of the innermost
            ``saga.workflow`` block. A task of no block around is said to the gateways behind all
            base URLs.
    """
    with _GUARD:
        blocks = list(_blocks())
        if task_id is None and not blocks:
            return
        wanted = blocks[0].task_id if task_id is None else wire_id(task_id)
        ended = [block for block in blocks if block.task_id == wanted]
        for block in ended:
            if not block.session_given:
                block.end_session()
        if ended:
            ended[-1].end_task()
        else:
            _say(EventKind.TASK_END, (), task_id=wanted)


def _blocks() -> Iterator[WorkflowRun]:
    block = current_workflow()
    while block is not None:
        yield block
        block = block.outer


def _say(
    kind: EventKind,
    destinations: tuple[Destination, ...],
    *,
    session_id: str | None = None,
    task_id: str = "",
) -> None:
    told = destinations or tuple(Destination(url) for url in allowed.base_events_urls)
    sender.put(Event(kind, session_id, task_id, "", told, at_s=time.time()))
