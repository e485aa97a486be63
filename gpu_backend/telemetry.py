"""Memory of the GPUs, from NVIDIA's management library where there is one."""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("vllm.saga")


@dataclass(frozen=True, slots=True)
class GPUMemory:
    """Memory of one GPU, of all processes on it.

    Attributes:
        gpu: its UUID.
    """

    gpu: str
    used_bytes: int
    total_bytes: int


class GPUMemoryReader:
    """Reads the memory of every GPU of this host; of none where the library is missing.

    Args:
        nvml: the module ``pynvml`` (package nvidia-ml-py); None finds it.
    """

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml
        self._handles: list[tuple[str, Any]] | None = None

    def read(self) -> list[GPUMemory]:
        """Ask each GPU; takes about a millisecond and may block. Switches itself off on failure."""
        try:
            if self._handles is None:
                self._handles = self._open()
            return [self._read(gpu, handle) for gpu, handle in self._handles]
        except ImportError:
            logger.debug("no GPU memory in the metrics: pynvml is not installed")
        except Exception as error:  # noqa: BLE001 - no driver, no GPU, or a GPU that was lost
            logger.info("no GPU memory in the metrics: %s", error)
        self._handles = []
        return []

    def _open(self) -> list[tuple[str, Any]]:
        if self._nvml is None:
            self._nvml = importlib.import_module("pynvml")
        self._nvml.nvmlInit()
        count = self._nvml.nvmlDeviceGetCount()
        handles = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        return [(_text(self._nvml.nvmlDeviceGetUUID(handle)), handle) for handle in handles]

    def _read(self, gpu: str, handle: Any) -> GPUMemory:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        return GPUMemory(gpu, int(memory.used), int(memory.total))


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
