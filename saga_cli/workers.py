"""Workers that commands start on this machine, without a GPU and without the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp

from saga_cli.processes import Service
from saga_core.errors import SagaError

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


async def worker_state(worker: Service) -> dict[str, Any]:
    """The state that its control API gives.

    Raises:
        SagaError: it does not answer, or the plugin is off.
    """
    url = f"{worker.url}/saga/v1/state"
    try:
        async with aiohttp.ClientSession() as client, client.get(url) as response:
            state: dict[str, Any] = await response.json()
    except (aiohttp.ClientError, ValueError) as error:
        raise SagaError(f"the worker's counters cannot be read: {error}") from error
    if not state.get("enabled"):
        reason = state.get("off_reason") or state.get("error") or "the plugin did not attach"
        raise SagaError(f"the worker's counters are off, its log says more: {reason}")
    return state


def cpu_dtype() -> str:
    """bfloat16 where the CPU multiplies it, float32 elsewhere: there it is 2 to 6 times faster."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "float32"
    return "bfloat16" if "avx512_bf16" in flags or "amx_bf16" in flags else "float32"
