"""`saga bench sdk`: what the SDK costs the program that it is in."""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
import tracemalloc
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

import saga_sdk as saga
from saga_cli.output import writable
from saga_core.errors import SagaError
from saga_sdk.events import Destination, Event, EventKind, EventSender
from saga_sdk.runs import RunKind, RunStart, RunTracker, Source
from saga_sdk.sessions import CallMap, NamedSessions
from saga_sim.machine import machine, versions
from saga_sim.report import write_json

BASE_URL = "http://gateway.invalid/v1"
_IMPORT = (
    "import sys, time; began = time.perf_counter(); import saga_sdk; "
    "print((time.perf_counter() - began) * 1e3, 'openai' in sys.modules, "
    "'httpx' in sys.modules, 'langchain_core' in sys.modules)"
)
_ANSWER = {
    "id": "1",
    "object": "chat.completion",
    "created": 0,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "done"},
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
_CALLS_A_CHAIN = 5
_WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the pairs: its median and its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """From two values at least."""
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(frozen=True, slots=True)
class Added:
    """What is added to the CPU time of one LLM call, microseconds.

    Attributes:
        without_us: of the call without the SDK.
        added_us: with the SDK less without, over the pairs.
    """

    name: str
    without_us: Spread
    added_us: Spread


def run(words: argparse.Namespace) -> int:
    """Measure, print a table and write JSON where it is asked for.

    Raises:
        SagaError: an option is wrong, or a library is missing.
    """
    json_path = writable("--json", words.json)
    if words.pairs < 2 or words.calls < 1 or words.runs < 2:
        raise SagaError("--pairs and --runs must be 2 or more, --calls 1 or more")
    summary = measure(pairs=words.pairs, calls=words.calls, runs=words.runs)
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=100)
    console.print(_table(summary))
    if json_path is not None:
        write_json(summary, json_path)
        console.print(f"Written to {json_path}", highlight=False)
    return 0


def measure(*, pairs: int, calls: int, runs: int) -> dict[str, Any]:
    """All figures, as they are written.

    Raises:
        SagaError: openai or langchain_openai is not installed.
    """
    added = [
        _added("bare client", _bare_client(), pairs, calls),
        _added("LangChain handler", _langchain(), pairs, calls, calls_a_time=_CALLS_A_CHAIN),
    ]
    return {
        "options": {"pairs": pairs, "calls": calls, "runs": runs},
        "added_us_per_call": [asdict(each) for each in added],
        "event_us": asdict(_events(pairs)),
        "memory": _memory(runs),
        "import": _import(),
        "versions": versions(["openai", "langchain-core", "langchain-openai"]),
        "machine": machine(),
    }


# With True, a block in which the SDK is on; it gives what makes some calls, one after the other.
Arm = Callable[[bool], AbstractContextManager[Callable[[], object]]]


def _added(name: str, arm: Arm, pairs: int, calls: int, *, calls_a_time: int = 1) -> Added:
    without, added = [], []
    gc_was_on = gc.isenabled()
    gc.disable()
    try:
        for pair in range(pairs):
            cost_us = {}
            # Which comes first alternates, so that what drifts counts for neither.
            for is_on in (pair % 2 == 0, pair % 2 != 0):
                with arm(is_on) as make_calls:
                    cost_us[is_on] = _median_us(make_calls, calls // calls_a_time) / calls_a_time
                gc.collect()
            without.append(cost_us[False])
            added.append(cost_us[True] - cost_us[False])
    finally:
        if gc_was_on:
            gc.enable()
        saga.uninstrument()
    return Added(name, Spread.of(without), Spread.of(added))


def _median_us(make_calls: Callable[[], object], times: int) -> float:
    # The median of single times: what other programs on the machine disturb counts for little.
    for _ in range(_WARM_UP):
        make_calls()
    took_s = []
    for _ in range(max(1, times)):
        began_s = time.thread_time()
        make_calls()
        took_s.append(time.thread_time() - began_s)
    return statistics.median(took_s) * 1e6


def _bare_client() -> Arm:
    client = _openai().OpenAI(base_url=BASE_URL, api_key="none", http_client=_null_http())
    messages = [{"role": "user", "content": "a"}]

    def call() -> None:
        client.chat.completions.create(model="m", messages=messages)

    @contextmanager
    def arm(is_on: bool) -> Iterator[Callable[[], object]]:
        if not is_on:
            saga.uninstrument()
            yield call
            return
        saga.instrument(BASE_URL)
        with saga.workflow("bench", deadline_s=60):
            yield call

    return arm


def _langchain() -> Arm:
    try:
        chat = importlib.import_module("langchain_openai").ChatOpenAI
        runnables = importlib.import_module("langchain_core.runnables")
    except ImportError as error:
        raise SagaError(f"the benchmark needs langchain-openai: {error}") from error
    model = chat(model="m", base_url=BASE_URL, api_key="none", http_client=_null_http())

    def agent(text: str) -> str:
        for _ in range(_CALLS_A_CHAIN):
            model.invoke(text)
        return text

    chain = runnables.RunnableLambda(agent)

    @contextmanager
    def arm(is_on: bool) -> Iterator[Callable[[], object]]:
        # Not the automatic handler, as LangChain keeps that, switched off, in the other arm.
        saga.uninstrument()
        callbacks = []
        if is_on:
            callbacks.append(saga.SagaCallbackHandler("bench", base_urls=BASE_URL, deadline_s=60))
        yield lambda: chain.invoke("a", {"callbacks": callbacks})

    return arm


def _openai() -> Any:
    try:
        return importlib.import_module("openai")
    except ImportError as error:
        raise SagaError(f"the benchmark needs openai: {error}") from error


def _null_http() -> Any:
    """An HTTP client, of the library that the OpenAI client uses, that answers by itself."""
    library = importlib.import_module(
        next(
            base.__module__.partition(".")[0]
            for base in _openai().DefaultHttpxClient.__mro__
            if base.__module__.startswith("httpx")
        )
    )
    body = json.dumps(_ANSWER).encode()

    def answer(request: Any) -> Any:
        return library.Response(200, content=body, headers={"content-type": "application/json"})

    return library.Client(transport=library.MockTransport(answer))


def _events(pairs: int) -> Spread:
    """CPU of all threads for one event, from the queue to a transport that answers at once."""
    costs_us = []
    for _ in range(pairs):
        sender = EventSender(may_send=lambda url: True, post=lambda *request: 202)
        to = (Destination("http://gateway.invalid/saga/v1/events", "Bearer none"),)
        began_s = time.process_time()
        for number in range(500):
            sender.put(Event(EventKind.TOOL_START, f"s-{number}", "task", "bench", to, "read_file"))
        sender.flush(30.0)
        costs_us.append((time.process_time() - began_s) / 500 * 1e6)
        sender.stop()
    return Spread.of(costs_us)


def _memory(runs: int) -> dict[str, float]:
    """Bytes held after half of the runs and after all; each is a chain, a call and a tool."""
    call_map = CallMap()
    tracker = RunTracker(call_map, sessions=NamedSessions(1000))
    tracemalloc.start()
    try:
        _agents(tracker, runs // 2)
        half_bytes, _ = tracemalloc.get_traced_memory()
        _agents(tracker, runs - runs // 2)
        all_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return {
        "runs": runs,
        "after_half_bytes": half_bytes,
        "after_all_bytes": all_bytes,
        "open_runs": len(tracker),
        "open_calls": len(call_map),
    }


def _agents(tracker: RunTracker, count: int) -> None:
    source = Source()
    for _ in range(count):
        root, call, tool = uuid.uuid4(), uuid.uuid4(), uuid.uuid4()
        thread = {"thread_id": str(root)}
        tracker.start(RunStart(RunKind.CHAIN, root, None, "agent", thread), source)
        tracker.start(RunStart(RunKind.CALL, call, root, "model", thread), source)
        tracker.end(call)
        tracker.start(RunStart(RunKind.TOOL, tool, root, "read_file", thread), source)
        tracker.end(tool)
        tracker.end(root)


def _import() -> dict[str, Any]:
    """How long ``import saga_sdk`` takes in a new process, and whether it loads a framework."""
    took_ms, loaded = [], set()
    for _ in range(9):
        done = subprocess.run(
            [sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True
        )
        took, *frameworks = done.stdout.split()
        took_ms.append(float(took))
        loaded |= set(frameworks)
    return {"ms": asdict(Spread.of(took_ms)), "loads_a_framework": loaded != {"False"}}


def _table(summary: dict[str, Any]) -> Table:
    options = summary["options"]
    title = f"The SDK's cost: median (quartiles) over {options['pairs']} pairs"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column("what")
    table.add_column("figure", justify="right")
    for each in summary["added_us_per_call"]:
        table.add_row(f"{each['name']}: a call without, CPU µs", _text(each["without_us"]))
        table.add_row(f"{each['name']}: added to a call, CPU µs", _text(each["added_us"]))
    table.add_row("an event, queued and sent, CPU µs", _text(summary["event_us"]))
    memory = summary["memory"]
    held = (memory["after_half_bytes"], memory["after_all_bytes"])
    halves = f"after {memory['runs'] // 2:,} and {memory['runs']:,} runs"
    table.add_row(f"memory {halves}, KB", " and ".join(f"{b / 1e3:,.0f}" for b in held))
    loads = "a framework" if summary["import"]["loads_a_framework"] else "no framework"
    table.add_row(f"import saga_sdk, ms ({loads} loaded)", _text(summary["import"]["ms"]))
    ran_on = {**summary["versions"], **summary["machine"]}
    table.caption = ", ".join(f"{name} {value}" for name, value in ran_on.items())
    return table


def _text(spread: dict[str, float]) -> str:
    return f"{spread['median']:.1f} ({spread['low']:.1f}-{spread['high']:.1f})"
