"""Beside OpenTelemetry: spans get the ids, and only who asked for it shares the baggage."""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Iterator

import openai
import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

import saga_sdk as saga
from saga_core.hints import HEADERS, Hints
from saga_sdk import semconv
from saga_sdk.testing import ScriptedServer

TRACER = TracerProvider().get_tracer("test")


def chat(server: ScriptedServer) -> None:
    with openai.OpenAI(base_url=server.base_url, api_key="none") as client:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])


def attributes_of(span: trace.Span) -> dict[str, object]:
    assert isinstance(span, ReadableSpan)
    return dict(span.attributes or {})


def test_the_current_span_gets_the_ids(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    with TRACER.start_as_current_span("agent") as span, saga.workflow("swe") as block:
        chat(server)
        chat(server)
    assert attributes_of(span) == {
        "saga.workflow_id": "swe",
        "saga.task_id": block.task_id,
        "saga.session_id": block.session_id,
        "gen_ai.conversation.id": block.session_id,
    }


def test_attributes_that_are_there_stay(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    attributes = {"gen_ai.conversation.id": "theirs"}
    with (
        TRACER.start_as_current_span("agent", attributes=attributes) as span,
        saga.workflow("swe"),
    ):
        chat(server)
    assert attributes_of(span)["gen_ai.conversation.id"] == "theirs"
    assert attributes_of(span)["saga.workflow_id"] == "swe"


def test_spans_are_left_alone_when_it_is_said(server: ScriptedServer) -> None:
    saga.instrument(server.base_url, span_attributes=False)
    with TRACER.start_as_current_span("agent") as span, saga.workflow("swe"):
        chat(server)
    assert attributes_of(span) == {}
    assert server.hints[0].workflow_id == "swe"
    assert server.requests[0].get("traceparent") is not None


def test_a_span_that_ended_gets_nothing(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    span = TRACER.start_span("agent")
    span.end()
    with trace.use_span(span), saga.workflow("swe"):
        chat(server)
    assert attributes_of(span) == {}


def test_baggage_is_attached_when_it_is_asked_for(server: ScriptedServer) -> None:
    saga.instrument(server.base_url)
    with saga.workflow("swe"):
        assert baggage.get_all() == {}
    saga.instrument(attach_baggage=True)
    before = context.get_current()
    with saga.workflow("swe", task_id="t") as block:
        expected = {
            "saga.workflow_id": "swe",
            "saga.task_id": "t",
            "saga.session_id": block.session_id,
        }
        assert baggage.get_all() == expected
        with saga.workflow("inner"):
            assert baggage.get_baggage("saga.workflow_id") == "inner"
        assert baggage.get_all() == expected
        chat(server)
    assert context.get_current() == before
    assert server.requests[0].get("baggage") == (
        f"saga.workflow_id=swe,saga.task_id=t,saga.session_id={block.session_id}"
    )


def test_a_block_left_in_another_context_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    saga.instrument("http://127.0.0.1:1/v1", attach_baggage=True)

    def numbers() -> Iterator[int]:
        with saga.workflow("swe"):
            yield 1

    generator = numbers()
    assert contextvars.copy_context().run(next, generator) == 1
    generator.close()
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
    assert baggage.get_all() == {}


def test_the_mapping_is_of_hints() -> None:
    hints = Hints("w", "t", "s")
    for field in (*semconv.SPAN_ATTRIBUTES, *semconv.BAGGAGE_KEYS):
        assert field in HEADERS
        assert getattr(hints, field) is not None
