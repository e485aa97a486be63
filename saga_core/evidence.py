"""What one workflow, or all of them, has shown: counts that decay."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from saga_core.fields import fields_of, items_of, number_of, numbers
from saga_core.transitions import MAX_TIME_S, Context, Node, Transitions, node_of

MAX_NODES = 256
MAX_STEP = 2**20
_NUM_STRETCHES = 21


History = tuple[Node, ...]
"""The last nodes of a session, two at most, the latest last."""


def stretch_of(step: int) -> int:
    """Number of the stretch of steps that holds ``step`` (from 0): 0, 1-2, 3-6, 7-14 and so on."""
    return min((step + 1).bit_length() - 1, _NUM_STRETCHES - 1)


class NodeSums:
    """What the steps of a node were, as decayed sums.

    Attributes:
        steps, output_tokens: how many there were, and the tokens of their answers.
        observed, observation_tokens: how often a next step brought what their tool returned, and
            the tokens of it.
    """

    __slots__ = ("observation_tokens", "observed", "output_tokens", "steps")

    def __init__(self) -> None:
        self.steps = self.output_tokens = self.observed = self.observation_tokens = 0.0

    def add(
        self, steps: float, output_tokens: float, observed: float, observation_tokens: float
    ) -> None:
        """Add to the sums."""
        self.steps += steps
        self.output_tokens += output_tokens
        self.observed += observed
        self.observation_tokens += observation_tokens

    def scale(self, factor: float) -> None:
        """Multiply the sums."""
        self.steps *= factor
        self.output_tokens *= factor
        self.observed *= factor
        self.observation_tokens *= factor

    def as_list(self) -> list[float]:
        """The sums in the order of ``add``."""
        return [self.steps, self.output_tokens, self.observed, self.observation_tokens]


class Evidence:
    """Decayed evidence of one workflow, or of all.

    Attributes:
        weight: what a count made now weighs; a count divided by it is a number of things.
        tasks: sessions that came to their end.
        steps, familiar: steps that were seen while it was cold; and those of them whose
            predecessor other workflows knew.
        learned: how often something was learned.
        worked_out: what follows from it, by where a session stands, and as of which ``learned``;
            kept for those who work it out.
    """

    def __init__(self, half_life_s: float) -> None:
        self.learned = 0
        self.worked_out: dict[tuple[History, int], tuple[int, Any]] = {}
        self.transitions = Transitions(half_life_s)
        self.weight = 1.0
        self.tasks = self.steps = self.familiar = 0.0
        self._nodes: OrderedDict[Node, NodeSums] = OrderedDict()
        self._all = NodeSums()
        # By stretch: steps in it whose session came to its end, and the steps that came after them.
        self._left = [[0.0, 0.0] for _ in range(_NUM_STRETCHES)]

    @property
    def nodes(self) -> OrderedDict[Node, NodeSums]:
        """The nodes, least recently used first."""
        return self._nodes

    def advance(self, now_s: float) -> None:
        """Let it be ``now_s``."""
        factor = self.transitions.clock.advance(now_s)
        self.weight = self.transitions.clock.weight
        if factor != 1.0:
            self._scale(factor)

    # Learning

    def step(
        self, history: History, stretch: int | None, node: Node, overlap: float | None
    ) -> None:
        """A session that stood after ``history`` took a step that was ``node``.

        Args:
            stretch: that of the last step of the history; None: it does not count.
            overlap: share of the last step's cached prefix that this one began with, 0 to 1.
        """
        count = self.weight
        self.learned += 1
        touch = self.transitions.touch
        every, after = touch(()), touch(history[-1:])
        num_new = every.add(node, count) + after.add(node, count)
        if len(history) > 1:
            num_new += touch(history).add(node, count)
        self.transitions.num_nexts += num_new
        if stretch is not None:
            touch((stretch, history[-1])).went += count
        if overlap is not None:
            for seen in (every, after):
                seen.known += count
                seen.reused += count * overlap

    def size(
        self, node: Node, output_tokens: int | None, observed: tuple[Node, int] | None
    ) -> None:
        """A step had so long an answer, and its prompt so much from the tool of the one before."""
        count = self.weight
        tokens = count * max(output_tokens or 0, 0)
        for sums in (self._node(node), self._all):
            sums.steps += count
            sums.output_tokens += tokens
        if observed is not None:
            sums = self._node(observed[0])
            sums.observed += count
            sums.observation_tokens += count * max(observed[1], 0)

    def end(self, history: History, stretch: int | None, step: int) -> None:
        """A session ended that stood after ``history``, its last step number ``step``."""
        count = self.weight
        last = history[-1]
        contexts: tuple[Context, ...] = ((), (last,), history)[: 1 + len(history)]
        for context in contexts if stretch is None else (*contexts, (stretch, last)):
            self.transitions.touch(context).ended += count
        self._lasted(step)

    def _lasted(self, step: int) -> None:
        for stretch in range(stretch_of(step) + 1):
            first, last = 2**stretch - 1, min(2 ** (stretch + 1) - 2, step)
            steps = last - first + 1
            self._left[stretch][0] += self.weight * steps
            self._left[stretch][1] += self.weight * steps * (step - 0.5 * (first + last))

    def _node(self, node: Node) -> NodeSums:
        sums = self._nodes.get(node)
        if sums is None:
            sums = self._nodes[node] = NodeSums()
            if len(self._nodes) > MAX_NODES:
                self._nodes.popitem(last=False)
        else:
            self._nodes.move_to_end(node)
        return sums

    def declare(self, node: Node, sums: list[float]) -> None:
        """Add a node's sums, in the order of ``NodeSums.add``."""
        weighed = [self.weight * each for each in sums]
        self._node(node).add(*weighed)
        self._all.add(*weighed)

    # What it knows

    def steps_left(self, stretch: int) -> tuple[float, float]:
        """Steps that came after ones in the stretch on average, and how many such there were."""
        counted, left = self._left[stretch]
        return (left / counted if counted else 0.0), counted / self.weight

    def mean_output_tokens(self) -> float:
        """Tokens of an answer on average over all nodes; 0 where there is none."""
        return self._all.output_tokens / self._all.steps if self._all.steps else 0.0

    # State

    def merge(self, other: Evidence) -> None:
        """Add what another graph has seen; evidence of both must be apart."""
        mine, theirs = self.transitions.clock, other.transitions.clock
        if theirs.landmark_s is None:
            return
        # The later landmark counts, so that neither grows.
        landmark_s = max(theirs.landmark_s, mine.landmark_s or theirs.landmark_s)
        self._scale(mine.move(landmark_s))
        half_life_s = mine.half_life_s
        factor = 2.0 ** ((theirs.landmark_s - landmark_s) / half_life_s)
        self.transitions.merge(other.transitions, factor)
        self.learned += other.learned
        self.worked_out.clear()
        self.tasks += factor * other.tasks
        self.steps += factor * other.steps
        self.familiar += factor * other.familiar
        for node, sums in other._nodes.items():
            self._node(node).add(*(factor * each for each in sums.as_list()))
        self._all.add(*(factor * each for each in other._all.as_list()))
        for own, added in zip(self._left, other._left, strict=True):
            own[0] += factor * added[0]
            own[1] += factor * added[1]
        self.advance(theirs.now_s)

    def state(self) -> dict[str, Any]:
        """All that it holds, as values of JSON."""
        clock = self.transitions.clock
        numbers_of: dict[Node, int] = {node: at for at, node in enumerate(self._nodes)}
        contexts = self.transitions.state(numbers_of)
        return {
            "landmark_s": clock.landmark_s,
            "now_s": clock.now_s if clock.landmark_s is not None else None,
            "tasks": self.tasks,
            "steps": self.steps,
            "familiar": self.familiar,
            "nodes": [list(node) for node in numbers_of],
            "sums": [sums.as_list() for sums in self._nodes.values()],
            "all": self._all.as_list(),
            "left": [list(each) for each in self._left],
            "contexts": contexts,
        }

    @classmethod
    def from_state(cls, state: Any, half_life_s: float, where: str) -> Evidence:
        """What ``state`` gave.

        Raises:
            StateError: it is not such a state.
        """
        fields = fields_of(state, where)
        evidence = cls(half_life_s)
        evidence.tasks = number_of(fields, "tasks", where)
        evidence.steps = number_of(fields, "steps", where)
        evidence.familiar = min(number_of(fields, "familiar", where), evidence.steps)
        nodes = [node_of(pair, place) for pair, place in items_of(fields, "nodes", f"{where}.")]
        for (sums, place), node in zip(items_of(fields, "sums", f"{where}."), nodes, strict=False):
            evidence._node(node).add(*numbers(sums, 4, place))
        for (left, place), own in zip(
            items_of(fields, "left", f"{where}."), evidence._left, strict=False
        ):
            own[:] = numbers(left, 2, place)
        evidence._all.add(*numbers(fields.get("all"), 4, f"{where}.all"))
        evidence.transitions.load(fields, nodes, where)
        if fields.get("landmark_s") is not None:
            landmark_s = number_of(fields, "landmark_s", where, least=-MAX_TIME_S, most=MAX_TIME_S)
            now_s = number_of(fields, "now_s", where, least=landmark_s, most=MAX_TIME_S)
            evidence.transitions.clock.move(landmark_s)
            evidence.advance(now_s)
        return evidence

    def check_integrity(self) -> None:
        """Raise AssertionError when it contradicts itself."""
        self.transitions.check_integrity()
        if len(self._nodes) > MAX_NODES:
            raise AssertionError("more nodes than are allowed")
        sums = [each for sums in self._nodes.values() for each in sums.as_list()]
        left = [each for both in self._left for each in both]
        for number in (self.tasks, self.steps, self.familiar, *sums, *left):
            if not 0.0 <= number < float("inf"):
                raise AssertionError(f"{number} is not a count")

    def _scale(self, factor: float) -> None:
        self.transitions.scale(factor)
        self.tasks *= factor
        self.steps *= factor
        self.familiar *= factor
        for sums in (self._all, *self._nodes.values()):
            sums.scale(factor)
        self._left = [[factor * each for each in both] for both in self._left]
