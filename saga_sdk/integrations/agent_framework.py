"""The Microsoft Agent Framework integration: agents, workflows, model calls and tools become runs.

A session is the ``AgentSession`` that an agent runs with, by its id; it goes on when the program
uses it again. A run without one remembers nothing: its session is its own, and ends with it. The
agents of a workflow are children of the workflow; an agent that a tool runs is a child of the
session that called the tool. Each run of the outermost agent or workflow is a task.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import threading
from collections.abc import Awaitable
from typing import Any
from weakref import finalize

import agent_framework
from agent_framework import BaseAgent, BaseChatClient, FunctionTool, ResponseStream, Workflow

from saga_sdk.guard import Guard
from saga_sdk.patches import Method, Patches
from saga_sdk.reporting import (
    Conversation,
    MakeRun,
    Run,
    coroutine,
    current_run,
    named_block,
    run_of,
    wrap_subclasses,
)
from saga_sdk.runs import RunKind

_FOLLOW = Guard("watch over a run")
_WORKFLOW_AGENTS: tuple[type, ...] = tuple(
    getattr(agent_framework, name)
    for name in ("WorkflowAgent", "FunctionalWorkflowAgent")
    if hasattr(agent_framework, name)
)
# Where a stream has its run.
_RUN = "_saga_run"
# Names that workflows have when the user gave them none.
_BUILDERS = frozenset({"Sequential", "Concurrent", "GroupChat", "Handoff", "Magentic"})


class _State:
    """What is installed. Changed under the lock, read without it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.installed = False
        self.patches = Patches()


_state = _State()


def install() -> None:
    """Report what agents, workflows, tools and chat clients do from now on; idempotent."""
    wrap = _state.patches.wrap
    with _state.lock:
        if _state.installed:
            return
        _state.installed = True
        wrap_subclasses(_state.patches, BaseAgent, _wrap_agent)
        wrap(Workflow, "run", _deferred(_run_of_workflow))
        if hasattr(agent_framework, "FunctionalWorkflow"):
            wrap(agent_framework.FunctionalWorkflow, "run", _deferred(_run_of_workflow))
        for read in ("__anext__", "get_final_response"):
            wrap(ResponseStream, read, _in_its_run)
        wrap(BaseChatClient, "get_response", _deferred(_run_of_call))
        wrap(FunctionTool, "invoke", coroutine(_run_of_tool))


def uninstall() -> None:
    """Put the original methods back; runs under way still end. Idempotent."""
    with _state.lock:
        _state.installed = False
        _state.patches.undo()


def _wrap_agent(agent: type) -> None:
    # A workflow in the clothes of an agent asks no model itself.
    if "run" in vars(agent) and not issubclass(agent, _WORKFLOW_AGENTS):
        _state.patches.wrap(agent, "run", _deferred(_run_of_agent))


def _deferred(make_run: MakeRun) -> Any:
    """A wrapper of a method that returns an awaitable, or with ``stream=True`` a stream."""

    def wrapper_of(original: Method) -> Method:
        @functools.wraps(original)
        def reported(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            run = run_of(make_run, *args, **kwargs)
            if run is None:
                return result
            if isinstance(result, ResponseStream):
                with _FOLLOW:
                    _follow(result, run)
            elif inspect.iscoroutine(result):
                awaited = _awaited(result, run)
                with _FOLLOW:
                    # One that is cancelled before it begins must not leave the other behind.
                    finalize(awaited, result.close).atexit = False
                return awaited
            return result

        return reported

    return wrapper_of


async def _awaited(result: Awaitable[Any], run: Run) -> Any:
    with run:
        return await result


def _follow(stream: ResponseStream[Any, Any], run: Run) -> None:
    # A stream that is dropped half read runs no hook.
    finalize(stream, run.end).atexit = False
    stream.with_cleanup_hook(run.end)
    setattr(stream, _RUN, run)


def _in_its_run(original: Method) -> Method:
    """Make what is read of a stream in the stream's run; the reader has it outside of the run."""

    @functools.wraps(original)
    async def reading(self: Any) -> Any:
        run = getattr(self, _RUN, None)
        if run is None:
            return await original(self)
        with run.entered():
            item = await original(self)
        if run.kind is RunKind.CALL:
            # The request is sent, and nothing else happens in a call.
            setattr(self, _RUN, None)
        return item

    return reading


def _run_of_agent(agent: Any, /, *args: Any, session: Any = None, **kwargs: Any) -> Run | None:
    if not _state.installed:
        return None
    outer = current_run()
    conversation = None
    if session is not None:
        conversation = Conversation(session.session_id)
        if outer is not None and outer.kind is RunKind.TOOL:
            # An agent as a tool has a session for this one call; nobody else will see it again.
            finalize(session, conversation.end).atexit = False
    elif outer is not None and named_block() is None:
        conversation = Conversation()
    name = _name_of(agent)
    return Run(
        RunKind.CHAIN,
        name,
        subject=agent,
        node=name,
        conversation=conversation,
        one_off=session is None,
    )


def _name_of(agent: Any) -> str:
    if agent.name:
        return str(agent.name)
    # All agents that nobody named would be one workflow.
    instructions = str(getattr(agent, "default_options", {}).get("instructions") or "")
    digest = hashlib.sha256(instructions.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{type(agent).__name__}-{digest}"


def _run_of_workflow(workflow: Any, /, *args: Any, **kwargs: Any) -> Run | None:
    if not _state.installed:
        return None
    return Run(RunKind.CHAIN, _workflow_name(workflow), subject=workflow)


def _workflow_name(workflow: Any) -> str:
    name = str(workflow.name)
    if name.startswith("WorkflowBuilder-"):
        # A builder makes a new name for each workflow that the user gave none.
        name = "Workflow"
    elif name not in _BUILDERS:
        return name
    # What it is made of tells it from others that nobody named.
    parts = [
        _name_of(executor.agent) if hasattr(executor, "agent") else executor_id
        for executor_id, executor in workflow.executors.items()
    ]
    return ":".join((name, *parts))


def _run_of_call(client: Any, /, *args: Any, **kwargs: Any) -> Run | None:
    if not _state.installed:
        return None
    outer = current_run()
    if outer is not None and outer.kind is RunKind.CALL:
        # What prepares a call, as a summary of the messages does, is another conversation.
        return Run(RunKind.CALL, None, conversation=Conversation(), one_off=True)
    return Run(RunKind.CALL, None)


def _run_of_tool(tool: Any, /, *args: Any, **kwargs: Any) -> Run | None:
    return Run(RunKind.TOOL, tool.name) if _state.installed else None
