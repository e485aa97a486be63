"""`saga aeg`: graphs of agents' workflows, learned from traces, shown, and put to the test."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from saga_cli.output import writable
from saga_core.errors import SagaError

if TYPE_CHECKING:
    from saga_core.aeg import Aeg
    from saga_core.graph import Graphs
    from saga_sim.aeg.identification import Identification

    _Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]

_HTTP_TIMEOUT_S = 10.0


def add_to(commands: _Commands) -> None:
    """Add the words of this command."""
    aeg = commands.add_parser(
        "aeg",
        help="agent execution graphs: learn them from traces, show them, put them to the test",
        description="Agent execution graphs: what each workflow's sessions do next, and when.",
    )
    inner = aeg.add_subparsers(dest="aeg", required=True, metavar="COMMAND")

    learn = inner.add_parser(
        "learn",
        help="learn graphs from traces, into a file that a gateway can go on from",
        description="Learns the graphs of recorded sessions and writes them to a file: what "
        "`saga gateway --set state_file=FILE` goes on from, and `saga aeg show` reads.",
    )
    learn.add_argument("trace", nargs="+", metavar="TRACE", help=_TRACES)
    learn.add_argument("--state", required=True, metavar="FILE", help="where the graphs go")

    show = inner.add_parser(
        "show",
        help="show a graph, of a file or of a running gateway",
        description="Lists the workflows, or shows the graph of one.",
    )
    show.add_argument("state", metavar="FILE|URL", help="a file of `saga aeg learn`, or a gateway")
    show.add_argument("--workflow", metavar="NAME", help="the one to show")
    show.add_argument("--tenant", metavar="NAME", help="whose it is, on a gateway with API keys")
    show.add_argument("--key", metavar="KEY", help="API key of the gateway")
    show.add_argument(
        "--format",
        choices=("table", "json", "dot", "mermaid"),
        default="table",
        help="(table)",
    )

    evaluate = inner.add_parser(
        "eval",
        help="learn from some sessions of a trace and foretell the others",
        description="What can be told of sessions that nothing was learned from: which session a "
        "request belongs to, the next step, the end, the length of pauses.",
    )
    evaluate.add_argument("trace", nargs="+", metavar="TRACE", help=f"{_TRACES}; or `generated`")
    evaluate.add_argument(
        "--hide-ids", action="store_true", help="also tell sessions and tasks by content alone"
    )
    evaluate.add_argument(
        "--edges", metavar="FILE", help="true edges between spans, as JSON: {file: [[from, to]]}"
    )
    evaluate.add_argument("--folds", type=int, default=5, metavar="N", help="(5)")
    evaluate.add_argument("--seed", type=int, default=0, metavar="N", help="(0)")
    evaluate.add_argument("--json", metavar="FILE", help="also write the results to FILE")


_TRACES = "trace files, or folders of one kind"


def run(options: argparse.Namespace) -> int:
    """Run one of the commands.

    Raises:
        SagaError: an option or a trace is wrong.
    """
    if options.aeg == "learn":
        return _learn(options.trace, options.state)
    if options.aeg == "show":
        return _show(options)
    return _evaluate(options)


def _learn(traces: Sequence[str], state: str) -> int:
    from saga_core.graph import Graphs
    from saga_sim.aeg.sources import learn_all, read_sequences

    path = writable("--state", state)
    assert path is not None
    graphs, sessions, steps = Graphs(), 0, 0
    for sequences in read_sequences(list(map(Path, traces))):
        learn_all(graphs, sequences, now_s=time.time())
        sessions += len(sequences.runs)
        steps += sum(len(run.steps) for run in sequences.runs)
    path.write_text(json.dumps(graphs.state()))
    print(f"{steps} steps of {sessions} sessions, {len(graphs)} workflows: written to {path}")
    return 0


def _show(options: argparse.Namespace) -> int:
    if options.state.startswith(("http://", "https://")):
        return _show_remote(options)
    graphs = _read_state(Path(options.state))
    if options.workflow is None:
        rows = [_listed(key, graphs.graph(key)) for key in reversed(graphs.workflows())]
        _print_workflows([row for row in rows if row is not None])
        return 0
    for key in graphs.workflows():
        tenant, workflow = key if isinstance(key, tuple) else (None, str(key))
        if workflow == options.workflow and tenant == options.tenant:
            found = graphs.graph(key, workflow)
            assert found is not None
            _print_graph(found, options.format)
            return 0
    raise SagaError(f"{options.state} has no workflow {options.workflow}: leave --workflow out")


def _show_remote(options: argparse.Namespace) -> int:
    from saga_core.aeg import read_aeg

    if options.workflow is None:
        rows = json.loads(_get(options, "/saga/v1/workflows"))["workflows"]
        _print_workflows(rows)
        return 0
    form = "json" if options.format == "table" else options.format
    tenant = "" if options.tenant is None else f"&tenant={options.tenant}"
    text = _get(options, f"/saga/v1/workflows/{options.workflow}/aeg?format={form}{tenant}")
    if options.format == "table":
        _print_graph(read_aeg(text), "table")
    else:
        print(text)
    return 0


def _get(options: argparse.Namespace, path: str) -> str:
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    url = options.state.rstrip("/") + path
    headers = {} if options.key is None else {"Authorization": f"Bearer {options.key}"}
    try:
        with urlopen(Request(url, headers=headers), timeout=_HTTP_TIMEOUT_S) as answer:
            content: bytes = answer.read()
    except HTTPError as error:
        raise SagaError(f"{url}: HTTP {error.code}: {error.read()[:500].decode()}") from error
    except (URLError, TimeoutError) as error:
        raise SagaError(f"{url}: {error}") from error
    return content.decode()


def _read_state(path: Path) -> Graphs:
    from saga_core.fields import StateError
    from saga_core.graph import Graphs

    try:
        return Graphs.from_state(json.loads(path.read_text()))
    except (OSError, json.JSONDecodeError, StateError) as error:
        raise SagaError(f"{path}: {error}; expected a file of `saga aeg learn`") from error


def _listed(key: object, aeg: Aeg | None) -> dict[str, Any] | None:
    if aeg is None:
        return None
    tenant, workflow = key if isinstance(key, tuple) else (None, key)
    counts = {"tasks": aeg.tasks, "nodes": len(aeg.nodes), "edges": len(aeg.edges)}
    return {"tenant": tenant, "workflow": workflow, **counts, "is_cold": aeg.is_cold}


def _print_workflows(rows: Sequence[dict[str, Any]]) -> None:
    table = _table("workflow", "tenant", "tasks", "nodes", "edges", "")
    for row in rows:
        tasks, tenant = f"{row['tasks']:.0f}", row["tenant"] or ""
        cold = "cold" if row["is_cold"] else ""
        table.add_row(
            str(row["workflow"]), tenant, tasks, str(row["nodes"]), str(row["edges"]), cold
        )
    _print(table)


def _print_graph(aeg: Aeg, form: str) -> None:
    from saga_core.aeg import RENDERERS, to_dict

    if form != "table":
        print(RENDERERS[form](aeg))
        return
    shown = to_dict(aeg)
    table = _table("step", "seen", "then", "end", "pause P50 / P95", "answer", "result")
    for node in shown["nodes"]:
        after = [edge for edge in shown["edges"] if edge["from"] == node["id"]]
        after.sort(key=lambda edge: -edge["probability"])
        then = ", ".join(f"{edge['to']} {edge['probability']:.0%}" for edge in after[:4])
        table.add_row(
            node["id"],
            f"{node['count']:.0f}",
            then,
            f"{node['p_end']:.0%}",
            f"{_seconds(node['pause_p50_s'])} / {_seconds(node['pause_p95_s'])}",
            _tokens(node["output_tokens"]),
            _tokens(node["observation_tokens"]),
        )
    _print(table)


def _evaluate(options: argparse.Namespace) -> int:
    from saga_sim.aeg import sources
    from saga_sim.aeg.prediction import describe, evaluate
    from saga_sim.machine import machine
    from saga_sim.report import write_json

    json_path = writable("--json", options.json)
    if options.folds < 2:
        raise SagaError("--folds must be 2 or more")
    results: dict[str, Any] = {
        "benchmark": "aeg",
        "options": {"trace": [Path(each).name for each in options.trace], "seed": options.seed},
        "machine": machine(),
    }
    for told in sources.told_apart(options.trace, hide_ids=options.hide_ids, seed=options.seed):
        results.setdefault("identification", {})[told.name] = asdict(told.figures)
        _print_identification(told.name, told.figures, told.us_per_request)
    edges = None if options.edges is None else _read_edges(Path(options.edges))
    inferred = sources.edges_of(options.trace, edges)
    if inferred:
        results["edges"] = {each.name: each.as_dict() for each in inferred}
        _print_edges(inferred)
    for sequences in sources.read_sequences(sources.without_generated(options.trace)):
        found = evaluate(sequences, folds=options.folds, seed=options.seed)
        results.setdefault("prediction", {})[sequences.name] = asdict(found)
        print(describe(found))
    if json_path is not None:
        write_json(results, json_path)
        print(f"Written to {json_path}")
    return 0


def _read_edges(path: Path) -> dict[str, list[tuple[str, str]]]:
    try:
        content = json.loads(path.read_text())
        return {name: [(str(a), str(b)) for a, b in edges] for name, edges in content.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        message = f"--edges {path}: {error}; expected JSON: {{file: [[from, to], ...]}}"
        raise SagaError(message) from error


def _print_identification(name: str, found: Identification, us: float) -> None:
    print(
        f"{name}: {found.scored} of {found.requests} requests scored, {found.owners} true, "
        f"{found.groups} told\n"
        f"  pairs: precision {found.precision:.4f}, recall {found.recall:.4f}; purity "
        f"{found.purity:.4f}; {found.merged} merged; branches {found.right_forks} of "
        f"{found.forks}; {us:.0f} us a request\n"
        f"  {', '.join(f'{relation} {count}' for relation, count in found.relations.items())}"
    )


def _print_edges(found: Sequence[Any]) -> None:
    table = _table("spans of", "edges told", "true", "precision", "recall")
    for each in found:
        score = each.score
        if score is None:
            table.add_row(each.name, str(len(each.edges)), "", "", "")
        else:
            shares = f"{score.precision:.3f}", f"{score.recall:.3f}"
            table.add_row(each.name, str(score.inferred), str(score.true), *shares)
    _print(table)


def _table(*columns: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for column in columns:
        table.add_column(column)
    return table


def _print(table: Any) -> None:
    import os

    from rich.console import Console

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=140)
    console.print(table)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} s"


def _tokens(value: float | None) -> str:
    return "-" if not value else f"{value:.0f} tokens"
