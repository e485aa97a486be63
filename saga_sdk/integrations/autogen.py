"""The AutoGen 0.7 integration: agents, teams, model calls and tools become runs of the tracker.

A session is what one agent remembers. It belongs to the agent object, so it goes on when the agent
or its team runs again, and ends with ``on_reset``, ``load_state``, or when the object is collected.
A team has a session of its own, in which its manager asks for the next speaker; its participants
are children of it. An agent or a team that a tool runs is a child of the session that called the
tool. Each run of the outermost agent or team is a task.

In ``saga.workflow(..., session_id=...)`` an agent goes by that session, and the participants of a
team by ``<session_id>:<name>``: so a conversation keeps its sessions over a restart of the program.

Nothing here depends on the context of a team's runtime, which may have been started elsewhere: the
team's id, which is a part of every message's address, leads to the run.
"""

from __future__ import annotations

import functools
import threading
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, finalize

from autogen_agentchat.agents import (
    AssistantAgent,
    BaseChatAgent,
    CodeExecutorAgent,
    SocietyOfMindAgent,
)
from autogen_agentchat.base import Team
from autogen_agentchat.teams import BaseGroupChat
from autogen_agentchat.teams._group_chat._chat_agent_container import ChatAgentContainer
from autogen_agentchat.teams._group_chat._events import GroupChatRequestPublish
from autogen_agentchat.teams._group_chat._sequential_routed_agent import SequentialRoutedAgent
from autogen_core.models import ChatCompletionClient
from autogen_core.tools import BaseStreamTool, BaseTool

from saga_sdk.guard import Guard
from saga_sdk.patches import Method, Patches
from saga_sdk.reporting import (
    Conversation,
    Run,
    coroutine,
    current_run,
    named_block,
    run_of,
    stream,
    wrap_subclasses,
)
from saga_sdk.runs import RunKind

_AGENTS = (AssistantAgent, CodeExecutorAgent, SocietyOfMindAgent)


class _State:
    """What is installed, what runs, and who remembers. Changed under the lock.

    Attributes:
        teams: the run of each team, by team id.
        memories: the conversation of each agent and team, and what ends it.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.installed = False
        self.patches = Patches()
        self.teams: WeakValueDictionary[str, Run] = WeakValueDictionary()
        self.memories: WeakKeyDictionary[Any, tuple[Conversation, finalize[Any, Any]]] = (
            WeakKeyDictionary()
        )


_state = _State()


def install() -> None:
    """Report what agents, teams, tools and model clients do from now on; idempotent."""
    wrap = _state.patches.wrap
    with _state.lock:
        if _state.installed:
            return
        _state.installed = True
        wrap(BaseChatAgent, "run", coroutine(_run_of_agent))
        wrap(BaseChatAgent, "run_stream", stream(_run_of_agent))
        for agent in _AGENTS:
            # It leaves the stream early, which then ends some time later.
            wrap(agent, "on_messages", coroutine(_run_of_agent))
            wrap(agent, "on_messages_stream", stream(_run_of_agent))
            wrap(agent, "on_reset", _and_forget)
            wrap(agent, "load_state", _and_forget)
        wrap(BaseGroupChat, "run_stream", stream(_run_of_team))
        wrap(BaseGroupChat, "reset", _and_forget)
        wrap(BaseGroupChat, "load_state", _and_forget)
        wrap(SequentialRoutedAgent, "on_message_impl", _in_its_run)
        wrap(AssistantAgent, "_execute_tool_call", coroutine(_run_of_tool_call))
        wrap(BaseTool, "run_json", coroutine(_run_of_tool))
        wrap(BaseStreamTool, "run_json_stream", stream(_run_of_tool))
        wrap(CodeExecutorAgent, "execute_code_block", coroutine(_run_of_code))
        wrap_subclasses(_state.patches, ChatCompletionClient, _wrap_client)


def uninstall() -> None:
    """Put the original methods back; runs under way still end. Idempotent."""
    with _state.lock:
        _state.installed = False
        _state.patches.undo()


# --- agents and teams


def _is_new(subject: object) -> bool:
    # What runs calls its own methods, which are wrapped too.
    outer = current_run()
    return _state.installed and (outer is None or outer.subject is not subject)


def _run_of_agent(agent: Any, /, *args: Any, **kwargs: Any) -> Run | None:
    return _run_of(agent, node=agent.name) if _is_new(agent) else None


def _run_of_team(team: Any, /, *args: Any, **kwargs: Any) -> Run | None:
    if not _is_new(team):
        return None
    name = team.name
    if name == getattr(team, "DEFAULT_NAME", None):
        # All teams that nobody named would be one workflow.
        name = ":".join((name, *team._participant_names))
    run = _run_of(team, name=name, node=team._group_chat_manager_name)
    _state.teams[team._team_id] = run
    return run


def _run_of(runner: Any, *, node: str, name: str | None = None) -> Run:
    outer, block = current_run(), named_block()
    conversation = path = None
    if block is not None:
        # It goes by the block's own session.
        path = block.session_id
    elif outer is not None and outer.path is not None:
        path = f"{outer.path}:{runner.name}"
        conversation = Conversation(path)
    elif outer is None or _calls_models(runner):
        conversation = _memory_of(runner)
    return Run(
        RunKind.CHAIN,
        name or runner.name,
        subject=runner,
        node=node,
        conversation=conversation,
        path=path,
    )


def _calls_models(runner: Any) -> bool:
    # A team whose manager asks no model is no session: its participants are children of the
    # session that runs the team.
    return not isinstance(runner, BaseGroupChat) or hasattr(runner, "_model_client")


def _memory_of(runner: Any) -> Conversation:
    with _state.lock:
        known = _state.memories.get(runner)
        if known is not None:
            return known[0]
        conversation = Conversation()
        ending = finalize(runner, conversation.end)
        ending.atexit = False
        _state.memories[runner] = (conversation, ending)
        return conversation


def _and_forget(original: Method) -> Method:
    """What a conversation was about is gone: the next run begins another one."""

    @functools.wraps(original)
    async def forgetting(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = await original(self, *args, **kwargs)
        with Guard("end of a conversation"), _state.lock:
            for runner in (self, *getattr(self, "_participants", ())):
                _, ending = _state.memories.pop(runner, (None, None))
                if ending is not None:
                    ending()
        return result

    return forgetting


def _in_its_run(original: Method) -> Method:
    """Handle a message of a team in the run of the team, or of the agent that is to speak."""

    @functools.wraps(original)
    async def on_message_impl(self: Any, message: Any, ctx: Any) -> Any:
        team = run_of(_team_of, self)
        if team is None:
            return await original(self, message, ctx)
        with team.entered(), run_of(_run_of_speaker, self, message) or nullcontext():
            return await original(self, message, ctx)

    return on_message_impl


def _team_of(handler: Any) -> Run | None:
    run = _state.teams.get(handler.id.key) if _state.installed else None
    return run if run is not None and run.is_open else None


def _run_of_speaker(handler: Any, message: Any) -> Run | None:
    if not isinstance(handler, ChatAgentContainer):
        return None
    if not isinstance(message, GroupChatRequestPublish) or isinstance(handler._agent, Team):
        return None
    return _run_of_agent(handler._agent)


# --- tools and model clients


def _run_of_tool_call(*args: Any, tool_call: Any = None, **kwargs: Any) -> Run | None:
    name = (args[0] if tool_call is None else tool_call).name
    return Run(RunKind.TOOL, name, subject=BaseTool) if _is_new(BaseTool) else None


def _run_of_tool(tool: Any, /, *args: Any, **kwargs: Any) -> Run | None:
    return Run(RunKind.TOOL, tool.name, subject=BaseTool) if _is_new(BaseTool) else None


def _run_of_code(*args: Any, **kwargs: Any) -> Run | None:
    return Run(RunKind.TOOL, "execute_code", subject=BaseTool) if _is_new(BaseTool) else None


def _run_of_call(client: Any, /, *args: Any, **kwargs: Any) -> Run | None:
    # A cache or the like asks another client, or none: its own calls are no calls.
    is_front = any(isinstance(each, ChatCompletionClient) for each in vars(client).values())
    if is_front or not _is_new(ChatCompletionClient):
        return None
    return Run(RunKind.CALL, None, subject=ChatCompletionClient)


def _wrap_client(client: type) -> None:
    for name, wrapper_of in (("create", coroutine), ("create_stream", stream)):
        if name in vars(client):
            _state.patches.wrap(client, name, wrapper_of(_run_of_call))
