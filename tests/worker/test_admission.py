"""The order of vLLM's waiting queue under the plugin."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from vllm.v1.request import Request

from gpu_backend.model_free import BLOCK_TOKENS, TOKEN, Engine

MakeEngine = Callable[..., Engine]


class Queue:
    """An engine whose pool one request fills, two sessions that were there, and a clock."""

    def __init__(self, make_engine: MakeEngine, policy: str = "saga") -> None:
        self.engine = make_engine(100, policy)
        self.now_s = 10.0
        self.engine.saga.clock = lambda: self.now_s
        self.rng = random.Random(1)
        self.prompts = {name: self.tokens(28) for name in ("here", "gone")}
        self.engine.run(self.prompts["gone"], session_id="gone")
        self.engine.scheduler.reset_prefix_cache()
        self.engine.run(self.prompts["here"], session_id="here")
        self.blocker = self.engine.add(self.tokens(70), output_tokens=64)
        for _ in range(4):
            self.engine.step()

    def tokens(self, blocks: int) -> list[int]:
        return [self.rng.randrange(1000) for _ in range(blocks * BLOCK_TOKENS)]

    def add(self, session_id: str | None, blocks: int = 28) -> Request:
        prompt = self.prompts.get(session_id or "", self.tokens(blocks))
        return self.engine.add([*prompt, TOKEN, TOKEN], session_id=session_id)

    def admitted(self) -> list[str]:
        """Ids of those that wait now, in the order in which they are admitted."""
        return [new.req_id for out in self.engine.steps() for new in out.scheduled_new_reqs]


def _ids(*requests: Request) -> list[str]:
    return [request.request_id for request in requests]


@pytest.mark.parametrize("policy", ["saga", "prefix-lru"])
def test_a_session_whose_kv_is_there_goes_first(make_engine: MakeEngine, policy: str) -> None:
    queue = Queue(make_engine, policy)
    gone = queue.add("gone")
    here = queue.add("here")
    queue.engine.step()
    queue.now_s += 0.1
    assert queue.admitted() == _ids(here, gone)


def test_stock_order_under_the_stock_policy(make_engine: MakeEngine) -> None:
    queue = Queue(make_engine, "vllm")
    gone, here = queue.add("gone"), queue.add("here")
    queue.engine.step()
    queue.now_s += 0.1
    assert queue.admitted() == _ids(gone, here)


def test_requests_without_a_session_keep_their_places(make_engine: MakeEngine) -> None:
    queue = Queue(make_engine)
    first, gone, second, here, third = (
        queue.add(None),
        queue.add("gone"),
        queue.add(None),
        queue.add("here"),
        queue.add(None),
    )
    queue.engine.step()
    queue.now_s += 0.1
    assert queue.admitted() == _ids(first, here, second, gone, third)


def test_who_has_waited_too_long_is_overtaken_no_more(make_engine: MakeEngine) -> None:
    queue = Queue(make_engine)
    gone = queue.add("gone")
    stranger = queue.add("stranger")
    queue.engine.step()
    queue.now_s += 60.0
    here = queue.add("here")
    queue.engine.step()
    queue.now_s += 0.1
    assert queue.admitted() == _ids(gone, stranger, here)


def test_it_can_be_switched_off(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAGA_ORDER_WAITING", "0")
    queue = Queue(make_engine)
    gone, here = queue.add("gone"), queue.add("here")
    queue.engine.step()
    queue.now_s += 0.1
    assert queue.admitted() == _ids(gone, here)
