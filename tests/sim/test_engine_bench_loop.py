"""The closed loop on a virtual clock, its client on a scripted server, and the log's replay."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import random
from collections import OrderedDict

import aiohttp
import pytest
from aiohttp import web

from saga_core.errors import SagaError
from saga_sim.engine_bench import Answer, ClosedLoop, Completions, LoadOptions, Request, make_load
from saga_sim.engine_bench.log_replay import replay
from saga_sim.profiles import make_profile

FIRST_TOKEN_S = 0.01
TOKEN_S = 0.001
SESSIONS = {"swe": 40, "web": 60, "chat": 120, "tree": 800}


class VirtualTime:
    """A clock that moves on when nothing else can happen."""

    def __init__(self):
        self.now_s = 0.0
        self._sleepers = []
        self._number = itertools.count()

    def clock(self):
        return self.now_s

    async def sleep(self, seconds):
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now_s + seconds, next(self._number), future))
        await future

    async def run(self, work):
        task = asyncio.ensure_future(work)
        while not task.done():
            for _ in range(20):
                await asyncio.sleep(0)
            if self._sleepers and not task.done():
                self.now_s, _, future = heapq.heappop(self._sleepers)
                if not future.done():
                    future.set_result(None)
        return task.result()


class ScriptedEngine:
    """Answers after a fixed time; the tokens depend on the prompt only."""

    def __init__(self, time, fail_at=None):
        self._time = time
        self._fail_at = fail_at
        self.calls = 0

    async def __call__(self, prompt, num_tokens, session_id):
        self.calls += 1
        number = self.calls
        await self._time.sleep(FIRST_TOKEN_S)
        first_token_s = self._time.now_s
        if number == self._fail_at:
            raise SagaError("no room")
        await self._time.sleep(TOKEN_S * num_tokens)
        rng = random.Random(sum(prompt))
        return Answer([rng.randrange(3, 1024) for _ in range(num_tokens)], first_token_s, 0)


def load_of(name, **options):
    trace = make_profile(name, sessions=SESSIONS[name], seed=1)
    return make_load(trace, LoadOptions(scale=64, pool_tokens=32_768, **options))


async def play(load):
    time = VirtualTime()
    loop = ClosedLoop(load, ScriptedEngine(time), clock=time.clock, sleep=time.sleep)
    await time.run(loop.run())
    return loop


@pytest.mark.parametrize("name", ["swe", "web", "chat", "tree"])
async def test_every_call_is_sent_after_its_pause_and_continues_what_it_says(name):
    load = load_of(name)
    loop = await play(load)
    assert len(loop.requests) == load.num_calls
    assert loop.tasks_done == len(load.tasks)
    done = {(r.task, r.call): r for r in loop.requests}
    for (number, index), request in done.items():
        planned = load.tasks[number].calls[index]
        assert len(request.prompt) == planned.input_tokens
        assert len(request.answer) == planned.output_tokens
        assert request.session_id == planned.session_id
        if planned.waits_for:
            ready_s = max(done[number, i].end_s for i in planned.waits_for)
            assert request.sent_s == pytest.approx(ready_s + planned.pause_s)
        if planned.base is not None:
            base = done[number, planned.base]
            context = [*base.prompt, *base.answer]
            assert request.prompt[: planned.keep_tokens] == context[: planned.keep_tokens]


async def test_as_many_tasks_are_alive_as_the_load_says():
    load = load_of("swe")
    requests = (await play(load)).requests
    spans = {}
    for r in requests:
        start_s, end_s = spans.get(r.task, (r.sent_s, r.end_s))
        spans[r.task] = (min(start_s, r.sent_s), max(end_s, r.end_s))
    edges = sorted(
        [(start_s, 1) for start_s, _ in spans.values()]
        + [(end_s, -1) for _, end_s in spans.values()]
    )
    alive = list(itertools.accumulate(change for _, change in edges))
    assert max(alive) == load.live_tasks
    assert [start_s for start_s, _ in spans.values()].count(0.0) == load.live_tasks


async def test_the_seed_decides_every_token():
    one, two = (await play(load_of("web")), await play(load_of("web")))
    assert one.requests == two.requests
    other = await play(load_of("web", seed=3))
    assert [r.prompt for r in other.requests] != [r.prompt for r in one.requests]


async def test_the_first_failure_ends_all_and_is_raised_as_it_is():
    time = VirtualTime()
    engine = ScriptedEngine(time, fail_at=5)
    loop = ClosedLoop(load_of("swe"), engine, clock=time.clock, sleep=time.sleep)
    with pytest.raises(SagaError, match="no room"):
        await time.run(loop.run())
    calls = engine.calls
    for _ in range(20):
        await asyncio.sleep(0)
    assert engine.calls == calls
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not others


# The client


async def serve(aiohttp_handler):
    app = web.Application()
    app.router.add_post("/v1/completions", aiohttp_handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"


def streaming(chunks, seen):
    async def handler(request):
        seen.append((await request.json(), request.headers.get("X-Session-ID")))
        response = web.StreamResponse()
        await response.prepare(request)
        for chunk in chunks:
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    return handler


CHUNKS = [
    {"choices": [{"token_ids": [7]}]},
    {"choices": [{"token_ids": [8, 9]}]},
    {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 64}}},
]


async def complete(handler, num_tokens, **options):
    runner, url = await serve(handler)
    try:
        async with aiohttp.ClientSession() as client:
            send = Completions(client, url, "m", clock=lambda: 5.0, **options)
            return await send([1, 2, 3], num_tokens, "s1")
    finally:
        await runner.cleanup()


async def test_the_client_sends_token_ids_and_reads_token_ids():
    seen = []
    answer = await complete(streaming(CHUNKS, seen), 3)
    assert answer == Answer([7, 8, 9], 5.0, 64)
    ((body, session_id),) = seen
    assert session_id == "s1"
    assert body["prompt"] == [1, 2, 3]
    assert (body["max_tokens"], body["ignore_eos"], body["temperature"]) == (3, True, 0)


async def test_plain_traffic_carries_no_session():
    seen = []
    await complete(streaming(CHUNKS, seen), 3, with_sessions=False)
    assert seen[0][1] is None


async def test_a_short_answer_and_a_refusal_are_errors():
    with pytest.raises(SagaError, match="3 tokens instead of 4"):
        await complete(streaming(CHUNKS, []), 4)

    async def refuse(request):
        return web.Response(status=400, text="too long")

    with pytest.raises(SagaError, match="answered 400: too long"):
        await complete(refuse, 3)


# The replay


def request(session_id, at_s, prompt, answer=(1,), cached=0, call=0, task=0):
    return Request(task, call, session_id, at_s, at_s + 0.1, at_s + 0.5, prompt, answer, cached)


def test_what_a_cache_without_bound_would_have_had_is_regret_when_it_was_computed():
    a, b = list(range(100, 109)), list(range(200, 209))
    requests = [
        request("a", 0.0, a, answer=[5, 6, 7, 8]),
        request("b", 1.0, b),
        request("a", 2.0, [*a, 5, 6, 7, 8, 9], cached=4),
    ]
    # Blocks of 4: a's two of the prompt and one with the answer; the answer's last token has no KV.
    log = replay(requests, capacity_blocks=100, block_tokens=4)
    assert (log.prompt_tokens, log.known_tokens, log.belady_tokens) == (32, 12, 12)
    assert (log.regret_tokens, log.belady_regret_tokens) == (8, 0)
    tight = replay(requests, capacity_blocks=4, block_tokens=4)
    assert (tight.known_tokens, tight.belady_tokens, tight.belady_regret_tokens) == (12, 4, 8)


def test_the_last_token_of_a_prompt_is_nobodys_hit():
    prompt = list(range(8))
    requests = [request("a", 0.0, prompt), request("b", 1.0, prompt, cached=4)]
    log = replay(requests, capacity_blocks=100, block_tokens=4)
    assert (log.known_tokens, log.regret_tokens) == (4, 0)


def test_an_answer_of_one_token_ends_after_it_began():
    one = Request(0, 0, "a", 0.0, 0.1, 0.1, list(range(8)), [1], 0)
    assert replay([one, one], capacity_blocks=9, block_tokens=4).known_tokens == 4


@pytest.mark.parametrize("seed", range(20))
def test_no_lru_cache_has_less_regret_than_belady(seed):
    rng = random.Random(seed)
    contexts = {name: [rng.randrange(9) for _ in range(12)] for name in "abcd"}
    cache = OrderedDict()
    requests = []
    for step in range(40):
        name = rng.choice("abcd")
        prompt = contexts[name] = contexts[name][:60] + [rng.randrange(9) for _ in range(4)]
        keys = [tuple(prompt[:end]) for end in range(4, len(prompt) + 1, 4)]
        hit = 0
        while hit < (len(prompt) - 1) // 4 and keys[hit] in cache:
            hit += 1
        for key in keys[::-1]:
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > 20:
            cache.popitem(last=False)
        requests.append(request(name, float(step), prompt, cached=4 * hit))
    log = replay(requests, capacity_blocks=20, block_tokens=4)
    assert 0 <= log.belady_regret_tokens <= log.regret_tokens
    assert log.regret_tokens > 0
