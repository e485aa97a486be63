"""Spans that continue the client's trace, and the log."""

import asyncio
import io
import json
import logging
import sys
from types import SimpleNamespace

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from saga_core.errors import SettingsError
from saga_gateway import tracing
from saga_gateway.logs import set_up
from saga_gateway.settings import GatewaySettings

CHAT = "/v1/chat/completions"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-03"


@pytest.fixture
async def collector():
    """A stand-in for an OpenTelemetry collector; the spans that it got, with their attributes."""
    spans = []

    async def serve(reader, writer):
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
                request = ExportTraceServiceRequest.FromString(await reader.readexactly(length))
                for resource in request.resource_spans:
                    spans.extend(span for scope in resource.scope_spans for span in scope.spans)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    yield SimpleNamespace(spans=spans, url=f"http://127.0.0.1:{port}/v1/traces")
    server.close()


def attributes(span):
    def read(value):
        kind = value.WhichOneof("value")
        if kind == "array_value":
            return [read(item) for item in value.array_value.values]
        return getattr(value, kind)

    return {each.key: read(each.value) for each in span.attributes}


@pytest.fixture
async def traced(start_gateway, worker, collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "none")
    gateway = await start_gateway(worker, otlp_endpoint=collector.url)

    async def flush():
        await asyncio.to_thread(gateway.app.parts.tracing._provider.force_flush)

    gateway.flush = flush
    return gateway


async def test_a_span_stands_between_the_clients_and_the_workers(traced, worker, collector):
    worker.call_tools("read_file")
    headers = {"X-SAGA-Session-ID": "s", "X-SAGA-Workflow-ID": "swe", "X-SAGA-Node": "coder"}
    body = {"messages": [{"role": "user", "content": "a secret prompt"}]}
    await traced.client.post(CHAT, json=body, headers=headers | {"traceparent": PARENT})
    await traced.flush()
    (span,) = collector.spans
    assert span.name == "chat"
    assert span.trace_id.hex() == TRACE
    assert span.parent_span_id.hex() == "b7ad6b7169203331"
    assert worker.chats[0].header("traceparent")[:52] == f"00-{TRACE}-{span.span_id.hex()}"
    assert attributes(span) == {
        "url.path": CHAT,
        "gen_ai.operation.name": "chat",
        "gen_ai.conversation.id": "s",
        "gen_ai.agent.name": "coder",
        "gen_ai.response.finish_reasons": ["tool_calls"],
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 2,
        "http.response.status_code": 200,
        "saga.workflow_id": "swe",
        "saga.session_id": "s",
    }
    assert "secret" not in str(span)


async def test_a_trace_begins_here_where_the_client_has_none(traced, worker, collector):
    await traced.client.post("/v1/embeddings", json={})
    await traced.client.post("/tokenize", json={})
    await traced.flush()
    assert [span.name for span in collector.spans] == ["embeddings", "/tokenize"]
    assert all(not span.parent_span_id for span in collector.spans)
    sent = [exchange.header("traceparent") for exchange in worker.chats]
    assert [each.split("-")[1] for each in sent] == [s.trace_id.hex() for s in collector.spans]


async def test_what_goes_wrong_is_said(traced, worker, collector, eventually):
    async def hang(exchange):
        await exchange.gone()

    worker.script = hang
    request = asyncio.create_task(traced.chat())
    await eventually(lambda: worker.chats)
    request.cancel()
    await eventually(lambda: traced.app.stats.clients_gone == 1)
    await worker.stop()
    await traced.chat()
    await traced.flush()
    gone, down = map(attributes, collector.spans)
    assert gone["error.type"] == "client_gone"
    assert (down["http.response.status_code"], down["error.type"]) == (502, "502")


async def test_without_an_endpoint_the_clients_trace_passes_as_it_is(gateway, worker):
    await gateway.client.post(CHAT, json={}, headers={"traceparent": PARENT})
    assert worker.chats[0].header("traceparent") == PARENT


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    settings = GatewaySettings(("http://x:1",), otlp_endpoint="http://x:4318/v1/traces")
    with pytest.raises(SettingsError, match=r"saga-sdk\[otel\]"):
        tracing.make_provider(settings)


# The log


@pytest.fixture
def log(monkeypatch):
    """Sets the log up on a text stream, and puts the old one back."""
    root, requests = logging.getLogger(), logging.getLogger("saga_gateway.requests")
    before = root.handlers[:], root.level, requests.level
    written = io.StringIO()

    def start(log_format, **more):
        monkeypatch.setattr(sys, "stderr", written)
        set_up(log_format, **more)
        return written

    yield start
    root.handlers[:], level, requests.level = before
    root.setLevel(level)


async def test_each_request_is_a_line_of_json_without_its_text(gateway, log):
    written = log("json", requests=True)
    body = {"messages": [{"role": "user", "content": "a secret prompt"}]}
    await gateway.chat("s", body=body)
    (line,) = written.getvalue().splitlines()
    said = json.loads(line)
    (worker,) = gateway.app.workers
    assert (said["message"], said["level"]) == ("request", "info")
    assert (said["path"], said["status"], said["session"]) == (CHAT, 200, "s")
    assert said["worker"] == worker.worker_id
    assert said["duration_s"] >= 0
    assert "secret" not in line


async def test_requests_are_logged_only_where_that_is_wanted(gateway, log):
    written = log("text", requests=False)
    await gateway.chat("s")
    assert written.getvalue() == ""
    logging.getLogger("saga_gateway").warning("look", extra={"fields": {"at": 1}})
    assert written.getvalue().endswith("WARNING look at=1\n")


def test_an_exception_is_one_line_of_json(log):
    written = log("json", requests=False)
    try:
        raise ValueError("wrong\nlines")
    except ValueError:
        logging.getLogger("saga_gateway").exception("failed")
    (line,) = written.getvalue().splitlines()
    assert "ValueError: wrong\nlines" in json.loads(line)["exception"]
