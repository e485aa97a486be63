"""The texts of exchanges whose words links are told by."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from saga_core.conversations import Piece
from saga_core.prompts import PromptReader
from saga_sim.aeg.exchanges import Exchange

_END_CHARS = 1000


def prompt_texts(exchange: Exchange) -> list[str]:
    """The system prompt and the messages from the last one back; of plain text its two ends.

    Where tokens, or blocks, stand for a text there are no words.
    """
    if exchange.api == "completions":
        text = exchange.body["prompt"]
        if not isinstance(text, str):
            return []
        return [text[:_END_CHARS], text[_END_CHARS:][-_END_CHARS:]]
    messages = exchange.body["messages"]
    texts = [_content(message) for message in messages if message["role"] != "system"][::-1]
    return [_content(each) for each in messages if each["role"] == "system"] + texts


def answer_texts(exchange: Exchange) -> list[str]:
    """The answer's text, then the texts among the arguments of its tool calls."""
    texts = [exchange.answer]
    for _, arguments in exchange.calls:
        values = json.loads(arguments)
        if isinstance(values, dict):
            texts += [value for value in values.values() if isinstance(value, str)]
    return texts


def as_user(reader: PromptReader, text: str) -> tuple[Piece, ...]:
    """The pieces that a text is as the message of a user."""
    prompt = reader.read("chat", {"messages": [{"role": "user", "content": text}]})
    return prompt.pieces if prompt is not None else ()


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""
