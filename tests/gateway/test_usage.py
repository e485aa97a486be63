"""Token counts of answers: as the stream says them, else as the worker does."""

import re

import pytest

from saga_gateway.answers import Usage
from saga_gateway.usage import PATIENCE_S, UsageDesk
from tests.gateway.conftest import Clock


async def counted(gateway):
    """Tokens counted so far, by kind, and answers that have been accounted for."""
    text = (await gateway.client.get("/metrics")).text
    tokens = re.findall(r'saga_gateway_tokens_total\{kind="(\w+)"\} (\S+)', text)
    (answers,) = re.findall(r"saga_gateway_duration_seconds_count (\S+)", text)
    return {kind: float(value) for kind, value in tokens}, float(answers)


async def until_counted(gateway, answers):
    while True:
        tokens, seen = await counted(gateway)
        if seen == answers:
            return tokens


@pytest.fixture
async def told(start_gateway, worker, eventually):
    """A gateway that follows the state of a worker that streams without usage."""
    worker.steps = []
    worker.tell("before", 1000, 1000, 1000)  # Nobody followed then.

    async def script(exchange):
        await exchange.stream(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\ndata: [DONE]\n\n')

    worker.script = script
    gateway = await start_gateway(worker)
    await eventually(lambda: worker.watchers == 1)
    await eventually(lambda: gateway.app._states.follows(worker.worker_id))
    return gateway


async def test_the_worker_says_what_the_stream_did_not(told, worker):
    await told.chat("s")
    assert await counted(told) == ({"prompt": 0, "cached": 0, "completion": 0}, 0)
    worker.tell("s", 70, 64, 5)
    assert await until_counted(told, 1) == {"prompt": 70, "cached": 64, "completion": 5}


async def test_a_word_of_another_session_is_not_taken(told, worker):
    await told.chat("s")
    worker.tell("t", 1, 1, 1)
    worker.tell("s", 70, 64, 5)
    assert await until_counted(told, 1) == {"prompt": 70, "cached": 64, "completion": 5}


async def test_what_the_stream_says_counts_once(told, worker, wire):
    async def script(exchange):
        usage = {"prompt_tokens": 7, "completion_tokens": 2}
        await exchange.stream(wire.event({**wire.delta("stop"), "usage": usage}))

    silent, worker.script = worker.script, script
    await told.chat("s")
    assert await until_counted(told, 1) == {"prompt": 7, "cached": 0, "completion": 2}
    worker.script = silent
    await told.chat("s")
    worker.tell("s", 7, 0, 2)  # The first answer's, which is known.
    worker.tell("s", 70, 64, 5)
    assert await until_counted(told, 2) == {"prompt": 77, "cached": 64, "completion": 7}


async def test_without_a_word_the_answer_counts_without_tokens(told):
    await told.chat("s")
    told.clock.advance(PATIENCE_S + 1)
    assert await until_counted(told, 1) == {"prompt": 0, "cached": 0, "completion": 0}


async def test_without_a_stream_of_states_nobody_waits_for_ever(told, worker):
    await told.chat("s")
    await worker.stop()
    told.clock.advance(PATIENCE_S + 1)
    assert await until_counted(told, 1) == {"prompt": 0, "cached": 0, "completion": 0}


async def test_a_stream_of_states_that_breaks_is_opened_again(told, worker, eventually):
    await worker.stop()
    await eventually(lambda: not told.app._states.follows(worker.worker_id))
    worker.watchers = 0
    await worker.start()
    await eventually(lambda: told.app._states.follows(worker.worker_id))
    told.clock.advance(10.0)  # The breaker lets requests through again.
    await told.chat("s")
    worker.tell("s", 70, 64, 5)
    assert await until_counted(told, 1) == {"prompt": 70, "cached": 64, "completion": 5}


async def test_answers_count_at_once_where_no_worker_says_more(gateway, worker):
    await gateway.chat("s")
    assert await counted(gateway) == ({"prompt": 7, "cached": 0, "completion": 2}, 1)


class Desk:
    """A desk, and what each answer that waited was told."""

    def __init__(self):
        self.clock = Clock()
        self.desk = UsageDesk(self.clock)
        self.told = {}

    def wait(self, name, session="s"):
        def told(usage):
            assert name not in self.told
            self.told[name] = usage

        self.desk.wait_for("w", session, told)

    def tell(self, prompt, session="s"):
        self.desk.tell("w", session, Usage(prompt))


def test_a_session_is_told_of_in_the_order_of_its_answers():
    desk = Desk()
    for name in ("first", "second"):
        desk.wait(name)
    desk.wait("other", session="t")
    desk.tell(1)
    desk.tell(3, session="t")
    desk.tell(2)
    assert desk.told == {"first": Usage(1), "other": Usage(3), "second": Usage(2)}
    assert len(desk.desk) == 0


@pytest.mark.parametrize(("after_s", "expected"), [(0.5, Usage(1)), (1.5, None)])
def test_a_word_may_come_shortly_before_the_answer_ends(after_s, expected):
    desk = Desk()
    desk.tell(1)
    desk.clock.advance(after_s)
    desk.desk.give_up()
    desk.wait("a")
    assert desk.told.get("a") == expected
    desk.desk.close()
    assert desk.told == {"a": expected}


def test_what_waits_is_bounded_in_time_and_number():
    desk = Desk()
    desk.wait("old")
    desk.clock.advance(PATIENCE_S - 0.1)
    desk.wait("new")
    desk.clock.advance(0.2)
    desk.desk.give_up()
    assert desk.told == {"old": None}
    for number in range(10_000):
        desk.wait(number, session=str(number))
    assert desk.told == {"old": None, "new": None}
    assert len(desk.desk) == 10_000
    for number in range(20_000):
        desk.tell(1, session=f"early{number}")
    assert len(desk.desk._early) == 10_000
