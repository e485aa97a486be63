"""What the demo shows: a live view, one table, one JSON file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from saga_cli.demo.workload import (
    AGENTS,
    BLOCK_TOKENS,
    POOL_BLOCKS,
    STEPS_PER_TASK,
    TASKS_PER_AGENT,
    Progress,
)
from saga_sim.machine import machine, versions

POOL_TOKENS = POOL_BLOCKS * BLOCK_TOKENS
_PLAIN_EVERY_S = 15.0


@dataclass(frozen=True, slots=True)
class Arm:
    """Figures of one arm; token counts are the worker's own over the whole arm.

    Attributes:
        tct_p50_s, tct_p95_s, tct_mean_s: completion time of a task, seconds.
        prompt_tokens: of all requests. prefill_tokens: of these, computed.
        regret_tokens: of the computed, those that had been cached and were evicted.
        hit_rate: prompt tokens from the cache ÷ prompt tokens, all requests.
        agent_hit_rate: the same, requests of agents only.
        agents_share, chat_share: largest prompts of all agents at once, and all prompts of the
            one-off chat, ÷ the KV pool.
    """

    tasks: int
    steps: int
    tct_p50_s: float
    tct_p95_s: float
    tct_mean_s: float
    elapsed_s: float
    prompt_tokens: int
    prefill_tokens: int
    regret_tokens: int
    hit_rate: float
    agent_hit_rate: float
    preempted_tokens: int
    chats: int
    chat_prompt_tokens: int
    agents_share: float
    chat_share: float

    @classmethod
    def from_run(cls, progress: Progress, state: dict[str, Any], elapsed_s: float) -> Arm:
        """Figures from what the clients saw and what the worker counted."""
        counters = state["counters"]
        times = sorted(progress.task_times_s)
        sizes = sorted((r.last_prompt_tokens for r in progress.results), reverse=True)
        agent_prompts = sum(r.prompt_tokens for r in progress.results)
        return cls(
            tasks=progress.tasks,
            steps=progress.steps,
            tct_p50_s=statistics.median(times),
            tct_p95_s=times[min(len(times) - 1, int(0.95 * len(times)))],
            tct_mean_s=statistics.fmean(times),
            elapsed_s=elapsed_s,
            prompt_tokens=counters["prompt_tokens"],
            prefill_tokens=counters["computed_tokens"],
            regret_tokens=counters["regret_tokens"],
            hit_rate=counters["cached_tokens"] / counters["prompt_tokens"],
            agent_hit_rate=sum(r.cached_tokens for r in progress.results) / agent_prompts,
            preempted_tokens=counters["preempted_tokens"],
            chats=progress.chats,
            chat_prompt_tokens=progress.chat_prompt_tokens,
            agents_share=sum(sizes[:AGENTS]) / POOL_TOKENS,
            chat_share=progress.chat_prompt_tokens / POOL_TOKENS,
        )


def summarise(pairs: Sequence[dict[str, Arm]]) -> dict[str, Any]:
    """Medians over the pairs, every run, and what it ran on, as one JSON object."""
    arms = {
        arm: {
            name: statistics.median(asdict(pair[arm])[name] for pair in pairs)
            for name in asdict(pairs[0][arm])
        }
        for arm in pairs[0]
    }
    ratios = [pair["stock"].tct_p50_s / pair["saga"].tct_p50_s for pair in pairs]
    return {
        "arms": arms,
        "tct_p50_ratio": {"median": statistics.median(ratios), "each": ratios},
        "runs": [{arm: asdict(figures) for arm, figures in pair.items()} for pair in pairs],
        "workload": {
            "agents": AGENTS,
            "tasks_per_agent": TASKS_PER_AGENT,
            "steps_per_task": STEPS_PER_TASK,
            "kv_pool_tokens": POOL_TOKENS,
            "block_tokens": BLOCK_TOKENS,
        },
        "versions": versions(("langchain", "openai")),
        "machine": machine(),
    }


def write_json(result: dict[str, Any], path: Path) -> None:
    """Write the result for programs."""
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


class LiveView:
    """The demo's terminal: lines that stay, one line that moves, a table at the end.

    Where the output is not a terminal the moving line is printed every 15 s instead.
    """

    def __init__(self) -> None:
        self._console = Console()

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def arm(self, name: str, progress: Progress) -> Iterator[None]:
        """Show the progress of one arm while the block runs."""
        started_s = monotonic()

        def line() -> Text:
            total = AGENTS * TASKS_PER_AGENT
            return Text(
                f"  {name:5}  {monotonic() - started_s:4.0f} s   tasks {progress.tasks}/{total}   "
                f"steps {progress.steps}/{total * STEPS_PER_TASK}   one-off chats {progress.chats}"
            )

        if self._console.is_terminal:
            with Live(get_renderable=line, console=self._console, refresh_per_second=4):
                yield
        else:
            stop = Event()

            def print_now_and_then() -> None:
                while not stop.wait(_PLAIN_EVERY_S):
                    self._console.print(line())

            printer = Thread(target=print_now_and_then, daemon=True)
            printer.start()
            try:
                yield
            finally:
                stop.set()
                printer.join()
                self._console.print(line())

    def table(self, result: dict[str, Any]) -> None:
        """Print the comparison."""
        stock, saga = result["arms"]["stock"], result["arms"]["saga"]
        table = Table(title="Same agents, same prompts, same seeds")
        for column in ("", "stock vLLM", "SAGA", "ratio"):
            table.add_column(column, justify="left" if not column else "right")
        for label, name, form in (
            ("task completion time p50, s", "tct_p50_s", "{:.1f}"),
            ("task completion time p95, s", "tct_p95_s", "{:.1f}"),
            ("prompt tokens prefilled", "prefill_tokens", "{:,.0f}"),
            ("regret tokens (prefilled again)", "regret_tokens", "{:,.0f}"),
            ("hit rate, all requests", "hit_rate", "{:.1%}"),
            ("hit rate, agents", "agent_hit_rate", "{:.1%}"),
            ("agent steps", "steps", "{:.0f}"),
            ("one-off chats beside them", "chats", "{:.0f}"),
        ):
            ratio = f"{stock[name] / saga[name]:.2f}x" if saga[name] else ""
            if form.endswith("%}") or name in ("steps", "chats"):
                ratio = ""
            table.add_row(label, form.format(stock[name]), form.format(saga[name]), ratio)
        self._console.print(table)
        self.say(
            f"KV pool: {POOL_TOKENS:,} tokens. All {AGENTS} agents at their largest take "
            f"{saga['agents_share']:.0%} of it; the one-off chat wrote {saga['chat_share']:.1f} "
            f"times the pool in the SAGA arm and {stock['chat_share']:.1f} times in the stock arm."
        )
        self.say(
            "Stock is vLLM's own prefix caching and eviction order, addressed directly; the plugin "
            "only counts there. SAGA adds the SDK, the gateway and the worker's retention."
        )
