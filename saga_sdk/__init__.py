"""What runs in the agent's process: hints that travel with every LLM call.

``import saga_sdk as saga``, then ``saga.instrument(base_urls=[...])``, ``with saga.workflow(...)``,
or a ``saga.SagaCallbackHandler`` in a LangChain config.
"""

from typing import TYPE_CHECKING, Any

from saga_sdk.context import WorkflowContext, WorkflowRun, workflow
from saga_sdk.instrumentation import instrument, uninstrument

if TYPE_CHECKING:
    from saga_sdk.integrations.langchain import SagaCallbackHandler

__all__ = [
    "SagaCallbackHandler",
    "WorkflowContext",
    "WorkflowRun",
    "instrument",
    "uninstrument",
    "workflow",
]


def __getattr__(name: str) -> Any:
    # Lazy, so that importing the package imports no framework.
    if name == "SagaCallbackHandler":
        from saga_sdk.integrations.langchain import SagaCallbackHandler

        return SagaCallbackHandler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
