"""Requests and answers as a gateway sees them, with the truth about them beside."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and its answer.

    Attributes:
        name: of the request; known to scores only.
        owner: the conversation or task that it belongs to; known to scores only.
        parent: the conversation that its own branched from; known to scores only.
        start_s, end_s: when it came, and when its answer or failure did.
        api: as in :meth:`PromptReader.read`.
        body: of the request, parsed.
        calls: name and JSON arguments of each tool call of the answer.
        is_answered: False: it failed.
    """

    name: str
    owner: str
    start_s: float
    end_s: float
    api: str
    body: dict[str, Any]
    answer: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    is_answered: bool = True
    parent: str | None = field(default=None, kw_only=True)

    def shifted(self, by_s: float, prefix: str = "") -> Exchange:
        """The same at another time and, so that recordings can be mixed, under a longer name."""
        return replace(
            self,
            name=prefix + self.name,
            owner=prefix + self.owner,
            start_s=self.start_s + by_s,
            end_s=self.end_s + by_s,
        )


@dataclass(frozen=True, slots=True)
class Event:
    """A request comes, or its answer does."""

    now_s: float
    is_start: bool
    exchange: Exchange


def in_time(exchanges: Iterable[Exchange]) -> list[Event]:
    """Their events in order; of the same moment answers first, then by name."""
    events = []
    for each in exchanges:
        events += [Event(each.start_s, True, each), Event(each.end_s, False, each)]
    events.sort(key=attrgetter("exchange.name"))
    events.sort(key=attrgetter("now_s", "is_start"))
    return events
