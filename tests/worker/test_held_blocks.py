"""Claims that a session's next run takes over from the one before, against claiming anew."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_backend.held_blocks import BlockHolders, Held
from saga_core.pauses import View, Wait

BLOCKS = 24

# Chains that begin alike more often than not; a block stands in a chain once.
chains = st.builds(
    lambda start, rest: [*range(start), *(block for block in rest if block >= start)],
    st.integers(0, 16),
    st.lists(st.integers(0, BLOCKS - 1), unique=True, max_size=8),
)


def _held(holders: BlockHolders, run_id: int, blocks: Sequence[int]) -> Held:
    wait = Wait(View(("paused",), 0.0))
    return Held(run_id, "s", "paused", *holders.entries(blocks), 0.0, wait, 0.0, len(blocks))


@settings(derandomize=True, deadline=None)
@given(
    before=chains,
    after=chains,
    others=chains,
    lost=st.lists(st.integers(0, BLOCKS - 1), max_size=4),
    taken=st.integers(0, 6),
)
def test_a_run_that_takes_over_claims_holds_what_it_would_have_claimed(
    before: list[int], after: list[int], others: list[int], lost: list[int], taken: int
) -> None:
    told, anew = BlockHolders(BLOCKS), BlockHolders(BLOCKS)
    given_up = []
    for holders in (told, anew):
        other, old = _held(holders, 1, others), _held(holders, 2, before)
        holders.claim(other)
        holders.claim(old)
        holders.take(old, taken)
        holders.lose(lost)
        new = _held(holders, 3, after)
        holders.claim(new, after=old if holders is told else None)
        given_up.append([block for block in holders.unclaim(old) if block not in after])
        holders.check_integrity([other, new], [])
    assert given_up[0] == given_up[1]
    assert (told.session_blocks, told.session_entries) == (
        anew.session_blocks,
        anew.session_entries,
    )
