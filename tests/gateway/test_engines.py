"""What a worker turns out to be, and in which words it is told of sessions and priorities."""

import json

import pytest

from saga_gateway.engines import Engine, EngineKind, detect
from saga_gateway.identity import new_key


async def seen(gateway, eventually, *workers):
    """Wait until the gateway knows what these workers are."""
    for worker in workers:
        await eventually(lambda w=worker: gateway.app.workers[w.worker_id].engine is not None)


def engine_of(gateway, worker):
    return gateway.app.workers[worker.worker_id].engine


@pytest.mark.parametrize(
    ("kind", "scheduling", "expected"),
    [
        ("saga", "fcfs", Engine(EngineKind.SAGA, "0.32.0")),
        ("saga", "priority", Engine(EngineKind.SAGA, "0.32.0", takes_priority=True)),
        ("vllm", "priority", Engine(EngineKind.VLLM, "0.32.0")),
        ("vllm-dev", "fcfs", Engine(EngineKind.VLLM, "0.32.0")),
        ("vllm-dev", "priority", Engine(EngineKind.VLLM, "0.32.0", takes_priority=True)),
        ("sglang", "fcfs", Engine(EngineKind.SGLANG, "0.5.9")),
        ("sglang-old", "fcfs", Engine(EngineKind.SGLANG, "0.4.1")),
        ("other", "fcfs", Engine(EngineKind.OTHER)),
    ],
)
async def test_a_worker_is_known_by_what_it_says(
    start_gateway, worker, eventually, kind, scheduling, expected
):
    worker.kind, worker.scheduling = kind, scheduling
    gateway = await start_gateway(worker)
    await seen(gateway, eventually, worker)
    assert engine_of(gateway, worker) == expected
    shown = (await gateway.client.get("/saga/v1/workers")).json()["workers"][0]
    assert shown["engine"] == {
        "kind": expected.kind,
        "version": expected.version,
        "takes_priority": expected.takes_priority,
    }
    assert shown["takes_notices"] is (expected.kind is EngineKind.SAGA)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'"x"',
        b"{",
        b"\xff",
        b'{"version": 7, "data": 3}',
        b'{"data": [4]}',
        b'{"data": [{"owned_by": []}]}',
    ],
)
async def test_nonsense_is_some_other_engine(body):
    async def get(_path):
        return 200, body

    assert await detect(get) == Engine(EngineKind.OTHER)


async def test_each_engine_hears_of_the_session_in_its_own_words(
    start_gateway, workers, eventually
):
    for worker, kind in zip(workers, ("vllm", "sglang"), strict=True):
        worker.kind = kind
        gateway = await start_gateway(worker)
        await seen(gateway, eventually, worker)
        await gateway.client.post(
            "/v1/chat/completions",
            json={},
            headers={"X-SAGA-Session-ID": "s", "X-Session-ID": "mine", "X-SMG-Routing-Key": "k"},
        )
        await gateway.client.post(
            "/v1/chat/completions", json={}, headers={"X-SMG-Routing-Key": "k"}
        )
    vllm, sglang = workers
    assert [e.header("X-Session-ID") for e in vllm.chats] == ["s", None]
    assert [e.header("X-SMG-Routing-Key") for e in vllm.chats] == [None, "k"]
    assert [e.header("X-Session-ID") for e in sglang.chats] == [None, None]
    assert [e.header("X-SMG-Routing-Key") for e in sglang.chats] == ["s", "k"]


def urgency_of_last(gateway):
    """What the coordinator gave the latest request."""
    return gateway.app._dispatcher.recent[-1].decision.priority


async def test_only_a_worker_that_serves_by_priority_hears_of_one(
    start_gateway, workers, eventually
):
    ordered, plain = workers
    ordered.scheduling = "priority"
    urgency = []
    for worker in workers:
        gateway = await start_gateway(worker)
        await seen(gateway, eventually, worker)
        for said in ("0", "-3", "high", "9" * 40):
            answer = await gateway.client.post(
                "/v1/chat/completions", json={}, headers={"X-Vllm-Priority": said}
            )
            assert answer.status_code == 200
            urgency.append(urgency_of_last(gateway))
        # What the body says stands when nothing else is said.
        await gateway.client.post("/v1/chat/completions", json={"priority": 4})
    told = [e.header("X-Vllm-Priority") for e in ordered.chats]
    assert told.pop() is None
    added = [int(each) - own for each, own in zip(told, urgency, strict=False)]
    assert added == [0, -3, 0, 2**30]
    assert [e.header("X-Vllm-Priority") for e in plain.chats] == [None] * 5


async def test_a_key_says_the_priority_and_its_caller_does_not(
    start_gateway, worker, eventually, tmp_path
):
    worker.scheduling = "priority"
    urgent, urgent_entry = new_key("a")
    usual, usual_entry = new_key("b")
    path = tmp_path / "keys.toml"
    path.write_text(f"{urgent_entry}priority = -5\n{usual_entry}")
    gateway = await start_gateway(worker, keys_file=str(path))
    await seen(gateway, eventually, worker)
    urgency = []
    for key in (urgent, usual):
        await gateway.client.post(
            "/v1/chat/completions",
            json={"priority": -1000},
            headers={"Authorization": f"Bearer {key}", "X-Vllm-Priority": "-1000"},
        )
        urgency.append(urgency_of_last(gateway))
    # Also 0 is said: else the priority in the body would count.
    told = [int(e.header("X-Vllm-Priority")) for e in worker.chats]
    assert told == [urgency[0] - 5, urgency[1]]


async def test_no_notice_goes_to_an_engine_without_our_control_api(
    start_gateway, workers, eventually
):
    ours, theirs = workers
    theirs.kind = "vllm"
    for worker in workers:
        gateway = await start_gateway(worker)
        await seen(gateway, eventually, worker)
        await gateway.chat("s")
    await eventually(lambda: ours.notices)
    assert gateway.app.stats.notices_dropped == 1
    assert theirs.notify_posts == 0


async def test_a_worker_that_comes_back_as_another_engine_is_known_as_that(
    start_gateway, worker, eventually
):
    worker.kind, worker.notify_status = "vllm", 404
    gateway = await start_gateway(worker, health_interval_s=0.02)
    await seen(gateway, eventually, worker)
    assert engine_of(gateway, worker).kind is EngineKind.VLLM
    worker.health_status = 503
    await eventually(lambda: not gateway.app.workers[worker.worker_id].healthy)
    worker.kind, worker.health_status, worker.notify_status = "saga", 200, 200
    await eventually(lambda: (engine_of(gateway, worker) or Engine("x")).kind is EngineKind.SAGA)
    await gateway.chat("s")
    await eventually(lambda: [n["session_id"] for n in worker.notices] == ["s"])


async def test_a_worker_that_is_down_at_the_start_is_asked_again(start_gateway, worker, eventually):
    await worker.stop()
    gateway = await start_gateway(worker, health_interval_s=0.02)
    await eventually(lambda: not gateway.app.workers[worker.worker_id].healthy)
    assert engine_of(gateway, worker) is None
    await worker.start()
    await seen(gateway, eventually, worker)
    assert engine_of(gateway, worker).kind is EngineKind.SAGA


@pytest.mark.parametrize(("details", "expected"), [({"cached_tokens": 5}, "5"), ({}, None)])
async def test_cached_tokens_are_said_where_they_are_known_in_time(
    gateway, worker, wire, details, expected
):
    content = wire.completion()
    content["usage"]["prompt_tokens_details"] = details

    async def script(exchange):
        await exchange.answer(content)

    worker.script = script
    answer = await gateway.chat("s")
    assert answer.headers.get("X-SAGA-Cached-Tokens") == expected
    assert answer.content == json.dumps(content).encode()


async def test_a_stream_does_not_wait_to_say_cached_tokens(gateway, worker, wire):
    async def script(exchange):
        usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 5}}
        await exchange.stream(
            wire.event({**wire.delta("stop"), "usage": usage}), b"data: [DONE]\n\n"
        )

    worker.script = script
    answer = await gateway.chat("s", {"stream": True})
    assert "X-SAGA-Cached-Tokens" not in answer.headers
