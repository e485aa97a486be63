"""The tables of the dashboard: lists of a snapshot, and of a graph, as HTML."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import quote, urlencode

from saga_core.aeg import END_ID
from saga_gateway.graph_drawing import arrows_of
from saga_gateway.markup import Markup, badge, markup, meter, table
from saga_gateway.overview import Snapshot
from saga_gateway.units import amount, percent, ratio, seconds

WORKFLOWS_PATH = "/dashboard/workflows"
_WORKERS_HEAD = (
    "Worker; State; Engine; #Load; #Running; #Waiting; #Other; #In engine; GPU memory; "
    "Held by sessions; Host memory; #Prefill; #Cached; #Regret; Prefetches"
)
_SESSIONS_HEAD = (
    "Session; State; Waits for; Workflow; Home; Resident: GPU, host; #TTL left; #Returns in; "
    "#P(return); #Steps; #To come; #Tokens"
)
_WORKFLOWS_HEAD = "Workflow; Tenant; State; #Sessions; #Tasks; #Steps; #Edges"
_TENANTS_HEAD = "Tenant; #Weight; #AFS; #Due; #Running; #Live tasks; #Runs; #Waits"
_DECISIONS_HEAD = "Request; #Ago; Session; Worker; Route; Reason; #Waited; #Priority; Moved from"
_STEPS_HEAD = "Step; Tool; #Seen; #Ends here; #Pause P50; #Pause P95; #Pauses; #Answer; #Result"
_EDGES_HEAD = "From; To; #Probability; #Pause P50 / P95; #Seen; #Prefix kept"


def workers_table(workers: Iterable[Snapshot]) -> Markup:
    """The workers: their queues, memory and counters."""
    rows = [
        (
            each["worker_id"],
            badge(each["status"]),
            _engine(each),
            "-" if each["load"] is None else f"{each['load']:.2f}",
            each["running"],
            each["waiting"],
            each["foreign"],
            _in_engine(each),
            _tier(each["memory"].get("gpu"), "GPU memory in use"),
            _pressure(each["pressure"]),
            _tier(each["memory"].get("host"), "host memory in use"),
            _rate(each["prefill_tokens_per_s"]),
            *_counted(each["counters"]),
            _prefetches(each["prefetch"]),
        )
        for each in workers
    ]
    return table("Workers", _WORKERS_HEAD, rows, empty="There are no workers.")


def _engine(worker: Snapshot) -> str | None:
    parts = (worker["engine"], worker["engine_version"], worker["policy"])
    return " ".join(part for part in parts if part) or None


def _in_engine(worker: Snapshot) -> str | None:
    if worker["engine_running"] is None:
        return None
    return f"{worker['engine_running']} + {worker['engine_waiting']}"


def _tier(tier: Snapshot | None, name: str) -> Markup | None:
    if tier is None:
        return None
    used, capacity = tier["used_tokens"], tier["capacity_tokens"]
    return meter(ratio(used, capacity), f"{amount(used)} of {amount(capacity)}", name=name)


def _pressure(pressure: float | None) -> Markup | None:
    if pressure is None:
        return None
    return meter(pressure, percent(pressure), name="GPU memory that sessions hold")


def _rate(tokens_per_s: float | None) -> str | None:
    return None if tokens_per_s is None else f"{amount(tokens_per_s)}/s"


def _counted(counters: Snapshot | None) -> tuple[str | None, str | None]:
    if counters is None:
        return None, None
    prompt = counters.get("prompt_tokens")
    return tuple(  # type: ignore[return-value]
        percent(ratio(counters.get(name), prompt)) for name in ("cached_tokens", "regret_tokens")
    )


def _prefetches(counts: Snapshot | None) -> str | None:
    if counts is None:
        return None
    names = ("started", "useful", "late", "wasted")
    return ", ".join(f"{counts[name]:.0f} {name}" for name in names if name in counts)


def sessions_table(sessions: Iterable[Snapshot]) -> Markup:
    """Sessions: state, tool, residency, and what is expected of their pause."""
    rows = [
        (
            each["session_id"],
            _session_state(each),
            _tool(each),
            _workflow_link(each["tenant"], each["workflow"]),
            each["home"],
            _resident(each),
            _ttl(each["ttl_left_s"]),
            seconds(each["returns_in_s"]),
            percent(each["p_return"]),
            each["steps"],
            "-" if each["steps_left"] is None else f"{each['steps_left']:.1f}",
            amount(each["tokens"]),
        )
        for each in sessions
    ]
    return table("Sessions", _SESSIONS_HEAD, rows, empty="No session yet.")


def _session_state(session: Snapshot) -> Markup:
    since = session["paused_for_s"]
    if since is None:
        return badge(session["state"])
    return markup("{badge} {since}", badge=badge(session["state"]), since=seconds(since))


def _tool(session: Snapshot) -> str | None:
    if session["paused_for_s"] is None:
        return None
    return session["tool"] or "a person"


def _resident(session: Snapshot) -> str | None:
    if session["gpu_tokens"] is None:
        return None
    return f"{amount(session['gpu_tokens'])}, {amount(session['host_tokens'])}"


def _ttl(left_s: float | None) -> str:
    return "over" if left_s == 0.0 else seconds(left_s)


def _workflow_link(tenant: str | None, workflow: str | None) -> Markup | None:
    if workflow is None:
        return None
    query = "" if tenant is None else "?" + urlencode({"tenant": tenant})
    path = f"{WORKFLOWS_PATH}/{quote(workflow, safe='')}{query}"
    return markup('<a href="{path}">{name}</a>', path=path, name=workflow)


def workflows_table(workflows: Iterable[Snapshot]) -> Markup:
    """Workflows, each with a link to its graph."""
    rows = [
        (
            _workflow_link(each["tenant"], each["workflow"]),
            each["tenant"],
            known_badge(each["is_cold"]),
            each["sessions"],
            f"{each['tasks']:.0f}",
            each["nodes"],
            each["edges"],
        )
        for each in workflows
    ]
    return table("Workflows", _WORKFLOWS_HEAD, rows, empty="No workflow has been seen yet.")


def known_badge(is_cold: bool) -> Markup:
    """Whether enough is known of a workflow to act on it."""
    return badge("cold" if is_cold else "learned")


def tenants_table(tenants: Iterable[Snapshot]) -> Markup:
    """Tenants: what they are due, and what they have."""
    rows = [
        (
            each["tenant"] or "without a key",
            f"{each['weight']:g}",
            f"{each['afs']:.2f}",
            percent(each["share_due"]),
            percent(each["share_running"]),
            each["live_tasks"],
            each["running"],
            each["waiting"],
        )
        for each in tenants
    ]
    return table("Tenants", _TENANTS_HEAD, rows, empty="No tenant has sent anything yet.")


def decisions_table(decisions: Iterable[Snapshot]) -> Markup:
    """Admissions: where a request went, and why."""
    rows = [
        (
            each["request"],
            seconds(each["ago_s"]),
            each["session_id"],
            each["worker_id"],
            badge(each["route"]),
            each["reason"],
            f"{each['waited_ms']:.0f} ms",
            each["priority"],
            each["moved_from"],
        )
        for each in decisions
    ]
    return table(
        "Decisions", _DECISIONS_HEAD, rows, empty="No request has been sent to a worker yet."
    )


def nodes_table(nodes: Iterable[dict[str, Any]]) -> Markup:
    """The steps of a graph."""
    rows = [
        (
            node["id"],
            node["tool"],
            f"{node['count']:.0f}",
            percent(node["p_end"]),
            seconds(node["pause_p50_s"]),
            seconds(node["pause_p95_s"]),
            node["pauses"],
            f"{amount(node['output_tokens'])} tokens",
            f"{amount(node['observation_tokens'])} tokens",
        )
        for node in nodes
    ]
    return table("Steps", _STEPS_HEAD, rows, empty="No step has been seen yet.")


def edges_table(graph: dict[str, Any]) -> Markup:
    """The edges of a graph, those to its end among them."""
    counts = {(edge["from"], edge["to"]): edge for edge in graph["edges"]}
    rows = []
    for arrow in arrows_of(graph):
        edge = counts.get((arrow.source, arrow.target))
        is_end = arrow.target == END_ID
        rows.append(
            (
                arrow.source,
                arrow.target,
                percent(arrow.probability),
                None if is_end else arrow.pause or None,
                None if edge is None else f"{edge['count']:.0f}",
                None if edge is None else percent(edge["overlap"]),
            )
        )
    return table("Edges", _EDGES_HEAD, rows, empty="No edge has been seen yet.")
