"""Plays a load against an engine: each session sends its next request after its pause."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from saga_sim.engine_bench.plan import Load
from saga_sim.engine_bench.tasks import Task, prompt_of


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine streamed.

    Attributes:
        tokens: ids of the answer.
        first_token_s: when the first of them was there, on the client's clock.
        cached_tokens: prompt tokens that it had cached, in any tier.
    """

    tokens: Sequence[int]
    first_token_s: float
    cached_tokens: int


Complete = Callable[[Sequence[int], int, str], Awaitable[Answer]]
"""Generates exactly n tokens after a prompt, for a session: (prompt, n, session id)."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request and its answer; times on the client's clock.

    Attributes:
        task: number of its task. call: number of its call in the task.
    """

    task: int
    call: int
    session_id: str
    sent_s: float
    first_token_s: float
    end_s: float
    prompt: Sequence[int]
    answer: Sequence[int]
    cached_tokens: int


class ClosedLoop:
    """The load's tasks, ``live_tasks`` of them at a time; a task that ends makes room for the next.

    Args:
        complete: the engine.
        clock: monotonic seconds. sleep: waits for seconds of that clock.
    """

    def __init__(
        self,
        load: Load,
        complete: Complete,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.requests: list[Request] = []
        self.tasks_done = 0
        self._load = load
        self._complete = complete
        self._clock = clock
        self._sleep = sleep

    async def run(self) -> None:
        """Play all tasks; the first failure of a request ends all and is raised."""
        waiting = iter(enumerate(self._load.tasks))
        await _all(self._slot(waiting) for _ in range(self._load.live_tasks))

    async def _slot(self, waiting: Iterator[tuple[int, Task]]) -> None:
        for number, task in waiting:
            player = _TaskPlayer(self, number, task)
            await player.run()
            self.tasks_done += 1

    async def send(self, task: int, number: int, context: Sequence[int]) -> list[int]:
        """Send a call that continues ``context``; returns its prompt with its answer."""
        options = self._load.options
        call = self._load.tasks[task].calls[number]
        key = f"{options.seed} {task} {number}"
        unit_tokens = self._load.tasks[task].unit_tokens
        prompt = prompt_of(call, context, key, unit_tokens, options.vocabulary)
        sent_s = self._clock()
        answer = await self._complete(prompt, call.output_tokens, call.session_id)
        self.requests.append(
            Request(
                task,
                number,
                call.session_id,
                sent_s,
                answer.first_token_s,
                self._clock(),
                prompt,
                answer.tokens,
                answer.cached_tokens,
            )
        )
        return [*prompt, *answer.tokens]

    async def pause(self, seconds: float) -> None:
        """Wait on the loop's clock."""
        await self._sleep(seconds)


class _TaskPlayer:
    """One task: its calls side by side, each after those that it waits for."""

    def __init__(self, loop: ClosedLoop, number: int, task: Task) -> None:
        self._loop = loop
        self._number = number
        self._task = task
        self._contexts: list[list[int]] = [[] for _ in task.calls]
        self._answered = [asyncio.Event() for _ in task.calls]

    async def run(self) -> None:
        await _all(self._play(number) for number in range(len(self._task.calls)))

    async def _play(self, number: int) -> None:
        call = self._task.calls[number]
        for before in call.waits_for:
            await self._answered[before].wait()
        await self._loop.pause(call.pause_s)
        context = self._contexts[call.base] if call.base is not None else []
        self._contexts[number] = await self._loop.send(self._number, number, context)
        self._answered[number].set()


async def _all(works: Iterator[Awaitable[None]]) -> None:
    """Run all to their end; the first failure cancels the others and is raised as it is."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
