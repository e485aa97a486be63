"""Prompts as pieces: what a request says, as keyed hashes and lengths.

The bodies of four APIs are read: OpenAI's chat completions, text completions and responses, and
Anthropic's messages. What clients write in more than one way (parts or a text, JSON arguments with
other spaces, blanks at the ends) gives the same pieces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Generic, NamedTuple, TypeVar

import orjson

from saga_core.conversations import Kind, Piece
from saga_core.plain_text import DigestOf
from saga_core.workflows import Template

_DIGEST_BYTES = 8
_DIGITS = b"0123456789"
# Words with a digit in them: dates, times, counts, ids. Names of days and months stand beside such.
_VALUE = re.compile(
    rb"(?<!\S)[^\s0-9]*+[0-9]\S*+|\b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b"
    rb"|\b(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec|mon|tue|wed|thu|fri|sat|sun)[a-z]*\b",
    re.IGNORECASE,
)
_MAX_KNOWN = 50_000
_MAX_MASKED = 4096
_BIG_CHARS = 2**16
_BIG_ENDS_CHARS = 2**10
_FIRST_BLOCK_CHARS = 64
_BLOCK_SHARE = 64
_LONGEST_BLOCK = 4
_TOKENS_PER_BLOCK = 64
_MIN_LINE_CHARS = 12
_MAX_LINES = 256
# A conversation of more is not looked into: it would hold up other requests.
_MAX_MESSAGES = 10_000
_MAX_DEPTH = 32
_TEMPLATE_CHARS = 2**16

_CALL = "call"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's prompt.

    Attributes:
        pieces: messages, tool calls and tool results in order, or blocks of plain text.
        shape: keyed hash of what all runs of a workflow have in common: model, system prompt
            without its values, names of the tools.
        observed_chars: length of what was added after the last answer, tool results above all.
        follows: id of the response that the prompt goes on from; its own pieces are what is new.
    """

    pieces: tuple[Piece, ...]
    shape: int
    observed_chars: int
    follows: str | None = None


class PromptReader:
    """Reads the bodies of requests, parsed from JSON.

    Nothing of a prompt is kept, save for hashes of what was said lately. A body that is not as its
    API says gives what can be read of it: the worker says what is wrong.

    Args:
        secret: key of the hashes, at most 64 bytes; equal in replicas that share what they learn.
    """

    def __init__(self, secret: bytes = b"") -> None:
        self._hash = blake2b(digest_size=_DIGEST_BYTES, key=secret)
        self._user, self._assistant, self._tool = map(self._begun, ("user", "assistant", "tool"))
        self._known = _Lately[Piece](_MAX_KNOWN)
        self._masked = _Lately[int](_MAX_MASKED)

    def read(self, api: str, content: Mapping[str, Any]) -> Prompt | None:
        """The prompt of a body; None when there is none, or more than one.

        Args:
            api: "chat", "completions", "responses" or "messages".
        """
        if api == "completions":
            pieces = self._flat(content.get("prompt"))
        elif _is_long(content):
            return None
        else:
            pieces = []
            self._add_messages(pieces, api, content)
        if not pieces:
            return None
        observed = 0
        for piece in reversed(pieces):
            if piece.kind is Kind.ASSISTANT or piece.kind is Kind.SYSTEM:
                break
            observed += piece.size
        follows = content.get("previous_response_id")
        return Prompt(
            tuple(pieces),
            self._shape(content, pieces),
            observed,
            follows if isinstance(follows, str) and api == "responses" else None,
        )

    def digest_of(self, content: Mapping[str, Any]) -> DigestOf:
        """Hashes of parts of a plain prompt: of "completions", from one place to another."""
        prompt: Any = content.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]

        def digest(start: int, end: int) -> int:
            part = prompt[start:end]
            return self._digest(part.encode() if isinstance(part, str) else orjson.dumps(part))

        return digest

    def answer(self, text: str, calls: Iterable[tuple[str, str]] = ()) -> list[Piece]:
        """The pieces as which an answer comes back: its text, then its calls.

        Args:
            calls: name and JSON arguments of each.
        """
        pieces: list[Piece] = []
        self._said(pieces, Kind.ASSISTANT, self._assistant, text)
        pieces += [self._call(name, arguments) for name, arguments in calls]
        return pieces

    def template(self, api: str, content: Mapping[str, Any]) -> Template:
        """What the body shows of its workflow. Dearer than reading it; once for each shape."""
        tools = _tool_names(content)
        text = _system_text(api, content)
        is_stable = bool(text or tools)
        if not is_stable:
            text = _first_text(api, content)
        lines = (line.strip() for line in re.split(r"\n|(?<=[.!?]) ", text[:_TEMPLATE_CHARS]))
        kept = [line for line in lines if len(line) >= _MIN_LINE_CHARS][:_MAX_LINES]
        return Template(
            kind=self._digest(orjson.dumps([_model(content), tools])),
            lines=tuple(map(self._masked_digest, kept or tools[:1])),
            is_stable=is_stable,
        )

    # Pieces

    def _add_messages(self, pieces: list[Piece], api: str, content: Mapping[str, Any]) -> None:
        system = _system_text(api, content) if api != "chat" else ""
        if system:
            pieces.append(self._system(system))
        if api == "chat":
            for message in _objects(content.get("messages")):
                self._add_chat(pieces, message)
        elif api == "messages":
            for message in _objects(content.get("messages")):
                self._add_anthropic(pieces, message)
        elif isinstance(content.get("input"), str):
            self._said(pieces, Kind.USER, self._user, content["input"])
        else:
            for item in _objects(content.get("input")):
                self._add_item(pieces, item)

    def _add_chat(self, pieces: list[Piece], message: Mapping[str, Any]) -> None:
        role, text = message.get("role"), message.get("content")
        if type(text) is not str:
            text = _text(text)
        if role == "user":
            self._said(pieces, Kind.USER, self._user, text)
        elif role == "assistant":
            self._said(pieces, Kind.ASSISTANT, self._assistant, text)
            functions = [call.get("function") for call in _objects(message.get("tool_calls"))]
            for function in [*functions, message.get("function_call")]:
                if isinstance(function, dict):
                    pieces.append(self._call(function.get("name"), function.get("arguments")))
        elif role in ("tool", "function"):
            self._said(pieces, Kind.TOOL, self._tool, text)
        elif role in ("system", "developer"):
            pieces.append(self._system(text))
        else:
            self._said(pieces, Kind.USER, self._user, text)

    def _add_anthropic(self, pieces: list[Piece], message: Mapping[str, Any]) -> None:
        content = message.get("content")
        blocks = _objects(content)
        for block in blocks:
            if block.get("type") == "tool_result":
                self._said(pieces, Kind.TOOL, self._tool, _text(block.get("content")))
        if message.get("role") == "assistant":
            self._said(pieces, Kind.ASSISTANT, self._assistant, _text(content))
        else:
            self._said(pieces, Kind.USER, self._user, _text(content))
        for block in blocks:
            if block.get("type") == "tool_use":
                pieces.append(self._call(block.get("name"), block.get("input")))

    def _add_item(self, pieces: list[Piece], item: Mapping[str, Any]) -> None:
        kind = item.get("type", "message")
        if kind == "message":
            self._add_chat(pieces, item)
        elif kind in ("function_call", "custom_tool_call"):
            pieces.append(self._call(item.get("name"), item.get("arguments", item.get("input"))))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._said(pieces, Kind.TOOL, self._tool, _text(item.get("output")))

    def _flat(self, prompt: object) -> list[Piece]:
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        if isinstance(prompt, str):
            blocks = [(block.encode(), len(block)) for block in _blocks(prompt)]
        elif isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            starts = range(0, len(prompt), _TOKENS_PER_BLOCK)
            cut = [prompt[start : start + _TOKENS_PER_BLOCK] for start in starts]
            blocks = [(orjson.dumps(tokens), len(tokens)) for tokens in cut]
        else:
            return []
        return [Piece(self._digest(block), size, Kind.USER) for block, size in blocks]

    def _said(self, pieces: list[Piece], kind: Kind, begun: _Begun, text: str) -> None:
        """Add what somebody said, if it is anything; ``begun`` is a hash of who."""
        key = hash(text) ^ begun.salt
        piece = self._known.new.get(key) or self._known.get(key)
        if piece is None:
            stripped = text.strip()
            if not stripped:
                return
            hashed = begun.hash.copy()
            hashed.update(stripped.encode())
            piece = Piece(int.from_bytes(hashed.digest()), len(stripped), kind)
            self._known.put(key, piece)
        pieces.append(piece)

    def _system(self, text: str) -> Piece:
        return Piece(self._masked_digest(text.strip()), len(text), Kind.SYSTEM)

    def _call(self, name: object, arguments: object) -> Piece:
        if not isinstance(name, str):
            name = ""
        if not isinstance(arguments, str):
            return self._new_call(name, arguments)
        key = hash((name, arguments))
        piece = self._known.get(key)
        if piece is None:
            piece = self._new_call(name, _parsed(arguments))
            self._known.put(key, piece)
        return piece

    def _new_call(self, name: str, arguments: object) -> Piece:
        # In one way whatever the order of keys and the spaces.
        content = orjson.dumps([_CALL, name, arguments or {}], option=orjson.OPT_SORT_KEYS)
        return Piece(self._digest(content), len(content), Kind.ASSISTANT)

    def _shape(self, content: Mapping[str, Any], pieces: Sequence[Piece]) -> int:
        system = [piece.digest for piece in pieces[:4] if piece.kind is Kind.SYSTEM]
        known: list[object] = [_model(content), *_tool_names(content), *system]
        if not system and len(known) == 1:
            known.append(pieces[0].digest)
        return self._digest(orjson.dumps(known))

    def _begun(self, who: str) -> _Begun:
        begun = self._hash.copy()
        begun.update(f"{who} ".encode())
        return _Begun(begun, hash(who))

    def _digest(self, content: bytes) -> int:
        hashed = self._hash.copy()
        hashed.update(content)
        return int.from_bytes(hashed.digest())

    def _masked_digest(self, text: str) -> int:
        """Hash of a text without its values; worked out once for each text."""
        key = hash(text)
        known = self._masked.get(key)
        if known is None:
            lines = text.encode()[:_TEMPLATE_CHARS].split(b"\n")
            masked = [
                line if line.translate(None, _DIGITS) == line else _VALUE.sub(b"0", line)
                for line in lines
            ]
            known = self._digest(b"\n".join(masked))
            self._masked.put(key, known)
        return known


class _Begun(NamedTuple):
    """A hash that has begun with who speaks, and what tells them apart in a process."""

    hash: blake2b
    salt: int


class _Lately(Generic[T]):
    """What was worked out lately, by hashes that hold in this process alone.

    Agents send all that was said with every request: nearly all of it has been hashed before, and
    Python's own hash costs a tenth of one that holds in every process. What has not come in a
    while goes.

    Attributes:
        new: the newer half, to look into first.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.new: dict[int, T] = {}
        self._old: dict[int, T] = {}

    def get(self, key: int) -> T | None:
        found = self.new.get(key)
        if found is None:
            found = self._old.get(key)
            if found is not None:
                self.put(key, found)
        return found

    def put(self, key: int, value: T) -> None:
        if len(self.new) >= self._most:
            self._old, self.new = self.new, {}
        self.new[key] = value


def _parsed(arguments: str) -> object:
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments.strip()


def _blocks(text: str) -> Iterator[str]:
    """Plain text cut after line ends, if these come; blocks grow with the text before them.

    So a text and one that it begins have all blocks in common but the shorter one's last, and a
    long text has a few hundred.
    """
    start = 0
    while start < len(text):
        size = max(_FIRST_BLOCK_CHARS, start // _BLOCK_SHARE)
        longest = start + _LONGEST_BLOCK * size
        # Text without line ends is cut all the same.
        end = text.find("\n", start + size, longest) + 1 or min(longest, len(text))
        yield text[start:end]
        start = end


def _text(content: object) -> str:
    """The text of a content, in parts or not; anything else stands in it by a few of its ends."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "".join(map(_part, content))


def _part(part: object) -> str:
    if not isinstance(part, dict):
        return part if isinstance(part, str) else ""
    text = part.get("text")
    if isinstance(text, str):
        return text
    kind = part.get("type")
    if kind in ("tool_use", "tool_result", "thinking", "redacted_thinking", "reasoning"):
        return ""
    # An image, a file: megabytes that differ at their ends.
    return "".join(_ends(value) for value in _texts(part))


def _texts(value: object, depth: int = 0) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict) and depth < _MAX_DEPTH:
        for each in value.values():
            yield from _texts(each, depth + 1)


def _ends(text: str) -> str:
    if len(text) <= _BIG_CHARS:
        return text
    return f"{text[:_BIG_ENDS_CHARS]}{len(text)}{text[-_BIG_ENDS_CHARS:]}"


def _system_text(api: str, content: Mapping[str, Any]) -> str:
    if api == "messages":
        return _text(content.get("system"))
    if api == "responses":
        return _text(content.get("instructions"))
    messages = _objects(content.get("messages"))
    return "\n".join(
        _text(message.get("content"))
        for message in messages[:4]
        if message.get("role") in ("system", "developer")
    )


def _first_text(api: str, content: Mapping[str, Any]) -> str:
    if api == "completions":
        prompt = content.get("prompt")
        return prompt if isinstance(prompt, str) else _text(prompt)
    messages = content.get("input") if api == "responses" else content.get("messages")
    if isinstance(messages, str):
        return messages
    return next((_text(message.get("content")) for message in _objects(messages)), "")


def _tool_names(content: Mapping[str, Any]) -> list[str]:
    names = []
    for tool in _objects(content.get("tools")):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else tool.get("name")
        if isinstance(name, str):
            names.append(name)
    return sorted(names)


def _model(content: Mapping[str, Any]) -> str:
    model = content.get("model")
    return model if isinstance(model, str) else ""


def _is_long(content: Mapping[str, Any]) -> bool:
    lists = (content.get("messages"), content.get("input"))
    return any(isinstance(each, list) and len(each) > _MAX_MESSAGES for each in lists)


def _objects(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
