"""`saga bench coordinator`: what a decision costs, by the number of workers and sessions."""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from saga_cli.output import writable
from saga_core.coordinator import Coordinator
from saga_core.coordinator_events import (
    Admit,
    Event,
    RequestArrived,
    RequestEnded,
    SessionTold,
    Tick,
    WorkerTold,
    WorkerUp,
)
from saga_core.coordinator_settings import CoordinatorSettings
from saga_core.errors import SagaError
from saga_sim.machine import machine, versions
from saga_sim.report import write_json

WORKERS = "10,100,1000"
SESSIONS = "10000,100000,1000000"
EVENTS = 40_000
QUICK_WORKERS, QUICK_SESSIONS, QUICK_EVENTS = "4,8", "200,400", 400

_SLOTS = 16
_CAPACITY_TOKENS = 400_000
# More than all slots: requests wait everywhere, and each that ends lets another one begin.
_CROWD = 1.25
_TENANTS, _PREFIXES = 20, 100
_MIN_COLUMNS = 110


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU of one kind of event, microseconds.

    Attributes:
        kind: the event's class; "all": of every kind, as they come in the load.
        number: how many were measured.
    """

    kind: str
    number: int
    median_us: float
    p99_us: float

    @classmethod
    def of(cls, kind: str, took_ns: Sequence[int]) -> Cost:
        """From one value an event, at least two."""
        p99_ns = statistics.quantiles(took_ns, n=100, method="inclusive")[98]
        return cls(kind, len(took_ns), statistics.median(took_ns) / 1e3, p99_ns / 1e3)


@dataclass(frozen=True, slots=True)
class Size:
    """The costs at one size of the fleet, those of all events first.

    Attributes:
        in_flight: requests that waited or ran.
        waiting: of these, those that waited.
    """

    workers: int
    sessions: int
    in_flight: int
    waiting: int
    costs: tuple[Cost, ...]


def run(words: argparse.Namespace) -> int:
    """Measure, print a table and write JSON where it is asked for.

    Raises:
        SagaError: an option is wrong.
    """
    json_path = writable("--json", words.json)
    if words.quick:
        chosen = QUICK_WORKERS, QUICK_SESSIONS, QUICK_EVENTS
    else:
        chosen = words.workers, words.sessions, words.events
    summary = measure(
        workers=_numbers("--workers", chosen[0]),
        sessions=_numbers("--sessions", chosen[1]),
        events=chosen[2],
        seed=words.seed,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=_MIN_COLUMNS)
    console.print(_table(summary))
    if json_path is not None:
        write_json(summary, json_path)
        console.print(f"Written to {json_path}", highlight=False)
    return 0


def measure(
    *,
    workers: Sequence[int],
    sessions: Sequence[int],
    events: int,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """All figures, as they are written: each number of workers with each number of sessions.

    Raises:
        SagaError: nothing would be measured.
    """
    if events < 200:
        raise SagaError("--events must be 200 or more")
    sizes = []
    for fleet in workers:
        for known in sessions:
            size = _Load(fleet, known, seed).measure(events)
            sizes.append(asdict(size))
            of_all = size.costs[0]
            say(
                f"{fleet:,} workers, {known:,} sessions: median {of_all.median_us:.1f} µs, "
                f"p99 {of_all.p99_us:.1f} µs"
            )
    return {
        "options": {
            "workers": list(workers),
            "sessions": list(sessions),
            "events": events,
            "seed": seed,
        },
        "sizes": sizes,
        "versions": versions(),
        "machine": machine(),
    }


class _Load:
    """A crowded fleet: for each request that ends another one comes, of any of the sessions."""

    def __init__(self, workers: int, sessions: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._workers, self._sessions = workers, sessions
        self._coordinator = Coordinator(CoordinatorSettings(max_sessions=max(1, sessions)))
        self._running: list[str] = []
        self._now_s = 0.0
        self._number = 0
        for number in range(workers):
            self._coordinator.apply(WorkerUp(0.0, f"w{number}", _SLOTS, _CAPACITY_TOKENS, 1e4))
        for number in range(sessions):
            home, tokens = f"w{number % workers}", self._rng.randrange(1000, 20_000)
            self._coordinator.apply(SessionTold(0.0, f"s{number}", home, tokens))
        self._crowd = int(workers * _SLOTS * _CROWD)
        for _ in range(self._crowd):
            self._apply(self._arrival())

    def measure(self, events: int) -> Size:
        """Time so many events, most of them requests that come and end."""
        took_ns: dict[str, list[int]] = {}
        for number in range(events):
            event = self._event(number)
            took_ns.setdefault(type(event).__name__, []).append(self._apply(event))
        every = [each for kind in took_ns.values() for each in kind]
        costs = [Cost.of("all", every)]
        costs += [Cost.of(kind, took_ns[kind]) for kind in sorted(took_ns)]
        in_flight = len(self._coordinator)
        return Size(
            self._workers, self._sessions, in_flight, in_flight - len(self._running), tuple(costs)
        )

    def _event(self, number: int) -> Event:
        # Of fifty events one is a tick and nine are states; the others are requests.
        self._now_s += 0.002
        if number % 50 == 0:
            self._now_s += 0.1
            return Tick(self._now_s)
        if number % 5 == 1 and number % 50 != 1:
            worker_id = f"w{self._rng.randrange(self._workers)}"
            free = self._rng.randrange(_CAPACITY_TOKENS)
            return WorkerTold(self._now_s, worker_id, _SLOTS, free, 1e4)
        if self._running and len(self._coordinator) >= self._crowd:
            return RequestEnded(self._now_s, self._take())
        return self._arrival()

    def _take(self) -> str:
        at = self._rng.randrange(len(self._running))
        self._running[at], self._running[-1] = self._running[-1], self._running[at]
        return self._running.pop()

    def _arrival(self) -> RequestArrived:
        self._number += 1
        number = self._rng.randrange(self._sessions)
        prompt_tokens = self._rng.randrange(4000, 20_000)
        return RequestArrived(
            self._now_s,
            f"r{self._number}",
            tenant=f"tenant{number % _TENANTS}",
            session_id=f"s{number}",
            task_id=f"t{number // 2}",
            prompt_tokens=prompt_tokens,
            output_tokens=self._rng.randrange(50, 500),
            prefix_id=f"p{number % _PREFIXES}",
            prefix_tokens=3000,
            step_s=0.2,
            work_s=self._rng.uniform(1.0, 20.0),
            task_s=self._rng.uniform(10.0, 100.0),
        )

    def _apply(self, event: Event) -> int:
        """Apply the event; returns the CPU time of that, nanoseconds."""
        began_ns = time.thread_time_ns()
        made = self._coordinator.apply(event)
        took_ns = time.thread_time_ns() - began_ns
        self._running += [each.request_id for each in made if isinstance(each, Admit)]
        return took_ns


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise SagaError(f"{option} {text} must be numbers from 1 on, with commas between")
    return numbers


def _table(summary: dict[str, Any]) -> Table:
    events = summary["options"]["events"]
    title = f"A decision of the coordinator, CPU µs: median / p99 of {events:,} events"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    kinds = [cost["kind"] for cost in summary["sizes"][0]["costs"]]
    for name in ("workers", "sessions", "waiting", *kinds):
        table.add_column(name, justify="right")
    for size in summary["sizes"]:
        cells = [f"{size[name]:,}" for name in ("workers", "sessions", "waiting")]
        costs = {cost["kind"]: cost for cost in size["costs"]}
        for kind in kinds:
            cost = costs[kind]
            cells.append(f"{cost['median_us']:.0f} / {cost['p99_us']:.0f}")
        table.add_row(*cells)
    ran_on = {**summary["versions"], **summary["machine"]}
    table.caption = ", ".join(f"{name} {value}" for name, value in ran_on.items())
    return table
