"""What every synthetic session is made of: a prompt that grows, and calls that last as long as
their answer is long.
"""

from __future__ import annotations

CONTEXT_TOKENS = 131_072
ANSWER_ROOM_TOKENS = 2_000
"""A session ends with the call whose next prompt, had it all observations, would leave less room
than this for an answer in ``CONTEXT_TOKENS`` (ours)."""

PREFILL_S = 0.5
DECODE_S_PER_TOKEN = 0.03
"""A call lasts ``PREFILL_S + DECODE_S_PER_TOKEN · output tokens``, whatever was cached (ours)."""

CLIENT_OVERHEAD_S = (0.02, 0.08)
"""What a client spends around a tool, uniform between the two (ours)."""


class Prompt:
    """A prompt's length and the ids of its full blocks. An id is used for one content only.

    Args:
        shared_tokens: of the system prompt; its full blocks have the ids from 0 on.
        next_id: first id that no prompt has used.
    """

    def __init__(self, block_tokens: int, shared_tokens: int, next_id: int) -> None:
        shared = range(shared_tokens // block_tokens)
        self._block_tokens = block_tokens
        self._runs = [shared] if shared else []
        self.next_id = next_id
        self.tokens = len(shared) * block_tokens

    @property
    def chain(self) -> tuple[range, ...]:
        """Ids of the full blocks, as runs of consecutive ids."""
        return tuple(self._runs)

    def extend(self, tokens: int) -> None:
        """Append ``tokens``; each block that they fill gets an id that is new."""
        old = self.tokens // self._block_tokens
        self.tokens += tokens
        new = range(self.next_id, self.next_id + self.tokens // self._block_tokens - old)
        self.next_id = new.stop
        if new and self._runs and self._runs[-1].stop == new.start:
            self._runs[-1] = range(self._runs[-1].start, new.stop)
        elif new:
            self._runs.append(new)

    def truncate(self, tokens: int) -> None:
        """Keep the first ``tokens``."""
        drop = self.tokens // self._block_tokens - tokens // self._block_tokens
        self.tokens = tokens
        while drop:
            last = self._runs.pop()
            if len(last) > drop:
                self._runs.append(last[:-drop])
            drop -= min(drop, len(last))

    def fork(self) -> Prompt:
        """A prompt with the same content; its next block needs an id that no other took."""
        other = Prompt(self._block_tokens, 0, self.next_id)
        other._runs = list(self._runs)
        other.tokens = self.tokens
        return other
