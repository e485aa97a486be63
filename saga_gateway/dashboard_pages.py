"""The pages of the dashboard: a snapshot of the gateway as HTML."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import quote, urlencode

from saga_gateway.dashboard_tables import (
    WORKFLOWS_PATH,
    decisions_table,
    edges_table,
    known_badge,
    nodes_table,
    sessions_table,
    tenants_table,
    workers_table,
    workflows_table,
)
from saga_gateway.graph_drawing import draw
from saga_gateway.markup import Markup, facts, joined, markup, section
from saga_gateway.overview import Snapshot
from saga_gateway.units import amount, percent, ratio, seconds

DASHBOARD_PATH = "/dashboard"
_SESSIONS, _TENANTS = f"{DASHBOARD_PATH}/sessions", f"{DASHBOARD_PATH}/tenants"
_DECISIONS = f"{DASHBOARD_PATH}/decisions"
_FEW = 10

NAMES = {
    DASHBOARD_PATH: "Overview",
    _SESSIONS: "Sessions",
    WORKFLOWS_PATH: "Workflows",
    _TENANTS: "Tenants",
    _DECISIONS: "Decisions",
}
"""The pages that are in the menu, and what they are called."""


def overview_page(shot: Snapshot) -> Markup:
    """Everything in short."""
    total = shot["sessions"]["total"]
    return joined(
        [
            markup("<h1>Overview</h1>\n"),
            _headline(shot),
            section("workers", "Workers", workers_table(shot["workers"])),
            _savings(shot["savings"]),
            section(
                "sessions",
                "Latest sessions",
                sessions_table(shot["sessions"]["listed"][:_FEW]),
                more=(_SESSIONS, f"all {total}"),
            ),
            section(
                "workflows",
                "Workflows",
                workflows_table(shot["workflows"][:_FEW]),
                more=(WORKFLOWS_PATH, f"all {len(shot['workflows'])}"),
            ),
            section(
                "tenants", "Tenants", tenants_table(shot["tenants"][:_FEW]), more=(_TENANTS, "more")
            ),
            section(
                "decisions",
                "Latest decisions",
                decisions_table(shot["decisions"][:_FEW]),
                more=(_DECISIONS, "more"),
            ),
        ]
    )


def sessions_page(shot: Snapshot) -> Markup:
    """The sessions that were used last."""
    listed, states = shot["sessions"]["listed"], shot["sessions"]["states"]
    counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    note = f"The latest {len(listed)} of {shot['sessions']['total']}. {counts.capitalize()}."
    return joined(
        [
            markup("<h1>Sessions</h1>\n"),
            section("sessions", "Latest sessions", _note(note), sessions_table(listed)),
        ]
    )


def workflows_page(shot: Snapshot) -> Markup:
    """The workflows that have a graph."""
    return joined(
        [
            markup("<h1>Workflows</h1>\n"),
            section("workflows", "Workflows with a graph", workflows_table(shot["workflows"])),
        ]
    )


def tenants_page(shot: Snapshot) -> Markup:
    """Tenants, what they are due and what they have."""
    note = (
        "AFS: workers that a tenant's live tasks need from now on to be on time. Due: AFS × weight "
        "of all; running: its requests of all that run."
    )
    return joined(
        [
            markup("<h1>Tenants</h1>\n"),
            section("tenants", "Fair shares", _note(note), tenants_table(shot["tenants"])),
        ]
    )


def decisions_page(shot: Snapshot) -> Markup:
    """Which request went where, and why."""
    return joined(
        [
            markup("<h1>Decisions</h1>\n"),
            section(
                "decisions", "Why a request went where it went", decisions_table(shot["decisions"])
            ),
        ]
    )


PAGES: dict[str, Callable[[Snapshot], Markup]] = {
    DASHBOARD_PATH: overview_page,
    _SESSIONS: sessions_page,
    WORKFLOWS_PATH: workflows_page,
    _TENANTS: tenants_page,
    _DECISIONS: decisions_page,
}
"""What stands in the menu's pages."""


def workflow_page(graph: dict[str, Any], tenant: str | None) -> Markup:
    """A workflow's graph, of the form that ``aeg.to_dict`` gives."""
    drawing, left_out = draw(graph)
    whose = "" if tenant is None else f" of tenant {tenant}"
    note = (
        f"{graph['tasks']:.0f} tasks seen to their end{whose}. At an edge: its probability, and "
        "P50 / P95 of the pause before the next step. Dashed: too unlikely to be acted upon."
    )
    described = markup(
        '<p class="note">{state} {note} {left_out}</p>\n',
        state=known_badge(graph["is_cold"]),
        note=note,
        left_out=left_out,
    )
    query = "" if tenant is None else "?" + urlencode({"tenant": tenant})
    json_path = f"/saga/v1/workflows/{quote(graph['workflow'], safe='')}/aeg{query}"
    return joined(
        [
            markup("<h1>Workflow {name}</h1>\n", name=graph["workflow"]),
            section(
                "graph",
                "Graph",
                described,
                markup(
                    '<div class="scroll" role="region" aria-label="drawing" tabindex="0">'
                    "{drawing}</div>",
                    drawing=drawing,
                ),
                more=(json_path, "as JSON"),
            ),
            section("nodes", "Steps", nodes_table(graph["nodes"])),
            section("edges", "Edges", edges_table(graph)),
        ]
    )


# Parts


def _headline(shot: Snapshot) -> Markup:
    states, workers = shot["sessions"]["states"], shot["workers"]
    up = sum(each["status"] == "up" for each in workers)
    running = sum(each["running"] for each in workers)
    return section(
        "now",
        "Now",
        facts(
            [
                ("Workers", f"{up} of {len(workers)}", "up"),
                ("Requests", running, f"run, {shot['queued']} wait"),
                ("Sessions", shot["sessions"]["total"], f"{states.get('paused', 0)} paused"),
                ("Workflows", len(shot["workflows"]), "with a graph"),
                ("Served since", seconds(shot["uptime_s"]), f"{amount(shot['requests'])} requests"),
            ]
        ),
    )


def _savings(savings: Snapshot) -> Markup:
    answers, workers = savings["answers"], savings["workers"]
    prompt, cached = answers.get("prompt_tokens", 0), answers.get("cached_tokens", 0)
    rows = [
        ("Prompt tokens", amount(prompt), "as answers say"),
        ("Prefill avoided", percent(ratio(cached, prompt)), f"{amount(cached)} tokens cached"),
    ]
    if workers is not None:
        prompt, cached = workers["prompt_tokens"], workers["cached_tokens"]
        host, regret = workers["host_cached_tokens"], workers["regret_tokens"]
        rows += [
            ("Prompt tokens", amount(prompt), "as workers count"),
            (
                "Prefill avoided",
                percent(ratio(cached, prompt)),
                f"{amount(cached)} tokens, {amount(host)} of them from host memory",
            ),
            (
                "Prefill time avoided",
                seconds(workers["prefill_avoided_s"]),
                "at the measured rate",
            ),
            ("Regret", percent(ratio(regret, prompt)), f"{amount(regret)} tokens again"),
        ]
    return section("savings", "Savings", facts(rows))


def _note(text: str) -> Markup:
    return markup('<p class="note">{text}</p>\n', text=text)
