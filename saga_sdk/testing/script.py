"""What a scripted server is asked, and what it can be told to answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from saga_core.hints import Hints, decode

_MAX_SHOWN_CHARS = 120


class ScriptError(AssertionError):
    """The script does not say what to answer; the message names the request."""


@dataclass(slots=True)
class Request:
    """One request as it arrived.

    Attributes:
        number: counts all requests of the server, from 1.
        body: the JSON object; empty when there was none.
        status: of the answer; 0 until there is one, and when the connection was dropped before.
    """

    number: int
    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: dict[str, Any]
    status: int = 0

    def get(self, name: str) -> str | None:
        """The value of a header, its name in any case."""
        return next((v for n, v in self.headers if n.lower() == name.lower()), None)

    @property
    def hints(self) -> Hints:
        """What the request says of its place in an agent's run.

        Raises:
            ValueError: a hint header has no legal value; gateways would pass over it.
        """
        decoded = decode(self.headers)
        if decoded.dropped:
            raise ValueError(f"{self}: no legal value in {', '.join(decoded.dropped)}")
        return decoded.hints

    @property
    def saga_headers(self) -> dict[str, str]:
        """The ``X-SAGA-*`` headers, names in lower case."""
        return {n.lower(): v for n, v in self.headers if n.lower().startswith("x-saga-")}

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation of a chat request, or that of another route put as one.

        Items of a ``/v1/responses`` request that are no messages stand among them as they came.
        """
        body = self.body
        if "messages" in body:
            return list(body["messages"])
        said = body.get("input", body.get("prompt", ""))
        system = body.get("instructions")
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(said, list) and all(isinstance(item, dict) for item in said):
            return [*messages, *said]
        return [*messages, {"role": "user", "content": said}]

    @property
    def text(self) -> str:
        """All texts of the conversation, a line each, tools' results included."""
        return "\n".join(
            text
            for m in self.messages
            for text in (_text(m.get("content", m.get("output"))),)
            if text
        )

    @property
    def user_text(self) -> str:
        """The text of the last user message; empty without one."""
        texts = [_text(m.get("content")) for m in self.messages if m.get("role") == "user"]
        return texts[-1] if texts else ""

    @property
    def turn(self) -> int:
        """How many answers of the model follow the last user message."""
        turn, before = 0, False
        for message in self.messages:
            is_user = message.get("role") == "user"
            is_answer = message.get("role") == "assistant" or message.get("type") == "function_call"
            turn = 0 if is_user else turn + (is_answer and not before)
            before = is_answer
        return turn

    @property
    def tool_names(self) -> list[str]:
        """The tools that the model may call."""
        return [t.get("name") or t["function"]["name"] for t in self.body.get("tools") or ()]

    def __str__(self) -> str:
        asked = (self.user_text or self.text)[:_MAX_SHOWN_CHARS]
        return f"request {self.number} ({self.method} {self.path}) asked {asked!r}"


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return " ".join(
        str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in parts
    )


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool that the model calls.

    Attributes:
        arguments: an object, or a text that goes as it is, legal JSON or not.
        call_id: by default one that no other call of the server has.
    """

    name: str
    arguments: Mapping[str, Any] | str = field(default_factory=dict)
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of the model: text, tool calls or both.

    Attributes:
        finish_reason: by default ``tool_calls`` or ``stop``.
    """

    text: str = ""
    tool_calls: Sequence[ToolCall] = ()
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """An answer with an HTTP status other than 200, and an error as OpenAI writes it.

    Attributes:
        retry_after_s: as ``Retry-After``, in whole seconds, and as ``Retry-After-Ms``, which the
            OpenAI client prefers; None leaves the client to its own patience.
        headers: more headers of the answer.
    """

    status: int = 500
    message: str = "scripted failure"
    retry_after_s: float | None = 0.001
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Malformed:
    """An answer with status 200 that is no JSON; as a stream, an event that is none."""

    content: str = '{"choices": ['


@dataclass(frozen=True, slots=True)
class Dropped:
    """The connection is cut: before the answer, or after some events of a streamed one."""

    step: Step = ""
    after_events: int = 0


@dataclass(frozen=True, slots=True)
class Held:
    """An answer that waits until ``until`` is set: before its first byte, or in its stream.

    The end of the server ends the wait too.
    """

    step: Step
    until: threading.Event
    after_events: int = 0


Step: TypeAlias = (
    "str | ToolCall | Sequence[ToolCall] | Reply | Failure | Malformed | Dropped | Held"
)
"""One answer. A text is a :class:`Reply`; so are tool calls, of which several are parallel."""

Script: TypeAlias = (
    "str | Reply | Iterable[Step] | Mapping[str, Iterable[Step]] | Callable[[Request], Step]"
)
"""What is answered to whom.

A text or a reply answers every request; a list is played in order. In a mapping each key is a
mark in the prompts of one agent, and its list is played to that agent; where several marks are
found, the longest counts. A function is asked for each request, from several threads at once.
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """A step taken apart: what to send, where to wait in it and where to stop.

    Attributes:
        holds: events to wait for, by the number of stream events that go before.
        cut_after: the number of stream events after which the connection is cut.
    """

    content: Reply | Failure | Malformed
    holds: tuple[tuple[int, threading.Event], ...] = ()
    cut_after: int | None = None


def answer_of(step: Step) -> Answer:
    """Take a step apart.

    Raises:
        ScriptError: it is no step.
    """
    match step:
        case Held():
            inner = answer_of(step.step)
            holds = (*inner.holds, (step.after_events, step.until))
            return Answer(inner.content, holds, inner.cut_after)
        case Dropped():
            inner = answer_of(step.step)
            return Answer(inner.content, inner.holds, step.after_events)
        case Reply() | Failure() | Malformed():
            return Answer(step)
        case str():
            return Answer(Reply(step))
        case ToolCall():
            return Answer(Reply(tool_calls=(step,)))
        case [*calls] if calls and all(isinstance(call, ToolCall) for call in calls):
            return Answer(Reply(tool_calls=tuple(calls)))
    raise ScriptError(f"no step of a script: {step!r}")


class Player:
    """Plays a script. Thread-safe."""

    def __init__(self, script: Script) -> None:
        self._lock = threading.Lock()
        self._interjected: list[Step] = []
        self._choose = self._chooser(script)

    def interject(self, steps: Iterable[Step]) -> None:
        """Answer the next requests with ``steps`` before the script goes on."""
        with self._lock:
            self._interjected += steps

    def interjected(self) -> Answer | None:
        """Take the next step that was put before the script; None when there is none."""
        with self._lock:
            return answer_of(self._interjected.pop(0)) if self._interjected else None

    def answer(self, request: Request) -> Answer:
        """Choose the answer to a request for text.

        Raises:
            ScriptError: the script has none.
        """
        return answer_of(self._choose(request))

    def _chooser(self, script: Script) -> Callable[[Request], Step]:
        if isinstance(script, str | Reply):
            return lambda request: script
        if isinstance(script, Mapping):
            parts = {mark: iter(steps) for mark, steps in script.items()}
            marks = sorted(parts, key=lambda mark: (-len(mark), mark))
            return lambda request: self._next(parts[_mark_of(request, marks)], request)
        if isinstance(script, Iterable):
            steps = iter(script)
            return lambda request: self._next(steps, request)
        return script

    def _next(self, steps: Iterator[Step], request: Request) -> Step:
        with self._lock:
            for step in steps:
                return step
        raise ScriptError(f"the script is at its end: {request}")


def _mark_of(request: Request, marks: Sequence[str]) -> str:
    text = request.text
    for mark in marks:
        if mark in text:
            return mark
    raise ScriptError(f"no mark of the script ({', '.join(marks)}) is in the prompt: {request}")
