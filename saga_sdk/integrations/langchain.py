"""The LangChain and LangGraph integration: a callback handler that reports runs."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.tracers.context import register_configure_hook

from saga_sdk import instrumentation
from saga_sdk.context import enter_call
from saga_sdk.guard import Guard
from saga_sdk.hosts import allowed
from saga_sdk.options import options
from saga_sdk.runs import RunKind, RunStart, Source, tracker

# What LangChain calls runs that nobody has named: every program has them.
_GENERIC_NAMES = frozenset(
    {"LangGraph", "RunnableSequence", "RunnableParallel", "RunnableLambda", "AgentExecutor"}
)
_START = Guard("callback at a start")
_END = Guard("callback at an end")


class RunReporter(BaseCallbackHandler, ABC):
    """A callback handler that reports every run to the run tracker; it never raises.

    It runs inline, in the context of the code that makes the HTTP request, also in async code:
    only there do the hints reach the request.
    """

    run_inline = True

    @abstractmethod
    def source(self) -> Source | None:
        """What the user told this handler; None while it is switched off."""

    def _start(
        self,
        kind: RunKind,
        names: tuple[Any, Any],
        run_id: UUID,
        parent_run_id: UUID | None,
        metadata: dict[str, Any] | None,
        signature: Callable[[], str] | None = None,
    ) -> None:
        with _START:
            source = self.source()
            if source is None:
                return
            metadata = metadata or {}
            name = _name_in(names[0]) or _name_in(names[1])
            if parent_run_id is None and name in _GENERIC_NAMES:
                name = metadata.get("lc_agent_name") or name
            start = RunStart(
                kind,
                run_id,
                parent_run_id,
                None if name is None else str(name),
                metadata,
                generic_name=name in _GENERIC_NAMES,
                signature=signature,
            )
            tracker.start(start, source)
            if kind is RunKind.CALL:
                enter_call(run_id)

    def _start_call(
        self,
        serialized: dict[str, Any],
        run_id: UUID,
        parent_run_id: UUID | None,
        metadata: dict[str, Any] | None,
        kwargs: dict[str, Any],
    ) -> None:
        def signature() -> str:
            return _signature(metadata or {}, kwargs)

        names = (kwargs, serialized)
        self._start(RunKind.CALL, names, run_id, parent_run_id, metadata, signature)

    def _end(self, run_id: UUID) -> None:
        # Also while switched off: runs that started before must not stay.
        with _END:
            tracker.end(run_id)

    def on_chain_start(
        self,
        serialized: dict[str, Any],
        inputs: dict[str, Any],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._start(RunKind.CHAIN, (kwargs, serialized), run_id, parent_run_id, metadata)

    def on_retriever_start(
        self,
        serialized: dict[str, Any],
        query: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        # Some retrievers call models: without this run their calls would have no root.
        self._start(RunKind.CHAIN, (kwargs, serialized), run_id, parent_run_id, metadata)

    def on_tool_start(
        self,
        serialized: dict[str, Any],
        input_str: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        inputs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        # The run's name is the user's to choose; the tool's own name says what it does.
        self._start(RunKind.TOOL, (serialized, kwargs), run_id, parent_run_id, metadata)

    def on_chat_model_start(
        self,
        serialized: dict[str, Any],
        messages: list[list[Any]],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._start_call(serialized, run_id, parent_run_id, metadata, kwargs)

    def on_llm_start(
        self,
        serialized: dict[str, Any],
        prompts: list[str],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._start_call(serialized, run_id, parent_run_id, metadata, kwargs)

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._end(run_id)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._end(run_id)

    def on_retriever_end(self, documents: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._end(run_id)

    def on_retriever_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._end(run_id)

    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._end(run_id)

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._end(run_id)

    def on_llm_end(self, response: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._end(run_id)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._end(run_id)


class SagaCallbackHandler(RunReporter):
    """A LangChain callback handler, added by hand, that gives every LLM call below it its hints.

    Passing it in ``config={"callbacks": [handler]}`` is enough: constructing it wraps the OpenAI
    client too. One handler may serve any number of runs at once. The workflow is the argument,
    else the ``saga.workflow`` block, else ``saga_workflow`` in the metadata, else the name of the
    root run; a name that LangGraph gives by itself is extended by a digest of the first call's
    node and tools. The session is the argument, else ``saga_session_id`` or ``thread_id`` in the
    metadata, else the root run's own. A chain's or an agent's own session ends with it, and
    allow-listed gateways that saw it are told; a named session may go on. A model that is called
    on its own, in no chain, no block and no named session, says its workflow alone: nobody could
    tell which conversation it continues.

    Args:
        workflow: the kind of agent, the same in every run of it.
        base_urls: hosts that may see hints; by default those of the environment, as for
            :func:`saga_sdk.instrument`.
        session_id: the conversation that all runs continue.
        deadline_s: seconds from the start of a task until it should be done.

    Raises:
        SettingsError: a URL in ``base_urls`` is not an absolute http or https one.
    """

    def __init__(
        self,
        workflow: str | None = None,
        base_urls: str | Iterable[str] | None = None,
        session_id: str | None = None,
        deadline_s: float | None = None,
    ) -> None:
        super().__init__()
        self._source = Source(workflow, session_id, deadline_s)
        allowed.add(base_urls)
        instrumentation.watch_clients()

    def source(self) -> Source | None:
        return self._source


class AutomaticHandler(RunReporter):
    """The handler that :func:`saga_sdk.instrument` puts into every run of the process."""

    def __init__(self) -> None:
        super().__init__()
        self.enabled = False

    def source(self) -> Source | None:
        if not self.enabled:
            return None
        return Source(by_hand=False, default_workflow=options.workflow)


_lock = threading.Lock()
_automatic = AutomaticHandler()
_hooks: list[ContextVar[Any]] = []


def install() -> None:
    """Put the automatic handler into every run.

    LangChain cannot forget a hook, so it is registered once and the handler is switched. LangChain
    leaves it out of a run that has a :class:`RunReporter` already.
    """
    with _lock:
        _automatic.enabled = True
        if not _hooks:
            _hooks.append(ContextVar("saga_langchain_handler", default=_automatic))
            register_configure_hook(_hooks[0], inheritable=True, handle_class=RunReporter)


def uninstall() -> None:
    """Switch the automatic handler off."""
    with _lock:
        _automatic.enabled = False


def _name_in(described: dict[str, Any] | None) -> Any:
    return described.get("name") if described else None


def _signature(metadata: dict[str, Any], kwargs: dict[str, Any]) -> str:
    """The node of a model's call and the names of its tools: the same in every run of an agent."""
    tools = (kwargs.get("invocation_params") or {}).get("tools") or ()
    described = [tool.get("function", tool) for tool in tools if isinstance(tool, dict)]
    names = sorted(str(tool.get("name")) for tool in described)
    return "\n".join([str(metadata.get("langgraph_node")), *names])
