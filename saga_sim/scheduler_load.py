"""What the scheduler's benchmark serves: sessions that pause and return, under steady loads."""

from __future__ import annotations

import random
from dataclasses import dataclass

from gpu_backend.model_free import BLOCK_TOKENS, TOKEN

_MAX_PROMPT_TOKENS = 2048
_ROOT_TOKENS = 4 * BLOCK_TOKENS
_ROOTS = 8
_NEW_SESSION_RATE = 0.4


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one kind in a steady flow.

    Attributes:
        running: requests that run at a time; fewer where the pool is small.
        new_tokens: prompt tokens that a step of a session adds.
        output_tokens: tokens of each answer.
        step_s: what an engine step takes on the virtual clock, seconds.
    """

    name: str
    running: int
    new_tokens: int
    output_tokens: int
    step_s: float


LOADS = (
    Load("decode-heavy", running=256, new_tokens=48, output_tokens=256, step_s=0.025),
    Load("mixed", running=128, new_tokens=400, output_tokens=64, step_s=0.05),
    Load("prefill-only", running=4, new_tokens=1024, output_tokens=1, step_s=0.2),
)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request before an engine makes it its own."""

    session_id: str
    prompt: list[int]
    output_tokens: int


class Traffic:
    """Sessions that pause and return at random, the same for every arm.

    A session grows over one of a few shared roots; now and then it begins anew. It has one request
    at a time.
    """

    def __init__(self, load: Load, sessions: int, blocks: int, seed: int) -> None:
        self._load = load
        self._rng = random.Random(seed)
        self._sessions = sessions
        room = blocks * BLOCK_TOKENS // (2 * _MAX_PROMPT_TOKENS)
        busy = max(1, min(load.running, sessions // 2, room))
        self._arrivals_per_step = busy / load.output_tokens
        self._first_tokens = blocks * BLOCK_TOKENS // sessions
        self._roots = [self._tokens(_ROOT_TOKENS) for _ in range(_ROOTS)]
        self._history: list[list[int]] = [[] for _ in range(sessions)]
        self._free_at_step = [0] * sessions
        self._step, self._owed = 0, 0.0

    def first(self, number: int) -> Arrival:
        """The first request of a session: together they fill the pool."""
        prompt = self._rng.choice(self._roots) + self._tokens(self._first_tokens)
        return self._arrival(number, prompt, 1)

    def step(self) -> list[Arrival]:
        """Requests that arrive before the next engine step."""
        self._step += 1
        self._owed += self._arrivals_per_step
        arrivals = []
        while self._owed >= 1.0:
            self._owed -= 1.0
            arrivals.append(self._next())
        return arrivals

    def _next(self) -> Arrival:
        load, number = self._load, self._rng.randrange(self._sessions)
        while self._free_at_step[number] > self._step:
            number = (number + 1) % self._sessions
        self._free_at_step[number] = self._step + load.output_tokens + 2
        history = self._history[number]
        is_long = len(history) + load.new_tokens > _MAX_PROMPT_TOKENS
        if is_long or self._rng.random() < _NEW_SESSION_RATE:
            history = self._rng.choice(self._roots)
        return self._arrival(number, history + self._tokens(load.new_tokens), load.output_tokens)

    def _arrival(self, number: int, prompt: list[int], output_tokens: int) -> Arrival:
        self._history[number] = prompt + [TOKEN] * output_tokens
        return Arrival(f"s{number}", prompt, output_tokens)

    def _tokens(self, count: int) -> list[int]:
        return self._rng.choices(range(8, 1000), k=count)
