"""What a model answered, from whole answers and from events of a stream alike.

The dialects are told apart by their content: OpenAI's chat and text completions, OpenAI's
responses, Anthropic's messages.
"""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from saga_core.hints import MAX_VALUE_CHARS
from saga_core.text_calls import tool_in_text

_MAX_TOOLS = 256
_MAX_ID_CHARS = 256
_MAX_TEXT_CHARS = 2**22
_FURTHER_CALL = 10**6
_LAST_RESPONSE_EVENTS = frozenset(
    {"response.completed", "response.incomplete", "response.failed", "response.cancelled"}
)
_MESSAGE_EVENTS = frozenset(
    {
        "message_start",
        "content_block_start",
        "content_block_delta",
        "message_delta",
        "message_stop",
        "message",
    }
)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of an answer; 0 where the worker did not say.

    Attributes:
        cached_tokens: of the prompt, found in a cache; None where the worker did not say.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What one step of a session ended with.

    Attributes:
        tool_names: tools that it called, in the order of the calls; of calls in its text the last.
        finish_reason: the last one said, in the dialect's own words; None when there was none.
        usage: token counts; None when the worker sent none.
        response_id: the id under which a later request may go on from it; only of responses.
        text: what it says, of the first choice; empty unless it was asked for.
        calls: name and JSON arguments of each tool call; none unless they were asked for.
    """

    tool_names: tuple[str, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
    response_id: str | None = None
    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()


class Draft:
    """An answer as far as it has been read.

    Args:
        with_text: keep what it says as well.

    Attributes:
        done: an event has said that it was the last one.
        found: something has been read.
    """

    def __init__(self, *, with_text: bool = False) -> None:
        self.done = False
        self._names: dict[tuple[int, int], str] = {}
        self._arguments: dict[tuple[int, int], list[str]] | None = {} if with_text else None
        self._ids: dict[tuple[int, int], str] = {}
        self._places: dict[tuple[int, int], tuple[int, int]] = {}
        self._texts: dict[int, list[str]] = {}
        self._raw: list[bytes] = []
        self._text_chars = 0
        self._finish_reason: str | None = None
        self._usage: Usage | None = None
        self._response_id: str | None = None
        self.found = False
        self._error = False

    def answer(self) -> Answer | None:
        """The answer; None after an error, or when nothing looked like one."""
        if self._error or not self.found:
            return None
        called = [(key, name) for key, name in sorted(self._names.items()) if name]
        names = tuple(name for _, name in called)
        if self._arguments is None:
            return Answer(names, self._finish_reason, self._usage, self._response_id)
        self._take_in_raw()
        text = "".join(piece for _, pieces in sorted(self._texts.items()) for piece in pieces)
        written = tool_in_text(text) if text and not names else None
        return Answer(
            names if written is None else (written,),
            self._finish_reason,
            self._usage,
            self._response_id,
            text=text,
            calls=tuple((name, "".join(self._arguments.get(key, ()))) for key, name in called),
        )

    def add_raw_text(self, piece: bytes) -> None:
        """Read a piece of text as it stands in JSON, without its quotes."""
        self._text_chars += len(piece)
        if self._text_chars <= _MAX_TEXT_CHARS:
            self._raw.append(piece)

    def add(self, content: object) -> None:
        """Read one event's content, or a whole answer."""
        if not isinstance(content, dict):
            return
        kind = content.get("type")
        if content.get("error") or kind == "error":
            self._error = True
        if "choices" in content:
            self._add_completion(content)
        elif content.get("object") == "response":
            self._add_response(content)
        elif isinstance(kind, str) and kind.startswith("response."):
            self._add_response_event(kind, content)
        elif kind in _MESSAGE_EVENTS:
            self._add_message_event(str(kind), content)

    # Chat and text completions

    def _add_completion(self, content: dict[str, object]) -> None:
        for choice in _objects(content.get("choices")):
            self.found = True
            self._end_with(choice.get("finish_reason"))
            number = _int(choice.get("index"))
            for part in (choice.get("delta"), choice.get("message")):
                if isinstance(part, dict):
                    self._add_calls(number, part)
                    if self._arguments is not None and number == 0:
                        self._add_text(0, part.get("content"))
            if self._arguments is not None and number == 0:
                self._add_text(0, choice.get("text"))
        self._use(content.get("usage"))

    def _add_calls(self, choice: int, part: dict[str, object]) -> None:
        for position, call in enumerate(_objects(part.get("tool_calls"))):
            function = call.get("function")
            if isinstance(function, dict):
                place = self._place(choice, _int(call.get("index"), position), call.get("id"))
                self._add_call(place, function)
        legacy = part.get("function_call")
        if isinstance(legacy, dict):
            self._add_call((choice, -1), legacy)

    def _place(self, choice: int, index: int, call_id: object) -> tuple[int, int]:
        """Where a piece of a call belongs. Some workers number no calls, or all of them alike:
        another id on the same place begins another call."""
        place = self._places.get((choice, index), (choice, index))
        if isinstance(call_id, str) and call_id:
            known = self._ids.setdefault(place, call_id)
            if known != call_id:
                place = self._places[choice, index] = (choice, _FURTHER_CALL + len(self._ids))
                self._ids[place] = call_id
        return place

    def _add_call(self, key: tuple[int, int], function: dict[str, object]) -> None:
        self._add_name(key, function.get("name"))
        self._add_arguments(key, function.get("arguments"))

    # Responses

    def _add_response(self, response: dict[str, object]) -> None:
        self.found = True
        if response.get("error"):
            self._error = True
        response_id = response.get("id")
        if isinstance(response_id, str) and len(response_id) <= _MAX_ID_CHARS:
            self._response_id = response_id
        self._end_with(response.get("status"))
        for position, item in enumerate(_objects(response.get("output"))):
            self._add_item(position, item)
        self._use(response.get("usage"))

    def _add_response_event(self, kind: str, content: dict[str, object]) -> None:
        response, item = content.get("response"), content.get("item")
        if isinstance(response, dict):
            self._add_response(response)
        if isinstance(item, dict):
            self._add_item(_int(content.get("output_index")), item)
        self.done = kind in _LAST_RESPONSE_EVENTS

    def _add_item(self, position: int, item: dict[str, object]) -> None:
        kind = item.get("type")
        if kind in ("function_call", "custom_tool_call", "mcp_call"):
            self._add_name((0, position), item.get("name"))
            if self._arguments is not None:  # An item says all of it, once begun and once done.
                before = self._arguments.pop((0, position), ())
                self._text_chars -= sum(map(len, before))
                self._add_arguments((0, position), item.get("arguments", item.get("input")))
        elif kind == "message" and self._arguments is not None:
            self._text_chars -= sum(map(len, self._texts.pop(position, ())))
            for part in _objects(item.get("content")):
                self._add_text(position, part.get("text"))

    # Messages

    def _add_message_event(self, kind: str, content: dict[str, object]) -> None:
        self.found = True
        block, delta = content.get("content_block"), content.get("delta")
        message = content if kind == "message" else content.get("message")
        if isinstance(message, dict):
            for position, part in enumerate(_objects(message.get("content"))):
                self._add_block(position, part)
            self._end_with(message.get("stop_reason"))
            self._use(message.get("usage"))
        if isinstance(block, dict):
            self._add_block(_int(content.get("index")), block)
        if isinstance(delta, dict):
            self._end_with(delta.get("stop_reason"))
            position = _int(content.get("index"))
            self._add_text(position, delta.get("text"))
            self._add_arguments((0, position), delta.get("partial_json"))
        if kind == "message_delta":
            self._use(content.get("usage"))
        self.done = kind == "message_stop"

    def _add_block(self, position: int, block: dict[str, object]) -> None:
        if block.get("type") == "tool_use":
            self._add_name((0, position), block.get("name"))
            if block.get("input") and self._arguments is not None:
                self._add_arguments((0, position), orjson.dumps(block["input"]).decode())
        else:
            self._add_text(position, block.get("text"))

    # All of them

    def _end_with(self, reason: object) -> None:
        if isinstance(reason, str):
            self._finish_reason = reason

    def _add_name(self, key: tuple[int, int], name: object) -> None:
        """Append a piece of a tool's name; a piece that repeats all there is is a repetition."""
        known = self._names.get(key, "")
        if not isinstance(name, str) or name == known or len(self._names) >= _MAX_TOOLS:
            return
        self._names[key] = (known + name)[:MAX_VALUE_CHARS]

    def _add_text(self, position: int, text: object) -> None:
        if self._arguments is None or not isinstance(text, str) or not text:
            return
        if self._raw:
            self._take_in_raw()
        self._text_chars += len(text)
        if self._text_chars <= _MAX_TEXT_CHARS:
            self._texts.setdefault(position, []).append(text)

    def _add_arguments(self, key: tuple[int, int], piece: object) -> None:
        if self._arguments is None or not isinstance(piece, str) or key not in self._names:
            return
        self._text_chars += len(piece)
        if self._text_chars <= _MAX_TEXT_CHARS:
            self._arguments.setdefault(key, []).append(piece)

    def _take_in_raw(self) -> None:
        raw, self._raw = self._raw, []
        if raw:
            text: str = orjson.loads(b'"' + b"".join(raw) + b'"')
            self._texts.setdefault(0, []).append(text)

    def _use(self, usage: object) -> None:
        """Take token counts; what a later event does not say again stays."""
        if not isinstance(usage, dict):
            return
        before = self._usage or Usage()
        cached = usage.get("cache_read_input_tokens")
        for name in ("prompt_tokens_details", "input_tokens_details"):
            details = usage.get(name)
            if isinstance(details, dict):
                cached = details.get("cached_tokens")
        prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
        if "cache_read_input_tokens" in usage and isinstance(prompt, int):
            # Anthropic counts what was read from a cache, and written to it, apart.
            prompt += _int(cached) + _int(usage.get("cache_creation_input_tokens"))
        completion = usage.get("completion_tokens", usage.get("output_tokens"))
        self._usage = Usage(
            prompt_tokens=_int(prompt, before.prompt_tokens),
            completion_tokens=_int(completion, before.completion_tokens),
            cached_tokens=cached if isinstance(cached, int) else before.cached_tokens,
        )


def _objects(value: object) -> list[dict[str, object]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _int(value: object, default: int = 0) -> int:
    return value if isinstance(value, int) else default
