"""Which session a request continues, told by what it says alone.

Agents and chat programs send the whole conversation with every request. A request therefore goes on
with the session whose last prompt and answer it begins with. No text is kept: a prompt is a list of
:class:`Piece`, messages or blocks of plain text, of which only keyed hashes and lengths are known.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from saga_core.key_table import KeyTable
from saga_core.plain_text import DigestOf, Endings

_MAX_HEADS = 64
_MAX_ANCHORS = 64
_MAX_SHARING = 64
_MAX_LOOKED_AT = 100
# What a session is found by, at a hundred bytes each: few have all that one may have.
_MEAN_KEYS = 24
_MIN_ANCHOR_CHARS = 16
_ANCHORED_SHARE = 0.3
_EDITED_PIECES = 3


class Kind(StrEnum):
    """Whose words a piece are."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class Piece(NamedTuple):
    """A message, or a block of a prompt that is plain text.

    Attributes:
        digest: keyed hash of its content, 64 bits. Of a system prompt: of what stays the same of
            it from request to request, as far as that is known.
        size: its length in characters.
        kind: whose words it is.
    """

    digest: int
    size: int
    kind: Kind


class Relation(StrEnum):
    """What a request is to the session that it is counted to.

    NEW: it begins one. CONTINUES: it adds to all that was said. RETRY: it says the same again.
    SUPERSEDES: it goes on from an earlier point, or from a shortened history, which takes the
    place of what came after. FORK: it begins a session beside the one that it shares a beginning
    with.
    """

    NEW = "new"
    CONTINUES = "continues"
    RETRY = "retry"
    SUPERSEDES = "supersedes"
    FORK = "fork"


@dataclass(frozen=True, slots=True)
class Match:
    """The session of a request.

    Attributes:
        parent_id: of a fork: the session that it branches from.
        known_pieces: leading pieces of the prompt that the session, or its parent, has had.
    """

    session_id: str
    relation: Relation
    parent_id: str | None = None
    known_pieces: int = 0


@dataclass(slots=True, eq=False)
class _Session:
    """Of one session: where its last prompt ends, and what it can be known by.

    Attributes:
        parent_id: the session that it branched from.
        head, answer_head: chain keys of its last prompt, and of that with its answer.
        pieces, opening: how many pieces the last prompt had, and the first.
        running: requests of it that are being served.
        is_answered: its last request has been.
        heads: chain keys by which it is found, the oldest first.
        anchors: digests of its own pieces.
    """

    session_id: str
    scope: int
    parent_id: str | None = None
    head: int = 0
    answer_head: int | None = None
    pieces: int = 0
    opening: int = 0
    running: int = 0
    is_answered: bool = False
    heads: list[int] = field(default_factory=list)
    anchors: list[int] = field(default_factory=list)


class _Found(NamedTuple):
    session: _Session
    relation: Relation


class Conversations:
    """Sessions by what was said in them.

    A chain key stands for a prompt up to a piece. The longest leading part of a prompt that some
    session has had decides; sessions with equal openings are told apart by their answers. Where
    the beginning has changed (a reminder in the system prompt, a compacted or truncated history),
    the session counts that alone had the last answer or tool's result among them. Plain text goes
    on with the session whose whole last prompt it begins with, or that alone has grown like it.

    Args:
        max_sessions: the least recently used goes beyond this many, or beyond 24 keys for each of
            these, by which sessions are found; none that runs.
        new_id: makes the id of a session.
    """

    def __init__(self, max_sessions: int, new_id: Callable[[], str]) -> None:
        self._max_sessions = max_sessions
        self._new_id = new_id
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._waiting: dict[int, int] = {}  # Answer heads, and how many sessions wait with each.
        self._by_head = KeyTable[_Session](_MAX_HEADS, _MAX_SHARING)
        self._by_anchor = KeyTable[_Session](_MAX_ANCHORS, _MAX_SHARING)
        self._endings = Endings()

    def __len__(self) -> int:
        return len(self._sessions)

    def arrived(
        self, scope: int, prompt: Sequence[Piece], digest_of: DigestOf | None = None
    ) -> Match:
        """A request has come; its session runs from now on.

        Args:
            scope: conversations of two scopes, such as tenants, never meet.
            digest_of: given if the prompt is plain text, whose blocks are the pieces.
        """
        keys = _chain(scope, prompt)
        if digest_of is not None:
            found, known = self._find_plain([scope, *keys], prompt, digest_of)
        else:
            found, known = self._find(keys, prompt)
            if found is None or found.relation in (Relation.FORK, Relation.SUPERSEDES):
                # The words after the common beginning say more.
                found = self._find_anchored(scope, prompt[known:]) or found
        if found is None or found.relation in (Relation.NEW, Relation.FORK):
            session = self._begin(scope)
        else:
            session = found.session
        if not session.opening:
            session.opening = len(prompt)
        self._take(session, keys, prompt, len(prompt) if digest_of is not None else known)
        if digest_of is not None and prompt:
            for key in keys[max(session.opening, known) : -1][-_MAX_HEADS:]:
                self._add_head(session, key)
            end = sum(piece.size for piece in prompt)
            start, stem = end - prompt[-1].size, [scope, *keys][-2]
            self._endings.add(session.session_id, stem, start, end, digest_of(start, end))
        self._keep_bound()
        if found is None or found.relation is Relation.NEW:
            return Match(session.session_id, Relation.NEW)
        parent_id = found.session.session_id if found.relation is Relation.FORK else None
        session.parent_id = parent_id or session.parent_id
        return Match(session.session_id, found.relation, parent_id, known)

    def answered(self, session_id: str, answer: Sequence[Piece]) -> None:
        """The session's request has been answered; empty: with what nobody could read."""
        session = self._sessions.get(session_id)
        if session is None:
            return
        session.running = max(0, session.running - 1)
        session.is_answered = True
        if answer:
            head = _chain(session.head, answer)[-1]
            self._waits_with(session, head)
            self._add_head(session, head)
            for piece in answer:
                self._add_anchor(session, piece)

    def failed(self, session_id: str) -> None:
        """The session's request has not been answered."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.running = max(0, session.running - 1)

    def check_integrity(self) -> None:
        """Raise AssertionError when the tables contradict each other."""
        for table, name in ((self._by_head, "heads"), (self._by_anchor, "anchors")):
            listed = [(key, id(session)) for key, session in table.entries()]
            own = [(key, id(s)) for s in self._sessions.values() for key in getattr(s, name)]
            assert sorted(listed) == sorted(own)
        waiting = Counter(
            s.answer_head for s in self._sessions.values() if s.answer_head is not None
        )
        assert waiting == self._waiting
        self._endings.check_integrity()

    # By the chain

    def _find(self, keys: Sequence[int], prompt: Sequence[Piece]) -> tuple[_Found | None, int]:
        """The session that had the longest leading part; with how many pieces that has.

        One that waits with just this said goes before one that had more and has gone on: agents
        that are run again say again what others have said before them.
        """
        best: tuple[_Found | None, int] = (None, 0)
        for count in range(len(keys), 0, -1):
            key = keys[count - 1]
            is_waited_with = key in self._waiting
            if best[0] is not None and not is_waited_with:
                continue
            sessions = self._by_head.get(key)
            if is_waited_with:
                waiting = next((each for each in sessions if each.answer_head == key), None)
                if waiting is not None:
                    return _Found(waiting, Relation.CONTINUES), count
            if not sessions or best[0] is not None:
                continue
            found, known = self._nearest(sessions, key, count, prompt)
            is_retry = found.relation is Relation.RETRY and not found.session.is_answered
            if is_retry or found.relation in (Relation.NEW, Relation.CONTINUES):
                return found, known
            best = found, known
        return best

    def _nearest(
        self, sessions: Sequence[_Session], key: int, count: int, prompt: Sequence[Piece]
    ) -> tuple[_Found, int]:
        """Of the sessions that had ``count`` pieces of a prompt: the one that it belongs to."""
        unsure = []
        for session in reversed(sessions):
            relation, is_sure = self._relation(session, key, count, prompt)
            if is_sure:
                return _Found(session, relation), count
            if relation is not Relation.NEW:
                unsure.append(_Found(session, relation))
        if len(unsure) == len(sessions) == 1:
            return unsure[0], count
        # It may be any of them, or none: better one session too many than two people in one.
        return _Found(sessions[0], Relation.NEW), 0

    @staticmethod
    def _relation(
        session: _Session, key: int, count: int, prompt: Sequence[Piece]
    ) -> tuple[Relation, bool]:
        """What the prompt, of which the session had ``count`` pieces, is to it; whether that is
        certain."""
        rest = prompt[count:]
        if key == session.answer_head:
            return Relation.CONTINUES, True
        if key != session.head:
            if not _has_begun(prompt[:count]):
                return Relation.NEW, False  # Many may have opened like this.
            # The session has gone on from here. Was that taken back, or is this beside it?
            is_edit = not session.running and session.pieces - count <= _EDITED_PIECES
            return (Relation.SUPERSEDES if is_edit else Relation.FORK), True
        if rest:
            if session.running:
                return Relation.FORK, True
            # Without the session's own answer: the client left it out or rewrote it, or it is
            # another session that opened alike.
            return Relation.CONTINUES, False
        if _has_begun(prompt):
            return (Relation.FORK if session.running else Relation.RETRY), True
        if not session.running and not session.is_answered:
            return Relation.RETRY, False
        # Two people may open with the same words.
        return Relation.NEW, False

    def _find_plain(
        self, keys: Sequence[int], prompt: Sequence[Piece], digest_of: DigestOf
    ) -> tuple[_Found | None, int]:
        """The session with the longest prompt that a text begins with; with how many blocks.

        None where two sessions had that prompt: it may be either's.
        """
        length = sum(piece.size for piece in prompt)
        longest, count = self._endings.longest(keys, length, digest_of)
        grown, shared = self._find_grown(keys)
        is_last = len(longest) == 1 and longest[0] == self._endings.of(longest[0].owner)[-1]
        if grown is not None and shared > count and not is_last:
            return grown, shared
        if len(longest) != 1:
            return None, 0
        ending = longest[0]
        session, own = self._sessions[ending.owner], self._endings.of(ending.owner)
        is_whole, has_begun = ending.end == length, len(own) > 1
        if ending != own[-1]:
            # As with messages: the last prompt was edited, or this is beside it.
            is_edit = not session.running and ending == own[-2]
            relation = Relation.SUPERSEDES if is_edit else Relation.FORK
        elif not is_whole:
            relation = Relation.FORK if session.running else Relation.CONTINUES
        elif session.running:
            relation = Relation.FORK if has_begun else Relation.NEW
        else:
            # Two people may open with the same words.
            is_retry = has_begun or not session.is_answered
            relation = Relation.RETRY if is_retry else Relation.NEW
        return _Found(session, relation), count + is_whole

    def _find_grown(self, keys: Sequence[int]) -> tuple[_Found | None, int]:
        """The session that alone had what a text begins with, and had it after its first prompt.

        First prompts may share a long template; what has come to one since is its own.
        """
        for count in range(len(keys) - 1, 0, -1):
            sessions = self._by_head.get(keys[count])
            if not sessions:
                continue
            if len(sessions) > 1 or count <= sessions[0].opening:
                return None, 0
            session = sessions[0]
            relation = Relation.FORK if session.running else Relation.SUPERSEDES
            return _Found(session, relation), count
        return None, 0

    # By single pieces

    def _find_anchored(self, scope: int, prompt: Sequence[Piece]) -> _Found | None:
        """The session that had the last answer or tool's result that only one has had.

        What the user said is no proof: two agents may be given the same task. A good part of all
        must be known of that session or of those that it branched from. What holds answers of
        others too sums up what several have found.
        """
        pieces = [piece for piece in prompt[-_MAX_ANCHORS:] if piece.kind is not Kind.SYSTEM]
        had = [(piece, self._by_anchor.get(_anchor(scope, piece))) for piece in pieces]
        proofs = [
            sessions[0]
            for piece, sessions in had
            if len(sessions) == 1 and piece.kind is not Kind.USER
        ]
        if not proofs:
            return None
        last = proofs[-1]
        ancestry = self._ancestry(last)
        if any(session.session_id not in ancestry for session in proofs):
            return None
        known = sum(
            piece.size
            for piece, sessions in had
            if any(session.session_id in ancestry for session in sessions)
        )
        if known < _ANCHORED_SHARE * sum(piece.size for piece in pieces):
            return None
        return _Found(last, Relation.FORK if last.running else Relation.SUPERSEDES)

    def _ancestry(self, session: _Session) -> set[str]:
        """The session and those that it branched from."""
        ancestry = {session.session_id}
        parent = self._sessions.get(session.parent_id or "")
        while parent is not None and parent.session_id not in ancestry:
            ancestry.add(parent.session_id)
            parent = self._sessions.get(parent.parent_id or "")
        return ancestry

    # Tables

    def _begin(self, scope: int) -> _Session:
        session = _Session(self._new_id(), scope)
        self._sessions[session.session_id] = session
        return session

    def _take(
        self, session: _Session, keys: Sequence[int], prompt: Sequence[Piece], known: int
    ) -> None:
        """The session's last prompt is this one, of which it knows the first pieces."""
        self._sessions.move_to_end(session.session_id)
        session.running += 1
        session.is_answered = False
        self._waits_with(session, None)
        session.head, session.pieces = keys[-1] if keys else session.scope, len(prompt)
        self._add_head(session, session.head)
        for piece in prompt[known:][-_MAX_ANCHORS:]:
            if piece.kind is not Kind.SYSTEM:
                self._add_anchor(session, piece)

    def _waits_with(self, session: _Session, head: int | None) -> None:
        """The session goes on from what it was answered; None: it goes on."""
        if session.answer_head is not None:
            self._waiting[session.answer_head] -= 1
            if not self._waiting[session.answer_head]:
                del self._waiting[session.answer_head]
        session.answer_head = head
        if head is not None:
            self._waiting[head] = self._waiting.get(head, 0) + 1

    def _add_head(self, session: _Session, head: int) -> None:
        self._by_head.add(session, session.heads, head)

    def _add_anchor(self, session: _Session, piece: Piece) -> None:
        if piece.size >= _MIN_ANCHOR_CHARS:
            anchor = _anchor(session.scope, piece)
            self._by_anchor.add(session, session.anchors, anchor)

    def _keep_bound(self) -> None:
        if not self._is_over_bound():
            return
        for session in list(itertools.islice(self._sessions.values(), _MAX_LOOKED_AT)):
            if session.running:
                self._sessions.move_to_end(session.session_id)  # Others are looked at next time.
                continue
            self._forget(session)
            if not self._is_over_bound():
                return

    def _is_over_bound(self) -> bool:
        keys = len(self._by_head) + len(self._by_anchor)
        return (
            len(self._sessions) > self._max_sessions
            or keys > _MEAN_KEYS * self._max_sessions + _MAX_HEADS + _MAX_ANCHORS
        )

    def _forget(self, session: _Session) -> None:
        del self._sessions[session.session_id]
        self._waits_with(session, None)
        self._by_head.forget(session, session.heads)
        self._by_anchor.forget(session, session.anchors)
        self._endings.forget(session.session_id)


def _has_begun(prompt: Sequence[Piece]) -> bool:
    """Whether something has been answered."""
    return any(piece.kind is Kind.ASSISTANT for piece in prompt)


def _chain(scope: int, prompt: Sequence[Piece]) -> list[int]:
    """The chain key at the end of every piece."""
    keys, key = [], scope
    for piece in prompt:
        key = hash((key, piece.digest))
        keys.append(key)
    return keys


def _anchor(scope: int, piece: Piece) -> int:
    return hash((scope, piece.digest))
