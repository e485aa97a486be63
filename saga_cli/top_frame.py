"""A frame of `saga top`: a snapshot of a gateway as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from saga_gateway.units import NONE, amount, percent, ratio, seconds

_LEAST_ROWS = 3
_MAX_WORKFLOWS = 3
# Titles, heads and rules, and the lines at the top.
_OTHER_LINES = 24
_STYLES = {
    "up": "green",
    "running": "green",
    "affinity": "green",
    "learned": "green",
    "waiting": "yellow",
    "draining": "yellow",
    "resting": "yellow",
    "cold": "yellow",
    "steal": "yellow",
    "rebalance": "yellow",
    "down": "bold red",
    "failover": "bold red",
}

Snapshot = dict[str, Any]


def rows_for(shot: Snapshot, height: int) -> int:
    """How many sessions, and how many decisions, fit into a terminal of that height."""
    taken = _OTHER_LINES + len(shot["workers"]) + len(shot["tenants"])
    return max(_LEAST_ROWS, (height - taken - min(_MAX_WORKFLOWS, len(shot["workflows"]))) // 2)


def frame(shot: Snapshot, url: str, *, rows: int, problem: str = "") -> Group:
    """A snapshot as it is printed.

    Args:
        rows: of sessions and of decisions, at most.
        problem: why it is not up to date; empty when it is.
    """
    parts: list[RenderableType] = [_head(shot, url)]
    if problem:
        parts.append(Text(_plain(problem), style="bold red"))
    parts += [
        _workers(shot["workers"]),
        _sessions(shot["sessions"]["listed"][:rows]),
        _workflows(shot["workflows"][:_MAX_WORKFLOWS]),
        _tenants(shot["tenants"]),
        _decisions(shot["decisions"][:rows]),
    ]
    return Group(*parts)


def _head(shot: Snapshot, url: str) -> Text:
    states, workers = shot["sessions"]["states"], shot["workers"]
    counted = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    running = sum(each["running"] for each in workers)
    savings = shot["savings"]
    answers = savings["answers"]
    prompt, cached = answers.get("prompt_tokens", 0), answers.get("cached_tokens", 0)
    lines = [
        f"SAGA gateway {url}, {shot['version']}, since {seconds(shot['uptime_s'])}",
        f"requests: {running} run, {shot['queued']} wait, {amount(shot['requests'])} in all; "
        f"sessions: {shot['sessions']['total']}" + (f" ({counted})" if counted else ""),
        f"prefill avoided: {percent(ratio(cached, prompt))} of {amount(prompt)} prompt tokens, as "
        "answers say",
    ]
    by_workers = savings["workers"]
    if by_workers is not None:
        prompt = by_workers["prompt_tokens"]
        lines[-1] += (
            f"; {percent(ratio(by_workers['cached_tokens'], prompt))} of {amount(prompt)}, regret "
            f"{percent(ratio(by_workers['regret_tokens'], prompt))}, as workers count"
        )
    return Text(_plain("\n".join(lines)))


def _workers(workers: Sequence[Snapshot]) -> Table:
    table = _table(
        "Workers", "worker; state; engine; #load; #run; #wait; #other; #in engine; #GPU KV; "
        "#sessions; #host KV; #prefill; #cached; #regret",
    )  # fmt: skip
    for each in workers:
        counters = each["counters"] or {}
        prompt = counters.get("prompt_tokens")
        inside = each["engine_running"], each["engine_waiting"]
        rate = each["prefill_tokens_per_s"]
        _add(
            table,
            each["worker_id"],
            each["status"],
            " ".join(filter(None, (each["engine"], each["engine_version"], each["policy"]))),
            NONE if each["load"] is None else f"{each['load']:.2f}",
            each["running"],
            each["waiting"],
            each["foreign"],
            NONE if inside[0] is None else f"{inside[0]} + {inside[1]}",
            _tier(each["memory"].get("gpu")),
            percent(each["pressure"]),
            _tier(each["memory"].get("host")),
            NONE if rate is None else f"{amount(rate)}/s",
            percent(ratio(counters.get("cached_tokens"), prompt)),
            percent(ratio(counters.get("regret_tokens"), prompt)),
        )
    return table


def _tier(tier: Snapshot | None) -> str:
    if tier is None:
        return NONE
    used, capacity = tier["used_tokens"], tier["capacity_tokens"]
    return f"{percent(ratio(used, capacity))} of {amount(capacity)}"


def _sessions(sessions: Sequence[Snapshot]) -> Table:
    table = _table(
        "Sessions", "session; state; #since; waits for; workflow; home; #GPU; #host; #TTL left; "
        "#returns in; #P(return); #steps; #to come",
    )  # fmt: skip
    for each in sessions:
        is_paused = each["paused_for_s"] is not None
        ttl_left_s = each["ttl_left_s"]
        _add(
            table,
            each["session_id"],
            each["state"],
            seconds(each["paused_for_s"]),
            (each["tool"] or "a person") if is_paused else NONE,
            each["workflow"],
            each["home"],
            amount(each["gpu_tokens"]),
            amount(each["host_tokens"]),
            "over" if ttl_left_s == 0.0 else seconds(ttl_left_s),
            seconds(each["returns_in_s"]),
            percent(each["p_return"]),
            each["steps"],
            NONE if each["steps_left"] is None else f"{each['steps_left']:.1f}",
        )
    return table


def _workflows(workflows: Sequence[Snapshot]) -> Table:
    table = _table("Workflows", "workflow; tenant; state; #sessions; #tasks; #steps; #edges")
    for each in workflows:
        _add(
            table,
            each["workflow"],
            each["tenant"],
            "cold" if each["is_cold"] else "learned",
            each["sessions"],
            f"{each['tasks']:.0f}",
            each["nodes"],
            each["edges"],
        )
    return table


def _tenants(tenants: Sequence[Snapshot]) -> Table:
    table = _table("Tenants", "tenant; #weight; #AFS; #due; #running; #live tasks; #run; #wait")
    for each in tenants:
        _add(
            table,
            each["tenant"] or "without a key",
            f"{each['weight']:g}",
            f"{each['afs']:.2f}",
            percent(each["share_due"]),
            percent(each["share_running"]),
            each["live_tasks"],
            each["running"],
            each["waiting"],
        )
    return table


def _decisions(decisions: Sequence[Snapshot]) -> Table:
    table = _table(
        "Decisions", "request; #ago; session; worker; route; reason; #waited; #priority; moved from"
    )
    for each in decisions:
        _add(
            table,
            each["request"],
            seconds(each["ago_s"]),
            each["session_id"],
            each["worker_id"],
            each["route"],
            each["reason"],
            f"{each['waited_ms']:.0f} ms",
            each["priority"],
            each["moved_from"],
        )
    return table


def _table(title: str, columns: str) -> Table:
    """A table; a column whose name begins with ``#`` holds numbers."""
    table = Table(
        title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", padding=(0, 1)
    )
    for name in columns.split("; "):
        justify = "right" if name.startswith("#") else "left"
        table.add_column(name.lstrip("#"), justify=justify, no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]
    return table


def _add(table: Table, *values: object) -> None:
    texts = [NONE if value is None else _plain(str(value)) for value in values]
    table.add_row(*(Text(text, style=_STYLES.get(text, "")) for text in texts))


def _plain(text: str) -> str:
    """The text without what would steer the terminal: names come from clients and workers."""
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)
