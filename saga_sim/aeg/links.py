"""Edges between requests, inferred from recorded spans with their ids hidden, and their score."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from saga_sim.aeg.exchanges import Exchange
from saga_sim.aeg.identification import replay

Edge = tuple[str, str]
"""Names of two requests; the second waited for the answer to the first."""


@dataclass(frozen=True, slots=True)
class EdgeScore:
    """Inferred edges against true ones; scores of several recordings add up."""

    found: int = 0
    inferred: int = 0
    true: int = 0

    @property
    def precision(self) -> float:
        return self.found / self.inferred if self.inferred else 1.0

    @property
    def recall(self) -> float:
        return self.found / self.true if self.true else 1.0

    def __add__(self, other: EdgeScore) -> EdgeScore:
        return EdgeScore(
            self.found + other.found, self.inferred + other.inferred, self.true + other.true
        )


def read_spans(path: Path) -> list[Exchange]:
    """The LLM calls of a JSON object with ``spans``; times count from the first one's start."""
    exchanges = []
    for span in json.loads(path.read_text())["spans"]:
        attributes = span["attributes"]
        answer, calls = _answer(attributes)
        exchanges.append(
            Exchange(
                span["span_id"],
                path.stem,
                _seconds(span["start_time"]),
                _seconds(span["end_time"]),
                "chat",
                {"messages": _parsed(attributes["gen_ai.input.messages"])},
                answer,
                calls,
            )
        )
    first_s = min((each.start_s for each in exchanges), default=0.0)
    return [each.shifted(-first_s) for each in exchanges]


def infer_edges(exchanges: Iterable[Exchange]) -> frozenset[Edge]:
    """Edges as a gateway sees them: from contents and times."""
    told = replay(exchanges)
    return frozenset((parent, each.exchange.name) for each in told for parent in each.parents)


def score_edges(inferred: AbstractSet[Edge], true: AbstractSet[Edge]) -> EdgeScore:
    """How many of the edges are right, and found."""
    return EdgeScore(len(inferred & true), len(inferred), len(true))


def _answer(attributes: Mapping[str, Any]) -> tuple[str, tuple[tuple[str, str], ...]]:
    messages = _parsed(attributes.get("gen_ai.output.messages", "[]"))
    text = attributes.get("gen_ai.output.text") or "".join(
        message.get("content") or "" for message in messages
    )
    functions = [call["function"] for each in messages for call in each.get("tool_calls") or ()]
    return text, tuple((of["name"], of["arguments"]) for of in functions)


def _parsed(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()
