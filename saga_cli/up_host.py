"""What this host has for workers: GPUs, CPU cores, memory."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from saga_cli.up_plan import Cpu, Memory
from saga_core.errors import SagaError

_CPUS = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")
_AVAILABLE = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
_CGROUPS = (  # Version 2, then 1: the limit, and what is in use of it.
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, else all that nvidia-smi lists.

    Raises:
        SagaError: nvidia-smi is there and fails.
    """
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return split_list(named)
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return []
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SagaError(f"nvidia-smi fails ({error}): name the GPUs with --gpus") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().partition("\n")[0]
        raise SagaError(f"nvidia-smi fails ({said}): name the GPUs with --gpus, or --gpus none")
    return done.stdout.split()


def split_list(text: str) -> list[str]:
    """The parts of a list with commas; none of them is empty."""
    return [part.strip() for part in text.split(",") if part.strip()]


def host_cpus() -> list[Cpu]:
    """The logical CPUs that this process may run on."""
    return [
        Cpu(number, _core_of(number), _node_of(number))
        for number in sorted(os.sched_getaffinity(0))
    ]


def _core_of(number: int) -> str:
    with suppress(OSError):
        return (_CPUS / f"cpu{number}/topology/thread_siblings_list").read_text().strip()
    return str(number)


def _node_of(number: int) -> int:
    nodes = (_CPUS / f"cpu{number}").glob("node[0-9]*")
    return min((int(node.name.removeprefix("node")) for node in nodes), default=0)


def host_memory(nodes: Collection[int]) -> dict[int, Memory]:
    """Memory of NUMA nodes, or of the container where that has a limit; as vLLM counts it."""
    return {node: _limited(_node_memory(node)) for node in nodes}


def _node_memory(node: int) -> Memory:
    try:
        text = (_NODES / f"node{node}/meminfo").read_text()
    except OSError:  # A system without nodes.
        text = Path("/proc/meminfo").read_text()
    amounts = {name: int(amount) * 1024 for name, amount in re.findall(r"(\S+):\s+(\d+) kB", text)}
    return Memory(amounts["MemTotal"], sum(amounts.get(name, 0) for name in _AVAILABLE))


def _limited(memory: Memory) -> Memory:
    for limit_file, usage_file in _CGROUPS:
        with suppress(OSError, ValueError):  # There is none, or it says "max".
            limit = int(Path(limit_file).read_text())
            left = max(0, limit - int(Path(usage_file).read_text()))
            if limit < memory.total_bytes:
                return Memory(limit, min(memory.available_bytes, left))
    return memory
