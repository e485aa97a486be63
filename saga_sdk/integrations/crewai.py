"""The CrewAI integration: crews, flows, agents, model calls and tools become runs of the tracker.

The kickoff of a crew or a flow is a task, one inside another a part of it; so is the kickoff of an
agent that is in neither. What an agent does for one task is one conversation and a session of its
own: that of an agent to whom a tool delegates is a child of the tool's caller, and so is what a
tool asks of a model itself. Model calls have the agent's role as their node. Of the calls that are
made on the agent's behalf, such as those for a plan or a summary, those that do not continue its
conversation are sessions apart.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from uuid import UUID, uuid4
from weakref import WeakSet

from crewai import Agent, BaseLLM, Crew, Flow
from crewai.llms import base_llm
from crewai.tools import BaseTool
from crewai.tools.base_tool import Tool
from crewai.tools.structured_tool import CrewStructuredTool
from crewai.utilities.string_utils import sanitize_tool_name

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

Begin = Callable[[tuple[Any, ...], dict[str, Any]], Callable[[], None] | None]

_UNNAMED_CREW = Crew.model_fields["name"].default
# How a conversation begins: what stands in the system prompt and in the first message.
_OPENING_MESSAGES = 2


@dataclass(slots=True, eq=False)
class _Enclosing:
    """The run, of an agent or of a tool, that encloses the code of a context.

    Attributes:
        agent: None in a tool.
        role: the agent's, before a run's inputs were put into it.
        conversations: the agent's, by how they begin; the first one is its run's own.
        asking: the conversation whose answer asks for tools, and its last call.
        inside: of a tool: the block that its own calls and agents belong to.
    """

    run_id: UUID
    agent: Any = None
    role: str | None = None
    conversations: dict[tuple[str, ...], UUID] = field(default_factory=dict)
    asking: tuple[UUID, Call | None] | None = None
    inside: WorkflowRun | None = None


@dataclass(slots=True, eq=False)
class _Calling:
    """The model call that a context is in.

    Attributes:
        ids: of the call's run, and of each later try, all with the same hints.
    """

    ids: list[UUID]
    is_open: bool = True


class _State:
    """Whether it is installed. Layers that others have wrapped cannot be taken off, but sleep."""

    installed = False


_START = Guard("report of a start in CrewAI")
_END = Guard("report of an end in CrewAI")

_lock = threading.RLock()
_patches = Patches()
_models: WeakSet[type] = WeakSet()
_enclosing: ContextVar[_Enclosing | None] = ContextVar("saga_crewai_enclosing", default=None)
_calling: ContextVar[_Calling | None] = ContextVar("saga_crewai_calling", default=None)


def install() -> None:
    """Report crews, flows, agents, model calls and tools from now on. Idempotent."""
    with _lock:
        _State.installed = True
        _wrap(Crew, "kickoff", _around(_kickoff))
        _wrap(Crew, "akickoff", _around_async(_kickoff))
        _wrap(Flow, "kickoff_async", _around_async(_kickoff))
        for name in ("execute_task", "kickoff"):
            _wrap(Agent, name, _around(_agent_run))
        for name in ("aexecute_task", "kickoff_async"):
            _wrap(Agent, name, _around_async(_agent_run))
        # Native tool calls take the first two, text ones the last.
        for tool in (BaseTool, Tool):
            _wrap(tool, "run", _around(_tool_run))
            _wrap(tool, "arun", _around_async(_tool_run))
        _wrap(CrewStructuredTool, "invoke", _around(_tool_run))
        _wrap(CrewStructuredTool, "ainvoke", _around_async(_tool_run))
        _wrap_models()
        for name in ("run_with_rate_limit_retry", "arun_with_rate_limit_retry"):
            # Older versions have none.
            if hasattr(base_llm, name):
                _wrap(base_llm, name, _wrap_retry)


def uninstall() -> None:
    """Put the original methods back; runs under way still end. Idempotent."""
    with _lock:
        _State.installed = False
        _patches.undo()
        _models.clear()


def _wrap(owner: Any, name: str, wrapper_of: Callable[[Method], Method]) -> None:
    # Where a version of CrewAI has no such method, the rest still works.
    with Guard(f"patch of {name}"):
        _patches.wrap(owner, name, wrapper_of)


def _wrap_models() -> None:
    """Wrap the models that are loaded: CrewAI loads a provider's when it is first used."""
    found = [BaseLLM]
    for model in found:
        found += model.__subclasses__()
    if _models.issuperset(found):
        return
    with _lock:
        for model in found[1:] if _State.installed else ():
            if "call" in vars(model):
                _wrap(model, "call", _around(_model_call))
            if "acall" in vars(model):
                _wrap(model, "acall", _around_async(_model_call))
        _models.update(found)


def _around(begin: Begin) -> Callable[[Method], Method]:
    """What wraps a method: ``begin`` reports its start and returns what reports its end."""

    def wrapper_of(original: Method) -> Method:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            end = _begun(begin, args, kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                _ended(end)

        return wrapper

    return wrapper_of


def _around_async(begin: Begin) -> Callable[[Method], Method]:
    def wrapper_of(original: Method) -> Method:
        @functools.wraps(original)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            end = _begun(begin, args, kwargs)
            try:
                return await original(*args, **kwargs)
            finally:
                _ended(end)

        return wrapper

    return wrapper_of


def _begun(
    begin: Begin, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], None] | None:
    if _State.installed:
        with _START:
            return begin(args, kwargs)
    return None


def _ended(end: Callable[[], None] | None) -> None:
    if end is not None:
        with _END:
            end()


def _kickoff(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], None] | None:
    # An agent's executor is a flow too; and a crew that a tool runs is a part of the tool.
    if _enclosing.get() is not None:
        return None
    outer = current_workflow()
    if outer is not None and not outer.session_given:
        return None
    # The agents of a crew would mix their conversations in a session that the user named.
    name = _workflow_of(args[0]) if outer is None else outer.workflow_id
    block = WorkflowContext(name, None, None, None)
    block.__enter__()
    return lambda: block.__exit__(None, None, None)


def _workflow_of(runnable: Any) -> str:
    if options.workflow is not None:
        return options.workflow
    if not isinstance(runnable, Crew):
        return str(getattr(runnable, "name", None) or type(runnable).__name__)
    if runnable.name and runnable.name != _UNNAMED_CREW:
        return str(runnable.name)
    return "+".join(_template_of(agent) for agent in runnable.agents) or _UNNAMED_CREW


def _template_of(agent: Any) -> str:
    return str(getattr(agent, "_original_role", None) or agent.role).strip()


def _agent_run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], None]:
    _wrap_models()
    agent = args[0]
    outer = _enclosing.get()
    run_id = uuid4()
    session_id = None
    # An agent's second try goes on in its session; a guardrail's agent does not.
    if outer is not None and outer.agent is not None and outer.agent is not agent:
        session_id = str(run_id)
    inner = _Enclosing(run_id, agent, _template_of(agent))
    outer_id = None if outer is None else outer.run_id
    _start(RunKind.CHAIN, run_id, outer_id, inner.role, session_id=session_id)
    return _enter(inner, outer)


def _tool_run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], None] | None:
    outer = _enclosing.get()
    if outer is None:
        return None
    tool, run_id = args[0], uuid4()
    asking_id, call = outer.asking or (outer.run_id, None)
    inner = _Enclosing(run_id, inside=inside_of(call))
    # As the model knows it.
    _start(RunKind.TOOL, run_id, asking_id, sanitize_tool_name(tool.name))
    return _enter(inner, outer)


def _enter(inner: _Enclosing, outer: _Enclosing | None) -> Callable[[], None]:
    inside = inner.inside
    if inside is not None:
        enter_block(inside)
    _enclosing.set(inner)

    def leave() -> None:
        # The garbage collector may close a coroutine in a context where it never was.
        if _enclosing.get() is inner:
            _enclosing.set(outer)
            if inside is not None and current_workflow() is inside:
                enter_block(inside.outer)
        if inside is not None:
            inside.end_session()
        for each in {inner.run_id, *inner.conversations.values()}:
            tracker.end(each)

    return leave


def _model_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], None] | None:
    caller, outer = _enclosing.get(), _calling.get()
    # Outside of agents and in tools it is like a bare client's call.
    if caller is None or caller.agent is None:
        return None
    # What a model calls in turn is a part of its call.
    if outer is not None and outer.is_open:
        return None
    run_id = uuid4()
    # Positional: the model, the messages, the tools.
    messages = args[1] if len(args) > 1 else kwargs.get("messages")
    tools = args[2] if len(args) > 2 else kwargs.get("tools")
    conversation_id = _conversation_of(caller, messages)
    inner = _Calling([run_id])
    _start(RunKind.CALL, run_id, conversation_id, None, node=caller.role)
    if tools or caller.asking is None:
        caller.asking = (conversation_id, calls.get(run_id))
    _calling.set(inner)
    enter_call(run_id)

    def leave() -> None:
        if _calling.get() is inner:
            _calling.set(outer)
        inner.is_open = False
        tracker.end(run_id)
        for each in inner.ids:
            calls.discard(each)

    return leave


def _wrap_retry(original: Method) -> Method:
    """CrewAI sends what a server was too busy for again: with the hints that it had."""

    @functools.wraps(original)
    def retry(operation: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        tries = count()

        def attempt() -> Any:
            if next(tries) > 0:
                with _START:
                    _call_again()
            return operation()

        return original(attempt, *args, **kwargs)

    return retry


def _call_again() -> None:
    calling = _calling.get()
    call = None if calling is None else calls.get(calling.ids[0])
    if calling is not None and call is not None:
        run_id = uuid4()
        calling.ids.append(run_id)
        calls.put(run_id, call)
        enter_call(run_id)


def _conversation_of(caller: _Enclosing, messages: Any) -> UUID:
    opening = _opening_of(messages)
    run_id = caller.conversations.get(opening)
    if run_id is None:
        run_id = uuid4() if caller.conversations else caller.run_id
        if run_id != caller.run_id:
            _start(RunKind.CHAIN, run_id, caller.run_id, caller.role, session_id=str(run_id))
        caller.conversations[opening] = run_id
    return run_id


def _opening_of(messages: Any) -> tuple[str, ...]:
    if not isinstance(messages, list):
        return (str(messages),)
    contents = (message.get("content") for message in messages[:_OPENING_MESSAGES])
    return tuple(each if isinstance(each, str) else repr(each) for each in contents)


def _start(
    kind: RunKind,
    run_id: UUID,
    parent_id: UUID | None,
    name: str | None,
    *,
    session_id: str | None = None,
    node: str | None = None,
) -> None:
    start = RunStart(kind, run_id, parent_id, name, session_id=session_id, node=node)
    source = Source(by_hand=False, default_workflow=options.workflow)
    tracker.start(start, source)
