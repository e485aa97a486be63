"""Whole tasks are let in, and paused, by the memory that they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from saga_sim.cluster.dispatch import Arrival, Done, Fleet, Loads, Placed, Sent


@dataclass(slots=True)
class _Task:
    """A task that has been seen.

    Attributes:
        home: the worker that it is let in at; None: it is paused.
        held: tokens of each session's last prompt with its answer.
        in_flight: its requests that its worker has. waiting: those that wait here.
    """

    home: int | None = None
    held: dict[str, int] = field(default_factory=dict)
    in_flight: int = 0
    waiting: list[Arrival] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(self.held.values())


class Pausing:
    """Tasks are let in at the worker with the most room, while all that are there fit its pool.

    A task counts with the latest prompts and answers of its sessions, also while its tools run.
    Where one outgrows the room, tasks whose tools run are paused, the smallest first, until the
    rest fits; if that is not enough it is paused itself, unless it is alone. A task that is paused
    loses its claim to memory; its next request waits until some worker has room for it, in the
    order of coming, and that worker becomes its home.
    """

    tick_s: float | None = None

    def __init__(self, fleet: Fleet) -> None:
        self._pool_tokens = fleet.pool_tokens
        self._up = dict.fromkeys(range(fleet.workers))
        self._tasks: dict[int, _Task] = {}
        self._queue: dict[int, None] = {}
        self._answered, self._output_tokens = 0, 0

    def arrived(self, arrival: Arrival, loads: Loads, now_s: float) -> Sent:
        number = arrival.key[0]
        task = self._tasks.setdefault(number, _Task())
        answer_tokens = self._output_tokens // max(1, self._answered)
        task.held[arrival.session_id] = arrival.prompt_tokens + answer_tokens
        task.waiting.append(arrival)
        if task.home is not None and not self._make_room(number, task.home):
            task.home = None
        if task.home is None:
            self._queue[number] = None
            return self._let_in()
        return self._send(task)

    def answered(self, done: Done, now_s: float) -> Sent:
        self._answered += 1
        self._output_tokens += done.output_tokens
        task = self._tasks[done.key[0]]
        task.in_flight -= 1
        task.held[done.session_id] = done.prompt_tokens + done.output_tokens
        return self._let_in()

    def session_ended(self, session_id: str, now_s: float) -> Sent:
        for task in self._tasks.values():
            task.held.pop(session_id, None)
        return self._let_in()

    def task_ended(self, task: int, now_s: float) -> Sent:
        del self._tasks[task]
        return self._let_in()

    def lost(self, worker: int, requests: Sequence[Arrival], loads: Loads, now_s: float) -> Sent:
        del self._up[worker]
        for task in self._tasks.values():
            if task.home == worker:
                task.home, task.in_flight = None, 0
        for arrival in requests:
            self._tasks[arrival.key[0]].waiting.append(arrival)
            self._queue[arrival.key[0]] = None
        return self._let_in()

    def back(self, worker: int, now_s: float) -> Sent:
        self._up[worker] = None
        return self._let_in()

    def tick(self, now_s: float) -> Sent:
        return ()

    def _at(self, worker: int) -> list[tuple[int, _Task]]:
        return [(n, task) for n, task in self._tasks.items() if task.home == worker]

    def _free(self, worker: int) -> int:
        return self._pool_tokens - sum(task.tokens for _, task in self._at(worker))

    def _make_room(self, number: int, worker: int) -> bool:
        """Pause others until the task fits, which is at the worker."""
        others = [(n, task) for n, task in self._at(worker) if n != number]
        idle = sorted((task.tokens, n) for n, task in others if not task.in_flight)
        free = self._free(worker)
        if free + sum(tokens for tokens, _ in idle) < 0:
            return not others  # It would not help to pause them.
        for tokens, other in idle:
            if free >= 0:
                break
            self._tasks[other].home = None
            free += tokens
        return True

    def _let_in(self) -> Sent:
        sent: list[Placed] = []
        while self._queue and self._up:
            number = next(iter(self._queue))
            task = self._tasks[number]
            best = max(self._up, key=lambda worker: (self._free(worker), -worker))
            if self._free(best) < task.tokens and self._at(best):
                break
            del self._queue[number]
            task.home = best
            sent += self._send(task)
        return sent

    def _send(self, task: _Task) -> Sent:
        assert task.home is not None
        sent = [Placed(arrival.key, task.home) for arrival in task.waiting]
        task.in_flight += len(sent)
        task.waiting.clear()
        return sent
