"""Tools of hand-written loops."""

from __future__ import annotations

import functools
import inspect
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar, overload

from saga_sdk.context import WorkflowRun, current_workflow, enter_block, last_call
from saga_sdk.events import EventKind, sender
from saga_sdk.guard import Guard
from saga_sdk.propagation import drive
from saga_sdk.runs import MIN_TOOL_S, tracker
from saga_sdk.sessions import Session, Task

P = ParamSpec("P")
R = TypeVar("R")

_START = Guard("start of a tool")
_END = Guard("end of a tool")


@overload
def tool(function: Callable[P, R], /, *, name: str | None = None) -> Callable[P, R]: ...


@overload
def tool(*, name: str | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def tool(function: Any = None, /, *, name: str | None = None) -> Any:
    """Make a function a tool: ``@saga.tool``, or ``@saga.tool(name="read_file")``.

    The next LLM call of the session that called the tool carries the tool's name and type.
    Gateways that saw the session hear of the tool's start, and of its end when it took over 1 s.
    What the function itself asks of a model is a session of its own, spawned by the calling one,
    which ends with the tool. The calling session is that of the agent that made the last LLM call
    here, while it runs, else that of the ``saga.workflow`` block; where there is neither, the
    function simply runs.

    The function may be a plain one, a coroutine function, a generator or an async generator: then
    the tool lasts from the first item to the last.

    Args:
        name: of the tool; by default the function's.
    """
    if function is None:
        return functools.partial(tool, name=name)
    tool_name = str(name or getattr(function, "__name__", "tool"))
    if inspect.isasyncgenfunction(function):
        wrapper = _of_async_generator(function, tool_name)
    elif inspect.isgeneratorfunction(function):
        wrapper = _of_generator(function, tool_name)
    elif inspect.iscoroutinefunction(function):
        wrapper = _of_coroutine(function, tool_name)
    else:
        wrapper = _of_function(function, tool_name)
    return functools.wraps(function)(wrapper)


@dataclass(slots=True)
class _Caller:
    """Whose tool it is."""

    session: Session
    task: Task
    workflow_id: str
    deadline_at_s: float | None
    spawner_id: str | None


def _caller() -> _Caller | None:
    call, block = last_call(), current_workflow()
    if call is not None and call.root_id is not None and tracker.is_open(call.root_id):
        session, task, said = call.session, call.task, call.hints
        # A block that was entered since then is nearer than the agent around it.
        if session is not None and task is not None and (block is None or block.task is task):
            return _Caller(session, task, said.workflow_id or "", call.deadline_at_s, session.id)
    if block is None:
        return None
    return _Caller(
        block.session, block.task, block.workflow_id, block.deadline_at_s, block.spawner_id
    )


@dataclass(slots=True)
class _ToolRun:
    """One call of a tool; the inside of it is a block, wherever its steps are run."""

    name: str
    _caller: _Caller | None = None
    _inside: WorkflowRun | None = None
    _outside: WorkflowRun | None = None
    _started_s: float = 0.0
    _key: object = field(default_factory=object)

    def start(self) -> None:
        with _START:
            caller = _caller()
            if caller is None:
                return
            self._inside = WorkflowRun(
                workflow_id=caller.workflow_id,
                task=caller.task,
                session=Session(str(uuid.uuid4())),
                session_given=False,
                parent_session_id=caller.spawner_id,
                deadline_at_s=caller.deadline_at_s,
                outer=current_workflow(),
                of_tool=True,
            )
            self._caller, self._started_s = caller, time.monotonic()
            caller.session.open_tools.add(self._key)
            self._say(caller, EventKind.TOOL_START)

    def end(self) -> None:
        caller, inside = self._caller, self._inside
        if caller is None or inside is None:
            return
        with _END:
            caller.session.open_tools.discard(self._key)
            caller.session.tool_ended(self.name)
            took_s = time.monotonic() - self._started_s
            if took_s > MIN_TOOL_S and not caller.session.open_tools:
                self._say(caller, EventKind.TOOL_END)
            inside.end_session()

    def enter(self) -> None:
        if self._inside is not None:
            with _START:
                self._outside = current_workflow()
                enter_block(self._inside)

    def leave(self) -> None:
        if self._inside is not None:
            with _END:
                enter_block(self._outside)

    def run(self, method: Callable[[Any], Any], value: Any) -> Any:
        """Run one step inside."""
        self.enter()
        try:
            return method(value)
        finally:
            self.leave()

    def _say(self, caller: _Caller, kind: EventKind) -> None:
        if caller.session.destinations:
            event = caller.session.event(kind, caller.task, caller.workflow_id, self.name)
            sender.put(event)


def _of_function(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        tool_run = _ToolRun(name)
        tool_run.start()
        tool_run.enter()
        try:
            return function(*args, **kwargs)
        finally:
            tool_run.leave()
            tool_run.end()

    return run


def _of_coroutine(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    async def run(*args: Any, **kwargs: Any) -> Any:
        tool_run = _ToolRun(name)
        tool_run.start()
        tool_run.enter()
        try:
            return await function(*args, **kwargs)
        finally:
            tool_run.leave()
            tool_run.end()

    return run


def _of_generator(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        tool_run = _ToolRun(name)
        tool_run.start()
        try:
            return (yield from drive(function(*args, **kwargs), tool_run.run))
        finally:
            tool_run.end()

    return run


def _of_async_generator(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    async def run(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        tool_run = _ToolRun(name)
        tool_run.start()
        steps = function(*args, **kwargs)
        method, value = steps.asend, None
        try:
            while True:
                try:
                    item = await _inside(tool_run, method, value)
                except StopAsyncIteration:
                    return
                try:
                    method, value = steps.asend, (yield item)
                except GeneratorExit:
                    await _inside(tool_run, _aclose, steps)
                    raise
                except BaseException as error:  # noqa: BLE001 (it is the generator's to handle)
                    method, value = steps.athrow, error
        finally:
            tool_run.end()

    return run


async def _inside(tool_run: _ToolRun, method: Callable[[Any], Any], value: Any) -> Any:
    tool_run.enter()
    try:
        return await method(value)
    finally:
        tool_run.leave()


async def _aclose(steps: Any) -> None:
    await steps.aclose()
