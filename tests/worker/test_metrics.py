"""The worker's series on vLLM's own /metrics."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpu_backend.metrics import ENABLED, GPU_SERIES, SERIES, exposition
from gpu_backend.telemetry import GPUMemory, GPUMemoryReader
from tests.worker.fake_engine import STATE, FakeWorker

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
Start = Callable[..., Awaitable[FakeWorker]]

FULL: dict[str, Any] = {
    **STATE,
    "evictions": {"unheld": 10, "ended": 4, "idle": 3, "paused": 2, "resuming": 1},
    "prefill_tokens_per_s": 5000.5,
    "queue": {"running": 2, "waiting": 1},
    "scheduler": {"steps": 70, "cpu_s": 0.5, "gave_way": 3},
    "host": {"num_blocks": 10, "held_blocks": 8, "refused_blocks": 6, "load_tokens_per_s": 9.5},
    "prefetch": {"started": 5, "useful": 3, "late": 1, "wasted": 1, "cancelled": 0}
    | {"loaded_tokens": 500, "computed_tokens": 0},
    "shadow": {
        "policy": "vllm",
        "off_reason": None,
        "counters": {"prompt_tokens": 1000, "cached_tokens": 400, "regret_tokens": 250},
    },
    "sessions": [{"session_id": "secret-session", "gpu_tokens": 10}],
}


def _parse(text: str | bytes) -> Samples:
    text = text.decode() if isinstance(text, bytes) else text
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples
            samples[key] = sample.value
    return samples


def _of(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((f"saga_worker_{name}", frozenset(labels.items())))


@pytest.fixture
async def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    monkeypatch.setenv("SAGA_PREFETCH", "0")

    async def run() -> FakeWorker:
        return await FakeWorker(monkeypatch).start()

    return run


async def _scrape(worker: FakeWorker) -> tuple[Samples, str]:
    async with worker.client() as client:
        answer = await client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    assert int(answer.headers["content-length"]) == len(answer.content)
    return _parse(answer.text), answer.text


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("admitted_requests_total", {}, 7),
        ("prompt_tokens_total", {}, 1000),
        ("hit_tokens_total", {"tier": "gpu"}, 400),
        ("hit_tokens_total", {"tier": "host"}, 200),
        ("regret_tokens_total", {}, 50),
        ("preempted_tokens_total", {}, 5),
        ("evicted_blocks_total", {"reason": "unheld"}, 10),
        ("evicted_blocks_total", {"reason": "ended"}, 4),
        ("evicted_blocks_total", {"reason": "resuming"}, 1),
        ("pinned_block_seconds_total", {}, 12.5),
        ("retained_bytes", {"tier": "gpu"}, 25_000),
        ("retained_bytes", {"tier": "host"}, 8_000),
        ("prefetches_total", {"outcome": "useful"}, 3),
        ("prefetches_total", {"outcome": "cancelled"}, 0),
        ("prefetch_tokens_total", {"source": "loaded"}, 500),
        ("host_load_tokens_per_second", {}, 9.5),
        ("host_refused_blocks_total", {}, 6),
        ("sessions", {}, 3),
        ("pressure", {}, 0.25),
        ("queue_requests", {"state": "waiting"}, 1),
        ("scheduler_steps_total", {}, 70),
        ("scheduler_cpu_seconds_total", {}, 0.5),
        ("gave_way_total", {}, 3),
        ("prefill_tokens_per_second", {}, 5000.5),
        ("notices_total", {}, 9),
        ("unknown_session_notices_total", {}, 2),
        ("shadow_hit_tokens_total", {"shadow": "vllm"}, 400),
        ("shadow_regret_tokens_total", {"shadow": "vllm"}, 250),
    ],
)
def test_each_number_of_the_state_has_its_series(
    name: str, labels: dict[str, str], value: float
) -> None:
    samples = _parse(exposition(FULL, []))
    assert _of(samples, name, policy="saga", **labels) == value
    assert _of(samples, "enabled") == 1


def test_every_family_appears_and_none_names_a_session() -> None:
    text = exposition(FULL, [GPUMemory("GPU-1", 3, 4)]).decode()
    names = {name for name, _ in _parse(text)}
    assert names == {ENABLED, *(s.name for s in SERIES), *(name for name, _, _ in GPU_SERIES)}
    assert "secret-session" not in text


def test_a_series_goes_with_what_it_describes() -> None:
    samples = _parse(exposition(STATE, []))
    assert _of(samples, "hit_tokens_total", policy="saga", tier="host") is None
    assert _of(samples, "retained_bytes", policy="saga", tier="host") is None
    assert _of(samples, "hit_tokens_total", policy="saga", tier="gpu") == 400
    parts = ("prefetch", "queue", "shadow", "gpu_memory", "prefill")
    assert not [name for name, _ in samples if any(part in name for part in parts)]
    shadow_off = {**FULL, "shadow": {**FULL["shadow"], "off_reason": "record failed"}}
    assert not [name for name, _ in _parse(exposition(shadow_off, [])) if "shadow" in name]
    unknown_size = {**FULL, "block_bytes": 0}
    assert not [name for name, _ in _parse(exposition(unknown_size, [])) if "bytes" in name]


@pytest.mark.parametrize("state", [None, {"enabled": False}, {**FULL, "enabled": False}])
def test_where_the_plugin_is_off_only_that_is_said(state: dict[str, Any] | None) -> None:
    assert _parse(exposition(state, [])) == {(ENABLED, frozenset()): 0.0}


def test_every_family_is_documented() -> None:
    text = Path("docs/worker.md").read_text()
    names = [ENABLED, *(s.name for s in SERIES), *(name for name, _, _ in GPU_SERIES)]
    assert [name for name in names if f"`{name}`" not in text] == []


# The route


async def test_they_stand_beside_vllms_own_on_its_route(start: Start) -> None:
    worker = await start()
    worker.engine.states = [json.loads(json.dumps(FULL))]
    samples, text = await _scrape(worker)
    assert _of(samples, "regret_tokens_total", policy="saga") == 50
    assert "python_info" in text  # Of the process's own registry, as vLLM exposes it.
    assert text.count("# TYPE python_info") == 1


async def test_so_they_do_in_prometheus_multiprocess_mode(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    worker = await start()
    samples, text = await _scrape(worker)
    assert _of(samples, "regret_tokens_total", policy="saga") == 50
    assert "python_info" not in text


async def test_the_engine_is_asked_right_before_a_scrape_and_at_most_once_a_second(
    start: Start,
) -> None:
    worker = await start()
    await _scrape(worker)
    worker.engine.state["counters"]["regret_tokens"] = 60
    samples, _ = await _scrape(worker)
    assert len(worker.engine.messages) == 1
    assert _of(samples, "regret_tokens_total", policy="saga") == 50
    await worker.clock.advance(1.0)
    samples, _ = await _scrape(worker)
    assert len(worker.engine.messages) == 2
    assert _of(samples, "regret_tokens_total", policy="saga") == 60


async def test_an_engine_that_does_not_answer_leaves_vllms_own(start: Start) -> None:
    worker = await start()
    worker.engine.error = RuntimeError("saga_control is not known")
    samples, text = await _scrape(worker)
    assert _of(samples, "enabled") == 0
    assert "python_info" in text


async def test_a_busy_engine_is_not_waited_for_and_the_last_state_is_told(start: Start) -> None:
    worker = await start()
    await _scrape(worker)
    await worker.clock.advance(2.0)
    worker.engine.gate.clear()
    state = await worker.endpoint._feed.recent(1.0, patience_s=0)
    assert state["counters"]["regret_tokens"] == 50
    assert len(worker.engine.messages) == 2
    worker.engine.gate.set()


async def test_a_failure_of_ours_leaves_vllms_own(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await start()
    monkeypatch.setattr("gpu_backend.endpoint.exposition", lambda *_: 1 / 0)
    _, text = await _scrape(worker)
    assert "python_info" in text
    assert "saga_worker" not in text


async def test_where_vllms_route_is_not_what_it_was_there_are_no_series(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SAGA_PREFETCH", "0")
    worker = FakeWorker(monkeypatch)

    async def stock() -> dict[str, str]:
        return {"series": "none"}

    worker.app.get("/metrics")(stock)
    await worker.start()
    async with worker.client() as client:
        answer = await client.get("/metrics")
        assert answer.json() == {"series": "none"}
        assert (await client.get("/saga/v1/state")).status_code == 200


# GPUs


class _NVML:
    """Two GPUs, the second of which can be lost."""

    def __init__(self) -> None:
        self.inits = 0
        self.is_lost = False

    def nvmlInit(self) -> None:
        self.inits += 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str | bytes:
        return [b"GPU-a", "GPU-b"][handle]  # Older releases of pynvml return bytes.

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        if self.is_lost:
            raise RuntimeError("GPU is lost")
        return SimpleNamespace(used=10 + handle, total=80)


def test_gpu_memory_is_read_of_every_gpu_and_opened_once() -> None:
    nvml = _NVML()
    reader = GPUMemoryReader(nvml)
    for _ in range(2):
        assert reader.read() == [GPUMemory("GPU-a", 10, 80), GPUMemory("GPU-b", 11, 80)]
    assert nvml.inits == 1
    samples = _parse(exposition(None, reader.read()))
    assert _of(samples, "gpu_memory_used_bytes", gpu="GPU-b") == 11
    assert _of(samples, "gpu_memory_total_bytes", gpu="GPU-a") == 80


def test_a_gpu_that_is_lost_takes_its_series_along() -> None:
    nvml = _NVML()
    reader = GPUMemoryReader(nvml)
    reader.read()
    nvml.is_lost = True
    assert reader.read() == []
    nvml.is_lost = False
    assert reader.read() == []


def test_without_the_library_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GPUMemoryReader().read() == []
