"""What the program told :func:`saga_sdk.instrument`, beside the hosts."""

from __future__ import annotations

from dataclasses import dataclass

from saga_sdk.dialects import DEFAULT, Dialect


@dataclass(slots=True)
class Options:
    """The options in force. Each is replaced as a whole, and read without a lock.

    Attributes:
        automatic: integrations are wanted: between ``instrument`` and ``uninstrument``.
        workflow: the workflow of calls that nothing else names.
        dialects: whose headers are written.
        attach_baggage: a block puts its ids into the baggage of OpenTelemetry's context, which
            goes to every host that the program calls.
        span_attributes: a call's ids are set on the current span.
    """

    automatic: bool = False
    workflow: str | None = None
    dialects: tuple[Dialect, ...] = DEFAULT
    attach_baggage: bool = False
    span_attributes: bool = True

    def reset(self) -> None:
        """Back to the defaults."""
        self.automatic, self.workflow, self.dialects = False, None, DEFAULT
        self.attach_baggage, self.span_attributes = False, True


options = Options()
