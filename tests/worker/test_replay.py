"""Prefetch on vLLM's own scheduler: what is brought back, when, and what gives way to what."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_backend.config import POLICY_VARIABLE
from gpu_backend.model_free import BLOCK_TOKENS, TOKEN, make_config
from tests.worker.contents import ContentEngine, with_host_tier

NUM_BLOCKS = 120
SESSION_BLOCKS = 40


class Worker:
    """One engine on a clock that only the test moves, and one session of 40 blocks."""

    def __init__(self, config: Any, host_blocks: int) -> None:
        config.kv_transfer_config = None
        if host_blocks:
            with_host_tier(config, host_blocks)
        self.engine = ContentEngine(config, NUM_BLOCKS)
        self.now_s = 1000.0
        saga = self.engine.saga
        saga.clock = lambda: self.now_s
        # A clock that stands still measures nothing: the rate of a small GPU.
        saga.prefill_rate.observe(5000, 1.0)
        self.engine.load_s_per_block = 2e-3
        self.rng = random.Random(3)
        self.prompt = self.tokens(SESSION_BLOCKS * BLOCK_TOKENS)

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(1000) for _ in range(count)]

    def step_of(self, session_id: str = "agent") -> int:
        """Serve the session's next request; returns the tokens that it found on the GPU."""
        hit = self.engine.run(self.prompt, session_id=session_id)
        self.prompt = [*self.prompt, TOKEN, *self.tokens(8)]
        return hit

    def flood(self, session_id: str | None = None) -> None:
        """Others take the whole pool."""
        for _ in range(2):
            self.engine.run(self.tokens(100 * BLOCK_TOKENS), session_id=session_id)

    def notify(self, *, kind: str, session_id: str = "agent", **facts: object) -> None:
        notice = {"kind": kind, "session_id": session_id, **facts}
        body = {"version": 1, "notices": [notice]}
        self.engine.scheduler.saga_control({"notify": body})

    def tick(self) -> float | None:
        answer = self.engine.scheduler.saga_control({"tick": True})
        for _ in self.engine.steps():
            self.engine.saga.index.check_integrity()
        return answer["wake_in_s"]  # type: ignore[no-any-return]

    @property
    def counts(self) -> dict[str, int]:
        return self.engine.scheduler.saga_control({})["prefetch"]  # type: ignore[no-any-return]


@pytest.fixture
def make_worker(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Worker]:
    monkeypatch.setenv(POLICY_VARIABLE, "saga")
    config = make_config(tiny_model)
    return lambda host_blocks: Worker(config, host_blocks)


@pytest.fixture(params=[0, 200], ids=["computed", "from host memory"])
def worker(make_worker: Callable[[int], Worker], request: pytest.FixtureRequest) -> Worker:
    worker = make_worker(request.param)
    if request.param:
        # The rate of loads is known once a request has loaded something.
        worker.step_of("first")
        worker.flood()
        worker.step_of("first")
        assert worker.engine.loads
        worker.notify(kind="end", session_id="first")
        worker.prompt = worker.tokens(SESSION_BLOCKS * BLOCK_TOKENS)
    worker.step_of()
    worker.flood()
    return worker


def test_an_announced_session_finds_its_kv_on_the_gpu(worker: Worker) -> None:
    worker.notify(kind="resume_soon")
    worker.tick()
    assert worker.counts["started"] == 1
    assert worker.counts["loaded_tokens"] + worker.counts["computed_tokens"] > 0

    before = worker.engine.loads
    assert worker.step_of() == SESSION_BLOCKS * BLOCK_TOKENS
    assert worker.engine.loads == before, "all of it was there before it was asked for"
    assert worker.counts["useful"] == 1
    assert worker.engine.saga.off_reason is None


def test_nobody_is_told_of_a_prefetch(worker: Worker) -> None:
    requests = worker.engine.scheduler.saga_control({})["counters"]["requests"]
    seen: list[str] = []
    update = worker.engine.scheduler.update_from_output

    def spy(*args: Any) -> Any:
        outputs = update(*args)
        seen.extend(output.request_id for client in outputs.values() for output in client.outputs)
        return outputs

    worker.engine.scheduler.update_from_output = spy
    worker.notify(kind="resume_soon")
    worker.tick()
    assert worker.counts["started"] == 1
    assert seen == []
    assert worker.engine.scheduler.saga_control({})["counters"]["requests"] == requests


def test_it_waits_for_the_announced_moment(worker: Worker) -> None:
    worker.notify(kind="resume_soon", in_s=60.0)
    announced_s = worker.now_s
    while (wake_in_s := worker.tick()) is not None:
        assert worker.counts["started"] == 0
        worker.now_s += wake_in_s
    assert worker.counts["started"] == 1
    assert 50.0 < worker.now_s - announced_s <= 60.0


def test_a_session_that_is_over_is_not_brought_back(worker: Worker) -> None:
    worker.notify(kind="end")
    for _ in range(50):
        worker.now_s += 5.0
        worker.tick()
    assert worker.counts["started"] == 0


def test_what_was_brought_back_in_vain_is_wasted(worker: Worker) -> None:
    worker.notify(kind="resume_soon")
    worker.tick()
    worker.prompt = worker.tokens(10 * BLOCK_TOKENS)
    worker.step_of()
    assert (worker.counts["useful"], worker.counts["wasted"]) == (0, 1)


def test_a_request_that_comes_first_makes_it_late(worker: Worker) -> None:
    worker.notify(kind="resume_soon")
    worker.engine.scheduler.saga_control({"tick": True})
    worker.engine.step()
    hit = worker.step_of()
    assert hit > 0
    assert worker.counts["late"] == 1
    assert worker.counts["useful"] == 0


def test_clients_come_first(make_worker: Callable[[int], Worker]) -> None:
    """A prefetch that is computed is given up when a request arrives, and taken up again."""
    worker = make_worker(0)
    worker.step_of()
    worker.flood()
    worker.notify(kind="resume_soon")
    worker.engine.scheduler.saga_control({"tick": True})
    worker.engine.step()  # 512 of 640 tokens: it is not done.
    client = worker.engine.add(worker.tokens(64))
    output = worker.engine.step()
    assert [new.req_id for new in output.scheduled_new_reqs] == [client.request_id]
    assert worker.counts["cancelled"] == 1

    for _ in worker.engine.steps():
        pass
    worker.now_s += 1.0
    worker.tick()
    assert worker.counts["started"] == 2
    assert worker.step_of() == SESSION_BLOCKS * BLOCK_TOKENS
    assert worker.counts["useful"] == 1
    assert worker.engine.saga.off_reason is None


def test_nothing_is_computed_ahead_while_clients_are_served(
    make_worker: Callable[[int], Worker],
) -> None:
    worker = make_worker(0)
    worker.step_of()
    worker.flood()
    worker.engine.add(worker.tokens(64), output_tokens=50)
    worker.engine.step()
    worker.notify(kind="resume_soon")
    for _ in range(20):
        worker.now_s += 0.1
        worker.engine.step()
    assert worker.counts["started"] == 0


def test_regular_pauses_are_foreseen_without_a_hint(worker: Worker) -> None:
    """A tool that always takes ten seconds: the KV is back shortly before."""

    def run_of_ten(steps: int) -> Iterator[int]:
        for _ in range(steps):
            for _ in range(100):
                worker.now_s += 0.1
                worker.tick()
            yield worker.step_of()
            worker.flood("other")

    for _ in run_of_ten(30):
        worker.prompt = worker.prompt[: SESSION_BLOCKS * BLOCK_TOKENS]
    before = worker.counts
    hits = []
    for hit in run_of_ten(5):
        hits.append(hit)
        worker.prompt = worker.prompt[: SESSION_BLOCKS * BLOCK_TOKENS]
    assert worker.counts["useful"] - before["useful"] >= 4
    assert min(hits) >= (SESSION_BLOCKS - 1) * BLOCK_TOKENS - BLOCK_TOKENS
    assert worker.engine.saga.off_reason is None


def _wakes(worker: Worker, seconds: float) -> int:
    """How often an idle engine asks to be ticked."""
    end_s, wakes = worker.now_s + seconds, 0
    while True:
        wake_in_s = worker.tick()
        if wake_in_s is None or worker.now_s + wake_in_s > end_s:
            return wakes
        worker.now_s += wake_in_s
        wakes += 1


def test_a_session_that_keeps_its_kv_leaves_an_idle_engine_in_peace(
    make_worker: Callable[[int], Worker],
) -> None:
    worker = make_worker(0)
    worker.step_of()
    assert _wakes(worker, 30.0) <= 5
    # What it loses it is asked about again at once.
    worker.flood()
    wake_in_s = worker.tick()
    assert wake_in_s is not None
    assert wake_in_s < 15.0
    assert _wakes(worker, 300.0) > 5
