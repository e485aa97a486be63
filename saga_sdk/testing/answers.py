"""Answers as the OpenAI API writes them, whole or as the events of a stream."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from saga_sdk.testing.script import Reply, Request

_CREATED_S = 1_700_000_000
_PIECE = re.compile(r"\s*\S+\s*|\s+")


@dataclass(frozen=True, slots=True)
class Said:
    """A reply as the answer to one request."""

    reply: Reply
    request: Request

    @property
    def pieces(self) -> list[str]:
        """The text cut into words; a streamed token each."""
        return _PIECE.findall(self.reply.text)

    @property
    def calls(self) -> list[tuple[str, str, str]]:
        """Id, name and arguments of each tool call."""
        return [
            (
                call.call_id or f"call_{self.request.number}_{index}",
                call.name,
                call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments),
            )
            for index, call in enumerate(self.reply.tool_calls)
        ]

    @property
    def finish_reason(self) -> str:
        return self.reply.finish_reason or ("tool_calls" if self.reply.tool_calls else "stop")

    @property
    def tokens(self) -> tuple[int, int]:
        """Of the prompt and of the answer: words, for want of a tokenizer."""
        spoken = len(self.pieces) + len(self.reply.tool_calls)
        return max(1, len(self.request.text.split())), max(1, spoken)

    def usage(self) -> dict[str, Any]:
        prompt, completion = self.tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def head(self, prefix: str, kind: str) -> dict[str, Any]:
        """The fields that every answer begins with."""
        model = str(self.request.body.get("model", "scripted"))
        answer_id = f"{prefix}-{self.request.number}"
        return {"id": answer_id, "object": kind, "created": _CREATED_S, "model": model}

    def choice(self, finish_reason: str | None, **content: Any) -> list[dict[str, Any]]:
        return [{"index": 0, **content, "finish_reason": finish_reason, "logprobs": None}]


def _halves(text: str) -> tuple[str, str]:
    return text[: len(text) // 2], text[len(text) // 2 :]


def chat(said: Said) -> dict[str, Any]:
    """The body of a ``/v1/chat/completions`` answer."""
    message: dict[str, Any] = {"role": "assistant", "content": said.reply.text or None}
    if said.calls:
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in said.calls
        ]
    else:
        message["content"] = said.reply.text
    choices = said.choice(said.finish_reason, message=message)
    return {**said.head("chatcmpl", "chat.completion"), "choices": choices, "usage": said.usage()}


def chat_stream(said: Said) -> Iterator[bytes]:
    """The events of a streamed one; arguments of tool calls come in pieces."""
    head = said.head("chatcmpl", "chat.completion.chunk")

    def delta(finish_reason: str | None = None, **fields: Any) -> bytes:
        return _event({**head, "choices": said.choice(finish_reason, delta=fields)})

    yield delta(role="assistant", content="")
    for piece in said.pieces:
        yield delta(content=piece)
    for index, (call_id, name, arguments) in enumerate(said.calls):
        function = {"name": name, "arguments": ""}
        call = {"index": index, "id": call_id, "type": "function", "function": function}
        yield delta(tool_calls=[call])
        for part in _halves(arguments):
            yield delta(tool_calls=[{"index": index, "function": {"arguments": part}}])
    yield delta(said.finish_reason)
    yield from _end_of_stream(said, head)


def completion(said: Said) -> dict[str, Any]:
    """The body of a ``/v1/completions`` answer."""
    choices = said.choice(said.finish_reason, text=said.reply.text)
    return {**said.head("cmpl", "text_completion"), "choices": choices, "usage": said.usage()}


def completion_stream(said: Said) -> Iterator[bytes]:
    """The events of a streamed one."""
    head = said.head("cmpl", "text_completion")
    for piece in said.pieces:
        yield _event({**head, "choices": said.choice(None, text=piece)})
    yield _event({**head, "choices": said.choice(said.finish_reason, text="")})
    yield from _end_of_stream(said, head)


def _end_of_stream(said: Said, head: dict[str, Any]) -> Iterator[bytes]:
    if (said.request.body.get("stream_options") or {}).get("include_usage"):
        yield _event({**head, "choices": [], "usage": said.usage()})
    yield b"data: [DONE]\n\n"


def _event(content: dict[str, Any], name: str | None = None) -> bytes:
    prefix = f"event: {name}\n" if name else ""
    return f"{prefix}data: {json.dumps(content)}\n\n".encode()


def response(said: Said) -> dict[str, Any]:
    """The body of a ``/v1/responses`` answer."""
    return _response(said, "completed", [item for item, _ in _output_items(said)])


def _response(said: Said, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    body, (prompt, answered) = said.request.body, said.tokens
    usage = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answered,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + answered,
    }
    return {
        "id": f"resp_{said.request.number}",
        "object": "response",
        "created_at": _CREATED_S,
        "model": str(body.get("model", "scripted")),
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "metadata": {},
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "usage": usage if status == "completed" else None,
    }


def _output_items(said: Said) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Each item of the output, and the pieces that its text or arguments are streamed in."""
    number = said.request.number
    if said.reply.text or not said.calls:
        part = {"type": "output_text", "text": said.reply.text, "annotations": []}
        message = {"id": f"msg_{number}", "type": "message", "role": "assistant"}
        yield {**message, "status": "completed", "content": [part]}, said.pieces
    for index, (call_id, name, arguments) in enumerate(said.calls):
        item = {"id": f"fc_{number}_{index}", "type": "function_call", "status": "completed"}
        item |= {"call_id": call_id, "name": name, "arguments": arguments}
        yield item, list(_halves(arguments))


def response_stream(said: Said) -> Iterator[bytes]:
    """The events of a streamed ``/v1/responses`` answer."""
    for number, (name, content) in enumerate(_response_events(said)):
        yield _event({"type": name, "sequence_number": number, **content}, name)


def _response_events(said: Said) -> Iterator[tuple[str, dict[str, Any]]]:
    begun = _response(said, "in_progress", [])
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, (item, pieces) in enumerate(_output_items(said)):
        if item["type"] == "message":
            yield from _message_events(index, item, pieces)
        else:
            yield from _function_call_events(index, item, pieces)
    yield "response.completed", {"response": response(said)}


def _message_events(
    index: int, item: dict[str, Any], pieces: list[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    (part,) = item["content"]
    at = {"output_index": index, "item_id": item["id"], "content_index": 0}
    begun = {**item, "status": "in_progress", "content": []}
    yield "response.output_item.added", {"output_index": index, "item": begun}
    yield "response.content_part.added", {**at, "part": {**part, "text": ""}}
    for piece in pieces:
        yield "response.output_text.delta", {**at, "delta": piece, "logprobs": []}
    yield "response.output_text.done", {**at, "text": part["text"], "logprobs": []}
    yield "response.content_part.done", {**at, "part": part}
    yield "response.output_item.done", {"output_index": index, "item": item}


def _function_call_events(
    index: int, item: dict[str, Any], pieces: list[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    at = {"output_index": index, "item_id": item["id"]}
    begun = {**item, "status": "in_progress", "arguments": ""}
    yield "response.output_item.added", {"output_index": index, "item": begun}
    for piece in pieces:
        yield "response.function_call_arguments.delta", {**at, "delta": piece}
    done = {**at, "name": item["name"], "arguments": item["arguments"]}
    yield "response.function_call_arguments.done", done
    yield "response.output_item.done", {"output_index": index, "item": item}


def embeddings(request: Request) -> dict[str, Any]:
    """The body of a ``/v1/embeddings`` answer: the same vector for every input."""
    given = request.body.get("input", "")
    count = len(given) if isinstance(given, list) and not _is_tokens(given) else 1
    data = [{"object": "embedding", "index": i, "embedding": [0.0, 1.0]} for i in range(count)]
    usage = {"prompt_tokens": count, "total_tokens": count}
    model = str(request.body.get("model", "scripted"))
    return {"object": "list", "model": model, "data": data, "usage": usage}


def _is_tokens(given: list[Any]) -> bool:
    return bool(given) and isinstance(given[0], int)


def models(model: str) -> dict[str, Any]:
    """The body of a ``/v1/models`` answer."""
    entry = {"id": model, "object": "model", "created": _CREATED_S, "owned_by": "saga"}
    return {"object": "list", "data": [entry]}


GENERATION: dict[
    str, tuple[Callable[[Said], dict[str, Any]], Callable[[Said], Iterator[bytes]]]
] = {
    "/chat/completions": (chat, chat_stream),
    "/completions": (completion, completion_stream),
    "/responses": (response, response_stream),
}
"""The end of a path → its answer whole, and as a stream; the first that fits counts."""
