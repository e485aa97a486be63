"""The shadow cache against real engines that run what it only imagines."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_backend.config import POLICY_VARIABLE
from gpu_backend.model_free import BLOCK_TOKENS, TOKEN, Engine, load_counters
from gpu_backend.session_index import SessionIndex
from gpu_backend.shadow import STOCK_ORDER, ShadowCache
from gpu_backend.virtual_blocks import VirtualBlocks
from saga_core.errors import SettingsError
from saga_core.notices import EndNotice, Notice, PauseNotice, ResumeNotice, encode_notices
from saga_core.pauses import Step
from saga_core.policies import POLICIES
from saga_core.settings import RetentionSettings
from saga_core.types import Pause

NUM_BLOCKS = 120
ORDERS = [STOCK_ORDER, *sorted(POLICIES)]
SHARED = ("requests", "prompt_tokens", "cached_tokens", "regret_tokens", "evicted_blocks")
FAR_FUTURE_S = 1e12

PROPERTY = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@dataclass(frozen=True)
class Call:
    """A request of the traffic, and a notice before it."""

    now_s: float
    session_id: str | None
    prompt: list[int]
    output_tokens: int
    notice: Notice


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000) for _ in range(count)]


def _notice(rng: random.Random) -> Notice:
    session_id = f"s{rng.randrange(9)}"
    pause = Pause(rng.random(), rng.random() * 90, rng.choice([None, "bash", "read"]))
    return rng.choice(
        [PauseNotice(session_id, pause), ResumeNotice(session_id), EndNotice(session_id)]
    )


def _traffic(seed: int, count: int) -> Iterator[Call]:
    """Sessions that grow, fork, are compacted, sent again or begun anew, among plain requests."""
    rng, now_s = random.Random(seed), 100.0
    roots = [_tokens(rng, blocks * BLOCK_TOKENS) for blocks in (2, 5)]
    history: dict[str, list[int]] = {}
    for _ in range(count):
        now_s += rng.choice([0.0, 0.1, 1.0, 20.0])
        session_id = f"s{rng.randrange(8)}"
        before = history.get(session_id, [])
        new = _tokens(rng, rng.choice([rng.randrange(1, 150), 2 * BLOCK_TOKENS]))
        kind = rng.random()
        if not before or len(before) > 60 * BLOCK_TOKENS or kind < 0.1:
            prompt = rng.choice(roots) + new
        elif kind < 0.2:
            prompt = before[: len(before) // 2] + new
        elif kind < 0.3:
            prompt = before  # A retry, with the answer: where it ends a block, the block is new.
        else:
            prompt = before + new
        output_tokens = rng.randrange(1, 40)
        history[session_id] = prompt + [TOKEN] * output_tokens
        yield Call(
            now_s,
            None if rng.random() < 0.2 else session_id,
            prompt,
            output_tokens,
            _notice(rng),
        )


def _shadow(order: str, num_blocks: int = NUM_BLOCKS, **constants: Any) -> ShadowCache:
    return ShadowCache(order, num_blocks, BLOCK_TOKENS, RetentionSettings(**constants))


@dataclass
class Watched:
    """An engine whose scheduler tells shadow caches what the plugin would tell them."""

    engine: Engine
    shadows: list[ShadowCache]
    now_s: float = 0.0
    hits: list[list[int]] = field(init=False)
    live_hits: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        scheduler, manager = self.engine.scheduler, self.engine.scheduler.kv_cache_manager
        self.hits = [[] for _ in self.shadows]
        self._allocate, manager.allocate_slots = manager.allocate_slots, self._on_allocate
        self._free, scheduler._free_request_blocks = scheduler._free_request_blocks, self._on_free
        if self.engine.with_plugin:
            self.engine.saga.clock = lambda: self.now_s

    def add(self, call: Call) -> Any:
        self.now_s = call.now_s
        if self.engine.with_plugin:
            self.engine.scheduler.saga_control({"notify": encode_notices([call.notice])})
        for shadow in self.shadows:
            shadow.take(call.notice, self.now_s)
        request = self.engine.add(
            call.prompt, session_id=call.session_id, output_tokens=call.output_tokens
        )
        request.arrival_time = FAR_FUTURE_S  # The plugin then takes each step to last 0 s.
        for shadow in self.shadows:
            shadow.arrived(call.session_id, self.now_s)
        return request

    def step(self) -> None:
        self.engine.step()
        for shadow in self.shadows:
            shadow.check_integrity()
            assert shadow.off_reason is None

    def run(self) -> None:
        while self.engine.scheduler.has_unfinished_requests():
            self.step()

    def _on_allocate(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.v1.request import RequestStatus

        is_new = request.status != RequestStatus.RUNNING and not request.num_computed_tokens
        new_blocks = self._allocate(request, *args, **kwargs)
        if is_new and new_blocks is not None:
            preempted = request.num_preemptions > 0
            if not preempted:
                self.live_hits.append(kwargs["num_new_computed_tokens"])
            for shadow, hits in zip(self.shadows, self.hits, strict=True):
                hit = shadow.admitted(
                    request.request_id,
                    request.session_id,
                    request.block_hashes,
                    request.num_tokens,
                    self.now_s,
                    preempted=preempted,
                )
                if not preempted:
                    hits.append(hit)
        return new_blocks

    def _on_free(self, request: Any) -> None:
        blocks = self.engine.scheduler.kv_cache_manager.get_blocks(request.request_id).blocks[0]
        full = sum(block.block_hash is not None for block in blocks)
        for shadow in self.shadows:
            shadow.released(
                request.request_id,
                request.block_hashes[:full],
                request.session_id,
                num_blocks=len(blocks),
                preempted=not request.is_finished(),
                step=Step(input_tokens=request.num_prompt_tokens, ending="length"),
                now_s=self.now_s,
            )
        self._free(request)


MakeWatched = Callable[..., Watched]


@pytest.fixture(scope="module")
def unchunked_config(tiny_model: Path) -> Any:
    """Every prompt is prefilled in one step."""
    from gpu_backend.model_free import make_config

    return make_config(tiny_model, max_batched_tokens=4096)


@pytest.fixture
def watch(
    unchunked_config: Any, engine_config: Any, monkeypatch: pytest.MonkeyPatch
) -> MakeWatched:
    """An engine with this eviction order, watched by shadows."""

    def make(
        order: str | None,
        shadows: list[ShadowCache],
        *,
        num_blocks: int = NUM_BLOCKS,
        chunked: bool = False,
    ) -> Watched:
        monkeypatch.setenv(POLICY_VARIABLE, order or "")
        config = engine_config if chunked else unchunked_config
        return Watched(Engine(config, num_blocks, with_plugin=order is not None), shadows)

    return make


def _cached(engine: Engine) -> set[bytes]:
    """Block hashes as requests have them: vLLM appends the number of the KV group."""
    return {key[:-4] for key in engine.pool.cached_block_hash_to_block._cache}


# Against real engines


@pytest.mark.parametrize(
    ("order", "plugin"), [(STOCK_ORDER, None), *((order, order) for order in ORDERS)]
)
def test_one_request_at_a_time_it_hits_what_an_engine_of_that_order_hits(
    watch: MakeWatched, order: str, plugin: str | None
) -> None:
    shadow = _shadow(order)
    live = watch("saga" if order == STOCK_ORDER else None, [shadow])
    real = watch(plugin, [])
    for call in _traffic(0, 150):
        for watched in (live, real):
            watched.add(call)
            watched.run()
        assert shadow.cached_hashes() == _cached(real.engine)
    assert live.hits[0] == real.live_hits
    assert shadow.counters.evicted_blocks > 5 * NUM_BLOCKS
    assert shadow.counters.overflow_blocks == 0
    if plugin is not None:
        counters = load_counters(real.engine)
        ours = shadow.state()["counters"]
        assert {name: counters[name] for name in SHARED} == {name: ours[name] for name in SHARED}
    if order not in (STOCK_ORDER, "prefix-lru"):
        assert live.hits[0] != live.live_hits  # The orders differ on this traffic.


def test_it_is_exact_in_a_pool_so_large_that_victims_are_chosen_ahead(watch: MakeWatched) -> None:
    num_blocks = 2000
    shadow = _shadow("saga", num_blocks)
    live = watch(None, [shadow], num_blocks=num_blocks)
    real = watch("saga", [], num_blocks=num_blocks)
    rng, history = random.Random(2), dict[str, list[int]]()
    for number in range(40):
        session_id = f"s{number % 17 if number % 2 else number}"
        prompt = history.get(session_id, []) + _tokens(rng, 120 * BLOCK_TOKENS)
        history[session_id] = prompt = prompt[: 220 * BLOCK_TOKENS]
        call = Call(float(number), session_id, prompt, 9, ResumeNotice("s1"))
        for watched in (live, real):
            watched.add(call)
            watched.run()
        assert shadow.cached_hashes() == _cached(real.engine)
    assert live.hits[0] == real.live_hits
    assert shadow.counters.evicted_blocks > num_blocks / 2


_call = st.tuples(
    st.integers(0, 3),  # session; 3 is a stranger without one
    st.integers(0, 25),  # blocks kept of the session's last prompt and answer
    st.integers(0, 260),  # new tokens
    st.integers(1, 40),  # output tokens
    st.sampled_from([0.0, 0.5, 30.0, 400.0]),  # seconds since the last
)


@PROPERTY
@given(
    calls=st.lists(_call, min_size=1, max_size=25),
    order=st.sampled_from([STOCK_ORDER, "saga", "prefix-lru", "wa-lru-ttl"]),
)
def test_it_is_exact_on_any_requests_one_at_a_time(
    watch: MakeWatched, calls: list[tuple[int, int, int, int, float]], order: str
) -> None:
    shadow, rng, now_s = _shadow(order, 60), random.Random(0), 0.0
    live = watch("saga" if order == STOCK_ORDER else None, [shadow], num_blocks=60)
    real = watch(None if order == STOCK_ORDER else order, [], num_blocks=60)
    history: dict[int, list[int]] = {}
    for session, kept_blocks, new_tokens, output_tokens, gap_s in calls:
        now_s += gap_s
        prompt = history.get(session, [])[: kept_blocks * BLOCK_TOKENS]
        prompt = [*prompt, *_tokens(rng, new_tokens)] or [1]
        history[session] = prompt + [TOKEN] * output_tokens
        session_id = f"s{session}" if session < 3 else None
        call = Call(now_s, session_id, prompt, output_tokens, ResumeNotice("s0"))
        for watched in (live, real):
            watched.add(call)
            watched.run()
        assert shadow.cached_hashes() == _cached(real.engine)
    assert live.hits[0] == real.live_hits


@pytest.mark.parametrize(("live", "order"), [("saga", STOCK_ORDER), (None, "saga")])
@pytest.mark.parametrize("most_steps", [4, 20])
def test_with_requests_side_by_side_it_is_off_by_a_hundredth_of_the_prompts_at_most(
    watch: MakeWatched, live: str | None, order: str, most_steps: int
) -> None:
    """Chunked prefills and preemptions; the two engines preempt at different moments."""
    shadow = _shadow(order)
    watched = watch(live, [shadow], chunked=True)
    real = watch(None if order == STOCK_ORDER else order, [], chunked=True)
    for each in (watched, real):
        rng, busy = random.Random(1), dict[str | None, Any]()
        for call in _traffic(1, 200):
            while call.session_id in busy and not busy[call.session_id].is_finished():
                each.step()
            request = each.add(call)
            if call.session_id is not None:
                busy[call.session_id] = request
            for _ in range(rng.randint(0, most_steps)):
                if each.engine.scheduler.has_unfinished_requests():
                    each.step()
        each.run()
    if most_steps == 4:
        assert any(request.num_preemptions for request in watched.engine.requests.values())
    counters = shadow.counters
    assert counters.requests == len(watched.hits[0]) == 200
    assert abs(sum(watched.hits[0]) - sum(real.live_hits)) <= 0.01 * counters.prompt_tokens
    assert counters.overflow_blocks <= 0.01 * counters.evicted_blocks


# By itself


def _serve(
    shadow: ShadowCache,
    chain: Sequence[Hashable],
    *,
    session_id: str | None = None,
    answer: Sequence[Hashable] = (),
    now_s: float = 0.0,
) -> int:
    """One request of whole blocks and one token; returns the blocks that it found."""
    num_tokens = len(chain) * BLOCK_TOKENS + 1
    hit = shadow.admitted("r", session_id, chain, num_tokens, now_s)
    _release(shadow, "r", [*chain, *answer], session_id=session_id, now_s=now_s)
    return hit // BLOCK_TOKENS


def _release(
    shadow: ShadowCache,
    request_id: str,
    computed: Sequence[Hashable],
    *,
    session_id: str | None = None,
    preempted: bool = False,
    now_s: float = 0.0,
) -> None:
    shadow.released(
        request_id,
        computed,
        session_id,
        num_blocks=len(computed) + 1,
        preempted=preempted,
        step=Step(),
        now_s=now_s,
    )
    shadow.check_integrity()
    assert shadow.off_reason is None


def _chain(name: str, blocks: int) -> list[Hashable]:
    return [(name, i) for i in range(blocks)]


@pytest.mark.parametrize("order", [STOCK_ORDER, "saga"])
def test_what_there_is_no_room_for_is_not_cached(order: str) -> None:
    shadow = _shadow(order, num_blocks=11)
    a, b = _chain("a", 6), _chain("b", 6)
    assert shadow.admitted("a", "sa", a, 6 * BLOCK_TOKENS + 1, 1.0) == 0
    assert shadow.admitted("b", "sb", b, 6 * BLOCK_TOKENS + 1, 1.0) == 0
    shadow.check_integrity()
    assert shadow.cached_hashes() == {*a, *b[:3]}
    _release(shadow, "b", b, session_id="sb", now_s=2.0)
    assert shadow.counters.overflow_blocks == 4
    _release(shadow, "a", a, session_id="sa", now_s=2.0)
    assert shadow.counters.overflow_blocks == 4
    assert _serve(shadow, b, session_id="sb", now_s=3.0) == 3


def test_room_that_others_have_made_is_used_when_the_request_ends() -> None:
    shadow = _shadow(STOCK_ORDER, num_blocks=11)
    a, b = _chain("a", 6), _chain("b", 6)
    shadow.admitted("a", None, a, 6 * BLOCK_TOKENS + 1, 0.0)
    shadow.admitted("b", None, b, 6 * BLOCK_TOKENS + 1, 0.0)
    _release(shadow, "a", a)
    _release(shadow, "b", b)
    assert shadow.counters.overflow_blocks == 0
    assert _serve(shadow, b) == 6


def test_an_answer_is_cached_with_its_prompt() -> None:
    shadow = _shadow(STOCK_ORDER)
    chain = _chain("a", 9)
    assert _serve(shadow, chain[:5], answer=chain[5:]) == 0
    assert _serve(shadow, [*chain, "new"]) == 9


def test_a_request_that_ends_in_its_prefill_leaves_what_it_has_computed() -> None:
    shadow = _shadow("saga")
    chain = _chain("a", 9)
    _serve(shadow, chain[:2], session_id="s")
    shadow.admitted("r", "s", chain, 9 * BLOCK_TOKENS + 1, 0.0)
    _release(shadow, "r", chain[:4], session_id="s")
    assert _serve(shadow, chain) == 4


def test_what_another_request_has_found_meanwhile_stays() -> None:
    shadow = _shadow(STOCK_ORDER)
    chain = _chain("a", 9)
    shadow.admitted("r", None, chain, 9 * BLOCK_TOKENS + 1, 0.0)
    assert shadow.admitted("q", None, chain[:6], 6 * BLOCK_TOKENS + 1, 0.0) == 6 * BLOCK_TOKENS
    _release(shadow, "r", chain[:4])
    assert shadow.cached_hashes() == set(chain[:6])


def test_a_request_aborted_before_it_ran_leaves_its_session_as_it_was() -> None:
    shadow = _shadow("saga", num_blocks=21)
    chain = _chain("a", 10)
    _serve(shadow, chain, session_id="s")
    shadow.arrived("s", 1.0)
    shadow.released("q", [], "s", num_blocks=0, preempted=False, step=Step(), now_s=2.0)
    assert shadow.counters.requests == 1
    assert _serve(shadow, chain, session_id="s", now_s=3.0) == 10


def test_a_preempted_request_counts_once() -> None:
    shadow = _shadow("saga")
    chain = _chain("a", 9)
    shadow.admitted("r", "s", chain[:5], 5 * BLOCK_TOKENS + 1, 0.0)
    _release(shadow, "r", chain[:7], session_id="s", preempted=True)
    again = shadow.admitted("r", "s", chain[:7], 7 * BLOCK_TOKENS + 1, 1.0, preempted=True)
    _release(shadow, "r", chain, session_id="s", now_s=2.0)
    assert again == 7 * BLOCK_TOKENS
    assert shadow.counters.requests == 1
    assert shadow.counters.prompt_tokens == 5 * BLOCK_TOKENS + 1
    assert shadow.counters.cached_tokens == 0


def test_regret_is_what_was_evicted_here() -> None:
    shadow = _shadow(STOCK_ORDER, num_blocks=12)
    chain = _chain("a", 10)
    assert [_serve(shadow, c) for c in (chain, _chain("b", 6), chain)] == [0, 0, 4]
    assert shadow.counters.regret_tokens == 6 * BLOCK_TOKENS
    forgetful = _shadow(STOCK_ORDER, num_blocks=12, max_ghost_blocks=0)
    assert [_serve(forgetful, c) for c in (chain, _chain("b", 6), chain)] == [0, 0, 4]
    assert forgetful.counters.regret_tokens == 0


def test_a_request_that_may_not_read_the_cache_hits_and_regrets_nothing() -> None:
    shadow = _shadow(STOCK_ORDER)
    chain = _chain("a", 5)
    _serve(shadow, chain)
    hit = shadow.admitted("q", None, chain, 5 * BLOCK_TOKENS + 1, 0.0, reads_cache=False)
    assert hit == shadow.counters.regret_tokens == 0
    _release(shadow, "q", chain)


def test_an_end_gives_a_session_up_and_a_pause_keeps_it() -> None:
    def hits(order: str) -> tuple[int, int]:
        shadow = _shadow(order, num_blocks=31)
        for name in ("kept", "over"):
            _serve(shadow, _chain(name, 10), session_id=name)
        shadow.take(PauseNotice("kept", Pause(0.99, 60.0)), 1.0)
        shadow.take(ResumeNotice("kept"), 1.0)
        shadow.take(EndNotice("over"), 1.0)
        _serve(shadow, _chain("flood", 18), now_s=2.0)
        kept = _serve(shadow, _chain("kept", 10), session_id="kept", now_s=3.0)
        return kept, _serve(shadow, _chain("over", 10), session_id="over", now_s=3.0)

    assert hits("wa-lru-ttl") == (10, 1)
    assert hits(STOCK_ORDER)[0] == 1


@pytest.mark.parametrize("order", [STOCK_ORDER, "saga"])
def test_a_reset_forgets_all_but_the_counters(order: str) -> None:
    shadow = _shadow(order)
    chain = _chain("a", 5)
    _serve(shadow, chain, session_id="s")
    shadow.admitted("running", "t", _chain("b", 5), 5 * BLOCK_TOKENS + 1, 0.0)
    shadow.clear()
    assert shadow.cached_hashes() == set()
    _release(shadow, "running", _chain("b", 5), session_id="t")
    assert _serve(shadow, chain, session_id="s") == 0
    assert (shadow.counters.requests, shadow.counters.regret_tokens) == (3, 0)


def test_a_failure_switches_the_shadow_off_and_raises_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken on purpose")

    shadow = _shadow("saga", num_blocks=20)
    _serve(shadow, _chain("a", 15), session_id="s")
    monkeypatch.setattr(SessionIndex, "victims", fail)
    for name in ("b", "c"):
        assert shadow.admitted(name, "s", _chain(name, 15), 15 * BLOCK_TOKENS, 1.0) == 0
    shadow.take(EndNotice("s"), 2.0)
    assert shadow.state()["off_reason"] == "admitted failed"
    assert shadow.counters.requests == 1
    assert [record.message for record in caplog.records] == [
        "SAGA's shadow cache is off: admitted failed"
    ]


def test_there_is_no_such_policy() -> None:
    with pytest.raises(SettingsError, match="no-such-policy"):
        _shadow("no-such-policy")


_event = st.tuples(
    st.sampled_from(["arrive", "admit", "admit", "release", "release", "preempt", "tell", "clear"]),
    st.integers(0, 5),  # request, and which of its session's prompts
    st.sampled_from([None, "s0", "s1", "s2"]),
    st.integers(0, 14),  # full blocks of the prompt, or blocks computed
    st.integers(0, BLOCK_TOKENS),  # further tokens, or blocks of the answer
)


@PROPERTY
@given(
    events=st.lists(_event, max_size=60),
    order=st.sampled_from([STOCK_ORDER, "saga", "wa-lru-ttl"]),
    seed=st.integers(0, 3),
)
def test_it_holds_whatever_is_told_in_any_order(
    events: list[tuple[str, int, str | None, int, int]], order: str, seed: int
) -> None:
    """Also what no engine does: more running than fits, two starts, ends of nobody, resets."""
    shadow, rng = _shadow(order, num_blocks=16), random.Random(seed)
    for now_s, (kind, number, session_id, blocks, more) in enumerate(events):
        chain = _chain(f"{number % 3}", blocks + more)
        if kind == "arrive":
            shadow.arrived(session_id, now_s)
        elif kind == "admit":
            num_tokens = max(1, blocks * BLOCK_TOKENS + more)
            hit = shadow.admitted(
                f"r{number}", session_id, chain[:blocks], num_tokens, now_s, preempted=more == 3
            )
            assert 0 <= hit < num_tokens
        elif kind in ("release", "preempt"):
            shadow.released(
                f"r{number}",
                chain,
                session_id,
                num_blocks=len(chain) + more % 2,
                preempted=kind == "preempt",
                step=Step(),
                now_s=now_s,
            )
        elif kind == "tell":
            shadow.take(_notice(rng), now_s)
        else:
            shadow.clear()
        shadow.check_integrity()
        assert len(shadow.cached_hashes()) < 16
    assert shadow.off_reason is None


def test_a_lookup_finds_the_block_that_has_had_the_hash_longest() -> None:
    blocks = VirtualBlocks(5)
    taken = blocks.take(4)
    for block in taken[:3]:
        blocks.cache(block, "h")
    assert blocks.find("h") == taken[:1]
    assert blocks.empty(taken[0]) is None
    assert blocks.find("h") == taken[1:2]
    assert blocks.empty(taken[2]) is None
    assert blocks.find("h") == taken[1:2]
    blocks.check_integrity([taken])
    assert blocks.empty(taken[1]) == "h"
    assert "h" not in blocks
    blocks.check_integrity([taken])


def test_released_blocks_are_taken_empty_ones_first_and_the_tail_of_a_chain_before_its_head() -> (
    None
):
    blocks = VirtualBlocks(6)
    chain = blocks.take(4)
    for block, block_hash in zip(chain, "abc", strict=False):
        blocks.cache(block, block_hash)
    blocks.release(chain)
    assert blocks.num_free == 5
    assert blocks.take(5) == [chain[3], 5, chain[2], chain[1], chain[0]]
