"""What the plugin adds to the CPU time of vLLM's scheduler.

Three arms serve the same requests at the same steps: stock vLLM, a subclass of its scheduler that
adds nothing (the noise floor), and the scheduler with the plugin. They take turns of a few steps
in one process. Time is the process's CPU time in ``add_request``, ``schedule`` and
``update_from_output``; there is no model, and making requests and tokens is not counted.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpu_backend.config import POLICY_VARIABLE, policy_names
from gpu_backend.model_free import (
    BLOCK_TOKENS,
    Engine,
    make_config,
    plain_subclass,
    write_tiny_model,
)
from saga_core.errors import SagaError, SettingsError
from saga_sim.machine import machine, versions
from saga_sim.scheduler_load import LOADS, Arrival, Load, Traffic

STOCK, SUBCLASS, SAGA = ARMS = ("stock", "subclass", "saga")

_TURN_STEPS = 20
_BATCHED_TOKENS = 8192
_AGEING_S = 300.0
_COVERAGE = 0.95


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What is measured.

    Attributes:
        sessions: paused sessions, at least 2.
        blocks: blocks of the pool, at least 200 and 10 a session.
        policy: the retention policy of the third arm.
        pairs: rounds in which every arm does ``steps`` steps, at least 1.
        steps: scheduler steps of an arm in a round, at least 1.
    """

    sessions: int = 10_000
    blocks: int = 100_000
    policy: str = "saga"
    pairs: int = 9
    steps: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        if self.policy not in policy_names():
            raise SettingsError(
                f"policy {self.policy!r}: choose one of {', '.join(policy_names())}"
            )
        least = {"sessions": 2, "blocks": 200, "pairs": 1, "steps": 1}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise SettingsError(f"{name}={getattr(self, name)} must be at least {value}")
        if self.blocks < 10 * self.sessions:
            raise SettingsError(f"blocks={self.blocks} must be at least 10 for each session")


@dataclass(slots=True)
class Totals:
    """Of one arm in one round.

    Attributes:
        cpu_s: CPU time of the scheduler, seconds.
        evicted_blocks: cached blocks that lost their content; only the plugin counts them.
    """

    cpu_s: float = 0.0
    steps: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    evicted_blocks: int = 0


class Arm:
    """One engine on a virtual clock."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.totals = Totals()
        self._engine = engine
        self._now_s = 0.0
        self._queued: set[str] = set()
        if engine.with_plugin:
            engine.saga.clock = lambda: self._now_s

    def turn(self, steps: Sequence[Sequence[Arrival]], step_s: float) -> None:
        """Serve what arrives at each of the steps; time and work go to ``totals``."""
        evicted_blocks = self._evicted_blocks()
        for arrivals in steps:
            self._now_s += step_s
            self._step(arrivals)
        self.totals.steps += len(steps)
        self.totals.evicted_blocks += self._evicted_blocks() - evicted_blocks

    def sizes(self) -> dict[str, int]:
        """What the plugin's index holds.

        Raises:
            SagaError: the plugin has switched itself off.
        """
        state = self._engine.saga.state()
        if state["off_reason"] is not None:
            raise SagaError(f"the plugin switched itself off: {state['off_reason']}")
        return {**state["held"], "ghost_blocks": state["ghost_blocks"]}

    def _step(self, arrivals: Sequence[Arrival]) -> None:
        engine, totals = self._engine, self.totals
        requests = [
            engine.make_request(
                arrival.prompt, session_id=arrival.session_id, output_tokens=arrival.output_tokens
            )
            for arrival in arrivals
        ]
        self._queued.update(request.request_id for request in requests)
        started_s = time.process_time()
        for request in requests:
            engine.scheduler.add_request(request)
        output = engine.schedule()
        totals.cpu_s += time.process_time() - started_s
        result = engine.compute(output)
        started_s = time.process_time()
        engine.update(output, result)
        totals.cpu_s += time.process_time() - started_s
        for new in output.scheduled_new_reqs:
            if new.req_id not in self._queued:
                continue  # The plugin's own, to have a prefix computed ahead.
            self._queued.discard(new.req_id)
            totals.requests += 1
            totals.prompt_tokens += len(new.prompt_token_ids or ())
            totals.cached_tokens += new.num_computed_tokens

    def _evicted_blocks(self) -> int:
        engine = self._engine
        return int(engine.saga.counters.evicted_blocks) if engine.with_plugin else 0


@dataclass(frozen=True, slots=True)
class Median:
    """A figure over the rounds: its median, and the interval that holds it in 95 % of cases.

    The interval is of two order statistics and assumes no distribution; with fewer than six
    rounds it is all that was seen, and holds the median less often.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Median:
        """From one value a round."""
        ordered, n = sorted(values), len(values)
        cut, outside = 0, 0.5**n
        while 2 * (outside + math.comb(n, cut + 1) * 0.5**n) <= 1.0 - _COVERAGE:
            cut += 1
            outside += math.comb(n, cut) * 0.5**n
        return cls(statistics.median(ordered), ordered[cut], ordered[n - 1 - cut])


@dataclass(slots=True)
class LoadResult:
    """One load's rounds; each maps the arms to what they did.

    Attributes:
        peak: greatest sizes of the plugin's index that were seen.
    """

    load: Load
    rounds: list[dict[str, Totals]] = field(default_factory=list)
    peak: dict[str, int] = field(default_factory=dict)

    def cpu_ms_per_step(self, arm: str) -> Median:
        """CPU milliseconds of a scheduler step."""
        return Median.of([1e3 * _per_step_s(one[arm]) for one in self.rounds])

    def ratio(self, arm: str) -> Median:
        """CPU of the arm ÷ CPU of stock vLLM, round by round."""
        return Median.of([_per_step_s(one[arm]) / _per_step_s(one[STOCK]) for one in self.rounds])

    def added_ms_per_step(self) -> Median:
        """Milliseconds that the plugin adds to a step."""
        return Median.of([1e3 * _added_s(one) / one[SAGA].steps for one in self.rounds])

    def added_us_per_evicted_block(self) -> Median | None:
        """All that the plugin adds, in microseconds, by evicted block; None: none was evicted."""
        if not all(one[SAGA].evicted_blocks for one in self.rounds):
            return None
        return Median.of([1e6 * _added_s(one) / one[SAGA].evicted_blocks for one in self.rounds])

    def per_step(self, arm: str, what: str) -> float:
        """A total of :class:`Totals` by step."""
        steps = sum(one[arm].steps for one in self.rounds)
        return float(sum(getattr(one[arm], what) for one in self.rounds) / steps)


def _per_step_s(totals: Totals) -> float:
    return totals.cpu_s / totals.steps


def _added_s(one: dict[str, Totals]) -> float:
    return one[SAGA].cpu_s - one[STOCK].cpu_s


def measure(options: BenchOptions, say: Callable[[str], None]) -> list[LoadResult]:
    """Run every load; ``say`` is told what goes on, once a round.

    Raises:
        SagaError: the plugin could not attach, or switched itself off.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(
            write_tiny_model(Path(folder)),
            max_batched_tokens=_BATCHED_TOKENS,
            max_seqs=2 * max(load.running for load in LOADS),
        )
        return [_measure_load(load, options, config, say) for load in LOADS]


def _measure_load(
    load: Load, options: BenchOptions, config: Any, say: Callable[[str], None]
) -> LoadResult:
    say(f"{load.name}: ageing the pool")
    traffic = Traffic(load, options.sessions, options.blocks, options.seed)
    arms = list(_arms(options, config))
    result = LoadResult(load)
    _age(traffic, arms, options)
    warm_steps = 2 * load.output_tokens + options.steps
    _take_turns(traffic, arms, load, warm_steps, result.peak)
    for number in range(options.pairs):
        gc.collect()
        gc.freeze()  # As vLLM's engine core does: old objects are not traversed again.
        for arm in arms:
            arm.totals = Totals()
        _take_turns(traffic, arms, load, options.steps, result.peak)
        result.rounds.append({arm.name: arm.totals for arm in arms})
        say(f"{load.name}: round {number + 1} of {options.pairs}, {result.ratio(SAGA).median:.3f}")
    return result


def _arms(options: BenchOptions, config: Any) -> Iterator[Arm]:
    yield Arm(STOCK, Engine(config, options.blocks, with_plugin=False))
    yield Arm(SUBCLASS, Engine(config, options.blocks, with_plugin=False, base=plain_subclass()))
    before = os.environ.get(POLICY_VARIABLE)
    os.environ[POLICY_VARIABLE] = options.policy
    try:
        engine = Engine(config, options.blocks)
    finally:
        os.environ.pop(POLICY_VARIABLE)
        if before is not None:
            os.environ[POLICY_VARIABLE] = before
    if engine.saga is None:
        raise SagaError("the plugin could not attach to the scheduler")
    yield Arm(SAGA, engine)


def _age(traffic: Traffic, arms: Sequence[Arm], options: BenchOptions) -> None:
    """Let every session leave its first request's KV."""
    per_step = max(1, _BATCHED_TOKENS // (options.blocks * BLOCK_TOKENS // options.sessions) // 2)
    step_s = _AGEING_S * per_step / options.sessions
    for start in range(0, options.sessions, per_step):
        numbers = range(start, min(options.sessions, start + per_step))
        arrivals = [traffic.first(number) for number in numbers]
        for arm in arms:
            arm.turn([arrivals], step_s)


def _take_turns(
    traffic: Traffic, arms: Sequence[Arm], load: Load, steps: int, peak: dict[str, int]
) -> None:
    """Every arm does the same steps; who begins changes from turn to turn."""
    for number, start in enumerate(range(0, steps, _TURN_STEPS)):
        turn = [traffic.step() for _ in range(min(_TURN_STEPS, steps - start))]
        first = number % len(arms)
        for arm in (*arms[first:], *arms[:first]):
            arm.turn(turn, load.step_s)
        sizes = next(arm for arm in arms if arm.name == SAGA).sizes()
        peak.update({name: max(size, peak.get(name, 0)) for name, size in sizes.items()})


def summarise(options: BenchOptions, results: Sequence[LoadResult]) -> dict[str, Any]:
    """The results for programs; figures over the rounds are a median with its interval."""
    return {
        "benchmark": "scheduler",
        "options": asdict(options),
        "versions": versions(),
        "machine": machine(),
        "loads": [_summary(result) for result in results],
    }


def _summary(result: LoadResult) -> dict[str, Any]:
    per_block = result.added_us_per_evicted_block()
    return {
        "load": asdict(result.load),
        "arms": {
            arm: {
                "cpu_ms_per_step": asdict(result.cpu_ms_per_step(arm)),
                "ratio_to_stock": asdict(result.ratio(arm)),
                "requests_per_step": result.per_step(arm, "requests"),
                "cached_token_share": result.per_step(arm, "cached_tokens")
                / max(1e-9, result.per_step(arm, "prompt_tokens")),
            }
            for arm in ARMS
        },
        "added_ms_per_step": asdict(result.added_ms_per_step()),
        "added_us_per_evicted_block": None if per_block is None else asdict(per_block),
        "evicted_blocks_per_step": result.per_step(SAGA, "evicted_blocks"),
        "peak_index": result.peak,
    }
