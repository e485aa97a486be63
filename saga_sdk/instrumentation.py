"""The switch: hints on every LLM call of the process, or none."""

from __future__ import annotations

from collections.abc import Iterable

from saga_sdk import clients
from saga_sdk.dialects import dialects_named
from saga_sdk.guard import Guard
from saga_sdk.hosts import allowed
from saga_sdk.imports import ImportWatch
from saga_sdk.integrations import INTEGRATIONS
from saga_sdk.options import options

_imports = ImportWatch()


def instrument(
    base_urls: str | Iterable[str] | None = None,
    workflow: str | None = None,
    dialects: str | Iterable[str] | None = None,
    *,
    attach_baggage: bool | None = None,
    span_attributes: bool | None = None,
) -> None:
    """Add hints to every LLM call of this process that goes to an allow-listed host.

    Wraps the clients openai, httpx and httpx2 and installs the integrations of LangChain, AutoGen,
    CrewAI, the OpenAI Agents SDK and the Agent Framework: of each that the program has imported,
    now; of the others, as soon as it imports them. Nothing is imported before the program does.
    Calling it again adds base URLs, and changes what else is given.

    Args:
        base_urls: hosts that may see hints, by scheme, host and port; by default the URLs of the
            environment variable SAGA_BASE_URL (separated by commas), else OPENAI_BASE_URL.
        workflow: the workflow of calls that nothing else names.
        dialects: whose headers are written: ``saga`` (the default), ``vllm``, ``dynamo``,
            ``llm-d``. Without ``saga`` no events go out either.
        attach_baggage: a ``saga.workflow`` block also puts its ids into the baggage of
            OpenTelemetry's context, which goes to every host that the program calls; by default
            it does not.
        span_attributes: a call's ids are set on the current span when it records; by default
            they are.

    Raises:
        SettingsError: a URL in ``base_urls`` is not an absolute http or https one, or a dialect
            is unknown; nothing is changed.
    """
    named = None if dialects is None else dialects_named(dialects)
    allowed.add(base_urls)
    if workflow is not None:
        options.workflow = str(workflow)
    if named is not None:
        options.dialects = named
    if attach_baggage is not None:
        options.attach_baggage = attach_baggage
    if span_attributes is not None:
        options.span_attributes = span_attributes
    options.automatic = True
    watch_clients()
    for integration in INTEGRATIONS:
        _imports.watch(integration.trigger, integration.installer(_is_on))


def uninstrument() -> None:
    """Undo :func:`instrument`: no more hints, the wrapped methods are the original ones again.

    Handlers added by hand stay where they are, but their hints are no longer sent.
    """
    allowed.clear()
    options.reset()
    _imports.stop()
    for integration in INTEGRATIONS:
        with Guard(f"uninstallation of {integration.name}"):
            integration.uninstall()
    with Guard("uninstallation of the client hooks"):
        clients.unwrap()


def default_workflow() -> str | None:
    """The workflow that :func:`instrument` was told."""
    return options.workflow


def watch_clients() -> None:
    """Wrap the HTTP clients, as :func:`instrument` does."""
    clients.watch(_imports)


def _is_on() -> bool:
    return options.automatic
