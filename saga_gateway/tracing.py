"""OpenTelemetry spans of the gateway: they continue the client's trace, and the worker's continue
them. Attributes are GenAI's conventions, which are in development; no text of a prompt or an answer
is among them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from saga_core.errors import SettingsError
from saga_core.hints import Hints
from saga_gateway.answers import Answer, Usage
from saga_gateway.headers import Headers
from saga_gateway.settings import GatewaySettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
_CONTEXT_HEADERS = frozenset({"traceparent", "tracestate"})
_FLUSH_MS = 2000


def make_provider(settings: GatewaySettings) -> TracerProvider | None:
    """What sends spans to ``otlp_endpoint``; None when that is empty.

    Raises:
        SettingsError: the packages that this takes are not installed.
    """
    if not settings.otlp_endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise SettingsError(
            f"otlp_endpoint needs OpenTelemetry's SDK ({error}): pip install 'saga-sdk[otel]'"
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": "saga-gateway"}))
    exporter = OTLPSpanExporter(endpoint=settings.otlp_endpoint)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class Tracing:
    """Makes a span for each relayed request; without a provider, none."""

    def __init__(self, provider: TracerProvider | None) -> None:
        self._provider = provider
        if provider is not None:
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            self._tracer = provider.get_tracer("saga_gateway")
            self._propagator = TraceContextTextMapPropagator()

    def begin(self, path: str, headers: Headers, said: Hints) -> Span | None:
        """A request has come: its span, below the client's if it names one."""
        if self._provider is None:
            return None
        from opentelemetry.trace import SpanKind

        operation = _OPERATIONS.get(path)
        attributes: dict[str, str] = {"url.path": path}
        if operation is not None:
            attributes["gen_ai.operation.name"] = operation
        if said.session_id is not None:
            attributes["gen_ai.conversation.id"] = said.session_id
        if said.node is not None:
            attributes["gen_ai.agent.name"] = said.node
        for name in ("workflow_id", "task_id", "session_id", "tool_name"):
            value = getattr(said, name)
            if value is not None:
                attributes[f"saga.{name}"] = value
        return self._tracer.start_span(
            operation or path,
            context=self._propagator.extract(dict(headers)),
            kind=SpanKind.SERVER,
            attributes=attributes,
        )

    def carry(self, span: Span | None, headers: Headers) -> Headers:
        """The headers with the span as the parent of what the worker does."""
        if span is None:
            return headers
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context=set_span_in_context(span))
        kept = [(name, value) for name, value in headers if name not in _CONTEXT_HEADERS]
        return [*kept, *carrier.items()]

    def end(
        self,
        span: Span | None,
        answer: Answer | None,
        status: int | None,
        usage: Usage | None,
        ended_ns: int,
    ) -> None:
        """The request is over, since ``ended_ns`` of the Unix clock.

        ``status`` None: its client left before there was one.
        """
        if span is None:
            return
        from opentelemetry.trace import Status, StatusCode

        if status is None:
            span.set_attribute("error.type", "client_gone")
        else:
            span.set_attribute("http.response.status_code", status)
            if status >= 500:
                span.set_status(Status(StatusCode.ERROR))
                span.set_attribute("error.type", str(status))
        if answer is not None:
            if answer.finish_reason is not None:
                span.set_attribute("gen_ai.response.finish_reasons", [answer.finish_reason])
            if answer.response_id is not None:
                span.set_attribute("gen_ai.response.id", answer.response_id)
        if usage is not None:
            span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
        span.end(ended_ns)

    def close(self) -> None:
        """Send what has not been sent, for two seconds at most."""
        if self._provider is not None:
            self._provider.force_flush(_FLUSH_MS)
            self._provider.shutdown()
