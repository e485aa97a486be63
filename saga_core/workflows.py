"""Which workflow a request belongs to when nobody says: by what all runs of one have in common."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

_SHAPES_PER_CLASS = 8
_MAX_SHARING = 16
# Runs of a workflow may fill most of a prompt with what is their own, below a first line that
# they have in common. With another first line they must be nearly the same.
_SHARE_UNDER_ONE_TITLE = 0.1
_SHARE_ELSE = 0.7

PLAIN = "plain"
"""The workflow of requests that have nothing in common with any others."""


@dataclass(frozen=True, slots=True)
class Template:
    """What a request shows of its workflow, as keyed hashes.

    Attributes:
        kind: of its model and the names of its tools: equal in all runs.
        lines: of its system prompt, in order, without values; of its first message where there is
            neither a system prompt nor a tool.
        is_stable: whether there is one of the two.
    """

    kind: int
    lines: tuple[int, ...]
    is_stable: bool


@dataclass(slots=True, eq=False)
class _Class:
    name: str
    key: tuple[int, int]
    lines: frozenset[int]
    runs: int = 0


class WorkflowClasses:
    """Workflows told apart by their templates; the least recently seen goes first.

    Requests with the same model and tools belong together when their system prompts begin alike
    and share a tenth of their lines, or share seven tenths however they begin. A first message
    alone makes a workflow only once a second one is like it.

    Args:
        max_classes: how many are remembered.
    """

    def __init__(self, max_classes: int = 1000) -> None:
        self._max_classes = max_classes
        self._classes: OrderedDict[_Class, None] = OrderedDict()
        self._by_title: dict[tuple[int, int], list[_Class]] = {}
        self._by_line: dict[tuple[int, int], list[_Class]] = {}
        self._by_shape: OrderedDict[tuple[int, int], _Class | None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._classes)

    def known(self, scope: int, shape: int) -> str | None:
        """The workflow of a prompt of this shape, if one has been seen; cheap."""
        if (scope, shape) not in self._by_shape:
            return None
        found = self._by_shape[scope, shape]
        if found is None:
            return PLAIN
        if found not in self._classes:
            del self._by_shape[scope, shape]
            return None
        self._by_shape.move_to_end((scope, shape))
        self._classes.move_to_end(found)
        return found.name

    def learn(self, scope: int, shape: int, template: Template) -> str:
        """The workflow of a prompt with this template; a new one when it is like no other."""
        found = self._learn(scope, template) if template.lines else None
        self._by_shape[scope, shape] = found
        if len(self._by_shape) > _SHAPES_PER_CLASS * self._max_classes:
            self._by_shape.popitem(last=False)
        return PLAIN if found is None else found.name

    def _learn(self, scope: int, template: Template) -> _Class | None:
        kind = hash((scope, template.kind))
        found = self._find(kind, template)
        if found is None:
            found = self._begin(kind, template)
        found.runs += 1
        self._classes.move_to_end(found)
        return None if not template.is_stable and found.runs == 1 else found

    def check_integrity(self) -> None:
        """Raise AssertionError when the tables contradict each other."""
        assert len(self._classes) <= self._max_classes
        for table in (self._by_title, self._by_line):
            assert all(table.values())
            for entries in table.values():
                assert all(each in self._classes for each in entries)

    def _find(self, kind: int, template: Template) -> _Class | None:
        lines = frozenset(template.lines)
        for known in self._by_title.get((kind, template.lines[0]), ()):
            if _overlap(known.lines, lines) >= _SHARE_UNDER_ONE_TITLE:
                return known
        shared: Counter[_Class] = Counter()
        for line in lines:
            shared.update(self._by_line.get((kind, line), ()))
        likely = (known for known, _ in shared.most_common(4))
        return next((each for each in likely if _overlap(each.lines, lines) >= _SHARE_ELSE), None)

    def _begin(self, kind: int, template: Template) -> _Class:
        lines = frozenset(template.lines)
        title = template.lines[0]
        number = len(self._by_title.get((kind, title), ()))
        # Of its content alone, so that replicas give it one name.
        name = f"wf-{hash((template.kind, title, number)) & 0xFFFFFFFFFFFF:012x}"
        made = _Class(name, (kind, title), lines)
        self._classes[made] = None
        alike = self._by_title.setdefault(made.key, [])
        if len(alike) < _MAX_SHARING:
            alike.append(made)
        for line in lines:
            sharing = self._by_line.setdefault((kind, line), [])
            if len(sharing) < _MAX_SHARING:
                sharing.append(made)
        if len(self._classes) > self._max_classes:
            self._forget(next(iter(self._classes)))
        return made

    def _forget(self, known: _Class) -> None:
        del self._classes[known]
        _remove(self._by_title, known.key, known)
        for line in known.lines:
            _remove(self._by_line, (known.key[0], line), known)
        known.lines = frozenset()  # Shapes that lead to it are dropped when they come again.


def _overlap(a: frozenset[int], b: frozenset[int]) -> float:
    return len(a & b) / len(a | b)


def _remove(table: dict[tuple[int, int], list[_Class]], key: tuple[int, int], gone: _Class) -> None:
    entries = table.get(key, [])
    if gone in entries:
        entries.remove(gone)
        if not entries:
            del table[key]
