"""How `saga up` splits a host over workers, and when what ends is started again."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from saga_cli import up_host
from saga_cli.up_plan import (
    Cpu,
    Memory,
    Share,
    cpu_shares,
    gpu_shares,
    option_value,
    world_size,
)
from saga_cli.up_restarts import Restarts
from saga_core.errors import SettingsError

GIB = 2**30
NOTHING: Mapping[str, str] = {}


# GPUs


def _visible(shares: Sequence[Share]) -> list[str]:
    return [share.environment["CUDA_VISIBLE_DEVICES"] for share in shares]


def test_gpus_are_split_evenly_and_each_worker_is_parallel_over_its_own() -> None:
    shares = gpu_shares(["0", "1", "2", "3"], 2, [])
    assert _visible(shares) == ["0,1", "2,3"]
    assert {share.words for share in shares} == {("--tensor-parallel-size", "2")}
    assert _visible(gpu_shares(["4", "GPU-x"], 2, [])) == ["4", "GPU-x"]
    assert gpu_shares(["0"], 1, [])[0].words == ()


def test_a_worker_that_says_how_it_uses_its_gpus_is_told_nothing_more() -> None:
    shares = gpu_shares(["0", "1", "2", "3"], 1, ["-tp", "2", "--pipeline-parallel-size=2"])
    assert shares[0].words == ()
    assert gpu_shares(["0", "1"], 2, ["--data-parallel-size", "1"])[0].words == ()


@pytest.mark.parametrize(
    ("gpus", "workers", "words", "said"),
    [
        ("0", 2, [], r"at least a GPU each and there are 1 \(0\): give --workers 1"),
        ("0,1,2,3", 3, [], "evenly over 3 workers: give --workers 1, 2, 4, or --gpus with 3"),
        ("0,1,0,1", 2, [], "more than once"),
        ("0,1,2,3", 2, ["-tp", "4"], "gets 2 of 4 GPUs, .* ask for 4: give --gpus with 8"),
        ("0,1,2,3", 2, ["--tensor_parallel_size=1"], "ask for 1: give --gpus with 2"),
        ("0,1", 1, ["-tp", "two"], "--tensor-parallel-size two must be a whole number"),
    ],
)
def test_gpus_that_cannot_be_split_are_refused(
    gpus: str, workers: int, words: list[str], said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        gpu_shares(gpus.split(","), workers, words)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ([], None),
        (["--size", "2"], "2"),
        (["--size=3", "--size", "4"], "4"),
        (["--si_ze", "2"], None),
        (["--size"], ""),
        (["x", "-s", "5"], "5"),
    ],
)
def test_the_value_of_an_option_among_words(words: list[str], value: str | None) -> None:
    assert option_value(words, ("--size", "-s")) == value


def test_a_world_is_the_product_of_its_parallel_sizes() -> None:
    assert world_size(["--max-model-len", "4096"]) is None
    assert world_size(["-tp", "2", "--pipeline_parallel_size", "3", "-dp=2"]) == 12


# CPU cores and memory


def _host(cores: int, *, siblings: int = 1, nodes: int = 1) -> list[Cpu]:
    """Cores that are numbered one after the other, their siblings behind all of them, as Linux."""
    return [
        Cpu(core + sibling * cores, f"core{core}", core * nodes // cores)
        for core in range(cores)
        for sibling in range(siblings)
    ]


PLENTY = Memory(100 * GIB, 100 * GIB)


def _cpu_shares(
    cpus: Sequence[Cpu],
    workers: int,
    words: Sequence[str] = (),
    *,
    memory: Memory = PLENTY,
    environment: Mapping[str, str] = NOTHING,
    host_tier_bytes: int = 0,
) -> list[Share]:
    nodes = {cpu.node: memory for cpu in cpus}
    return cpu_shares(cpus, nodes, workers, words, environment, host_tier_bytes)


def _bound(share: Share) -> str | None:
    return share.environment.get("VLLM_CPU_OMP_THREADS_BIND")


def test_each_worker_has_cores_of_its_own_and_leaves_one_to_the_scheduler() -> None:
    shares = _cpu_shares(_host(8), 2)
    assert [share.cpus for share in shares] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [_bound(share) for share in shares] == ["0,1,2", "4,5,6"]


def test_siblings_stay_together_and_one_of_them_has_a_thread() -> None:
    shares = _cpu_shares(_host(4, siblings=2), 2)
    assert [share.cpus for share in shares] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert [_bound(share) for share in shares] == ["4", "6"]


def test_cores_that_cannot_be_equal_differ_by_one() -> None:
    assert [share.cpus for share in _cpu_shares(_host(5), 2)] == [(0, 1, 2), (3, 4)]
    assert [_bound(share) for share in _cpu_shares(_host(5), 2)] == ["0,1", "3"]


def test_a_numa_node_is_filled_before_the_next() -> None:
    interleaved = [Cpu(n, str(n), n % 2) for n in range(8)]
    assert [share.cpus for share in _cpu_shares(interleaved, 2)] == [(0, 2, 4, 6), (1, 3, 5, 7)]


@pytest.mark.parametrize(("cores", "workers"), [(2, 3), (2, 2), (3, 2)])
def test_with_too_few_cores_to_leave_one_to_each_scheduler_nobody_is_bound(
    cores: int, workers: int
) -> None:
    for share in _cpu_shares(_host(cores), workers):
        assert share.cpus == ()
        assert share.environment == {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def test_ranks_of_a_worker_divide_its_cores() -> None:
    shares = _cpu_shares(_host(10), 2, ["-tp", "2"])
    assert [_bound(share) for share in shares] == ["0,1|2,3", "5,6|7,8"]
    assert [_bound(share) for share in _cpu_shares(_host(6), 2, ["-tp", "2"])] == ["0|1", "3|4"]
    assert [_bound(share) for share in _cpu_shares(_host(5), 2, ["-tp", "2"])] == ["nobind"] * 2


def test_one_worker_has_the_host_as_vllm_divides_it() -> None:
    (share,) = _cpu_shares(_host(8), 1)
    assert (share.cpus, share.environment) == ((), {})
    assert share.words == ("--gpu-memory-utilization", "0.9")


def test_memory_that_is_left_is_shared_by_the_workers_of_a_node() -> None:
    half = Memory(100 * GIB, 50 * GIB)
    for workers, nodes, part in ((2, 1, "0.225"), (2, 2, "0.45"), (3, 1, "0.15"), (1, 1, "0.45")):
        for share in _cpu_shares(_host(8, nodes=nodes), workers, memory=half):
            assert share.words == ("--gpu-memory-utilization", part)
    for share in _cpu_shares(_host(2), 3, memory=half):
        assert share.words[1] == "0.15"
    for share in _cpu_shares(_host(4), 2, memory=half, host_tier_bytes=10 * GIB):
        assert share.words[1] == "0.125"


@pytest.mark.parametrize(
    ("words", "environment"),
    [
        (["--gpu_memory_utilization", "0.3"], {}),
        (["--kv-cache-memory-bytes=1000"], {}),
        ([], {"VLLM_CPU_KVCACHE_SPACE": "4"}),
    ],
)
def test_memory_that_is_settled_stays_so(words: list[str], environment: dict[str, str]) -> None:
    shares = _cpu_shares(_host(4), 2, words, environment=environment)
    assert [share.words for share in shares] == [(), ()]


def test_cores_that_are_bound_stay_so() -> None:
    bind = {"VLLM_CPU_OMP_THREADS_BIND": "0-3"}
    for share in _cpu_shares(_host(4), 2, environment=bind):
        assert (share.cpus, share.environment) == ((), {})


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"0\.5 GiB of memory are left, too little for 2"):
        _cpu_shares(_host(4), 2, memory=Memory(100 * GIB, GIB // 2))
    with pytest.raises(SettingsError, match="smaller host tier"):
        _cpu_shares(_host(4), 2, host_tier_bytes=50 * GIB)


def test_this_host_is_read() -> None:
    cpus = up_host.host_cpus()
    assert {cpu.cpu_id for cpu in cpus} == os.sched_getaffinity(0)
    nodes = {cpu.node for cpu in cpus}
    memory = up_host.host_memory(nodes)
    assert memory.keys() == nodes
    for node in memory.values():
        assert 0 < node.available_bytes <= node.total_bytes


def test_gpus_are_those_of_the_variable_else_those_that_nvidia_smi_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '0\\n1\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert up_host.visible_gpus({}) == ["0", "1"]
    assert up_host.visible_gpus({"CUDA_VISIBLE_DEVICES": "3, 2"}) == ["3", "2"]
    assert up_host.visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    monkeypatch.setenv("PATH", "/nowhere")
    assert up_host.visible_gpus({}) == []


# Restarts


def _pauses(restarts: Restarts, *ends: float | None, exit_code: int = 1) -> list[float | None]:
    return [restarts.after(exit_code, ready_s) for ready_s in ends]


def test_pauses_double_up_to_a_minute_and_begin_anew_after_a_healthy_time() -> None:
    restarts = Restarts(5)
    assert _pauses(restarts, 5.0, *[None] * 8) == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert _pauses(restarts, 59.0, 60.0, 1.0) == [60, 1, 2]
    assert _pauses(Restarts(5), *[1.0] * 5000)[-1] == 60


def test_what_was_never_ready_is_given_up_and_what_was_is_not() -> None:
    assert _pauses(Restarts(5), *[None] * 5) == [1, 2, 4, 8, None]
    assert _pauses(Restarts(1), None) == [None]
    assert None not in _pauses(Restarts(1), 0.1, *[None] * 20)


def test_a_refused_command_line_is_not_tried_again() -> None:
    assert _pauses(Restarts(5), None, exit_code=2) == [None]
    assert _pauses(Restarts(5), 0.1, None, exit_code=2) == [1, 2]
