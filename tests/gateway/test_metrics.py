"""What Prometheus is told."""

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

CHAT = "/v1/chat/completions"


async def scrape(gateway):
    answer = await gateway.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


async def test_answers_routes_and_workers_are_counted(gateway2, workers):
    for _ in range(2):
        await gateway2.chat("s")
    await gateway2.client.post("/v1/embeddings", json={})
    await gateway2.client.get("/v1/responses/resp_1")
    await gateway2.client.get(f"{CHAT}/")
    await gateway2.client.get("/no/such/path/private")
    series = await scrape(gateway2)
    total = "saga_gateway_responses_total"
    assert series[total, ("path", CHAT), ("status", "200")] == 2
    assert series[total, ("path", CHAT), ("status", "405")] == 1
    assert series[total, ("path", "/v1/embeddings"), ("status", "200")] == 1
    assert series[total, ("path", "/v1/responses/"), ("status", "200")] == 1
    assert series[total, ("path", "other"), ("status", "404")] == 1
    assert series["saga_gateway_routes_total", ("reason", "affinity")] == 1
    assert series["saga_gateway_routes_total", ("reason", "new")] == 3
    assert series["saga_gateway_time_to_first_byte_seconds_count",] == 4
    assert series["saga_gateway_sessions",] == 1
    for worker in workers:
        assert series["saga_gateway_worker_available", ("worker", worker.worker_id)] == 1
    await workers[0].stop()
    await workers[1].stop()
    await gateway2.chat("s")
    after = await scrape(gateway2)
    assert after["saga_gateway_worker_available", ("worker", workers[0].worker_id)] == 0
    assert after[total, ("path", CHAT), ("status", "502")] == 1
    assert after["saga_gateway_failovers_total",] >= 1


async def test_times_are_those_of_the_clock(gateway, worker, wire):
    """A token each second after the first, which comes after two."""

    async def stream(exchange):
        gateway.clock.advance(2.0)
        await exchange.stream_head()
        await exchange.chunk(wire.event(wire.delta(content="a")))
        await started.wait()
        gateway.clock.advance(3.0)
        usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 4}}
        await exchange.chunk(wire.event(usage) + b"data: [DONE]\n\n")
        await exchange.send(b"0\r\n\r\n")

    import asyncio

    started = asyncio.Event()
    worker.script = stream
    async with gateway.client.stream("POST", CHAT, json={}) as answer:
        async for _ in answer.aiter_bytes():
            started.set()
    series = await scrape(gateway)
    name = "saga_gateway_{}_seconds_sum"
    assert series[name.format("time_to_first_byte"),] == pytest.approx(2.0)
    assert series[name.format("duration"),] == pytest.approx(5.0)
    assert series["saga_gateway_time_per_output_token_seconds_sum",] == pytest.approx(1.0)


async def test_no_label_is_a_clients_to_choose(gateway):
    for secret in ("sess-1", "sess-2"):
        await gateway.chat(secret, workflow_id=f"{secret}-w", tool_name="t-secret")
        await gateway.client.post(f"/x/{secret}", json={})
        await gateway.events({"event": "session_end", "session_id": secret})
    text = (await gateway.client.get("/metrics")).text
    assert not re.findall("secret|sess-", text)
    assert "saga_gateway_events_total" in text
