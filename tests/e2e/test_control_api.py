"""State, stream and metrics of a worker with a real engine."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpu_backend.openapi import document
from saga_cli.processes import Service
from tests.e2e.conftest import BLOCK_TOKENS, MODEL

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

POLICY = "wa-lru-ttl"
SESSION = "control-api"
PROMPT_TOKENS = 4 * BLOCK_TOKENS


def _step(worker: Service) -> None:
    prompt = " ".join(f"<{random.Random(9).randrange(3, 1000)}>" for _ in range(PROMPT_TOKENS))
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    headers = {"X-Session-ID": SESSION}
    answer = httpx.post(f"{worker.url}/v1/completions", json=body, headers=headers, timeout=120)
    answer.raise_for_status()


def _states(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        assert not line.startswith("event: error")
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def _samples(worker: Service) -> dict[tuple[str, ...], float]:
    text = httpx.get(f"{worker.url}/metrics", timeout=30).text
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_step_shows_in_the_stream_in_the_state_and_in_the_metrics(
    workers: dict[str, Service],
) -> None:
    worker = workers[POLICY]
    url = f"{worker.url}/saga/v1/state:watch?interval_s=60&sessions=1000"
    with httpx.stream("GET", url, timeout=90) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        states = _states(response)
        before = next(states)
        assert SESSION not in str(before["sessions"])
        _step(worker)
        after = next(state for state in states if SESSION in str(state.get("sessions")))
    held = next(one for one in after["sessions"] if one["session_id"] == SESSION)
    assert held["gpu_tokens"] == PROMPT_TOKENS
    assert after["counters"]["requests"] == before["counters"]["requests"] + 1
    assert after["pressure"] > 0

    state = httpx.get(f"{worker.url}/saga/v1/state", timeout=30).json()
    assert state["queue"] == {"running": 0, "waiting": 0}
    assert "sessions" not in state
    schema = {**document(), "$ref": "#/components/schemas/State"}
    jsonschema.Draft202012Validator(schema).validate(state)

    samples = _samples(worker)
    assert samples["saga_worker_enabled",] == 1
    assert samples["saga_worker_sessions", POLICY] == state["held"]["sessions"]
    counters = state["counters"]
    assert samples["saga_worker_prompt_tokens_total", POLICY] == counters["prompt_tokens"]
    assert samples["saga_worker_hit_tokens_total", POLICY, "gpu"] == counters["cached_tokens"]
    assert any(name[0].startswith("vllm:") for name in samples)


def test_stock_vllms_metrics_have_nothing_of_ours(workers: dict[str, Service]) -> None:
    names = {name[0] for name in _samples(workers["off"])}
    assert any(name.startswith("vllm:") for name in names)
    assert not any(name.startswith("saga_") for name in names)
