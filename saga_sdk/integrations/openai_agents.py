"""The OpenAI Agents SDK integration: runs, model calls and tools become runs of the tracker.

A run of the ``Runner`` is one conversation, handoffs included: its session is named by
``conversation_id``, else by the ``session`` memory, else by the ``group_id``, the SDK's own order;
else it is the run's own, and a run that is resumed from a ``RunState`` has a new one. An agent that
runs inside another one's run, as a tool or for a guardrail, is a child session; so is what a tool
asks of a model itself. Model calls have the agent's name as their node. A ``with trace(...)`` block
is a task that its runs are parts of; where tracing is off, each run is a task.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4
from weakref import WeakKeyDictionary, WeakSet

from agents import OpenAIChatCompletionsModel, OpenAIResponsesModel, RunConfig
from agents.run import AgentRunner
from agents.run_internal import run_loop, tool_actions, tool_execution
from agents.tracing import get_current_trace
from agents.tracing.traces import Trace, TraceImpl

from saga_sdk.context import (
    WorkflowContext,
    WorkflowRun,
    calls,
    current_workflow,
    enter_block,
    enter_call,
    inside_of,
)
from saga_sdk.guard import Guard
from saga_sdk.options import options
from saga_sdk.patches import Method, Patches
from saga_sdk.runs import RunKind, RunStart, Source, tracker
from saga_sdk.sessions import Call

# Tools that run in this process, each with the field of its action that holds the tool.
_LOCAL_TOOLS = {
    "ComputerAction": "computer_tool",
    "LocalShellAction": "local_shell_tool",
    "ShellAction": "shell_tool",
    "CustomToolAction": "custom_tool",
    "ApplyPatchAction": "apply_patch_tool",
}


@dataclass(slots=True, eq=False)
class _Enclosing:
    """The run, of an agent or of a tool, that encloses the code of a context.

    Attributes:
        node: the agent whose turn it is; None in a tool.
        call: the model call under way; what a model calls in turn is a part of it.
        last: the model call that was made last.
        has_failed: that call failed; the next one is a new try of it.
        inside: of a tool: the block that its own calls and agents belong to.
    """

    run_id: UUID
    node: str | None = None
    call: UUID | None = None
    last: Call | None = None
    has_failed: bool = False
    inside: WorkflowRun | None = None


class _State:
    """Whether it is installed. Layers that others have wrapped cannot be taken off, but sleep."""

    installed = False


_START = Guard("report of an agent's start")
_END = Guard("report of an agent's end")

_lock = threading.RLock()
_patches = Patches()
_models: WeakSet[type] = WeakSet()
_blocks: WeakKeyDictionary[Trace, WorkflowContext] = WeakKeyDictionary()
# Its value is mutable, as the SDK looks some things up in tasks whose context is lost.
_enclosing: ContextVar[_Enclosing | None] = ContextVar("saga_agents_enclosing", default=None)


def install() -> None:
    """Report agent runs, their model calls and tools from now on. Idempotent."""
    with _lock:
        _State.installed = True
        _wrap(AgentRunner, "run", _wrap_run)
        _wrap(AgentRunner, "run_streamed", _wrap_run_streamed)
        _wrap(TraceImpl, "__enter__", _wrap_enter)
        _wrap(TraceImpl, "__exit__", _wrap_exit)
        _wrap(run_loop, "get_model", _wrap_get_model)
        _wrap(tool_execution, "_invoke_function_tool_with_metadata", _wrap_function_tool)
        for action, field in _LOCAL_TOOLS.items():
            with Guard(f"patch of {action}"):
                owner = getattr(tool_actions, action)
                _patches.wrap(owner, "execute", functools.partial(_wrap_local_tool, field))
        for model in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
            _wrap_model(model)


def uninstall() -> None:
    """Put the original methods back; runs under way still end. Idempotent."""
    with _lock:
        _State.installed = False
        _patches.undo()
        _models.clear()


def _wrap(owner: Any, name: str, wrapper_of: Callable[[Method], Method]) -> None:
    # Where a version of the SDK has no such thing, the rest still works.
    with Guard(f"patch of {name}"):
        _patches.wrap(owner, name, wrapper_of)


# --- agent runs


def _wrap_run(original: Method) -> Method:
    @functools.wraps(original)
    async def run(*args: Any, **kwargs: Any) -> Any:
        outer = _enclosing.get()
        inner = _begin_run(args, kwargs)
        try:
            return await original(*args, **kwargs)
        finally:
            _leave(inner, outer)

    return run


def _wrap_run_streamed(original: Method) -> Method:
    @functools.wraps(original)
    def run_streamed(*args: Any, **kwargs: Any) -> Any:
        outer = _enclosing.get()
        inner = _begin_run(args, kwargs)
        result = None
        try:
            # The run goes on in a task, which has a copy of this context.
            result = original(*args, **kwargs)
            return result
        finally:
            if inner is not None:
                _enclosing.set(outer)
                _end_with(getattr(result, "run_loop_task", None), inner.run_id)

    return run_streamed


def _begin_run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Enclosing | None:
    if not _State.installed:
        return None
    with _START:
        outer = _enclosing.get()
        # args[0] is the runner
        agent = args[1] if len(args) > 1 else kwargs.get("starting_agent")
        config = kwargs.get("run_config")
        name = getattr(agent, "name", None)
        workflow = _setting(config, "workflow_name")
        run_id = uuid4()
        session_id = _session_of(kwargs)
        if outer is None:
            session_id = session_id or _group_of(config)
        elif outer.node is not None:
            # A guardrail's agent, say: it does not go on with the conversation around it.
            session_id = session_id or str(run_id)
        start = RunStart(
            RunKind.CHAIN,
            run_id,
            None if outer is None else outer.run_id,
            name,
            session_id=session_id,
            # The default name would be the same for every agent there is.
            workflow=None if workflow == RunConfig.workflow_name else workflow,
        )
        inner = _Enclosing(run_id, node=name or "agent")
        tracker.start(start, _source())
        _enclosing.set(inner)
        return inner
    return None


def _leave(inner: _Enclosing | None, outer: _Enclosing | None) -> None:
    if inner is None:
        return
    with _END:
        inside = inner.inside
        # The garbage collector may close a coroutine in a context where it never was.
        if _enclosing.get() is inner:
            _enclosing.set(outer)
            if inside is not None and current_workflow() is inside:
                enter_block(inside.outer)
        if inside is not None:
            inside.end_session()
    _end(inner.run_id)


def _end_with(task: Any, run_id: UUID) -> None:
    with _END:
        if task is not None:
            task.add_done_callback(lambda task: _end(run_id))
            return
    _end(run_id)


def _end(run_id: UUID) -> None:
    with _END:
        tracker.end(run_id)


def _source() -> Source:
    return Source(by_hand=False, default_workflow=options.workflow)


def _setting(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)


def _session_of(kwargs: dict[str, Any]) -> str | None:
    conversation_id = kwargs.get("conversation_id")
    if conversation_id:
        return str(conversation_id)
    memory = kwargs.get("session")
    if memory is not None:
        # A session of the server has no id before its first request, and raises.
        with Guard("id of a session memory"):
            return str(memory.session_id)
    return None


def _group_of(config: Any) -> str | None:
    group_id = _setting(config, "group_id") or getattr(get_current_trace(), "group_id", None)
    return str(group_id) if group_id else None


# --- model calls


def _wrap_get_model(original: Method) -> Method:
    @functools.wraps(original)
    def get_model(agent: Any, *args: Any, **kwargs: Any) -> Any:
        model = original(agent, *args, **kwargs)
        if _State.installed:
            with _START:
                enclosing = _enclosing.get()
                if enclosing is not None and enclosing.node is not None:
                    enclosing.node = agent.name
                _wrap_model(type(model))
        return model

    return get_model


def _wrap_model(model: type) -> None:
    if model in _models:
        return
    with _lock:
        if _State.installed:
            _models.add(model)
            _wrap(_owner(model, "get_response"), "get_response", _wrap_get_response)
            _wrap(_owner(model, "stream_response"), "stream_response", _wrap_stream_response)


def _owner(model: type, name: str) -> type:
    return next(each for each in model.__mro__ if name in vars(each))


def _wrap_get_response(original: Method) -> Method:
    @functools.wraps(original)
    async def get_response(*args: Any, **kwargs: Any) -> Any:
        caller = _begin_call()
        try:
            return await original(*args, **kwargs)
        except Exception:
            _note_failure(caller)
            raise
        finally:
            _end_call(caller)

    return get_response


def _wrap_stream_response(original: Method) -> Method:
    @functools.wraps(original)
    def stream_response(*args: Any, **kwargs: Any) -> Any:
        return _report_stream(original(*args, **kwargs))

    return stream_response


async def _report_stream(events: AsyncIterator[Any]) -> AsyncIterator[Any]:
    caller = _begin_call()
    try:
        async for event in events:
            yield event
    except Exception:
        _note_failure(caller)
        raise
    finally:
        _end_call(caller)
        close = getattr(events, "aclose", None)
        if close is not None:
            await close()


def _begin_call() -> _Enclosing | None:
    with _START:
        caller = _enclosing.get()
        # In a tool it is a call like that of a bare client.
        if not _State.installed or caller is None or caller.node is None or caller.call is not None:
            return None
        run_id = uuid4()
        if caller.has_failed and caller.last is not None:
            calls.put(run_id, caller.last)
        else:
            start = RunStart(RunKind.CALL, run_id, caller.run_id, None, node=caller.node)
            tracker.start(start, _source())
            caller.last = calls.get(run_id)
        caller.call, caller.has_failed = run_id, False
        enter_call(run_id)
        return caller
    return None


def _note_failure(caller: _Enclosing | None) -> None:
    if caller is not None:
        caller.has_failed = True


def _end_call(caller: _Enclosing | None) -> None:
    if caller is not None and caller.call is not None:
        run_id, caller.call = caller.call, None
        _end(run_id)


# --- tools


def _wrap_function_tool(original: Method) -> Method:
    @functools.wraps(original)
    async def invoke(*args: Any, **kwargs: Any) -> Any:
        outer = _enclosing.get()
        inner = _begin_tool(outer, kwargs.get("function_tool"))
        try:
            return await original(*args, **kwargs)
        finally:
            _leave(inner, outer)

    return invoke


def _wrap_local_tool(field: str, original: Method) -> Method:
    @functools.wraps(original)
    async def execute(*args: Any, **kwargs: Any) -> Any:
        outer = _enclosing.get()
        inner = _begin_tool(outer, getattr(kwargs.get("call", kwargs.get("action")), field, None))
        try:
            return await original(*args, **kwargs)
        finally:
            _leave(inner, outer)

    return execute


def _begin_tool(outer: _Enclosing | None, tool: Any) -> _Enclosing | None:
    if not _State.installed or outer is None:
        return None
    with _START:
        run_id = uuid4()
        name = getattr(tool, "name", None)
        inner = _Enclosing(run_id, inside=inside_of(outer.last))
        tracker.start(RunStart(RunKind.TOOL, run_id, outer.run_id, name), _source())
        if inner.inside is not None:
            enter_block(inner.inside)
        _enclosing.set(inner)
        return inner
    return None


# --- traces


def _wrap_enter(original: Method) -> Method:
    @functools.wraps(original)
    def enter(self: Any) -> Any:
        result = original(self)
        if _State.installed:
            with _START:
                # Inside another block the trace is a part of that block's task.
                task_id = self.trace_id if current_workflow() is None else None
                block = WorkflowContext(self.name, task_id, None, None)
                _blocks[self] = block
                block.__enter__()
        return result

    return enter


def _wrap_exit(original: Method) -> Method:
    @functools.wraps(original)
    def leave(self: Any, *exc: Any) -> Any:
        with _END:
            block = _blocks.pop(self, None)
            if block is not None:
                block.__exit__(None, None, None)
        return original(self, *exc)

    return leave
