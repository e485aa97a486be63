"""Traces of OpenTelemetry's GenAI spans: OTLP/JSON, or a JSON object with ``spans``."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from saga_sim.traces.chains import DEFAULT_BLOCK_TOKENS, BlockIds, head, tokens_of
from saga_sim.traces.model import Call
from saga_sim.traces.otel_messages import answer_text, called_tool, finish_reason, prompt_text
from saga_sim.traces.source import Part, Record, Source

EXPECTS = "resourceSpans, or spans"

LLM_OPERATIONS = frozenset({"chat", "text_completion", "generate_content"})
TOOL_OPERATION = "execute_tool"

NOTE = "Blocks, and tokens where they are not recorded, count 4 characters a token"
NO_TEXT_NOTE = "Prompts without recorded text share no blocks"

_ENDINGS = {
    "stop": "end_turn",
    "tool_calls": "tool_use",
    "tool_call": "tool_use",
    "function_call": "tool_use",
}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Key = tuple[str, str]
"""Trace id and span id."""


def matches(values: Mapping[str, Any]) -> bool:
    """Whether a record is of this format."""
    return "resourceSpans" in values or "spans" in values


@dataclass(frozen=True, slots=True)
class _Span:
    """A span of any kind.

    Attributes:
        parent: the span that this one is a child of.
        session_id: the session that its own attributes name.
        call: its LLM call, yet without a session; None when it is none.
        tool: the tool that it ran; None when it is no tool span.
    """

    key: Key
    parent: Key
    session_id: str | None
    start_s: float
    end_s: float
    call: Call | None
    tool: str | None


class Reader:
    """Reads spans.

    An LLM call is a span whose operation is one of ``LLM_OPERATIONS``, or that names a model and
    no operation. Its session is what the span or the nearest span above it names by
    ``gen_ai.conversation.id`` or an attribute that ends in ``session.id``, else its trace. The
    parent of a session is the nearest other session that a span above names.

    Tokens are those of ``gen_ai.usage``, else estimated from the text. Blocks come from the text,
    no more than the prompt's tokens fill; tokens beyond it have no identity.

    Tools that ran after a call and before the session's next one count as one for the call: it
    has the name of the one that ended last, and lasts from the first start to the last end.
    """

    def __init__(self, ids: BlockIds, block_tokens: int | None) -> None:
        self._ids = ids
        self._block_tokens = block_tokens or DEFAULT_BLOCK_TOKENS

    def read(self, source: Source) -> Part:
        """Read a file; equal text gets the ids that it has in the files read before."""
        notes = {NOTE: None}
        spans: dict[Key, _Span] = {}
        for record in source.records():
            for item in _span_records(record):
                span = self._span(item, record, notes)
                spans.setdefault(span.key, span)
        calls: dict[str, list[Call]] = {}
        tools: dict[str, list[_Span]] = {}
        for span in sorted(spans.values(), key=lambda span: span.start_s):
            session_id, parent = _session_of(span, spans)
            if span.call is not None:
                call = replace(span.call, session_id=session_id, parent_session_id=parent)
                calls.setdefault(session_id, []).append(call)
            elif span.tool is not None:
                tools.setdefault(session_id, []).append(span)
        sessions = [_with_tools(of, tools.get(name, ())) for name, of in calls.items()]
        return Part(sessions, self._block_tokens, clock="world", notes=tuple(notes))

    def _span(self, item: Record, document: Record, notes: dict[str, None]) -> _Span:
        attributes = Record(_attributes(item), f"{item.where}, attributes")
        trace_id = _either(item, "traceId", "trace_id") or document.name("trace_id", None)
        span_id = _either(item, "spanId", "span_id")
        if not trace_id or not span_id:
            raise item.error("has no span id or no trace id; expected spanId and traceId")
        start_ns = _time_ns(item, "startTimeUnixNano", "start_time")
        if start_ns is None:
            raise item.error("has no start; expected startTimeUnixNano or start_time")
        end_ns = _time_ns(item, "endTimeUnixNano", "end_time")
        if end_ns is not None and end_ns < start_ns:
            raise item.error("ends before it starts")
        is_call = _is_call(attributes)
        return _Span(
            key=(trace_id, span_id),
            parent=(trace_id, _either(item, "parentSpanId", "parent_span_id") or ""),
            session_id=_named_session(attributes),
            start_s=start_ns / 1e9,
            end_s=(start_ns if end_ns is None else end_ns) / 1e9,
            call=self._call(item, attributes, start_ns, end_ns, notes) if is_call else None,
            tool=None if is_call else _tool(item, attributes),
        )

    def _call(
        self,
        item: Record,
        attributes: Record,
        start_ns: int,
        end_ns: int | None,
        notes: dict[str, None],
    ) -> Call:
        values = attributes.values
        text = prompt_text(values)
        input_tokens = _usage(attributes, "input_tokens", "prompt_tokens", text)
        num_blocks = input_tokens // self._block_tokens
        if text:
            chain = head(self._ids.of_text(text, self._block_tokens), num_blocks)
        else:
            notes[NO_TEXT_NOTE] = None
            first = self._ids.take(num_blocks)
            chain = head((range(first, first + num_blocks),), num_blocks)
        tool = called_tool(values)
        reason = finish_reason(values)
        return Call(
            session_id="",
            arrival_s=start_ns / 1e9,
            input_tokens=input_tokens,
            output_tokens=_usage(
                attributes, "output_tokens", "completion_tokens", answer_text(values)
            ),
            chain=chain,
            duration_s=None if end_ns is None else (end_ns - start_ns) / 1e9,
            ending=_ENDINGS.get(reason, reason) or ("" if tool is None else "tool_use"),
            tool=tool,
            agent=_agent(item, attributes),
        )


def _span_records(record: Record) -> Iterator[Record]:
    """The spans of a document."""
    if record.has("spans"):
        yield from record.records("spans")
        return
    for resource in record.records("resourceSpans"):
        for scope in resource.records("scopeSpans") if resource.has("scopeSpans") else ():
            yield from scope.records("spans") if scope.has("spans") else ()


def _attributes(item: Record) -> dict[str, Any]:
    """A span's attributes by name, from an object or OTLP's list of keys and values."""
    value = item.values.get("attributes", {})
    if isinstance(value, dict):
        return value
    attributes = {}
    for pair in item.records("attributes"):
        attributes[pair.text("key")] = _plain(pair.values.get("value"), pair)
    return attributes


def _plain(value: Any, pair: Record) -> Any:
    """OTLP's typed value as a plain one."""
    if not isinstance(value, dict) or len(value) > 1:
        raise pair.error("'value' is not one of OTLP's; expected an object such as stringValue")
    for kind, content in value.items():
        if kind == "intValue":
            return _int(content, pair)
        if kind in ("arrayValue", "kvlistValue"):
            values = content.get("values", []) if isinstance(content, dict) else []
            if kind == "arrayValue":
                return [_plain(item, pair) for item in values]
            items = Record({kind: values}, pair.where).records(kind)
            return {item.text("key"): _plain(item.values.get("value"), item) for item in items}
        return content
    return None


def _int(content: Any, pair: Record) -> int:
    """OTLP writes 64-bit integers as strings."""
    try:
        return int(content)
    except (TypeError, ValueError):
        raise pair.error(f"'intValue' is {content!r}; expected an integer") from None


def _either(item: Record, *names: str) -> str | None:
    return next((item.name(name) for name in names if item.has(name)), None)


def _time_ns(item: Record, nano_name: str, iso_name: str) -> int | None:
    """A time of a span in nanoseconds since 1970; None when it is missing or 0."""
    nano = item.name(nano_name, None)
    if nano is not None:
        if not nano.isdecimal():
            raise item.error(f"{nano_name!r} is {nano!r}; expected nanoseconds since 1970")
        return int(nano) or None
    text = item.text(iso_name, None)
    if text is None:
        return None
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise item.error(
            f"{iso_name!r} is {text!r}; expected a time such as 2026-01-31T12:00:00Z"
        ) from None
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    return (time - _EPOCH) // timedelta(microseconds=1) * 1000


def _is_call(attributes: Record) -> bool:
    operation = attributes.values.get("gen_ai.operation.name")
    if operation is None:
        return attributes.has("gen_ai.request.model")
    return operation in LLM_OPERATIONS


def _tool(item: Record, attributes: Record) -> str | None:
    name = attributes.text("gen_ai.tool.name", None)
    if name is None and attributes.values.get("gen_ai.operation.name") == TOOL_OPERATION:
        return item.text("name", TOOL_OPERATION)
    return name


def _agent(item: Record, attributes: Record) -> str | None:
    """The agent by its own attribute, or by the service's where the span itself carries that."""
    name = attributes.text("gen_ai.agent.name", None)
    resource = item.values.get("resource_attributes")
    if name is None and isinstance(resource, dict):
        service = resource.get("service.name")
        return service if isinstance(service, str) else None
    return name


def _usage(attributes: Record, name: str, old_name: str, text: str) -> int:
    """Recorded tokens, else those of the text."""
    for known in (f"gen_ai.usage.{name}", f"gen_ai.usage.{old_name}"):
        if attributes.has(known):
            return attributes.integer(known)
    return tokens_of(text)


def _named_session(attributes: Record) -> str | None:
    names = ["gen_ai.conversation.id"]
    names += sorted(n for n in attributes.values if n == "session.id" or n.endswith(".session.id"))
    return _either(attributes, *names)


def _session_of(span: _Span, spans: Mapping[Key, _Span]) -> tuple[str, str | None]:
    """A span's session and that session's parent."""
    session_id: str | None = None
    seen: set[Key] = set()
    at: _Span | None = span
    while at is not None and at.key not in seen:
        seen.add(at.key)
        if session_id is None:
            session_id = at.session_id
        elif at.session_id not in (None, session_id):
            return session_id, at.session_id
        at = spans.get(at.parent)
    return session_id or span.key[0], None


def _with_tools(calls: Sequence[Call], tools: Sequence[_Span]) -> tuple[Call, ...]:
    """The calls of a session with the tools that ran after each; both in order of their start."""
    arrivals = [call.arrival_s for call in calls]
    after: dict[int, list[_Span]] = {}
    for tool in tools:
        after.setdefault(bisect_right(arrivals, tool.start_s) - 1, []).append(tool)
    result = []
    for i, call in enumerate(calls):
        ran = after.get(i, ())
        if ran:
            last = max(ran, key=lambda tool: tool.end_s)
            call = replace(call, tool=last.tool, tool_s=round(last.end_s - ran[0].start_s, 6))
        result.append(call)
    return tuple(result)
