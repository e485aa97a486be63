"""How well sessions and tasks are told apart by the content of requests alone."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from saga_core.conversations import Conversations, Match, Relation
from saga_core.links import Links, WordReader
from saga_core.prompts import PromptReader
from saga_sim.aeg.exchanges import Exchange, in_time
from saga_sim.aeg.texts import answer_texts, as_user, prompt_texts
from saga_sim.traces.source import Source

_SECRET = b"evaluation"
_MAX_SESSIONS = 10_000
_SCOPE = 1


@dataclass(frozen=True, slots=True)
class Told:
    """What a request was told to be.

    Attributes:
        session_id: the session that it was counted to.
        parents: names of the requests that it waited for.
    """

    exchange: Exchange
    match: Match
    parents: tuple[str, ...]

    @property
    def session_id(self) -> str:
        return self.match.session_id


@dataclass(frozen=True, slots=True)
class Identification:
    """How groups of requests agree with their true owners.

    Attributes:
        requests, scored: those whose text cannot tell two owners apart are not scored.
        precision: of pairs of requests that were put together, the share that belong together.
        recall: of pairs that belong together, the share that were put together.
        purity: share of requests that are of the owner that their group has most of.
        merged: groups with requests of two owners.
        relations: requests by what they were to their session.
        forks, right_forks: branches by the parent that was told.
    """

    requests: int
    scored: int
    groups: int
    owners: int
    precision: float
    recall: float
    purity: float
    merged: int
    relations: dict[str, int]
    forks: int
    right_forks: int


def replay(exchanges: Iterable[Exchange]) -> list[Told]:
    """Tell sessions and edges as a gateway does: requests and answers in the order of time."""
    reader, word_reader = PromptReader(_SECRET), WordReader(_SECRET)
    numbers = itertools.count()
    conversations = Conversations(_MAX_SESSIONS, lambda: f"s{next(numbers)}")
    links = Links(_MAX_SESSIONS)
    told: dict[str, Told] = {}
    for event in in_time(exchanges):
        each = event.exchange
        if event.is_start:
            prompt = reader.read(each.api, each.body)
            pieces = prompt.pieces if prompt is not None else ()
            is_plain = each.api == "completions" and pieces
            digest_of = reader.digest_of(each.body) if is_plain else None
            match = conversations.arrived(_SCOPE, pieces, digest_of)
            goes_on = match.relation in (Relation.CONTINUES, Relation.RETRY)
            words = word_reader.read(() if goes_on else prompt_texts(each))
            known = match.known_pieces if match.relation is Relation.CONTINUES else 0
            parents = links.arrived(_SCOPE, each.name, pieces, words, event.now_s, known)
            told[each.name] = Told(each, match, parents)
        elif each.is_answered:
            answer = reader.answer(each.answer, each.calls)
            texts = answer_texts(each)
            arguments = [piece for text in texts[1:] for piece in as_user(reader, text)]
            conversations.answered(told[each.name].session_id, answer)
            links.answered(each.name, answer, word_reader.read(texts), event.now_s, arguments)
        else:
            conversations.failed(told[each.name].session_id)
            links.failed(each.name)
    return list(told.values())


def sessions(told: Sequence[Told]) -> Identification:
    """Score sessions against conversations."""
    return _scored(told, lambda each: each.session_id, lambda each: each.exchange.owner)


def tasks(told: Sequence[Told], *, with_links: bool) -> Identification:
    """Score tasks: sessions, joined with those they branched from and, with links, waited for."""
    of_request = {each.exchange.name: each.session_id for each in told}
    joined: dict[str, str] = {}

    def task(session_id: str) -> str:
        while session_id in joined:
            session_id = joined[session_id]
        return session_id

    for each in told:
        others = [each.match.parent_id] if each.match.parent_id is not None else []
        if with_links:
            others += [of_request[parent] for parent in each.parents]
        for other in others:
            one, two = task(each.session_id), task(other)
            if one != two:
                joined[one] = two
    parent_of = {each.exchange.owner: each.exchange.parent for each in told}

    def true_task(each: Told) -> str:
        owner = each.exchange.owner
        while (parent := parent_of.get(owner)) is not None:
            owner = parent
        return owner

    return _scored(told, lambda each: task(each.session_id), true_task)


def _scored(
    told: Sequence[Told], group_of: Callable[[Told], str], owner_of: Callable[[Told], str]
) -> Identification:
    owners_of: dict[str, set[str]] = defaultdict(set)
    for each in told:
        owners_of[_content(each.exchange)].add(owner_of(each))
    scored = [each for each in told if len(owners_of[_content(each.exchange)]) == 1]
    scored = [each for each in scored if _content(each.exchange)]
    cells = Counter((group_of(each), owner_of(each)) for each in scored)
    groups: Counter[str] = Counter()
    owners: Counter[str] = Counter()
    most: dict[str, int] = {}
    for (group, owner), count in cells.items():
        groups[group] += count
        owners[owner] += count
        most[group] = max(count, most.get(group, 0))
    together = _pairs(cells.values())
    in_group, in_owner = _pairs(groups.values()), _pairs(owners.values())
    forks, right = _forks(told)
    return Identification(
        requests=len(told),
        scored=len(scored),
        groups=len(groups),
        owners=len(owners),
        precision=together / in_group if in_group else 1.0,
        recall=together / in_owner if in_owner else 1.0,
        purity=sum(most.values()) / len(scored) if scored else 1.0,
        merged=sum(count > most[group] for group, count in groups.items()),
        relations=dict(sorted(Counter(each.match.relation.value for each in told).items())),
        forks=forks,
        right_forks=right,
    )


def _forks(told: Sequence[Told]) -> tuple[int, int]:
    """True branches, and those of them whose parent was told."""
    first: dict[str, Told] = {}
    session_of: dict[str, set[str]] = defaultdict(set)
    for each in told:
        first.setdefault(each.exchange.owner, each)
        session_of[each.exchange.owner].add(each.session_id)
    branches = [each for each in first.values() if each.exchange.parent is not None]
    right = [
        each for each in branches if each.match.parent_id in session_of[each.exchange.parent or ""]
    ]
    return len(branches), len(right)


def _content(exchange: Exchange) -> str:
    """What the client says; "" when that is nothing."""
    if exchange.api == "completions":
        return str(exchange.body["prompt"])
    return json.dumps(exchange.body["messages"])


def _pairs(counts: Iterable[int]) -> int:
    return sum(count * (count - 1) // 2 for count in counts)


def read_flat(paths: Iterable[Path], within_s: float, seed: int) -> list[Exchange]:
    """Recordings of flat prompts (``timestamp`` in µs, ``input``, ``output``, ``session_id``).

    Each starts at random within a short time of the others; recorded times within it are kept.
    An answer comes before the task's next request, after half the time until then.
    """
    rng = random.Random(seed)
    exchanges = []
    for path in sorted(paths):
        records = sorted(Source(path).records(), key=lambda record: record.integer("timestamp"))
        times_us = [record.integer("timestamp") for record in records]
        shift_s = rng.uniform(0.0, within_s) - (times_us[0] / 1e6 if times_us else 0.0)
        times = [time_us / 1e6 + shift_s for time_us in times_us]
        for i, record in enumerate(records):
            next_s = times[i + 1] if i + 1 < len(times) else times[i] + 1.0
            exchanges.append(
                Exchange(
                    f"{path.name}/{i:05}",
                    record.name("session_id"),
                    times[i],
                    (times[i] + next_s) / 2,
                    "completions",
                    {"prompt": record.text("input")},
                    record.text("output", ""),
                )
            )
    return exchanges
