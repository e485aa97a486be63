"""Requests that no client should send: the gateway answers or closes, and goes on as before.

``make fuzz`` sends more of them: SAGA_FUZZ_REQUESTS says how many, SAGA_FUZZ_SEED which.
"""

import asyncio
import os
import random
import string

REQUESTS = int(os.environ.get("SAGA_FUZZ_REQUESTS", "500"))
SEED = int(os.environ.get("SAGA_FUZZ_SEED", "0"))
AT_A_TIME = 25
SILENCE_S = 0.2

METHODS = ["POST"] * 8 + [
    "GET",
    "HEAD",
    "OPTIONS",
    "PUT",
    "DELETE",
    "PATCH",
    "TRACE",
    "post",
    "X Y",
]
PATHS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/resp_1",
    "/v1/responses/../../sleep",
    "/v1/responses/resp_1/cancel/x",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/models",
    "/saga/v1/events",
    "/saga/v1/workers",
    "/saga/v1/workers/x:drain",
    "/health",
    "/metrics",
    "/",
    "",
    "//",
    "/%00%ff/é",
    "/v1/chat/completions?" + "a=%&" * 30,
    "http://evil.example/v1/chat/completions",
    "*",
]
NAMES = [
    "X-SAGA-Session-ID",
    "X-SAGA-Step",
    "X-SAGA-Deadline-Ms",
    "X-SAGA-Final",
    "X-SAGA-Tenant-ID",
    "X-Session-ID",
    "baggage",
    "traceparent",
    "Authorization",
    "X-API-Key",
    "Connection",
    "Expect",
    "Accept-Encoding",
    "Content-Encoding",
    "Content-Type",
    "Origin",
    "Upgrade",
]
VALUES = [
    "s",
    "",
    "-1",
    "999999999999999999999999",
    "saga.session_id=%zz,,=;=",
    "00-" + "0" * 32 + "-" + "0" * 16 + "-ff",
    "Bearer",
    "close, X-Session-ID",
    "100-continue",
    "gzip, br",
    "é\x00\x7f",
    "a" * 5000,
    "websocket",
]
BODIES = [
    b"",
    b"{}",
    b"[]",
    b"null",
    b'{"model": "m", "messages": []}',
    b'{"previous_response_id": "resp_1"}',
    b'{"previous_response_id": {"a": [1e999]}}',
    b'{"previous_response_id": ' + b"[" * 3000,
    b'[{"event": "session_end", "session_id": "s"}]',
    b'[{"event": "tool_end"}]',
    b'[{"event": 7, "session_id": "s"}, null]',
    b"\xff\xfe\x00",
    b"x" * 70_000,
]


def request(rng: random.Random) -> bytes:
    """One request, most of it legal, some of it not."""
    body = rng.choice(BODIES)
    lines = [f"{rng.choice(METHODS)} {rng.choice(PATHS)} HTTP/{rng.choice(['1.1'] * 6 + ['1.0'])}"]
    if rng.random() < 0.95:
        lines.append("Host: x")
    for _ in range(rng.randrange(4)):
        lines.append(f"{rng.choice(NAMES)}: {rng.choice(VALUES)}")
    kind = rng.random()
    if kind < 0.7:
        lines.append(f"Content-Length: {len(body)}")
    elif kind < 0.8:
        lines.append(f"Content-Length: {rng.choice(['-1', 'x', '5, 6', str(len(body) + 9), '1'])}")
    elif kind < 0.9:
        lines.append("Transfer-Encoding: chunked")
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        if rng.random() < 0.3:
            body = b"zz\r\n" + body
    text = "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body
    if rng.random() < 0.15:
        text = text[: rng.randrange(len(text))]
    if rng.random() < 0.1:
        at = rng.randrange(len(text) + 1)
        noise = "".join(rng.choices(string.printable, k=5)).encode()
        text = text[:at] + noise + text[at:]
    return text


async def send(port: int, text: bytes) -> bytes:
    """Send a request and leave when nothing more comes for a while."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        writer.write(text)
        await writer.drain()
        while piece := await asyncio.wait_for(reader.read(65536), SILENCE_S):
            answer += piece
    except (ConnectionError, TimeoutError):
        pass  # It was closed, or there is no more.
    finally:
        writer.close()
    return answer


async def test_malformed_requests_do_no_harm(start_gateway, worker, eventually, caplog):
    gateway = await start_gateway(worker, max_body_bytes=60_000, max_sessions=50)
    await gateway.chat("s")
    tasks = len(asyncio.all_tasks())
    rng, statuses = random.Random(SEED), {}
    for _ in range(0, REQUESTS, AT_A_TIME):
        texts = [request(rng) for _ in range(AT_A_TIME)]
        for text, answer in zip(
            texts, await asyncio.gather(*(send(gateway.port, text) for text in texts)), strict=True
        ):
            status = answer.partition(b" ")[2][:3].decode()
            statuses[status] = statuses.get(status, 0) + 1
            assert not status.startswith("5"), (text, answer)
    assert statuses["200"] > REQUESTS // 20
    assert {"400", "404", "405", "413"} <= statuses.keys()
    (upstream,) = gateway.app.workers
    await eventually(lambda: upstream.in_flight == 0)
    await eventually(lambda: len(asyncio.all_tasks()) <= tasks + 2)
    gateway.app.sessions.check_integrity()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert (await gateway.chat("s")).status_code == 200
