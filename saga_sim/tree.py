"""A branching search: an agent that tries several ways from one state and comes back to others.

A search starts with one branch. In every round it takes a branch, the newest or an older one,
lets it think once more, and forks ``TREE_WIDTH`` branches from there, which work side by side.
Each branch is a session of its own whose prompt begins with the whole context that it was forked
from. A branch that is taken again pauses for rounds and then reads its prefix. All of it is ours.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from saga_sim.prompts import CLIENT_OVERHEAD_S, DECODE_S_PER_TOKEN, PREFILL_S, Prompt
from saga_sim.traces.model import Call

TREE_SHARED_TOKENS = 1_024
TREE_FIRST_TOKENS = (2_000, 4_000)
TREE_OUTPUT_TOKENS = (100, 400)
TREE_ADDED_TOKENS = (100, 600)
"""An instruction for a new branch, or an observation."""

TREE_TOOL_S = (0.2, 4.0)
"""Seconds a tool runs, log-uniform between the two."""

TREE_ROUNDS = (3, 9)
TREE_WIDTH = 3
TREE_BRANCH_STEPS = (2, 4)
TREE_NEWEST_PROBABILITY = 0.6
"""Chance that a round goes on from one of the newest branches; else any older one comes back."""


@dataclass(slots=True)
class _Branch:
    """A session: its prompt so far, its calls, and when its last answer ended."""

    session_id: str
    parent_id: str | None
    prompt: Prompt
    end_s: float
    calls: list[Call] = field(default_factory=list)


@dataclass(slots=True)
class _Search:
    """One search; its sessions are on one clock, from 0 s."""

    name: str
    rng: random.Random
    next_id: int
    branches: list[_Branch] = field(default_factory=list)

    def run(self, block_tokens: int) -> None:
        root = self._open(None, Prompt(block_tokens, TREE_SHARED_TOKENS, self.next_id), 0.0)
        low, high = TREE_FIRST_TOKENS
        first_tokens = round(low * (high / low) ** self.rng.random())
        self._step(root, 0.0, first_tokens - root.prompt.tokens)
        now_s = root.end_s
        newest = [root]
        for _ in range(self.rng.randint(*TREE_ROUNDS)):
            older = [branch for branch in self.branches if branch not in newest]
            is_new = not older or self.rng.random() < TREE_NEWEST_PROBABILITY
            taken = self.rng.choice(newest if is_new else older)
            self._step(taken, now_s + self._tool_s(), self.rng.randint(*TREE_ADDED_TOKENS))
            newest = [self._fork(taken) for _ in range(TREE_WIDTH)]
            now_s = max(branch.end_s for branch in newest)

    def _fork(self, parent: _Branch) -> _Branch:
        """A branch that does all its steps of this round."""
        branch = self._open(parent.session_id, parent.prompt.fork(), parent.end_s)
        for step in range(self.rng.randint(*TREE_BRANCH_STEPS)):
            wait_s = self._tool_s() if step else self.rng.uniform(*CLIENT_OVERHEAD_S)
            self._step(branch, branch.end_s + wait_s, self.rng.randint(*TREE_ADDED_TOKENS))
        return branch

    def _open(self, parent_id: str | None, prompt: Prompt, now_s: float) -> _Branch:
        branch = _Branch(f"{self.name}-{len(self.branches)}", parent_id, prompt, now_s)
        self.branches.append(branch)
        return branch

    def _step(self, branch: _Branch, at_s: float, added_tokens: int) -> None:
        """One call: the prompt grows by ``added_tokens``, and after it by the answer."""
        output_tokens = self.rng.randint(*TREE_OUTPUT_TOKENS)
        prompt = branch.prompt
        self._extend(prompt, added_tokens)
        duration_s = PREFILL_S + DECODE_S_PER_TOKEN * output_tokens
        branch.calls.append(
            Call(
                branch.session_id,
                at_s,
                prompt.tokens,
                output_tokens,
                prompt.chain,
                duration_s=duration_s,
                ending="tool_use",
                parent_session_id=branch.parent_id,
            )
        )
        self._extend(prompt, output_tokens)
        branch.end_s = at_s + duration_s

    def _extend(self, prompt: Prompt, tokens: int) -> None:
        """Branches take the ids of new blocks from one counter."""
        prompt.next_id = self.next_id
        prompt.extend(tokens)
        self.next_id = prompt.next_id

    def _tool_s(self) -> float:
        low, high = TREE_TOOL_S
        tool_s = float(low * (high / low) ** self.rng.random())
        return tool_s + self.rng.uniform(*CLIENT_OVERHEAD_S)


def make_tree(sessions: int, rng: random.Random, block_tokens: int) -> tuple[tuple[Call, ...], ...]:
    """The first ``sessions`` sessions of one search after the other; the last one may be cut."""
    next_id = TREE_SHARED_TOKENS // block_tokens
    made: list[tuple[Call, ...]] = []
    number = 0
    while len(made) < sessions:
        search = _Search(f"tree-{number}", rng, next_id)
        search.run(block_tokens)
        made += [tuple(branch.calls) for branch in search.branches]
        next_id, number = search.next_id, number + 1
    return tuple(made[:sessions])
