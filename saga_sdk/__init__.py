"""What runs in the agent's process: hints that travel with every LLM call.

``import saga_sdk as saga``, then ``saga.instrument(base_urls=[...])``, ``with saga.workflow(...)``,
or a ``saga.SagaCallbackHandler`` in a LangChain config.
"""

from typing import TYPE_CHECKING, Any

from saga_sdk.context import WorkflowContext, WorkflowRun, workflow
from saga_sdk.ends import end_session, end_task
from saga_sdk.instrumentation import instrument, uninstrument
from saga_sdk.propagation import wrap
from saga_sdk.statistics import Stats, stats
from saga_sdk.tool_table import tool_types
from saga_sdk.tools import tool

if TYPE_CHECKING:
    from saga_sdk.integrations.langchain import SagaCallbackHandler

__all__ = [
    "SagaCallbackHandler",
    "Stats",
    "WorkflowContext",
    "WorkflowRun",
    "end_session",
    "end_task",
    "instrument",
    "stats",
    "tool",
    "tool_types",
    "uninstrument",
    "workflow",
    "wrap",
]


def __getattr__(name: str) -> Any:
    # Lazy, so that importing the package imports no framework.
    if name == "SagaCallbackHandler":
        from saga_sdk.integrations.langchain import SagaCallbackHandler

        return SagaCallbackHandler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
