"""What a model answered, from whole answers and from events of a stream alike.

The dialects are told apart by their content: OpenAI's chat and text completions, OpenAI's
responses, Anthropic's messages.
"""

from __future__ import annotations

from dataclasses import dataclass

from saga_core.hints import MAX_VALUE_CHARS

_MAX_TOOLS = 256
_MAX_ID_CHARS = 256
_LAST_RESPONSE_EVENTS = frozenset(
    {"response.completed", "response.incomplete", "response.failed", "response.cancelled"}
)
_MESSAGE_EVENTS = frozenset(
    {"message_start", "content_block_start", "message_delta", "message_stop", "message"}
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
        tool_names: tools that it called, in the order of the calls.
        finish_reason: the last one said, in the dialect's own words; None when there was none.
        usage: token counts; None when the worker sent none.
        response_id: the id under which a later request may go on from it; only of responses.
    """

    tool_names: tuple[str, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
    response_id: str | None = None


class Draft:
    """An answer as far as it has been read.

    Attributes:
        done: an event has said that it was the last one.
        found: something has been read.
    """

    def __init__(self) -> None:
        self.done = False
        self._names: dict[tuple[int, int], str] = {}
        self._finish_reason: str | None = None
        self._usage: Usage | None = None
        self._response_id: str | None = None
        self.found = False
        self._error = False

    def answer(self) -> Answer | None:
        """The answer; None after an error, or when nothing looked like one."""
        if self._error or not self.found:
            return None
        names = tuple(name for _, name in sorted(self._names.items()) if name)
        return Answer(names, self._finish_reason, self._usage, self._response_id)

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
        self._use(content.get("usage"))

    def _add_calls(self, choice: int, part: dict[str, object]) -> None:
        for position, call in enumerate(_objects(part.get("tool_calls"))):
            function = call.get("function")
            if isinstance(function, dict):
                self._add_name((choice, _int(call.get("index"), position)), function.get("name"))
        legacy = part.get("function_call")
        if isinstance(legacy, dict):
            self._add_name((choice, -1), legacy.get("name"))

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
        if item.get("type") in ("function_call", "custom_tool_call", "mcp_call"):
            self._add_name((0, position), item.get("name"))

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
        if kind == "message_delta":
            self._use(content.get("usage"))
        self.done = kind == "message_stop"

    def _add_block(self, position: int, block: dict[str, object]) -> None:
        if block.get("type") == "tool_use":
            self._add_name((0, position), block.get("name"))

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
