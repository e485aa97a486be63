"""Prompts and answers in the attributes of OpenTelemetry's GenAI spans, as text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

_PROMPT = ("gen_ai.system_instructions", "gen_ai.input.messages")
_ANSWER = ("gen_ai.output.messages", "gen_ai.output.text")


def prompt_text(attributes: Mapping[str, Any]) -> str:
    """The prompt, one message a line; a longer prompt of the same conversation begins with it."""
    return "".join(f"{_text(item)}\n" for name in _PROMPT for item in _items(attributes, name))


def answer_text(attributes: Mapping[str, Any]) -> str:
    """The answer; "" when it is not recorded."""
    for name in _ANSWER:
        if attributes.get(name):
            return "\n".join(map(_text, _items(attributes, name)))
    return ""


def called_tool(attributes: Mapping[str, Any]) -> str | None:
    """Name of the first tool that the answer calls."""
    for item in _items(attributes, _ANSWER[0]):
        for call in (*_list(item, "parts"), *_list(item, "tool_calls"), *_list(item, "content")):
            name = _tool_of(call)
            if name is not None:
                return name
    return None


def finish_reason(attributes: Mapping[str, Any]) -> str:
    """Why the answer ended, in the words of the span; "" when it does not say."""
    reasons = list(_items(attributes, "gen_ai.response.finish_reasons"))
    reasons += _items(attributes, "gen_ai.response.finish_reason")
    reasons += [
        item.get("finish_reason")
        for item in _items(attributes, _ANSWER[0])
        if isinstance(item, dict)
    ]
    return next((reason for reason in reasons if isinstance(reason, str)), "")


def _items(attributes: Mapping[str, Any], name: str) -> Iterator[Any]:
    """What an attribute lists: a list, the JSON text of one, or a single value."""
    value = attributes.get(name)
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            parsed = value
        value = parsed if isinstance(parsed, list | dict) else value
    if isinstance(value, list):
        yield from value
    elif value is not None:
        yield value


def _text(value: Any) -> str:
    """A message, a part of one, or plain text."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(map(_text, value))
    if not isinstance(value, dict):
        return json.dumps(value)
    if "role" in value:
        bodies = (value.get(name) for name in ("content", "parts", "tool_calls"))
        return f"{value['role']}: " + "\n".join(_text(body) for body in bodies if body)
    for name in ("content", "text"):
        if isinstance(value.get(name), str):
            return str(value[name])
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _list(item: Any, name: str) -> list[Any]:
    value = item.get(name) if isinstance(item, dict) else None
    return value if isinstance(value, list) else []


def _tool_of(call: Any) -> str | None:
    """The tool that a part of a message calls; None when the part is none such."""
    if not isinstance(call, dict):
        return None
    function = call.get("function")
    if isinstance(function, dict):
        call = function
    elif call.get("type") not in ("tool_call", "tool_use"):
        return None
    name = call.get("name")
    return name if isinstance(name, str) else None
