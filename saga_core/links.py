"""Whose answers a request waits for, told by what it says and when.

Agents of one task call each other through code that no request shows: a coordinator names its
specialists, each of them begins a conversation of its own, and the next prompt of the coordinator
holds what they found, word by word, in other words, or not at all. No text is kept: of answers and
openings hashes of words are known for a short while.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from saga_core.conversations import Kind, Piece

# Words that carry a topic; shorter ones are mostly grammar.
_WORD = re.compile(r"[^\W\d_]{5,}")
_MAX_WORDS = 128
_MAX_CHARS = 2000
# Words are compared with the last answers only: a call follows its cause within seconds.
_MAX_RECENT = 32
_RECENT_S = 60.0
# After this much silence a task sends nobody any more.
_SILENT_S = 10.0
# A text that has more than half of an answer's words tells it again; few words are in it by chance.
# Of another task than the one that it goes on with, it must have nearly all: those of one workflow
# say much the same.
_QUOTED_SHARE = 0.55
_MIN_QUOTED_WORDS = 6
_FULL_SHARE = 0.9
# A specialist's task takes up a part of what was said before it; one or two words are in any two
# texts. What only the question said counts a fifth, and so is never enough: requests that a client
# fills in from one form have all that in common, and do not know of each other.
_SENT_SHARE = 0.21
_ASKED_PART = 5
_MIN_SENT_WORDS = 3
# What is as short as "Done." was said by many.
_MIN_ANSWER_CHARS = 16
_MAX_LOOKED_AT = 64
_ANSWER_PIECES = 4
_MAX_SAYING = 8
_MAX_FORMS = 4096
# Of a word that one task uses. A whole number with many divisors: sums do not depend on the order.
_WEIGHT = 5040


class WordReader:
    """Reads the words of texts as keyed hashes, which mean nothing in another process."""

    def __init__(self, secret: bytes) -> None:
        self._prefix = secret.hex()

    def read(self, texts: Iterable[str]) -> frozenset[int]:
        """The first words of five letters and more; texts beyond the first 2,000 characters in
        all are not looked at."""
        words: dict[int, None] = {}
        room = _MAX_CHARS
        for text in texts:
            for word in _WORD.findall(text[:room].lower()):
                words[hash(self._prefix + word)] = None
            room -= len(text)
            if room <= 0 or len(words) >= _MAX_WORDS:
                break
        return frozenset(itertools.islice(words, _MAX_WORDS))


@dataclass(slots=True, eq=False)
class _Step:
    """A request.

    Attributes:
        number: counts requests in the order of their arrival.
        task: number of the first request of its task.
        asked: digest of its prompt's last piece.
        parents, children: numbers of the requests whose answers it waited for, and the converse.
        is_sent: it opens a conversation that its parent's answer caused.
        is_main: it is not said by one that was sent.
        words: of its prompt, then also of its answer; dropped when it is no longer recent.
        said: digests under which it is found.
    """

    key: str
    scope: int
    number: int
    task: int
    asked: int
    parents: tuple[int, ...]
    is_sent: bool
    is_main: bool
    words: frozenset[int]
    answer_words: frozenset[int] = frozenset()
    answered_s: float | None = None
    children: list[int] = field(default_factory=list)
    said: list[int] = field(default_factory=list)


class Links:
    """Edges between the requests of tasks.

    A request waits for

    1. the requests whose answers are in its prompt word by word, or with most of their words, and
       the one of whose tool calls its opening is an argument;
    2. where it goes on from an answer that has sent others: for those of them that have answered;
    3. where nothing of that is found: for the one that has sent it, the coordinator's last one in
       the task that was active a moment ago and in which most words of its opening were used, each
       counting the less the more tasks used it. Not so if its system prompt, or that it has none,
       was first seen where a task begins: runs of one workflow have most words in common.

    Only direct edges are told: none from a request that another of them has waited for.

    Args:
        max_steps: the oldest requests are forgotten beyond this many, of all scopes together.
    """

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._numbers = itertools.count()
        self._steps: OrderedDict[int, _Step] = OrderedDict()
        self._running: dict[str, int] = {}
        self._saying: dict[tuple[int, int], list[int]] = {}
        self._recent: dict[int, deque[int]] = {}
        self._opens_tasks: OrderedDict[tuple[int, int], bool] = OrderedDict()

    def __len__(self) -> int:
        return len(self._steps)

    def arrived(
        self,
        scope: int,
        key: str,
        prompt: Sequence[Piece],
        words: frozenset[int],
        now_s: float,
        known: int = 0,
    ) -> tuple[str, ...]:
        """A request has come: the keys of those that it waited for, the first that came first.

        Args:
            scope: tasks of two scopes, such as tenants, never meet.
            words: of the system prompt and what was said last, if the prompt opens a session; else
                none.
            known: leading pieces that its session has had, the last answer among them.
        """
        recent = self._lately(scope, now_s) if words else []
        has_begun = any(piece.kind is Kind.ASSISTANT for piece in prompt)
        system = next((piece.digest for piece in prompt if piece.kind is Kind.SYSTEM), 0)
        opens_task = not has_begun and self._opens_tasks.get((scope, system), False)
        found = self._held(scope, prompt, known)
        tasks = {step.task for step in found}
        found += _quoted(words, recent, tasks, may_retell=not (opens_task and system))
        direct = self._direct(found)
        parents = self._with_sent(direct)
        is_collecting = len(parents) > 1 and not any(parent.is_main for parent in parents)
        if not parents and not opens_task:
            parents = self._senders(words, recent, now_s)
        if not has_begun:
            self._add_form((scope, system), not parents)
        is_main = not parents or is_collecting or (has_begun and any(s.is_main for s in direct))
        step = _Step(
            key,
            scope,
            number := next(self._numbers),
            parents[0].task if parents else number,
            prompt[-1].digest if prompt else 0,
            tuple(parent.number for parent in parents),
            bool(parents) and not has_begun and not is_collecting,
            is_main,
            words,
        )
        for parent in parents:
            parent.children.append(number)
        self._steps[number] = step
        self._running[key] = number
        if len(self._steps) > self._max_steps:
            self._forget(self._steps.popitem(last=False)[1])
        return tuple(parent.key for parent in parents)

    def answered(
        self,
        key: str,
        answer: Sequence[Piece],
        words: frozenset[int],
        now_s: float,
        arguments: Iterable[Piece] = (),
    ) -> None:
        """The request has been answered.

        Args:
            words: of the answer's text and the arguments of its tool calls.
            arguments: the texts among these arguments, each as the message of a user.
        """
        step = self._steps.get(self._running.pop(key, -1))
        if step is None:
            return
        step.answered_s, step.answer_words, step.words = now_s, words, step.words | words
        for piece in (*answer, *arguments):
            if piece.size >= _MIN_ANSWER_CHARS:
                saying = self._saying.setdefault((step.scope, piece.digest), [])
                if len(saying) < _MAX_SAYING and step.number not in saying:
                    saying.append(step.number)
                    step.said.append(piece.digest)
        recent = self._recent.setdefault(step.scope, deque())
        recent.append(step.number)
        if len(recent) > _MAX_RECENT:
            _drop_words(self._steps.get(recent.popleft()))

    def failed(self, key: str) -> None:
        """The request has not been answered; nobody waits for it."""
        _drop_words(self._steps.get(self._running.pop(key, -1)))

    def _add_form(self, form: tuple[int, int], opens_task: bool) -> None:
        """The first opening with a system prompt says what all of them are."""
        self._opens_tasks.setdefault(form, opens_task)
        if len(self._opens_tasks) > _MAX_FORMS:
            self._opens_tasks.popitem(last=False)

    def _forget(self, step: _Step) -> None:
        if self._running.get(step.key) == step.number:
            del self._running[step.key]
        for digest in step.said:
            saying = self._saying[step.scope, digest]
            saying.remove(step.number)
            if not saying:
                del self._saying[step.scope, digest]
        recent = self._recent.get(step.scope)
        if recent is not None and not any(number in self._steps for number in recent):
            del self._recent[step.scope]

    def _lately(self, scope: int, now_s: float) -> list[_Step]:
        """The last answered requests, the oldest first."""
        steps = self._known(self._recent.get(scope, ()))
        return [step for step in steps if _age_s(step, now_s) <= _RECENT_S]

    def _known(self, numbers: Iterable[int]) -> Iterator[_Step]:
        steps = self._steps
        return (steps[number] for number in numbers if number in steps)

    # What a prompt holds

    def _held(self, scope: int, prompt: Sequence[Piece], known: int) -> list[_Step]:
        """Requests whose answers or tool arguments are among the last pieces of a prompt.

        Of more that said the same, the one that was asked what stands before it, else the last.
        """
        found: list[_Step] = []
        first = max(0, known - _ANSWER_PIECES, len(prompt) - _MAX_LOOKED_AT)
        for at in range(len(prompt) - 1, first - 1, -1):
            saying = self._saying.get((scope, prompt[at].digest))
            if not saying:
                continue
            steps = list(self._known(saying))
            before = prompt[at - 1].digest if at else 0
            asked = [step for step in steps if step.asked == before]
            found.append((asked or steps)[-1])
        return found

    def _direct(self, found: Iterable[_Step]) -> list[_Step]:
        """Those that no other of them waited for; by number."""
        steps = sorted({step.number: step for step in found}.values(), key=lambda s: -s.number)
        direct: list[_Step] = []
        before: set[int] = set()
        for step in steps:
            if step.number not in before:
                direct.append(step)
                self._add_ancestors(step, steps[-1].number, before)
        return direct[::-1]

    def _add_ancestors(self, step: _Step, first: int, ancestors: set[int]) -> None:
        """Add the numbers of what the step waited for, as far back as the first."""
        numbers = [step.number]
        while numbers:
            above = {n for step in self._known(numbers) for n in step.parents if n >= first}
            numbers = list(above - ancestors)
            ancestors |= above

    # Who was sent

    def _with_sent(self, steps: Iterable[_Step]) -> list[_Step]:
        """Those that they have sent and that have answered stand in for the senders."""
        result: dict[int, _Step] = {}
        for step in steps:
            for end in self._ends(step) or (step,):
                result[end.number] = end
        return [result[number] for number in sorted(result)]

    def _ends(self, step: _Step) -> list[_Step]:
        """The last answers of those that a request has sent, where nobody waited for them yet."""
        ends = []
        numbers = {child.number for child in self._known(step.children) if child.is_sent}
        seen: set[int] = set()
        while numbers:
            seen |= numbers
            children = list(self._known(sorted(numbers)))
            ends += [step for step in children if not step.children and step.answered_s is not None]
            numbers = {number for step in children for number in step.children} - seen
        return ends

    def _senders(self, words: frozenset[int], recent: Sequence[_Step], now_s: float) -> list[_Step]:
        """The request that has sent an opening; none when no task fits."""
        shared: dict[int, frozenset[int]] = {}
        for step in recent:
            shared[step.task] = shared.get(step.task, frozenset()) | (words & step.words)
        tasks = Counter(word for of in shared.values() for word in of)
        weights = {word: _WEIGHT // max(1, tasks[word]) for word in words}
        best, most = None, int(_SENT_SHARE * sum(weights.values()))
        for step in recent:
            common = words & step.words
            weight = sum(
                weights[word] // (1 if word in step.answer_words else _ASKED_PART)
                for word in common
            )
            if len(common) >= _MIN_SENT_WORDS and weight >= most:
                best, most = step, weight
        if best is None:
            return []
        of_task = [step for step in recent if step.task == best.task]
        if _age_s(of_task[-1], now_s) > _SILENT_S:
            return []
        return [step for step in of_task if step.is_main][-1:] or [best]


def _quoted(
    words: frozenset[int], recent: Iterable[_Step], tasks: set[int], *, may_retell: bool
) -> list[_Step]:
    """Requests most words of whose answers are among these, and are of these tasks.

    If there are no tasks: of the task with most of an answer, if the words may retell it, and what
    is repeated in full.
    """
    shares = [
        (len(words & step.answer_words) / len(step.answer_words), step)
        for step in recent
        if len(step.answer_words) >= _MIN_QUOTED_WORDS
    ]
    if tasks or not shares:
        return [step for share, step in shares if share >= _QUOTED_SHARE and step.task in tasks]
    _, best = max(shares, key=lambda found: (found[0], found[1].number))
    likely = {best.task} if may_retell else set()
    return [
        step
        for share, step in shares
        if share >= (_QUOTED_SHARE if step.task in likely else _FULL_SHARE)
    ]


def _age_s(step: _Step, now_s: float) -> float:
    return now_s - step.answered_s if step.answered_s is not None else float("inf")


def _drop_words(step: _Step | None) -> None:
    if step is not None:
        step.words = step.answer_words = frozenset()
