"""The `vllm.general_plugins` entry point: switches the plugin on in every vLLM process."""

from __future__ import annotations

import json
import logging
from typing import Any

from gpu_backend.config import is_enabled

logger = logging.getLogger("vllm.saga")


def register() -> None:
    """Let vLLM's engine build its scheduler with KV retention.

    Does nothing unless VLLM_PLUGINS names the plugin, and nothing the second time. When this vLLM
    is not one that the plugin knows, it says what has moved and leaves vLLM as it is.
    """
    if not is_enabled():
        return
    if _installed():
        return
    try:
        from gpu_backend import compat

        mismatch = compat.find_mismatch()
    except Exception as error:  # noqa: BLE001 - whatever has moved, vLLM must start
        mismatch = f"{type(error).__name__}: {error}"
    if mismatch is not None:
        logger.error(
            "SAGA is off, vLLM serves as stock: this vLLM differs from the supported ones: %s",
            mismatch,
        )
        return
    _install()


def _installed() -> bool:
    from vllm.v1.engine.core import EngineCore

    return hasattr(EngineCore, "saga_control")


def _install() -> None:
    from vllm.config.scheduler import SchedulerConfig
    from vllm.v1.engine.core import EngineCore

    from gpu_backend.scheduler import saga_scheduler_class

    stock = SchedulerConfig.get_scheduler_cls

    def get_scheduler_cls(self: SchedulerConfig) -> type:
        return saga_scheduler_class(stock(self))

    def saga_control(self: EngineCore, message: str) -> str:
        """Pass a control message, JSON in and out, to the scheduler, between two engine steps."""
        scheduler: Any = self.scheduler
        return json.dumps(scheduler.saga_control(json.loads(message)))

    SchedulerConfig.get_scheduler_cls = get_scheduler_cls  # type: ignore[method-assign]
    EngineCore.saga_control = saga_control  # type: ignore[attr-defined]
