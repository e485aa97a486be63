"""What a run of the cluster counts: each request, and each worker's steps."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_backend.virtual_engine import Work
from saga_sim.cluster.cost import StepCost


@dataclass(frozen=True, slots=True)
class Answered:
    """One request and what became of it; times on the virtual clock.

    Attributes:
        cached_tokens: of the prompt, found on the GPU. loaded_tokens: from host memory.
    """

    task: int
    call: int
    worker: int
    session_id: str
    sent_s: float
    first_token_s: float
    end_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    prefill_tokens: int
    recomputed_tokens: int
    regret_tokens: int
    loaded_tokens: int = 0

    @property
    def hit_tokens(self) -> int:
        """Of the prompt, found in any tier."""
        return self.cached_tokens + self.loaded_tokens


@dataclass(slots=True)
class Totals:
    """Of one worker.

    Attributes:
        busy_s: virtual seconds in steps. regret_s: of these, computing tokens that some worker of
            the cluster had computed before.
        used_share_s, cached_share_s: share of the pool that running requests held, and that held
            something readable, × seconds of the steps.
        copy_wait_s: of ``busy_s``, waiting for copies of blocks that a step overwrites.
    """

    steps: int = 0
    busy_s: float = 0.0
    regret_s: float = 0.0
    prefill_tokens: int = 0
    regret_tokens: int = 0
    own_tokens: int = 0
    made_tokens: int = 0
    used_share_s: float = 0.0
    cached_share_s: float = 0.0
    copy_wait_s: float = 0.0

    def add_decodes(self, decodes: int, step_s: float) -> None:
        """Count a step that only decodes."""
        self.steps += 1
        self.busy_s += step_s
        self.made_tokens += decodes

    def add(self, work: Work, cost: StepCost, step_s: float) -> None:
        """Count a step. Of its time what it takes beyond its decodes is the prompts'."""
        self.steps += 1
        self.busy_s += step_s
        self.prefill_tokens += work.prefill_tokens
        self.regret_tokens += work.regret_tokens
        self.own_tokens += work.own_tokens
        self.made_tokens += work.made_tokens
        if work.regret_tokens:
            decode_s = 0.0
            if work.decodes:
                decode_s = cost.step_s(0, 0, work.decodes, work.decode_attended)
            self.regret_s += (step_s - decode_s) * work.regret_tokens / work.prefill_tokens
