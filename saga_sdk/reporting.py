"""Runs that wrapped methods report, for frameworks that have no callbacks of their own."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from types import TracebackType
from typing import Any
from uuid import uuid4

from saga_sdk.context import WorkflowRun, calls, current_workflow, enter_block, enter_call
from saga_sdk.events import EventKind, sender
from saga_sdk.guard import Guard
from saga_sdk.options import options
from saga_sdk.patches import Method, Patches
from saga_sdk.runs import RunKind, RunStart, Source, tracker
from saga_sdk.sessions import Call, wire_id

_START = Guard("start of a run")
_END = Guard("end of a run")
_CONVERSATION_END = Guard("end of a conversation")

_current: ContextVar[Run | None] = ContextVar("saga_reported_run", default=None)


class Conversation:
    """A session that lasts as long as something of the program: an agent's memory, say."""

    __slots__ = ("_last", "id")

    def __init__(self, session_id: object = None) -> None:
        self.id = wire_id(uuid4() if session_id is None else session_id)
        self._last: Call | None = None

    def called(self, call: Call) -> None:
        """Note a call that continues it."""
        if call.hints.session_id == self.id:
            self._last = call

    def end(self) -> None:
        """Tell the gateways that saw it that it is over. The garbage collector may call this."""
        with _CONVERSATION_END:
            last, self._last = self._last, None
            if last is None or last.session is None or last.task is None:
                return
            if last.session.destinations:
                workflow_id = last.hints.workflow_id or ""
                sender.put(last.session.event(EventKind.SESSION_END, last.task, workflow_id))
                last.session.forget_gateways()


class Run:
    """One run of a framework, which begins when it is entered first; it never raises.

    ``with run:`` is the whole of it. A stream enters it for each of its parts, by
    :meth:`entered`, and calls :meth:`end`. What begins inside is a run below it. A run that
    begins directly inside one of the same subject is that very run and reports nothing.

    Args:
        subject: what runs: an agent, say.
        node: the name that its calls go by; by default that of the run around it.
        conversation: its session; by default the tracker decides.
        one_off: the conversation ends with the run.
        path: begins the session ids of those below, where the user named a session.

    Attributes:
        block: the ``saga.workflow`` block that it began in.
        is_open: it has begun, and not ended.
    """

    __slots__ = (
        "__weakref__",
        "_begun",
        "_name",
        "_one_off",
        "_whole",
        "block",
        "conversation",
        "id",
        "is_open",
        "kind",
        "node",
        "path",
        "subject",
    )

    def __init__(
        self,
        kind: RunKind,
        name: str | None,
        *,
        subject: object = None,
        node: str | None = None,
        conversation: Conversation | None = None,
        one_off: bool = False,
        path: str | None = None,
    ) -> None:
        self.id = uuid4()
        self.kind = kind
        self.node = node
        self.conversation = conversation
        self.path = path
        self.subject = subject
        self.block: WorkflowRun | None = None
        self.is_open = False
        self._name = name
        self._one_off = one_off
        self._begun = False
        self._whole: _Part | None = None

    def begin(self) -> None:
        """Report the start, once, with what it takes over from the run around it."""
        if self._begun:
            return
        self._begun = True
        self.block = current_workflow()
        outer = current_run()
        if outer is not None:
            if self.subject is not None and outer.subject is self.subject:
                return
            self.node = self.node or outer.node
            self.path = self.path or outer.path
            if self.conversation is None and self.kind is not RunKind.TOOL:
                self.conversation = outer.conversation
        start = RunStart(
            self.kind,
            self.id,
            None if outer is None else outer.id,
            self._name,
            session_id=None if self.conversation is None else self.conversation.id,
            node=self.node,
        )
        self.is_open = True
        tracker.start(start, Source(by_hand=False, default_workflow=options.workflow))

    def end(self) -> None:
        """Report the end, once. The garbage collector may call this."""
        if not self.is_open:
            return
        self.is_open = False
        self.subject = None
        with _END:
            tracker.end(self.id)
        if self._one_off and self.conversation is not None:
            self.conversation.end()

    def entered(self) -> AbstractContextManager[None]:
        """Make it the current run for a part of it, that begins and ends in one context."""
        return _Part(self)

    def __enter__(self) -> None:
        self._whole = _Part(self)
        self._whole.__enter__()

    def __exit__(self, *exc: object) -> None:
        if self._whole is not None:
            self._whole.__exit__(None, None, None)
        self.end()


class _Part:
    """A stretch of code in which a run is the current one, and in which its block is in force."""

    __slots__ = ("_block", "_outer", "_run")

    def __init__(self, run: Run) -> None:
        self._run = run
        self._outer: Run | None = None
        self._block: WorkflowRun | None = None

    def __enter__(self) -> None:
        run = self._run
        with _START:
            run.begin()
            if not run.is_open:
                return
            self._outer, self._block = _current.get(), current_workflow()
            _current.set(run)
            if self._block is not run.block:
                # A runtime that was started elsewhere runs its handlers in that context.
                enter_block(run.block)
            if run.kind is RunKind.CALL:
                enter_call(run.id)
                call = calls.get(run.id)
                if call is not None and run.conversation is not None:
                    run.conversation.called(call)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # No token is held: what closes a generator may do so in another context.
        with _END:
            if _current.get() is not self._run:
                return
            _current.set(self._outer)
            if current_workflow() is self._run.block is not self._block:
                enter_block(self._block)
            if self._outer is not None and self._outer.kind is RunKind.CALL:
                enter_call(self._outer.id)


def current_run() -> Run | None:
    """The innermost reported run of this context that is still open."""
    run = _current.get()
    return run if run is not None and run.is_open else None


def named_block() -> WorkflowRun | None:
    """The block around this code, if the user named its session and no run began in it yet."""
    outer, block = current_run(), current_workflow()
    is_named = block is not None and block.session_given
    return block if is_named and (outer is None or outer.block is not block) else None


MakeRun = Callable[..., Run | None]


def run_of(make_run: MakeRun, /, *args: Any, **kwargs: Any) -> Run | None:
    """The run that ``make_run`` makes of a call's arguments; None for none, or when it fails."""
    with _START:
        return make_run(*args, **kwargs)
    return None


def coroutine(make_run: MakeRun) -> Callable[[Method], Method]:
    """A wrapper that makes each call of an ``async`` function a run."""

    def wrapper_of(original: Method) -> Method:
        @functools.wraps(original)
        async def reported(*args: Any, **kwargs: Any) -> Any:
            with run_of(make_run, *args, **kwargs) or nullcontext():
                return await original(*args, **kwargs)

        return reported

    return wrapper_of


def stream(make_run: MakeRun) -> Callable[[Method], Method]:
    """A wrapper that makes each call of an async generator function a run.

    The run is the current one while an item is made, not while the reader has it.
    """

    def wrapper_of(original: Method) -> Method:
        @functools.wraps(original)
        async def reported(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            run = run_of(make_run, *args, **kwargs)
            part = nullcontext if run is None else run.entered
            items = aiter(original(*args, **kwargs))
            try:
                while True:
                    with part():
                        try:
                            item = await anext(items)
                        except StopAsyncIteration:
                            return
                    yield item
            finally:
                try:
                    # The reader may leave early; what is below must not wait for the collector.
                    if hasattr(items, "aclose"):
                        await items.aclose()
                finally:
                    if run is not None:
                        run.end()

        return reported

    return wrapper_of


def wrap_subclasses(patches: Patches, base: Any, wrap: Callable[[type], None]) -> None:
    """Call ``wrap`` for each class below ``base``: now, or as soon as the program defines it."""

    def wrapper_of(original: Method) -> Any:
        own = vars(base).get("__init_subclass__")

        def init_subclass(cls: type, /, **kwargs: Any) -> None:
            if own is None:
                super(base, cls).__init_subclass__(**kwargs)
            else:
                own.__func__(cls, **kwargs)
            with _START:
                wrap(cls)

        return classmethod(init_subclass)

    patches.wrap(base, "__init_subclass__", wrapper_of)
    for each in _subclasses(base):
        wrap(each)


def _subclasses(base: type) -> list[type]:
    below: list[type] = base.__subclasses__()
    return below + [deeper for each in below for deeper in _subclasses(each)]
