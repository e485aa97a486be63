"""Synthetic workloads: a coding agent (swe), a browser agent (web), people chatting (chat) and a
branching search (tree, in a module of its own).

Facts of the swe profile: eunomia-bpf/agentcgroup, 212 coding-agent sessions (tool durations and
which tool follows which; pairs seen fewer than five times are not in them). Step counts, prompt
and output lengths of swe and web, and the latencies of web: the SAGA paper (arXiv 2605.00528).
What neither says is ours, and marked so.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from saga_core.errors import SettingsError
from saga_sim.prompts import (
    ANSWER_ROOM_TOKENS,
    CLIENT_OVERHEAD_S,
    CONTEXT_TOKENS,
    DECODE_S_PER_TOKEN,
    PREFILL_S,
    Prompt,
)
from saga_sim.traces.model import Call, Trace
from saga_sim.tree import make_tree

Quantiles = tuple[float, float, float, float, float, float]
QUANTILE_LEVELS: Quantiles = (0.10, 0.50, 0.90, 0.95, 0.99, 1.0)

SWE_TOOL_S: Mapping[str, Quantiles] = {
    "Bash": (0.022, 2.52, 10.471, 12.967, 29.471, 307.93),
    "Read": (0.009, 0.014, 0.046, 0.306, 1.674, 10.91),
    "Edit": (0.018, 0.025, 0.056, 0.068, 0.089, 7.34),
    "Grep": (0.017, 0.027, 0.057, 0.109, 1.286, 7.78),
    "TodoWrite": (0.010, 0.015, 0.042, 0.046, 0.156, 11.29),
    "Glob": (0.017, 0.030, 0.133, 0.775, 2.955, 7.75),
    "Write": (0.019, 0.031, 0.061, 0.067, 0.085, 4.65),
    "Task": (0.036, 91.756, 199.896, 361.869, 361.869, 361.87),
    "WebFetch": (3.634, 8.806, 18.59, 23.505, 23.505, 23.505),
}
"""Seconds a tool ran, at the ``QUANTILE_LEVELS`` (agentcgroup)."""

START, END = "<start>", "<end>"
SWE_FOLLOWERS = (*SWE_TOOL_S, END)
SWE_FOLLOWER_COUNTS: Mapping[str, tuple[int, ...]] = {
    # Bash, Read, Edit, Grep, TodoWrite, Glob, Write, Task, WebFetch, END
    START: (20, 60, 0, 19, 107, 5, 0, 0, 0, 0),
    "Bash": (3464, 694, 255, 122, 289, 68, 83, 14, 0, 123),
    "Read": (599, 593, 293, 200, 163, 40, 23, 8, 0, 11),
    "Edit": (398, 129, 284, 25, 115, 0, 5, 0, 0, 10),
    "Grep": (139, 261, 19, 238, 22, 37, 5, 0, 0, 0),
    "TodoWrite": (336, 74, 116, 82, 7, 31, 13, 14, 6, 60),
    "Glob": (44, 100, 0, 37, 0, 85, 0, 0, 0, 0),
    "Write": (110, 5, 0, 0, 13, 0, 10, 0, 0, 0),
    "Task": (0, 13, 0, 0, 21, 0, 0, 0, 0, 0),
}
"""How often each of ``SWE_FOLLOWERS`` came after a tool (agentcgroup).

What followed WebFetch is not known; WebSearch is left out, since what led to it is not.
"""

_ANY_FOLLOWER_COUNTS = tuple(
    map(sum, zip(*(row for tool, row in SWE_FOLLOWER_COUNTS.items() if tool != START), strict=True))
)

SWE_ENDING_CALLS = 27
"""After n tool calls an end weighs √(n / this) of its count.

Counts alone make lengths geometric, with a median of 33; the sessions' lengths are a Weibull's of
shape 1.5 (P50 41, P90 92, mean 47 calls), whose hazard grows with √n.
"""

SWE_OBSERVATION_TOKENS: Mapping[str, tuple[float, float]] = {
    "Bash": (200, 1.2),
    "Read": (900, 1.0),
    "Edit": (150, 0.6),
    "Grep": (250, 1.0),
    "TodoWrite": (60, 0.3),
    "Glob": (120, 0.9),
    "Write": (40, 0.4),
    "Task": (800, 0.6),
    "WebFetch": (700, 0.6),
}
"""Median and σ of the log-normal length of a tool's result, at most 8,192 tokens (ours)."""

SWE_MAX_STEPS = 150
SWE_FIRST_TOKENS = (2_000, 4_000)
SWE_OUTPUT_TOKENS = (100, 500)
SWE_SHARED_TOKENS = 1_536

WEB_TOOL_S: Mapping[str, Quantiles] = {
    "browser_click": (0.25, 0.67, 1.9, 2.9, 35.0, 120.0),
    "browser_type": (0.20, 0.50, 1.3, 2.2, 25.0, 120.0),
    "browser_goto": (0.60, 1.50, 3.4, 5.1, 60.0, 120.0),
    "web_search": (0.35, 0.85, 2.4, 4.5, 45.0, 120.0),
    "python": (0.05, 0.18, 1.2, 2.4, 28.0, 60.0),
}
"""Seconds a tool ran, at the ``QUANTILE_LEVELS``.

P50, P95 and P99 of python are the paper's for code, those of the other four together, at their
``WEB_TOOL_SHARE``, the paper's for the web: 0.85, 4.5 and 45 s. The split among them is ours.
"""

WEB_TOOL_SHARE: Mapping[str, float] = {
    "browser_click": 0.33,
    "browser_type": 0.18,
    "browser_goto": 0.27,
    "web_search": 0.12,
    "python": 0.10,
}
"""How often a tool is called, whatever went before (ours)."""

WEB_END_PROBABILITY = 1 / 18.7
"""Chance that a step is the last: with the cap below, 18 steps on average."""

WEB_REPLACE_PROBABILITY = 0.5
"""Chance that a page replaces the observation before it in the prompt (ours)."""

WEB_MAX_STEPS = 60
WEB_FIRST_TOKENS = (4_000, 8_000)
WEB_OUTPUT_TOKENS = (50, 200)
WEB_SHARED_TOKENS = 2_048
WEB_PAGE_TOKENS = (1_000, 3_000)
WEB_PYTHON_TOKENS = (100, 500)

CHAT_END_PROBABILITY = 0.2
CHAT_MAX_TURNS = 40
CHAT_SHARED_TOKENS = 192
CHAT_FIRST_TOKENS = (200, 4_000)
CHAT_MESSAGE_TOKENS = (60.0, 1.0)
CHAT_OUTPUT_TOKENS = (250.0, 0.8)
CHAT_THINK_S = (90.0, 1.3)
"""Median and σ, log-normal, as of the two above: half the pauses exceed 1.5 minutes, one in a
hundred half an hour. All of chat is ours."""


@dataclass(frozen=True, slots=True)
class _Step:
    """An answer, and what leads to the prompt after it.

    Attributes:
        tool, tool_s: the tool that the answer calls, and how long it runs; None for none.
        pause_s: from the end of the answer to the next prompt, the tool included.
        added_tokens: what the next prompt has after the answer: an observation or a message.
        replaces: the next prompt lacks the ``added_tokens`` of the step before.
    """

    output_tokens: int
    tool: str | None = None
    tool_s: float | None = None
    pause_s: float = 0.0
    added_tokens: int = 0
    replaces: bool = False


def make_profile(name: str, *, sessions: int, seed: int, block_tokens: int = 64) -> Trace:
    """The trace of ``sessions`` sessions of the profile called ``name``.

    Equal arguments give equal traces, and more sessions only append. The sessions share the ids of
    their system prompt's full blocks. Each starts at 0 s on a clock of its own, save for the
    branches of a tree, which are on the clock of their search.

    Raises:
        SettingsError: no such profile, no session, or a block without tokens.
    """
    if name not in PROFILES:
        known = ", ".join(sorted(PROFILES))
        raise SettingsError(f"unknown profile {name!r}; choose one of {known}")
    return PROFILES[name](sessions=sessions, seed=seed, block_tokens=block_tokens)


def swe(*, sessions: int, seed: int, block_tokens: int = 64) -> Trace:
    """A coding agent whose prompts only grow; it calls one tool a step.

    The tools are a Markov chain over the measured transitions, with an end that grows likelier
    (``SWE_ENDING_CALLS``), and run as long as measured. After a tool whose successors are unknown
    any tool follows, as often as it does overall.
    """
    return _trace(
        "swe", sessions, seed, block_tokens, SWE_SHARED_TOKENS, SWE_FIRST_TOKENS, _swe_steps
    )


def web(*, sessions: int, seed: int, block_tokens: int = 64) -> Trace:
    """A browser agent that reads pages, one tool a step.

    Each page lands in the prompt; half of them replace the observation before. Such a prompt
    branches: it keeps the blocks up to that observation, and all after it is new.
    """
    return _trace(
        "web", sessions, seed, block_tokens, WEB_SHARED_TOKENS, WEB_FIRST_TOKENS, _web_steps
    )


def chat(*, sessions: int, seed: int, block_tokens: int = 64) -> Trace:
    """People who read the answer and think, for minutes, before they write again. No tools."""
    return _trace(
        "chat", sessions, seed, block_tokens, CHAT_SHARED_TOKENS, CHAT_FIRST_TOKENS, _chat_steps
    )


def tree(*, sessions: int, seed: int, block_tokens: int = 64) -> Trace:
    """Searches whose branches fork from a shared prefix, and come back: see ``saga_sim.tree``."""
    _check(sessions, block_tokens)
    made = make_tree(sessions, random.Random(seed), block_tokens)
    return Trace("tree", block_tokens, made, notes=(f"synthetic, seed {seed}",))


PROFILES: dict[str, Callable[..., Trace]] = {"swe": swe, "web": web, "chat": chat, "tree": tree}
"""Profiles by name; each takes ``sessions``, ``seed`` and ``block_tokens``."""


def _trace(
    name: str,
    sessions: int,
    seed: int,
    block_tokens: int,
    shared_tokens: int,
    first_tokens: tuple[int, int],
    steps: Callable[[random.Random], Iterator[_Step]],
) -> Trace:
    """``sessions`` draws of ``steps``, after first prompts log-uniform in ``first_tokens``."""
    _check(sessions, block_tokens)
    rng = random.Random(seed)
    next_id = shared_tokens // block_tokens
    low, high = first_tokens
    made: list[tuple[Call, ...]] = []
    for number in range(sessions):
        prompt = Prompt(block_tokens, shared_tokens, next_id)
        prompt.extend(round(low * (high / low) ** rng.random()) - prompt.tokens)
        made.append(tuple(_calls(f"{name}-{number}", prompt, steps(rng))))
        next_id = prompt.next_id
    return Trace(name, block_tokens, tuple(made), notes=(f"synthetic, seed {seed}",))


def _check(sessions: int, block_tokens: int) -> None:
    for setting, value in (("sessions", sessions), ("block_tokens", block_tokens)):
        if value < 1:
            raise SettingsError(f"{setting}={value} must be at least 1")


def _calls(session_id: str, prompt: Prompt, steps: Iterator[_Step]) -> Iterator[Call]:
    """The calls of one session: its first prompt, which grows by ``steps`` while it fits."""
    now_s = 0.0
    added_at: int | None = None
    for step in steps:
        added_tokens = step.output_tokens + step.added_tokens
        goes_on = prompt.tokens + added_tokens + ANSWER_ROOM_TOKENS <= CONTEXT_TOKENS
        duration_s = PREFILL_S + DECODE_S_PER_TOKEN * step.output_tokens
        yield Call(
            session_id,
            now_s,
            prompt.tokens,
            step.output_tokens,
            prompt.chain,
            duration_s=duration_s,
            ending="tool_use" if goes_on and step.tool else "end_turn",
            tool=step.tool if goes_on else None,
            tool_s=step.tool_s if goes_on else None,
        )
        if not goes_on:
            return
        now_s = now_s + duration_s + step.pause_s
        if step.replaces and added_at is not None:
            prompt.truncate(added_at)
        added_at = prompt.tokens + step.output_tokens
        prompt.extend(added_tokens)


def _swe_steps(rng: random.Random) -> Iterator[_Step]:
    tool = START
    for calls in range(SWE_MAX_STEPS - 1):
        tool = _next_tool(rng, tool, calls)
        if tool == END:
            break
        median, sigma = SWE_OBSERVATION_TOKENS[tool]
        yield _tool_step(
            rng,
            tool,
            rng.randint(*SWE_OUTPUT_TOKENS),
            SWE_TOOL_S[tool],
            _log_normal_tokens(rng, median, sigma, 8_192),
        )
    yield _Step(rng.randint(*SWE_OUTPUT_TOKENS))


def _next_tool(rng: random.Random, tool: str, calls: int) -> str:
    """What follows ``tool``, the last of ``calls`` tool calls: a tool, or ``END``."""
    *tools, end = SWE_FOLLOWER_COUNTS.get(tool, _ANY_FOLLOWER_COUNTS)
    end_weight = end * math.sqrt(calls / SWE_ENDING_CALLS)
    return rng.choices(SWE_FOLLOWERS, [*tools, end_weight])[0]


def _web_steps(rng: random.Random) -> Iterator[_Step]:
    for _ in range(WEB_MAX_STEPS - 1):
        if rng.random() < WEB_END_PROBABILITY:
            break
        tool = rng.choices(list(WEB_TOOL_SHARE), list(WEB_TOOL_SHARE.values()))[0]
        is_page = tool != "python"
        step = _tool_step(
            rng,
            tool,
            rng.randint(*WEB_OUTPUT_TOKENS),
            WEB_TOOL_S[tool],
            rng.randint(*(WEB_PAGE_TOKENS if is_page else WEB_PYTHON_TOKENS)),
        )
        yield replace(step, replaces=is_page and rng.random() < WEB_REPLACE_PROBABILITY)
    yield _Step(rng.randint(*WEB_OUTPUT_TOKENS))


def _chat_steps(rng: random.Random) -> Iterator[_Step]:
    for turn in range(1, CHAT_MAX_TURNS + 1):
        output_tokens = _log_normal_tokens(rng, *CHAT_OUTPUT_TOKENS, ANSWER_ROOM_TOKENS)
        if turn == CHAT_MAX_TURNS or rng.random() < CHAT_END_PROBABILITY:
            yield _Step(output_tokens)
            return
        think_s, sigma = CHAT_THINK_S
        yield _Step(
            output_tokens,
            pause_s=think_s * math.exp(rng.gauss(0.0, sigma)),
            added_tokens=_log_normal_tokens(rng, *CHAT_MESSAGE_TOKENS, CHAT_FIRST_TOKENS[1]),
        )


def _tool_step(
    rng: random.Random, tool: str, output_tokens: int, durations_s: Quantiles, added_tokens: int
) -> _Step:
    tool_s = _at_level(rng.random(), durations_s)
    pause_s = tool_s + rng.uniform(*CLIENT_OVERHEAD_S)
    return _Step(output_tokens, tool, tool_s, pause_s, added_tokens)


def _at_level(level: float, quantiles: Quantiles) -> float:
    """Quantile at ``level`` (0 to 1): log-linear between the given, the least of them below P10."""
    for i in range(1, len(QUANTILE_LEVELS)):
        if level <= QUANTILE_LEVELS[i]:
            low, high = QUANTILE_LEVELS[i - 1], QUANTILE_LEVELS[i]
            weight = max(0.0, (level - low) / (high - low))
            return float(quantiles[i - 1] ** (1 - weight) * quantiles[i] ** weight)
    return quantiles[-1]


def _log_normal_tokens(rng: random.Random, median: float, sigma: float, limit: int) -> int:
    """A log-normal length, at least one token and at most ``limit``."""
    return min(limit, max(1, round(median * math.exp(rng.gauss(0.0, sigma)))))
