"""What a retention decision costs: ``python -m saga_sim.decisions [SESSIONS]``.

Drives the worker's session index with small sessions that pause and return, and prints per policy
the CPU time of recording a pause (learning from it and ranking its run), of choosing a victim, and
of ranking runs anew as time goes by.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from gpu_backend.session_index import SessionIndex
from saga_core.pauses import Step
from saga_core.policies import POLICIES
from saga_core.settings import RetentionSettings

_STRETCHES = 7
_EVENTS = 2_000
_PAUSES_PER_S = 100.0


@dataclass(frozen=True, slots=True)
class Costs:
    """CPU time of decisions, medians.

    Attributes:
        pause_us: to record a pause, microseconds.
        victim_us: to choose a victim when no review is due, microseconds.
        reviews: share of a core that reviews take, 0 to 1, while all sessions pause.
    """

    pause_us: float
    victim_us: float
    reviews: float


class _Worker:
    """A session index with ``sessions`` small sessions that pause and return at random."""

    def __init__(self, policy: str, sessions: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._sessions = sessions
        self._index = SessionIndex(4 * sessions, policy, RetentionSettings())
        self._now_s = 0.0
        for number in range(sessions):
            self._now_s += 1.0 / _PAUSES_PER_S
            self._pause(number)

    def _pause(self, number: int) -> None:
        index, now_s, rng = self._index, self._now_s, self._rng
        session_id, block = f"s{number}", 2 * number
        index.resume(session_id, now_s=now_s)
        index.started(session_id, now_s=now_s, known_blocks=2)
        step = Step(rng.randrange(100_000), rng.random() * 10, rng.choice("tta"))
        index.record(session_id, [block, block + 1], now_s=now_s, step=step)

    def pauses_us(self) -> float:
        numbers = [self._rng.randrange(self._sessions) for _ in range(_EVENTS)]
        started_s = time.process_time()
        for number in numbers:
            self._now_s += 1.0 / _PAUSES_PER_S
            self._pause(number)
        return 1e6 * (time.process_time() - started_s) / _EVENTS

    def reviews(self) -> float:
        """CPU seconds of ten seconds in which a victim is asked for ten times a second."""
        self._victims(1)
        used_s = 0.0
        for _ in range(100):
            self._now_s += 0.1
            started_s = time.process_time()
            gone = self._victims(1)
            used_s += time.process_time() - started_s
            self._evict(gone)
        return used_s / 10.0

    def victims_us(self) -> float:
        count = min(_EVENTS // 4, self._sessions)
        self._evict(self._victims(1))
        started_s = time.process_time()
        gone = [block for _ in range(count) for block in self._victims(1)]
        used_s = time.process_time() - started_s
        self._evict(gone)
        return 1e6 * used_s / count

    def _victims(self, count: int) -> list[int]:
        return self._index.victims(count, now_s=self._now_s, is_idle=lambda block: True)

    def _evict(self, blocks: list[int]) -> None:
        for block in blocks:
            self._index.evicted(block, now_s=self._now_s)
        for number in {block // 2 for block in blocks}:
            self._pause(number)


def costs(policy: str, sessions: int, *, seed: int = 0) -> Costs:
    """Measure one policy."""
    worker = _Worker(policy, sessions, seed)
    found = [(worker.pauses_us(), worker.reviews(), worker.victims_us()) for _ in range(_STRETCHES)]
    pause_us, reviews, victim_us = (statistics.median(part) for part in zip(*found, strict=True))
    return Costs(pause_us, victim_us, reviews)


def lines(sessions: int) -> Iterator[str]:
    """The report, line by line."""
    yield f"{sessions:,} sessions, CPU time: a pause | a victim's choice | reviews"
    for policy in POLICIES:
        found = costs(policy, sessions)
        yield (
            f"{policy:20} {found.pause_us:6.1f} µs | {found.victim_us:5.1f} µs "
            f"| {100 * found.reviews:5.2f} % of a core"
        )


if __name__ == "__main__":
    for line in lines(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000):
        print(line, flush=True)
