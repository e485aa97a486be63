"""The one place that knows OpenTelemetry's names for what SAGA knows.

The GenAI conventions are in development: when they change, this file does.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from saga_core.hints import Hints

if TYPE_CHECKING:
    from opentelemetry import context, trace

# Field of a hint → attributes of a span. Only what is the same for all calls below the span:
# steps, tools and nodes change from call to call, and go in headers alone.
SPAN_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "workflow_id": ("saga.workflow_id",),
    "task_id": ("saga.task_id",),
    "session_id": ("saga.session_id", "gen_ai.conversation.id"),
}
BAGGAGE_KEYS: dict[str, str] = {
    "workflow_id": "saga.workflow_id",
    "task_id": "saga.task_id",
    "session_id": "saga.session_id",
}
"""Field of a hint → key of its member in W3C baggage."""


def current_span() -> trace.Span | None:
    """The current span, unless there is none that could be continued."""
    # Who has not imported the API has no span, and need not wait for its import.
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    span: trace.Span = api.get_current_span()
    if span is api.INVALID_SPAN or not span.get_span_context().is_valid:
        return None
    return span


def annotate(span: trace.Span, hints: Hints) -> None:
    """Set a call's ids on a span, if it records; attributes that are there stay."""
    if not span.is_recording():
        return
    # The API cannot read attributes, the SDK's spans can.
    present = getattr(span, "attributes", None) or {}
    for field, names in SPAN_ATTRIBUTES.items():
        value = getattr(hints, field)
        if value is not None:
            for name in names:
                if name not in present:
                    span.set_attribute(name, value)


def attach_baggage(hints: Hints) -> context.Context:
    """Put the ids into the baggage of OpenTelemetry's current context.

    Returns the context as it was, for :func:`restore`.
    """
    from opentelemetry import baggage, context

    before = context.get_current()
    after = before
    for field, key in BAGGAGE_KEYS.items():
        value = getattr(hints, field)
        if value is not None:
            after = baggage.set_baggage(key, value, after)
    context.attach(after)
    return before


def restore(before: context.Context) -> None:
    """Make a context the current one again."""
    from opentelemetry import context

    # No token is held: a block may be left in another context than it was entered in, where
    # detaching would log an error.
    context.attach(before)
