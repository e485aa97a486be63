"""The session index against a small model of a block pool.

The pool below does what vLLM's does, with our victims first: blocks have content (the chain of
tokens up to their end), a count of users, and a free queue. The model keeps, of every session, the
blocks that it surely holds and those that it may hold, and so knows which blocks may go.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gpu_backend.session_index import IndexCounts, SessionIndex
from saga_core.pauses import Step
from saga_core.policies import POLICIES
from saga_core.settings import RetentionSettings
from saga_core.types import Pause

PROPERTY = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
STATEFUL = settings(PROPERTY, max_examples=120, stateful_step_count=40)

Chain = tuple[int, ...]
ENDED, UNPROTECTED, PROTECTED, RESUMING = range(4)


def make_index(num_blocks, policy="wa-lru-ttl", **constants):
    s = RetentionSettings(**constants)
    return SessionIndex(num_blocks, policy, s)


@dataclass
class Pool:
    """A block pool with a prefix cache; an index chooses what goes."""

    index: SessionIndex
    content: list[Chain | None] = field(init=False)
    users: list[int] = field(init=False)
    free: list[int] = field(init=False)

    def __post_init__(self):
        size = self.index.num_blocks
        self.content, self.users, self.free = [None] * size, [0] * size, list(range(size))

    def is_idle(self, block):
        return self.users[block] == 0 and self.content[block] is not None

    def idle(self):
        return {block for block in self.free if self.content[block] is not None}

    def resident(self):
        return {content for content in self.content if content is not None}

    def hit(self, tokens):
        """The blocks of the longest cached prefix of ``tokens``."""
        found = []
        for end in range(1, len(tokens) + 1):
            if tokens[:end] not in self.content:
                break
            found.append(self.content.index(tokens[:end]))
        return found

    def use(self, blocks):
        for block in blocks:
            if self.users[block] == 0:
                self.free.remove(block)
            self.users[block] += 1

    def release(self, blocks):
        for block in reversed(blocks):
            self.users[block] -= 1
            if self.users[block] == 0:
                self.free.append(block)

    def wanted(self, count):
        """How many of ``count`` new blocks the index has to choose."""
        unheld = 0
        for block in self.free[:count]:
            if self.index.is_held(block):
                break
            unheld += 1
        return count - unheld

    def take(self, chosen, count, now_s):
        """``count`` blocks, the chosen ones first; what they held is lost."""
        self.free = chosen + [block for block in self.free if block not in chosen]
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            self.lose(block, now_s)
            self.users[block] = 1
        return taken

    def lose(self, block, now_s):
        if self.content[block] is not None:
            self.content[block] = None
            self.index.evicted(block, now_s=now_s)


@dataclass
class Running:
    """A request that has blocks; ``blocks[i]`` is to hold ``tokens[: i + 1]``."""

    session_id: str | None
    tokens: Chain
    blocks: list[int]


@dataclass
class Facts:
    """What the model knows of a session."""

    state: int = PROTECTED
    from_s: float = 0.0
    pause: Pause | None = None  # None: the index's own guess.
    surely: set[int] = field(default_factory=set)
    maybe: set[int] = field(default_factory=set)
    chain: list[int] = field(default_factory=list)

    def classes(self, now_s, s):
        """The least and the greatest class that the session's blocks may have."""
        if self.state != PROTECTED:
            return self.state, self.state
        if self.pause is None:
            return UNPROTECTED, PROTECTED
        ttl = min(self.pause.pause_p95_s, s.ttl_max_s)
        least_ttl = min(0.5 * self.pause.pause_p95_s, s.ttl_max_s)
        if self.pause.p_reuse < s.protect_min_p_reuse or now_s >= self.from_s + ttl:
            return UNPROTECTED, UNPROTECTED
        return PROTECTED if now_s < self.from_s + least_ttl else UNPROTECTED, PROTECTED


def check_that_reads_will_be_noticed(index):
    """The model watches no wait but those that the index would tell it the end of."""
    watched = {id(wait) for wait in index._model.waits() if not wait.is_over}
    runs = (*index._held.values(), *index._sessions.values())
    assert watched <= {id(held.wait) for held in runs}


SESSIONS = ["a", "b", "c", "d", "e"]
sessions = st.sampled_from(SESSIONS)
# Chains share prefixes: two system prompts, few tokens.
chains = st.tuples(
    st.sampled_from([(1, 1, 1), (2, 2), (1,)]), st.lists(st.integers(1, 3), max_size=4)
).map(lambda parts: (*parts[0], *parts[1]))


class World:
    """Requests, pauses, ends, preemptions, evictions and time over one pool and one index."""

    def __init__(self, policy, num_blocks, max_sessions):
        self.policy = policy
        self.now_s = 0.0
        # With a small beta it is the TTL, not P_reuse, that keeps a session.
        self.settings = RetentionSettings(beta=0.1, max_sessions=max_sessions)
        self.index = SessionIndex(num_blocks, policy, self.settings)
        self.pool = Pool(self.index)
        self.facts: OrderedDict[str, Facts] = OrderedDict()
        self.maybe_plain: set[int] = set()
        self.running: list[Running] = []
        self.waiting: list[tuple[str, Chain]] = []  # Queued or preempted requests of sessions.
        self.has_holes = False
        self.ending: set[str] = set()  # Said to be over while a request was under way.

    # Requests

    def idle_sessions(self):
        """Sessions without a request, known to the index or not."""
        busy = {r.session_id for r in self.running} | {waiting for waiting, _ in self.waiting}
        return [session_id for session_id in SESSIONS if session_id not in busy]

    def conversation(self, session_id):
        """What is left of the session's last chain in the pool."""
        contents = [self.pool.content[block] for block in self.facts[session_id].chain]
        return max((content for content in contents if content), key=len, default=(1,))

    def request(self, session_id, tokens):
        """Arrives and is admitted, where there is room; else it waits, a plain one is refused."""
        tokens = tokens[: self.index.num_blocks]
        if session_id is not None:
            self.index.resume(session_id, now_s=self.now_s)
            self.ending.discard(session_id)
            if session_id in self.facts:
                self.facts[session_id].state = RESUMING
        if not self._admit(session_id, tokens) and session_id is not None:
            self.waiting.append((session_id, tokens))

    def admit_waiting(self, number):
        if self._admit(*self.waiting[number]):
            del self.waiting[number]

    def abort_waiting(self, number):
        self._tick()
        session_id, _ = self.waiting.pop(number)
        self._record(session_id, [], resuming=False)

    def finish(self, number, computed):
        """Ends; blocks up to ``computed`` are full and cached."""
        self._stop(self.running.pop(number), computed, resuming=False)

    def preempt(self, number, computed):
        running = self.running.pop(number)
        self._stop(running, computed, resuming=True)
        if running.session_id is not None:
            self.waiting.append((running.session_id, running.tokens))

    # What the gateway says

    def pause(self, session_id, p_reuse, p95_s, p50_s=None):
        pause = Pause(p_reuse, p95_s, "tool", p50_s)
        facts = self.facts.get(session_id)
        known = self.index.pause(session_id, pause, now_s=self.now_s)
        assert known == (facts is not None)
        if facts is not None and session_id in self.idle_sessions() and facts.state != ENDED:
            facts.state, facts.pause = PROTECTED, pause

    def expect(self, session_id):
        facts = self.facts.get(session_id)
        assert self.index.expect(session_id, now_s=self.now_s) == (facts is not None)
        if facts is not None and facts.state == PROTECTED:
            facts.from_s = self.now_s

    def end(self, session_id):
        facts = self.facts.get(session_id)
        assert self.index.end(session_id, now_s=self.now_s) == (facts is not None)
        if facts is not None and session_id in self.idle_sessions():
            facts.state, facts.pause = ENDED, None
        elif session_id not in self.idle_sessions():
            self.ending.add(session_id)

    # The rest of the world

    def lose(self, block):
        """An eviction that was not our choice; chains may have holes from here on."""
        self.has_holes = True
        self.pool.lose(block, self.now_s)
        self._forget_block(block)

    def clear(self):
        """vLLM clears only when nothing runs."""
        self.index.clear()
        self.pool.content = [None] * self.index.num_blocks
        self.facts.clear()
        self.maybe_plain.clear()

    def check(self):
        """What must hold after each step."""
        self.index.check_integrity()
        check_that_reads_will_be_noticed(self.index)
        counts, size = self.index.counts(), self.index.num_blocks
        assert counts.sessions == len(self.facts) <= self.settings.max_sessions
        assert counts.runs - counts.sessions <= size
        surely = set().union(*(facts.surely for facts in self.facts.values()))
        maybe = set().union(*(facts.maybe for facts in self.facts.values()))
        assert len(surely) <= counts.session_blocks <= len(maybe)
        # Idle cached blocks are held, all of them, and no empty one is.
        for block in range(size):
            if self.pool.users[block] == 0:
                assert self.index.is_held(block) == (self.pool.content[block] is not None)

    # Internals

    def _tick(self):
        self.now_s += 0.001  # Two requests never end at the same time.

    def _admit(self, session_id, tokens):
        hit = self.pool.hit(tokens)
        needed = len(tokens) - len(hit)
        idle_after_hit = len([block for block in self.pool.free if block not in hit])
        if needed > idle_after_hit:
            return False
        self.pool.use(hit)
        chosen = self._choose(self.pool.wanted(needed))
        blocks = hit + self.pool.take(chosen, needed, self.now_s)
        for block in blocks[len(hit) :]:
            self._forget_block(block)
        self.running.append(Running(session_id, tokens, blocks))
        if session_id is not None:
            # Every third request does not know how much of it was lost to evictions.
            known_blocks = len(hit) if len(tokens) % 3 else None
            self.index.started(
                session_id, now_s=self.now_s, known_blocks=known_blocks, blocks=blocks
            )
            if session_id in self.facts:
                self.facts[session_id].state = UNPROTECTED
        return True

    def _stop(self, running, computed, *, resuming):
        """Blocks up to ``computed`` are cached, then all are given up."""
        self._tick()
        for number, block in enumerate(running.blocks[:computed]):
            self.pool.content[block] = running.tokens[: number + 1]
        cached = [block for block in running.blocks if self.pool.content[block] is not None]
        self._record(running.session_id, cached, resuming=resuming)
        self.pool.release(running.blocks)

    def _record(self, session_id, blocks, *, resuming):
        step = Step(len(blocks), run_s=0.001 * len(blocks), ending=len(blocks) % 2 or None)
        self.index.record(session_id, blocks, now_s=self.now_s, resuming=resuming, step=step)
        if session_id is None:
            self.maybe_plain.update(blocks)
            return
        before = self.facts.pop(session_id, Facts())
        facts = Facts(RESUMING if resuming else PROTECTED, self.now_s)
        if blocks:
            facts.surely, facts.maybe, facts.chain = set(blocks), set(blocks), list(blocks)
            self.maybe_plain |= before.maybe - facts.maybe
        else:
            facts.surely, facts.maybe, facts.chain = before.surely, before.maybe, before.chain
        self.facts[session_id] = facts
        if not resuming and session_id in self.ending:
            self.ending.remove(session_id)
            facts.state = ENDED
        while len(self.facts) > self.settings.max_sessions:
            _, oldest = self.facts.popitem(last=False)
            self.maybe_plain |= oldest.maybe

    def _forget_block(self, block):
        self.maybe_plain.discard(block)
        for facts in self.facts.values():
            facts.surely.discard(block)
            facts.maybe.discard(block)

    def _classes_of(self, block):
        """The least and the greatest class of a block: that of its strongest holder."""
        least = greatest = ENDED
        is_plain = not any(block in facts.maybe for facts in self.facts.values())
        if block in self.maybe_plain:
            greatest = UNPROTECTED
            least = UNPROTECTED if is_plain else ENDED
        for facts in self.facts.values():
            low, high = facts.classes(self.now_s, self.settings)
            if block in facts.surely:
                least = max(least, low)
            if block in facts.maybe:
                greatest = max(greatest, high)
        return least, greatest

    def _choose(self, wanted):
        """Ask for victims and check them."""
        pool, idle = self.pool, self.pool.idle()
        classes = {block: self._classes_of(block) for block in idle}
        reachable = {block for block in idle if self._is_reachable(block, pool.resident())}
        chosen = (
            self.index.victims(wanted, now_s=self.now_s, is_idle=pool.is_idle) if wanted else []
        )
        # In use never, twice never, and as many as were asked for while there are any. (A block
        # that lost its content from outside is free too, but not at the front of the queue.)
        assert len(chosen) == min(wanted, len(idle))
        assert len(set(chosen)) == len(chosen)
        assert set(chosen) <= idle
        left = idle - set(chosen)
        if self.policy == "wa-lru-ttl":
            for block in chosen:
                stronger = [other for other in left if classes[block][0] > classes[other][1]]
                assert not stronger, f"{block} goes before {stronger}"
        self._check_prefixes_outlive(chosen, left & reachable)
        self._note_what_was_given_up(chosen)
        return chosen

    def _is_reachable(self, block, resident):
        content = self.pool.content[block]
        return all(content[:end] in resident for end in range(1, len(content)))

    def _check_prefixes_outlive(self, chosen, left):
        """What a session still holds keeps its prefix; under LRU everything does."""
        if self.has_holes:
            return
        resident = {
            content
            for block, content in enumerate(self.pool.content)
            if content is not None and block not in chosen
        }
        surely = set().union(*(facts.surely for facts in self.facts.values()))
        private = {block for block in surely if self._has_one_holder(block)}
        for block in left if self.policy == "prefix-lru" else left & private:
            assert self._is_reachable(block, resident), f"{block} lost its prefix"

    def _has_one_holder(self, block):
        holders = sum(block in facts.maybe for facts in self.facts.values())
        return holders == 1 and block not in self.maybe_plain

    def _note_what_was_given_up(self, chosen):
        """A run that was asked may have given up blocks that others hold or use."""
        if chosen:
            for facts in self.facts.values():
                facts.surely = {
                    block
                    for block in facts.surely
                    if self._has_one_holder(block) and self.pool.users[block] == 0
                }


class WorldMachine(RuleBasedStateMachine):
    """Lets Hypothesis drive a world."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    @initialize(num_blocks=st.integers(8, 20), max_sessions=st.integers(1, 4))
    def start(self, num_blocks, max_sessions):
        self.world = World(self.policy, num_blocks, max_sessions)

    @rule(tokens=chains, is_short=st.booleans())
    def plain_request(self, tokens, is_short):
        running = len(self.world.running)
        self.world.request(None, tokens)
        if is_short and len(self.world.running) > running:
            self.world.finish(-1, len(tokens))

    @precondition(lambda self: self.world.idle_sessions())
    @rule(data=st.data(), tokens=chains, goes_on=st.booleans(), is_short=st.booleans())
    def step(self, data, tokens, goes_on, is_short):
        session_id = data.draw(st.sampled_from(self.world.idle_sessions()))
        if goes_on and session_id in self.world.facts:
            tokens = self.world.conversation(session_id) + tokens[-2:]
        running = len(self.world.running)
        self.world.request(session_id, tokens)
        if is_short and len(self.world.running) > running:
            self.world.finish(-1, len(tokens))

    @precondition(lambda self: self.world.waiting)
    @rule(number=st.integers(0, 4), is_aborted=st.booleans())
    def waiting_request(self, number, is_aborted):
        number %= len(self.world.waiting)
        (self.world.abort_waiting if is_aborted else self.world.admit_waiting)(number)

    @precondition(lambda self: self.world.running)
    @rule(
        number=st.integers(0, 9),
        computed=st.integers(0, 9) | st.just(99),
        is_preempted=st.booleans(),
    )
    def running_request(self, number, computed, is_preempted):
        number %= len(self.world.running)
        (self.world.preempt if is_preempted else self.world.finish)(number, computed)

    @rule(
        session_id=sessions,
        p_reuse=st.sampled_from([0.0, 0.4, 0.5, 0.9, 1.0]),
        p95_s=st.sampled_from([0.0, 1.0, 20.0, 1000.0]),
        p50_s=st.sampled_from([None, 0.0, 10.0]),
    )
    def pause(self, session_id, p_reuse, p95_s, p50_s):
        self.world.pause(session_id, p_reuse, p95_s, p50_s)

    @rule(session_id=sessions, is_end=st.booleans())
    def notice(self, session_id, is_end):
        (self.world.end if is_end else self.world.expect)(session_id)

    @precondition(lambda self: self.world.pool.idle())
    @rule(data=st.data())
    def lose_a_block(self, data):
        self.world.lose(data.draw(st.sampled_from(sorted(self.world.pool.idle()))))

    @precondition(lambda self: not self.world.running)
    @rule()
    def clear(self):
        self.world.clear()

    @rule(wait_s=st.sampled_from([0.5, 10.0, 19.0, 300.0]))
    def wait(self, wait_s):
        self.world.now_s += wait_s

    @invariant()
    def is_sound(self):
        if hasattr(self, "world"):
            self.world.check()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_index_agrees_with_a_model_of_the_pool(policy):
    run_state_machine_as_test(lambda: WorldMachine(policy), settings=STATEFUL)


def random_tokens(rng):
    prompt = rng.choice([(1, 1, 1), (2, 2), (1,)])
    return prompt + tuple(rng.randint(1, 3) for _ in range(rng.randint(0, 4)))


def random_step(world, rng, *, with_holes):
    """One step, likely ones more often than Hypothesis would take them."""
    what = rng.random()
    idle = world.idle_sessions()
    if what < 0.2:
        world.request(None, random_tokens(rng))
    elif what < 0.45 and idle:
        session_id, tokens = rng.choice(idle), random_tokens(rng)
        if session_id in world.facts and rng.random() < 0.8:
            tokens = world.conversation(session_id) + tokens[-2:]
        world.request(session_id, tokens)
    elif what < 0.75 and world.running:
        number, computed = rng.randrange(len(world.running)), rng.choice([99, 99, 99, 3])
        (world.preempt if rng.random() < 0.1 else world.finish)(number, computed)
    elif what < 0.8 and world.waiting:
        number = rng.randrange(len(world.waiting))
        (world.abort_waiting if rng.random() < 0.3 else world.admit_waiting)(number)
    elif what < 0.9:
        p_reuse, p95_s = rng.choice([0.0, 0.4, 0.5, 0.9]), rng.choice([0.0, 1.0, 20.0, 1000.0])
        world.pause(rng.choice(SESSIONS), p_reuse, p95_s)
    elif what < 0.95:
        (world.end if rng.random() < 0.5 else world.expect)(rng.choice(SESSIONS))
    elif what < 0.96 and with_holes and world.pool.idle():
        world.lose(rng.choice(sorted(world.pool.idle())))
    elif what < 0.962 and not world.running:
        world.clear()
    else:
        world.now_s += rng.choice([0.5, 5.0, 30.0, 60.0])


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(8))
def test_the_index_agrees_with_the_model_over_a_long_history(policy, seed):
    rng = random.Random(seed)
    world = World(policy, rng.randint(10, 30), rng.randint(2, 6))
    for _ in range(800):
        random_step(world, rng, with_holes=seed % 2 == 1)
        world.check()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_same_history_gives_the_same_victims(policy):
    def victims():
        rng, log = random.Random(5), []
        world = World(policy, 16, 4)
        choose = world.index.victims
        for _ in range(300):
            random_step(world, rng, with_holes=True)
            log.append((world.index.counts(), list(world.pool.content)))
        everything = choose(99, now_s=world.now_s, is_idle=world.pool.is_idle)
        return log, everything

    assert victims() == victims()


def always(block):
    return True


def all_victims(index, now_s, is_idle=always):
    return index.victims(index.num_blocks, now_s=now_s, is_idle=is_idle)


@PROPERTY
@given(
    st.lists(st.tuples(st.integers(0, 11), st.integers(1, 5)), min_size=1, max_size=15),
    st.sets(st.integers(0, 15)),
    st.integers(0, 16),
)
def test_plain_requests_go_least_recently_used_first_tail_first(requests, in_use, count):
    index = make_index(16, "prefix-lru")
    used = {}
    for now_s, (first, length) in enumerate(requests):
        blocks = list(range(first, min(16, first + length)))
        index.record(None, blocks, now_s=float(now_s))
        used.update({block: (now_s, -depth) for depth, block in enumerate(blocks)})
    expected = [block for block in sorted(used, key=used.__getitem__) if block not in in_use]
    is_idle = lambda block: block not in in_use  # noqa: E731
    chosen = index.victims(count, now_s=99.0, is_idle=is_idle)
    assert chosen == expected[:count]
    index.check_integrity()
    assert chosen + all_victims(index, 99.0, is_idle) == expected


def test_an_ended_session_goes_first_and_leaves_what_others_share():
    index = make_index(10)
    index.record(None, [8, 9], now_s=0.0)
    index.record("a", [0, 1, 2, 3], now_s=1.0)
    index.record("b", [0, 1, 4], now_s=2.0)
    assert index.end("a", now_s=3.0)
    assert all_victims(index, 3.0) == [3, 2, 9, 8, 4, 1, 0]


def test_a_queued_request_keeps_its_session_to_the_last():
    index = make_index(10)
    index.record("a", [0, 1], now_s=0.0)
    index.record("b", [2, 3], now_s=1.0)
    index.pause("b", Pause(1.0, 1000.0), now_s=1.0)
    index.resume("a", now_s=500.0)
    assert all_victims(index, 500.0) == [3, 2, 1, 0]


def test_what_a_running_request_did_not_take_is_not_protected():
    index = make_index(10)
    index.record("a", [0, 1], now_s=0.0)
    index.pause("a", Pause(1.0, 1000.0), now_s=0.0)
    index.record("b", [2, 3], now_s=1.0)
    index.pause("b", Pause(1.0, 1000.0), now_s=1.0)
    index.resume("a", now_s=2.0)
    index.started("a", now_s=2.0)
    assert index.pause("a", Pause(1.0, 1000.0), now_s=2.0)  # Overtaken by the request.
    assert all_victims(index, 2.0, lambda block: block != 0) == [1, 3, 2]


def test_a_preempted_request_keeps_its_blocks_to_the_last():
    index = make_index(10)
    index.record("a", [0, 1], now_s=0.0, resuming=True)
    index.record("b", [2, 3], now_s=1.0)
    assert all_victims(index, 1.0) == [3, 2, 1, 0]


def test_a_pause_notice_that_the_next_request_overtook_changes_nothing():
    index = make_index(10)
    index.record("a", [0], now_s=0.0)
    index.record("b", [1], now_s=0.0)
    index.pause("b", Pause(1.0, 1000.0), now_s=0.0)
    index.resume("a", now_s=1.0)
    assert index.pause("a", Pause(0.0, 0.0), now_s=1.0)
    assert all_victims(index, 1.0) == [1, 0]


def test_notices_about_unknown_sessions_are_answered_false():
    index = make_index(4)
    index.record("known", [0], now_s=0.0)
    index.resume("unknown", now_s=0.0)
    assert not index.pause("unknown", Pause(1.0, 1.0), now_s=0.0)
    assert not index.expect("unknown", now_s=0.0)
    assert not index.end("unknown", now_s=0.0)
    assert index.counts() == IndexCounts(sessions=1, runs=1, session_blocks=1)


@pytest.mark.parametrize(("later_s", "goes_first"), [(19.9, "plain"), (20.0, "session")])
def test_protection_ends_with_the_pause_that_a_notice_named(later_s, goes_first):
    index = make_index(100, beta=0.0, gamma=0.0)
    index.record("a", [0], now_s=0.0)
    index.pause("a", Pause(0.5, 20.0), now_s=3.0)  # It began with the record.
    index.record(None, [1], now_s=10.0)
    assert index.victims(1, now_s=later_s, is_idle=always) == [1 if goes_first == "plain" else 0]


def test_an_announced_request_starts_the_ttl_anew():
    index = make_index(100, beta=0.0, gamma=0.0)
    index.record("a", [0], now_s=0.0)
    index.pause("a", Pause(0.5, 20.0), now_s=0.0)
    index.record(None, [1], now_s=10.0)
    assert index.expect("a", now_s=19.0)
    assert all_victims(index, 38.9) == [1, 0]


def test_pressure_shortens_the_ttl():
    for held, goes_first in ((70, 99), (90, 0)):
        index = make_index(100, beta=0.0, gamma=0.0)
        index.record("other", list(range(1, held)), now_s=0.0, resuming=True)
        index.record("a", [0], now_s=0.0)
        index.pause("a", Pause(0.5, 20.0), now_s=0.0)
        index.record(None, [99], now_s=5.0)
        assert index.victims(1, now_s=10.0, is_idle=always) == [goes_first]


def test_an_unlikely_return_is_not_protected():
    index = make_index(100)
    index.record("a", [0], now_s=0.0)
    index.pause("a", Pause(0.0, 1000.0), now_s=0.0)
    index.record(None, [1], now_s=1.0)
    assert all_victims(index, 1.0) == [0, 1]


def test_without_notices_the_length_of_pauses_is_learned():
    index = make_index(100, beta=0.0, gamma=0.0)
    now_s = 0.0
    for _ in range(8):
        index.record("a", [0], now_s=now_s)
        now_s += 100.0
        index.resume("a", now_s=now_s)
        index.started("a", now_s=now_s)
    index.record("a", [0], now_s=now_s)
    index.record(None, [1], now_s=now_s + 1.0)
    # The sketch is right within 2 %.
    assert index.victims(1, now_s=now_s + 97.0, is_idle=always) == [1]
    assert index.victims(1, now_s=now_s + 103.0, is_idle=always) == [0]


def test_without_notices_sessions_that_end_lower_the_expected_return():
    index = make_index(100)
    for number in range(20):
        index.record(f"s{number}", [0], now_s=0.0)
        index.end(f"s{number}", now_s=0.0)
    index.record("a", [1], now_s=1.0)
    index.record(None, [2], now_s=400.0)
    assert index.victims(1, now_s=400.0, is_idle=lambda block: block > 0) == [1]


def test_a_request_without_blocks_leaves_the_session_what_it_had():
    index = make_index(10)
    index.record("a", [0, 1, 2], now_s=0.0)
    index.evicted(2, now_s=0.0)
    index.resume("a", now_s=1.0)
    index.record("a", [], now_s=2.0)
    index.check_integrity()
    assert index.counts() == IndexCounts(1, 1, 2)
    assert all_victims(index, 2.0) == [1, 0]


def test_superseded_blocks_rank_as_a_plain_requests():
    index = make_index(10)
    index.record("a", [0, 1, 2], now_s=0.0)
    index.record("a", [0, 3], now_s=1.0)
    assert index.counts() == IndexCounts(sessions=1, runs=2, session_blocks=2)
    assert all_victims(index, 1.0) == [2, 1, 3, 0]


def test_a_shared_block_keeps_the_recency_of_a_superseded_use():
    for other in (None, "b"):
        index = make_index(10, "prefix-lru")
        index.record(other, [0, 1], now_s=0.0)
        index.record("a", [0, 2], now_s=1.0)
        index.record("a", [3], now_s=2.0)
        assert all_victims(index, 3.0) == [1, 2, 0, 3]


def test_branches_of_a_session_supersede_nothing_until_a_request_comes_alone():
    index = make_index(10)
    index.record("a", [0, 1], now_s=0.0)
    for _ in range(2):
        index.resume("a", now_s=1.0)
    index.record("a", [0, 2], now_s=2.0)
    index.check_integrity()
    assert index.counts() == IndexCounts(sessions=1, runs=1, session_blocks=3)
    index.record("a", [0, 3], now_s=3.0)
    index.check_integrity()
    assert index.counts() == IndexCounts(sessions=1, runs=1, session_blocks=4)
    index.resume("a", now_s=4.0)
    index.record("a", [0, 3], now_s=5.0)
    index.check_integrity()
    assert index.counts() == IndexCounts(sessions=1, runs=2, session_blocks=2)


def test_a_block_in_use_is_recorded_again_by_its_request():
    index = make_index(10)
    index.record("a", [0, 1], now_s=0.0)
    index.resume("a", now_s=1.0)
    assert all_victims(index, 1.0, lambda block: block != 0) == [1]
    index.evicted(1, now_s=1.0)
    assert not index.is_held(0)
    index.record("a", [0, 2], now_s=2.0)
    index.check_integrity()
    assert all_victims(index, 2.0) == [2, 0]


def test_more_sessions_than_the_bound_lose_the_oldest_but_not_its_blocks():
    index = make_index(10, "prefix-lru", max_sessions=2)
    for number in range(4):
        index.record(f"s{number}", [number], now_s=float(number))
        index.check_integrity()
    assert index.counts() == IndexCounts(sessions=2, runs=4, session_blocks=2)
    assert not index.end("s1", now_s=4.0)
    assert all_victims(index, 4.0) == [0, 1, 2, 3]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_memory_is_bounded_whatever_comes(policy):
    index = make_index(16, policy, max_sessions=5)
    rng = random.Random(1)
    for number in range(2000):
        session_id = rng.choice([None, f"s{rng.randrange(1000)}"])
        blocks = rng.sample(range(16), rng.randint(0, 6))
        index.record(session_id, blocks, now_s=float(number))
        if rng.random() < 0.2:
            index.evicted(rng.randrange(16), now_s=float(number))
    index.check_integrity()
    counts = index.counts()
    assert counts.sessions == 5
    assert counts.runs <= 16 + 5
    assert len(index._order) == counts.runs
    assert len(index._order._by_key) <= 2 * (16 + 5) + 64


def test_a_cleared_index_holds_nothing_and_goes_on():
    index = make_index(10)
    index.record("a", [0, 1], now_s=0.0)
    index.record(None, [2], now_s=0.0)
    index.clear()
    index.check_integrity()
    assert index.counts() == IndexCounts()
    assert not any(index.is_held(block) for block in range(10))
    assert all_victims(index, 1.0) == []
    index.record("a", [2], now_s=1.0)
    assert all_victims(index, 1.0) == [2]
