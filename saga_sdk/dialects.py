"""Session headers of other systems, so that the hints help where no SAGA gateway is.

========  ==========================================================  ==========================
dialect   headers                                                     read by
========  ==========================================================  ==========================
saga      ``X-SAGA-*``, ``baggage``                                   SAGA's gateway
vllm      ``X-Session-ID``                                            vLLM's router with
                                                                      ``consistent_hash``, vLLM
                                                                      with SAGA's plugin
dynamo    ``x-dynamo-session-id``, ``x-dynamo-parent-session-id``     NVIDIA Dynamo's frontend
llm-d     ``x-session-affinity``, ``x-gateway-inference-fairness-id`` llm-d's endpoint picker;
                                                                      the second is the task
========  ==========================================================  ==========================
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from saga_core.errors import SettingsError
from saga_core.hints import Hints, clean


class Dialect(StrEnum):
    """A system whose headers can be written."""

    SAGA = "saga"
    VLLM = "vllm"
    DYNAMO = "dynamo"
    LLM_D = "llm-d"


DEFAULT = (Dialect.SAGA,)

_FIELDS: dict[Dialect, tuple[tuple[str, str], ...]] = {
    Dialect.SAGA: (),
    Dialect.VLLM: (("X-Session-ID", "session_id"),),
    Dialect.DYNAMO: (
        ("x-dynamo-session-id", "session_id"),
        ("x-dynamo-parent-session-id", "parent_session_id"),
    ),
    Dialect.LLM_D: (
        ("x-session-affinity", "session_id"),
        ("x-gateway-inference-fairness-id", "task_id"),
    ),
}


def dialects_named(names: str | Iterable[str]) -> tuple[Dialect, ...]:
    """The dialects of these names, in the order of :class:`Dialect`.

    Raises:
        SettingsError: a name is not one of them; the message lists them.
    """
    given = {str(name) for name in ([names] if isinstance(names, str) else names)}
    unknown = given - set(Dialect)
    if unknown or not given:
        raise SettingsError(
            f"dialects must be some of {', '.join(Dialect)}, not {sorted(unknown) or 'none'}"
        )
    return tuple(dialect for dialect in Dialect if dialect in given)


def foreign_headers(dialects: Iterable[Dialect], hints: Hints) -> dict[str, str]:
    """The headers of the dialects that are not SAGA's own, as far as the hints say their values."""
    headers: dict[str, str] = {}
    if dialects == DEFAULT:
        return headers
    for dialect in dialects:
        for header, field in _FIELDS[dialect]:
            value = clean(getattr(hints, field) or "")
            if value is not None:
                headers[header] = value
    return headers
