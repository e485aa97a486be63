"""The `vllm.general_plugins` entry point: switches the plugin on in every vLLM process."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from typing import Any

from gpu_backend.config import is_enabled

logger = logging.getLogger("vllm.saga")
_HOST_TIER = "gpu_backend.offload"


def register() -> None:
    """Let vLLM's engine build its scheduler with KV retention.

    Does nothing unless VLLM_PLUGINS names the plugin, and nothing the second time. When this vLLM
    is not one that the plugin knows, it says what has moved and leaves vLLM as it is; a host tier
    that was asked for is dropped then too. Where only a part does not fit, only that is off.
    """
    if not is_enabled():
        return
    try:
        if _installed():
            return
        from gpu_backend import compat

        mismatch = _ask(compat.find_mismatch)
        _watch_host_tier(mismatch)
        if mismatch is None:
            compat.backport()
            _switch_off("SAGA_PREFETCH", "prefetch", compat.find_prefetch_mismatch)
            _switch_off("SAGA_PREEMPT_WAITING", "preemption", compat.find_preemption_mismatch)
            _install()
            _warn_of_untested(compat.vllm_version())
    except Exception as error:  # noqa: BLE001 - whatever has moved, vLLM must start
        mismatch = f"{type(error).__name__}: {error}"
    if mismatch is not None:
        _say_off("SAGA is off, vLLM serves as stock", mismatch)


def _ask(find: Callable[[], str | None]) -> str | None:
    try:
        return find()
    except Exception as error:  # noqa: BLE001 - a vLLM that has changed may raise anything
        return f"{type(error).__name__}: {error}"


def _switch_off(variable: str, part: str, find: Callable[[], str | None]) -> None:
    """Turn a part's setting off in this process when it does not fit this vLLM."""
    mismatch = _ask(find)
    if mismatch is not None:
        os.environ[variable] = "0"
        _say_off(f"SAGA's {part} is off", mismatch)


def _say_off(what: str, mismatch: str) -> None:
    from gpu_backend import compat

    logger.error(
        "%s: vLLM %s differs from the supported ones (%s): %s",
        what,
        compat.vllm_version(),
        ", ".join(compat.SUPPORTED),
        mismatch,
    )


def _warn_of_untested(version: str) -> None:
    from gpu_backend import compat

    if not compat.is_supported(version):
        logger.warning(
            "SAGA is not tested on vLLM %s, only on %s; all that it touches there is as expected",
            version,
            ", ".join(compat.SUPPORTED),
        )


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


def _watch_host_tier(mismatch: str | None) -> None:
    """Take our connector out of an engine's configuration when it does not fit this vLLM.

    Args:
        mismatch: why the retention is off, which the host tier cannot do without.
    """
    from vllm.engine.arg_utils import EngineArgs

    stock = EngineArgs.create_engine_config

    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        if _wants_host_tier(self):
            from gpu_backend import compat

            flaw = mismatch or _ask(compat.find_offload_mismatch)
            if flaw is not None:
                self.kv_transfer_config = None
                _say_off("SAGA's host tier is off", flaw)
        return stock(self, *args, **kwargs)

    EngineArgs.create_engine_config = create_engine_config  # type: ignore[method-assign]


def _wants_host_tier(args: Any) -> bool:
    transfer = getattr(args, "kv_transfer_config", None)
    return getattr(transfer, "kv_connector_module_path", None) == _HOST_TIER
