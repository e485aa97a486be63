"""Made conversations that do what clients do, as bodies of chat completions."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from saga_sim.aeg.exchanges import Exchange

Message = dict[str, Any]

_OPENINGS = (
    "Fix the failing test in the parser, please.",
    "Write a report about tides and harbours.",
)
_SYSTEM = "You are a careful agent. Use the tools, and say what you have done.\n"
_REMINDERS = (
    "Keep the list of open points up to date.",
    "Files have changed since they were last read.",
    "Answer in few words.",
)
_TOOLS = ("read_file", "run_command", "search")
_SYLLABLES = ("ba", "de", "ki", "lo", "mu", "na", "pe", "ri", "so", "tu", "va", "zo")
_NUM_WORDS = 40

_SPREAD_S = 600.0
_MEAN_SERVED_S = 4.0
_MEAN_PAUSE_S = 6.0
_SERIAL_S = 0.001


@dataclass(frozen=True, slots=True)
class Habits:
    """How often clients do what makes conversations hard to follow, as probabilities.

    Attributes:
        common_opening: a conversation opens as many others do.
        clock, reminder: a conversation whose system prompt tells the time, or something new from
            time to time.
        reserialized: a client that writes the arguments of tool calls in its own way.
        failure, repeat: a request fails and is sent again, or is sent again though answered.
        edit, compaction, drop, branches: at a step.
    """

    common_opening: float = 0.25
    clock: float = 0.2
    reminder: float = 0.2
    reserialized: float = 0.3
    failure: float = 0.05
    repeat: float = 0.02
    edit: float = 0.04
    compaction: float = 0.03
    drop: float = 0.03
    branches: float = 0.02


def generate(
    seed: int, num_conversations: int = 200, habits: Habits | None = None
) -> list[Exchange]:
    """Conversations that overlap at random, the requests in the order of their times.

    A branch is a conversation of its own; its parent is told.
    """
    rng = random.Random(seed)
    exchanges: list[Exchange] = []
    for number in range(num_conversations):
        talk = _Talk(str(number), random.Random(rng.random()), habits or Habits())
        exchanges += talk.run(rng.uniform(0.0, _SPREAD_S), rng.randint(2, 20))
    exchanges.sort(key=lambda each: (each.start_s, each.name))
    return exchanges


@dataclass(slots=True)
class _Talk:
    """A conversation as its client has it.

    Attributes:
        messages: without the system prompt.
        steps: requests that were answered.
        words: that it is about.
    """

    name: str
    rng: random.Random
    habits: Habits
    messages: list[Message] = field(default_factory=list)
    parent: str | None = None
    steps: int = 0
    sent: int = 0
    branched: int = 0
    has_clock: bool = False
    has_reminder: bool = False
    rewrites: bool = False
    words: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.messages:
            return
        self.words = tuple(
            "".join(self.rng.choices(_SYLLABLES, k=self.rng.randint(2, 4)))
            for _ in range(_NUM_WORDS)
        )
        is_common = self._chance(self.habits.common_opening)
        text = self.rng.choice(_OPENINGS) if is_common else self._text("I need help with")
        self.messages = [{"role": "user", "content": text}]
        self.has_clock = self._chance(self.habits.clock)
        self.has_reminder = self._chance(self.habits.reminder)
        self.rewrites = self._chance(self.habits.reserialized)

    def run(self, now_s: float, num_steps: int) -> Iterator[Exchange]:
        """Its requests, and those of its branches."""
        for step in range(num_steps):
            if self._chance(self.habits.failure):
                failed = self._exchange(now_s, is_answered=False)
                yield failed
                now_s = failed.end_s + self.rng.uniform(0.2, 2.0)
            done = self._exchange(now_s)
            if self._chance(self.habits.repeat):
                yield done
                done = self._exchange(done.end_s + self.rng.uniform(0.2, 2.0))
            yield done
            self._add_turn(done)
            now_s = done.end_s + _SERIAL_S + self.rng.expovariate(1 / _MEAN_PAUSE_S)
            if step == num_steps - 1:
                return
            if self.steps >= 2 and self._chance(self.habits.branches):
                yield from self._branches(now_s)
            else:
                self._rewrite()

    def _branches(self, now_s: float) -> Iterator[Exchange]:
        """Others go on from the same point just after this one has, each with its own words."""
        for _ in range(self.rng.randint(1, 2)):
            self.branched += 1
            branch = _Talk(
                f"{self.name}.{self.branched}",
                random.Random(self.rng.random()),
                self.habits,
                [*self.messages[:-1], {"role": "user", "content": self._text("Instead, try")}],
                parent=self.name,
                steps=self.steps,
                has_clock=self.has_clock,
                has_reminder=self.has_reminder,
                rewrites=self.rewrites,
                words=self.words,
            )
            # While this one's next request is served: it takes at least half a second.
            start_s = now_s + self.rng.uniform(0.01, 0.4)
            yield from branch.run(start_s, self.rng.randint(1, 8))

    def _exchange(self, now_s: float, *, is_answered: bool = True) -> Exchange:
        self.sent += 1
        served_s = 0.5 + self.rng.expovariate(1 / _MEAN_SERVED_S)
        answer, calls = self._answer() if is_answered else ("", ())
        return Exchange(
            f"{self.name}/{self.sent}",
            self.name,
            now_s,
            now_s + served_s,
            "chat",
            {"model": "m", "messages": [self._system(now_s), *self.messages]},
            answer,
            calls,
            is_answered,
            parent=self.parent,
        )

    def _system(self, now_s: float) -> Message:
        text = _SYSTEM
        if self.has_clock:
            minutes, seconds = divmod(int(now_s), 60)
            text += f"It is Tuesday, 2026-03-17 10:{minutes:02}:{seconds:02}.\n"
        if self.has_reminder:
            text += _REMINDERS[self.steps // 3 % len(_REMINDERS)]
        return {"role": "system", "content": text}

    def _answer(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        num_calls = self.rng.choice((0, 1, 1, 1, 2, 3))
        text = self._text("I will look at") if not num_calls or self._chance(0.6) else ""
        return text, tuple(
            (self.rng.choice(_TOOLS), json.dumps({"path": self._text("src"), "lines": [1, 40]}))
            for _ in range(num_calls)
        )

    def _add_turn(self, done: Exchange) -> None:
        """Take over the answer, and say what comes after it."""
        self.steps += 1
        message: Message = {"role": "assistant", "content": done.answer or None}
        if done.calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{self.rng.randrange(10**9)}",
                    "type": "function",
                    "function": {"name": name, "arguments": self._rewritten(arguments)},
                }
                for name, arguments in done.calls
            ]
        self.messages.append(message)
        for call in message.get("tool_calls", ()):
            content = self._text("Found") if self._chance(0.9) else "OK"
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        if not done.calls or self._chance(0.05):
            self.messages.append({"role": "user", "content": self._text("Now do")})

    def _rewritten(self, arguments: str) -> str:
        if not self.rewrites:
            return arguments
        return json.dumps(json.loads(arguments), indent=1, sort_keys=True)

    def _rewrite(self) -> None:
        """Change what was said before, as some clients do."""
        chance, habits = self.rng.random(), self.habits
        if chance < habits.edit:
            self.messages[-1] = {"role": "user", "content": self._text("No, rather")}
        elif chance < habits.edit + habits.compaction and len(self.messages) > 6:
            summary = {"role": "user", "content": self._text("Summary of what was done:")}
            self.messages = [summary, *self._last_turns(2)]
        elif chance < habits.edit + habits.compaction + habits.drop and len(self.messages) > 8:
            self.messages = self._last_turns(3)

    def _last_turns(self, count: int) -> list[Message]:
        """Whole turns, so that no tool result is without its call."""
        starts = [i for i, each in enumerate(self.messages) if each["role"] == "assistant"]
        return self.messages[starts[-min(count, len(starts))] :]

    def _text(self, opening: str) -> str:
        words = " ".join(self.rng.choices(self.words, k=self.rng.randint(4, 30)))
        return f"{opening} {words}, number {self.rng.randrange(10**6)}."

    def _chance(self, probability: float) -> bool:
        return self.rng.random() < probability
