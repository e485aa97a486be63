"""A worker of the simulated cluster alone, with requests that come when the test says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpu_backend.shadow import STOCK_ORDER
from gpu_backend.virtual_clock import VirtualClock
from gpu_backend.virtual_engine import Served, VirtualEngine
from gpu_backend.virtual_shape import EngineShape
from saga_core.notices import Notice
from saga_sim.cluster.cost import Measured, StepCost
from saga_sim.cluster.dispatch import Key
from saga_sim.cluster.events import Events
from saga_sim.cluster.workers import Worker

SIZE = 16
COST = Measured(1000.0, 0.01, 0.002, 1e-6)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: so many full blocks of a session, and some tokens more."""

    session: str
    blocks: int
    output_tokens: int = 1
    more_tokens: int = 4

    @property
    def prompt_tokens(self) -> int:
        return self.blocks * SIZE + self.more_tokens


@dataclass
class OneWorker:
    """See above. ``answered`` holds what is done, by number, in the order of the answers."""

    model: Path
    shape: EngineShape
    variables: Mapping[str, str] | None = None
    cost: StepCost = COST
    single_steps: bool = False
    sent_s: list[float] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    answered: dict[int, Served] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        self.events = Events(self.clock)
        policy = (self.variables or {}).get("SAGA_POLICY", STOCK_ORDER)
        config = self.shape.config(self.model, policy=policy)
        engine = VirtualEngine(self.shape, config, self.clock, self.variables)
        self.worker = Worker(
            0, engine, self.cost, self.events, self._take, self._answer, self.single_steps
        )

    @property
    def engine(self) -> VirtualEngine:
        return self.worker.engine

    def at(self, at_s: float, act: Callable[[], None]) -> None:
        self.events.at(at_s, act)

    def send(self, asked: Asked) -> int:
        """It arrives now; its number."""
        self.asked.append(asked)
        self.sent_s.append(self.clock.now_s)
        number = len(self.asked) - 1
        self.worker.inbox.append((0, number))
        self.worker.wake()
        return number

    def send_at(self, at_s: float, asked: Asked) -> None:
        self.at(at_s, lambda: void(self.send(asked)))

    def tell_at(self, at_s: float, notice: Notice) -> None:
        def tell() -> None:
            self.worker.notices.append(notice)
            self.worker.wake()

        self.at(at_s, tell)

    def run(self, until_s: float = 1e6) -> None:
        """Until nothing happens any more, or then."""
        stop: list[bool] = []
        self.at(until_s, lambda: stop.append(True))
        with self.clock.stands_in():
            while len(self.events) and not stop:
                self.events.happen()
        assert self.engine.off_reason() is None

    def waited_s(self, number: int) -> float:
        """From the sending to the first token."""
        first_s = self.answered[number].first_token_s
        assert first_s is not None
        return first_s - self.sent_s[number]

    def _take(self, engine: VirtualEngine, key: Key) -> None:
        asked = self.asked[key[1]]
        full = (asked.prompt_tokens + asked.output_tokens) // SIZE
        engine.submit(
            key,
            [f"{asked.session} {place}".encode() for place in range(full)],
            prompt_tokens=asked.prompt_tokens,
            output_tokens=asked.output_tokens,
            session_id=asked.session if self.variables is not None else None,
            arrival_s=self.sent_s[key[1]],
        )

    def _answer(self, worker: Worker, served: Served) -> None:
        self.answered[served.key[1]] = served


def void(_: object) -> None:
    """Forget a result."""
