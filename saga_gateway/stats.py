"""What the gateway counts about itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class Stats:
    """Counts since the start.

    Attributes:
        requests: chat requests that were read to their end.
        hints_dropped: hint headers whose value was not legal.
        stale_retries: requests sent again because the pooled connection was dead.
        failovers: requests sent to another worker because the first was down.
        clients_gone: requests whose client left before the answer was complete.
        answers_broken: answers that a worker did not finish.
        answers_unread: successful answers that the side reader could make nothing of.
        notices_sent, notices_dropped: notices taken by a worker; given up for want of room, for a
            failure, or because the worker does not speak the protocol.
        notice_failures: failed deliveries per kind of failure.
        events: events received per kind.
        identified: requests that named no session, by what they were found to be to theirs.
    """

    requests: int = 0
    hints_dropped: int = 0
    stale_retries: int = 0
    failovers: int = 0
    clients_gone: int = 0
    answers_broken: int = 0
    answers_unread: int = 0
    notices_sent: int = 0
    notices_dropped: int = 0
    notice_failures: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    identified: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, int | dict[str, int]]:
        """The counts as JSON can hold them."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            name: dict(value) if isinstance(value, Counter) else value
            for name, value in values.items()
        }
