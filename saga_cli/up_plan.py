"""What each worker of one host gets: GPUs, or CPU cores and memory. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import floor, prod
from typing import TypeVar

from saga_core.errors import SettingsError

_T = TypeVar("_T")

BIND_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
_KV_SPACE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
_USABLE_MEMORY = 0.9
_LEAST_FRACTION = 0.01

_TENSOR = ("--tensor-parallel-size", "-tp")
_PARALLEL = (
    _TENSOR,
    ("--pipeline-parallel-size", "-pp"),
    ("--data-parallel-size", "-dp"),
    ("--prefill-context-parallel-size", "-pcp"),
)
_MEMORY = ("--gpu-memory-utilization", "--device-memory-utilization", "--kv-cache-memory-bytes")


@dataclass(frozen=True, slots=True)
class Cpu:
    """A logical CPU.

    Attributes:
        core: the same for those that share a physical core, of them alone.
        node: NUMA node.
    """

    cpu_id: int
    core: str
    node: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a NUMA node, bytes."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class Share:
    """What one worker is started with.

    Attributes:
        shown: what it gets, for people.
        words: options of ``saga worker``; they stand before the user's own, which win.
        environment: variables that it gets besides those of this process.
        cpus: logical CPUs that it may run on; empty: all.
    """

    shown: str
    words: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    cpus: tuple[int, ...] = ()


def gpu_shares(gpus: Sequence[str], workers: int, words: Sequence[str]) -> list[Share]:
    """Each worker's GPUs: equal, contiguous parts of the list.

    The tensor-parallel size is the number of GPUs that fall to a worker, unless ``words``, the
    user's own for every worker, say how it is to use them.

    Raises:
        SettingsError: the list names a GPU twice or cannot be split evenly, or ``words`` ask for
            another number of GPUs than a worker gets; the message says what would be right.
    """
    if len(set(gpus)) < len(gpus):
        raise SettingsError(f"--gpus {','.join(gpus)} names a GPU more than once")
    each, left = divmod(len(gpus), workers)
    if not each:
        raise SettingsError(
            f"{workers} workers need at least a GPU each and there are {len(gpus)} "
            f"({','.join(gpus)}): give --workers {len(gpus)} or fewer, or more GPUs with --gpus"
        )
    if left:
        fitting = ", ".join(str(n) for n in range(1, len(gpus) + 1) if len(gpus) % n == 0)
        raise SettingsError(
            f"{len(gpus)} GPUs ({','.join(gpus)}) cannot be split evenly over {workers} workers: "
            f"give --workers {fitting}, or --gpus with {each * workers} of them"
        )
    wanted = world_size(words)
    if wanted is not None and wanted != each:
        raise SettingsError(
            f"each of {workers} workers gets {each} of {len(gpus)} GPUs, and the options behind -- "
            f"ask for {wanted}: give --gpus with {wanted * workers}, or other parallel sizes"
        )
    tensor = () if wanted is not None else (_TENSOR[0], str(each))
    return [
        Share(
            shown=f"GPU {','.join(part)}",
            words=tensor if each > 1 else (),
            environment={"CUDA_VISIBLE_DEVICES": ",".join(part)},
        )
        for part in _parts(gpus, workers)
    ]


def cpu_shares(
    cpus: Collection[Cpu],
    memory: Mapping[int, Memory],
    workers: int,
    words: Sequence[str],
    environment: Mapping[str, str],
    host_tier_bytes: int = 0,
) -> list[Share]:
    """Each worker's CPU cores and memory, as equal as they can be.

    What ``words``, the user's own for every worker, or variables in ``environment`` settle already
    stays as it is. One worker gets all, as vLLM itself divides it.

    Args:
        memory: by node.
        host_tier_bytes: what each worker takes besides, for a host tier.

    Raises:
        SettingsError: there is not enough of something; the message says of what.
    """
    shares = [Share("all CPU cores")] * workers
    if BIND_VARIABLE in environment:
        shares = [Share(f"CPU cores as in {BIND_VARIABLE}")] * workers
    elif workers > 1:
        shares = _core_shares(cpus, workers, world_size(words) or 1)
    is_told = any(option_value(words, (name,)) is not None for name in _MEMORY)
    if is_told or environment.get(_KV_SPACE_VARIABLE):
        return shares
    # vLLM takes memory of the node of the first CPU that it may run on.
    node_of = {cpu.cpu_id: cpu.node for cpu in cpus}
    nodes = [node_of[min(share.cpus or node_of)] for share in shares]
    return [
        _with_memory(share, memory[node], nodes.count(node), host_tier_bytes)
        for share, node in zip(shares, nodes, strict=True)
    ]


def _core_shares(cpus: Collection[Cpu], workers: int, ranks: int) -> list[Share]:
    cores: dict[tuple[int, str], list[int]] = {}
    for cpu in sorted(cpus, key=lambda cpu: cpu.cpu_id):
        cores.setdefault((cpu.node, cpu.core), []).append(cpu.cpu_id)
    if len(cores) < workers * (ranks + 1):
        # Bound to it, API server, scheduler and model would take turns on a core.
        alone = {BIND_VARIABLE: "nobind", "OMP_NUM_THREADS": "1"}
        return [Share("CPU cores shared, one thread", environment=alone)] * workers
    # Neighbours on a NUMA node stay together. Python sorts stably: then by the lowest CPU.
    ordered = sorted(cores, key=lambda core: core[0])
    return [_core_share([cores[core] for core in part], ranks) for part in _parts(ordered, workers)]


def _core_share(cores: Sequence[Sequence[int]], ranks: int) -> Share:
    """A worker's cores: a thread on each, the last one left to scheduler and API server.

    That is how vLLM divides a whole host. It knows no way to do the same in a part of one.
    """
    threads = [core[-1] for core in cores[:-1]]
    bound = "|".join(",".join(map(str, part)) for part in _parts(threads, ranks))
    cpus = tuple(sorted(cpu for core in cores for cpu in core))
    shown = f"CPU {','.join(map(str, cpus))}"
    return Share(shown, environment={BIND_VARIABLE: bound}, cpus=cpus)


def _with_memory(share: Share, memory: Memory, sharers: int, host_tier_bytes: int) -> Share:
    """With the part of its node's memory that vLLM may take, which is how vLLM is told of it."""
    mine_bytes = _USABLE_MEMORY * memory.available_bytes / sharers - host_tier_bytes
    fraction = floor(mine_bytes / memory.total_bytes * 1000) / 1000
    if fraction < _LEAST_FRACTION:
        raise SettingsError(
            f"{memory.available_bytes / 2**30:.1f} GiB of memory are left, too little for "
            f"{sharers} workers: end other programs, or give fewer --workers or a smaller host tier"
        )
    words = (*share.words, _MEMORY[0], f"{fraction:g}")
    return Share(share.shown, words, share.environment, share.cpus)


def world_size(words: Sequence[str]) -> int | None:
    """How many GPUs, or ranks, a worker's options ask for; None where they say nothing of it.

    Raises:
        SettingsError: a parallel size is no whole number above 0.
    """
    sizes = []
    for names in _PARALLEL:
        text = option_value(words, names)
        if text is None:
            continue
        if not text.isdecimal() or not int(text):
            raise SettingsError(f"{names[0]} {text} must be a whole number above 0")
        sizes.append(int(text))
    return prod(sizes) if sizes else None


def option_value(words: Sequence[str], names: Sequence[str]) -> str | None:
    """The value of an option, the last one that is given, as vLLM reads it; None: not given.

    Names may be written with underscores; the value is the next word, or follows an equals sign.
    """
    value = None
    for number, word in enumerate(words):
        head, equals, rest = word.partition("=")
        if head.startswith("--"):
            head = head.replace("_", "-")
        if head in names:
            value = rest if equals else "".join(words[number + 1 : number + 2])
    return value


def _parts(items: Sequence[_T], count: int) -> list[Sequence[_T]]:
    """Contiguous parts, the first ones longer by one where they cannot be equal."""
    each, left = divmod(len(items), count)
    starts = [number * each + min(number, left) for number in range(count + 1)]
    return [items[start:end] for start, end in pairwise(starts)]
