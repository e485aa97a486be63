"""Identity of prompt blocks: ids that stand for a whole prefix, each with one predecessor."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

from saga_sim.traces.model import runs_of

Chain = tuple[range, ...]

CHARS_PER_TOKEN = 4
"""Characters that count as one token where only text is recorded."""


DEFAULT_BLOCK_TOKENS = 64
"""Size of a block where text is recorded and nothing else is asked for."""


class BlockIds:
    """Hands out the block ids of one trace, small and consecutive; none twice."""

    def __init__(self) -> None:
        self._next = 0
        self._texts: dict[tuple[int, bytes], int] = {}

    def take(self, count: int) -> int:
        """The first of ``count`` new consecutive ids."""
        first = self._next
        self._next += count
        return first

    def of_text(self, text: str, block_tokens: int) -> Chain:
        """Chain of the full blocks of a prompt's text; equal prefixes get equal ids.

        A block is ``block_tokens × CHARS_PER_TOKEN`` characters; its id stands for its text and
        the id before it.
        """
        size = block_tokens * CHARS_PER_TOKEN
        ids: list[int] = []
        last = -1
        for start in range(0, len(text) - size + 1, size):
            block = text[start : start + size].encode("utf-8", "surrogatepass")
            key = (last, blake2b(block, digest_size=16).digest())
            known = self._texts.get(key)
            last = self._texts[key] = self.take(1) if known is None else known
            ids.append(last)
        return runs_of(ids)


def tokens_of(text: str) -> int:
    """Estimated length of a text in tokens; a text that is not empty has one at least."""
    return max(len(text) // CHARS_PER_TOKEN, min(len(text), 1))


def head(chain: Chain, num_blocks: int) -> Chain:
    """The first ``num_blocks`` blocks of a chain."""
    runs = []
    for run in chain:
        if num_blocks <= 0:
            break
        runs.append(run[:num_blocks])
        num_blocks -= len(run)
    return tuple(runs)


def moved(chain: Chain, by: int, pieces: Sequence[tuple[range, int]] = ()) -> Chain:
    """The chain with ``by`` added to every id, or what its piece says.

    Args:
        pieces: disjoint ranges of ids in order, each with what is added to its ids instead.
    """
    runs: list[range] = []
    for run in chain:
        at = run.start
        for piece, piece_by in pieces:
            start, stop = max(at, piece.start), min(run.stop, piece.stop)
            if start < stop:
                runs += [range(at + by, start + by), range(start + piece_by, stop + piece_by)]
                at = stop
        runs.append(range(at + by, run.stop + by))
    return joined(runs)


def joined(runs: Iterable[range]) -> Chain:
    """The runs with neighbours that go on from each other made one; empty ones are dropped."""
    chain: list[range] = []
    for run in filter(None, runs):
        if chain and chain[-1].stop == run.start:
            chain[-1] = range(chain[-1].start, run.stop)
        else:
            chain.append(run)
    return tuple(chain)


def common_blocks(a: Chain, b: Chain) -> int:
    """Blocks in the longest common prefix of two chains of prefix identities."""
    common = 0
    for x, y in zip(a, b, strict=False):
        if x.start != y.start:
            break
        common += min(len(x), len(y))
        if x.stop != y.stop:
            break
    return common


def end_of_ids(chains: Iterable[Chain]) -> int:
    """One more than the highest id."""
    return max((run.stop for chain in chains for run in chain), default=0)


def ambiguous_id(chains: Iterable[Chain]) -> int | None:
    """An id that follows two different ids, or None when every id has one predecessor.

    Being the first of a chain counts as a predecessor of its own.
    """
    before: dict[int, int] = {}  # first id of a run → the id before it, -1 when it opens a chain
    inner: set[range] = set()  # ids that follow the next lower id
    for chain in chains:
        last = -1
        for run in chain:
            if before.setdefault(run.start, last) != last:
                return run.start
            inner.add(range(run.start + 1, run.stop))
            last = run.stop - 1
    starts = _merged(inner)
    keys = [ids.start for ids in starts]
    for first, last in before.items():
        i = bisect_right(keys, first) - 1
        if i >= 0 and first in starts[i] and last != first - 1:
            return first
    return None


def predecessors(chain: Chain, block_id: int) -> Iterator[int]:
    """The id before each ``block_id`` in the chain; -1 where it opens the chain."""
    last = -1
    for run in chain:
        if block_id in run:
            yield last if block_id == run.start else block_id - 1
        last = run.stop - 1


def prefix_ids(chains: Sequence[Chain]) -> Sequence[Chain]:
    """The chains, with new ids from 0 if one of theirs follows two different ones."""
    return chains if ambiguous_id(chains) is None else by_prefix(chains)


def by_prefix(chains: Sequence[Chain]) -> list[Chain]:
    """Chains with new ids from 0 that stand for whole prefixes.

    For recorded ids that name a block's content alone, and so follow several others.
    """
    new_ids: dict[tuple[int, int], int] = {}
    result = []
    for chain in chains:
        ids: list[int] = []
        last = -1
        for run in chain:
            for old in run:
                last = new_ids.setdefault((last, old), len(new_ids))
                ids.append(last)
        result.append(runs_of(ids))
    return result


def _merged(ranges: Iterable[range]) -> list[range]:
    """Disjoint ranges in order that hold the same numbers."""
    merged: list[range] = []
    for ids in sorted(filter(None, ranges), key=lambda r: (r.start, r.stop)):
        if merged and ids.start <= merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, ids.stop))
        else:
            merged.append(ids)
    return merged
