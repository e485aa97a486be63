"""What a retention decision costs: ``python -m saga_sim.decisions [SESSIONS]``.

Drives the worker's session index with small sessions that pause and return, and prints the CPU
time of ranking a run and of choosing a victim, per policy: the medians of several stretches.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Iterator

from gpu_backend.session_index import SessionIndex
from saga_core.pauses import Step
from saga_core.policies import POLICIES
from saga_core.settings import RetentionSettings

_STRETCHES = 7
_EVENTS = 2_000


def costs_us(policy: str, sessions: int, *, seed: int = 0) -> tuple[float, float]:
    """CPU microseconds of a pause (read, learned from and ranked) and of a victim's choice."""
    rng = random.Random(seed)
    index = SessionIndex(4 * sessions, policy, RetentionSettings())
    now_s = 0.0

    def pause(number: int) -> None:
        session_id, block = f"s{number}", 2 * number
        index.resume(session_id, now_s=now_s)
        index.started(session_id, now_s=now_s, known_blocks=2)
        step = Step(rng.randrange(100_000), rng.random() * 10, rng.choice("tta"))
        index.record(session_id, [block, block + 1], now_s=now_s, step=step)

    for number in range(sessions):
        now_s += 0.01
        pause(number)
    pauses, victims = [], []
    for _ in range(_STRETCHES):
        returning = [rng.randrange(sessions) for _ in range(_EVENTS)]
        started_s = time.process_time()
        for number in returning:
            now_s += rng.expovariate(100.0)
            pause(number)
        pauses.append(1e6 * (time.process_time() - started_s) / _EVENTS)
        gone: list[int] = []
        started_s = time.process_time()
        for _ in range(_EVENTS // 4):
            now_s += 0.01
            gone += index.victims(1, now_s=now_s, is_idle=lambda block: True)
        victims.append(1e6 * (time.process_time() - started_s) / (_EVENTS // 4))
        for block in gone:
            index.evicted(block, now_s=now_s)
        for number in {block // 2 for block in gone}:
            pause(number)
    return statistics.median(pauses), statistics.median(victims)


def lines(sessions: int) -> Iterator[str]:
    """The report, line by line."""
    yield f"{sessions:,} sessions; CPU microseconds: a pause of 2 blocks | a victim's choice"
    for policy in POLICIES:
        pause_us, victim_us = costs_us(policy, sessions)
        yield f"{policy:20} {pause_us:7.1f} | {victim_us:5.1f}"


if __name__ == "__main__":
    for line in lines(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000):
        print(line, flush=True)
