"""`saga simulate`: replays traces through the retention policies."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from saga_cli.output import writable
from saga_core.errors import SagaError
from saga_sim import report
from saga_sim.kv_bytes import kv_bytes_per_token, read_config
from saga_sim.profiles import make_profile
from saga_sim.study import CacheStudy, PolicyRun, StudyOptions
from saga_sim.traces import Trace, read_trace

PROFILE = "profile:"
PROFILE_SESSIONS = 400
PROFILE_SEED = 100
_GIB = 2**30
_PLAIN_COLUMNS = 150
_PLAIN_EVERY_S = 15.0


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """What the command line says, word by word; None: not said.

    Attributes:
        pressure: numbers with commas between; policies and signals: names likewise.
        capacity_gib, host_gib: memory of one GPU's KV and of its host tier.
        host_gbps: bandwidth between the two, 10^9 bytes per second.
    """

    trace: list[str]
    format: str | None
    block_tokens: int | None
    policies: str
    signals: str
    pressure: str | None
    seeds: int
    live_sessions: float
    calls: int
    capacity_gib: float | None
    model: str | None
    kv_bytes_per_token: int | None
    kv_dtype: str | None
    tensor_parallel: int | None
    host_gib: float | None
    host_gbps: float | None
    json: str | None
    plot: str | None

    @classmethod
    def from_words(cls, words: argparse.Namespace) -> CacheOptions:
        """From parsed words."""
        return cls(**{field.name: getattr(words, field.name) for field in fields(cls)})


def cache(options: CacheOptions) -> int:
    """Run the study that the options ask for and print its table.

    Raises:
        SagaError: options or the trace are wrong, or a policy came out better than the optimum.
    """
    _check_pairs(options)
    token_bytes = _token_bytes(options)
    json_path = writable("--json", options.json)
    draw = _drawer(options.plot)
    # Checked before a long trace is read; the capacity needs the trace's block size.
    study_options(options, token_bytes, block_tokens=1)
    trace = _trace(options)
    study = CacheStudy(trace, study_options(options, token_bytes, trace.block_tokens))
    rows = report.rows_of(_watched(study))
    console = _console(sys.stdout)
    report.print_report(study, rows, console, profile=_profile(options))
    if json_path is not None:
        hardware = _hardware(options, token_bytes)
        report.write_json(report.summarise(study, rows, hardware), json_path)
        _say(console, f"Written to {json_path}")
    if draw is not None:
        draw(study, rows)
        _say(console, f"Drawn in {options.plot}")
    return 0


# Options


def study_options(
    options: CacheOptions, token_bytes: int | None, block_tokens: int
) -> StudyOptions:
    """The grid that the words describe.

    Raises:
        SagaError: a number or a name is wrong, or the memory holds no block.
    """
    grid: dict[str, Any] = {
        "policies": _names(options.policies),
        "signals": _names(options.signals),
        "seeds": options.seeds,
        "live_sessions": options.live_sessions,
        "measured_calls": options.calls,
    }
    if options.pressure is not None:
        grid["pressures"] = _numbers("--pressure", options.pressure)
    if token_bytes is not None:
        block_bytes = token_bytes * block_tokens
        if options.capacity_gib is not None:
            grid["capacity_blocks"] = _blocks("--capacity-gib", options.capacity_gib, block_bytes)
        if options.host_gib is not None and options.host_gbps is not None:
            grid["host_blocks"] = _blocks("--host-gib", options.host_gib, block_bytes)
            grid["host_blocks_per_s"] = options.host_gbps * 1e9 / block_bytes
    return StudyOptions(**grid)


def _check_pairs(options: CacheOptions) -> None:
    """Refuse options that say nothing without others, or that contradict each other."""
    has_memory = options.capacity_gib is not None or options.host_gib is not None
    has_bytes = options.model is not None or options.kv_bytes_per_token is not None
    wrong = {
        "--capacity-gib and --pressure exclude each other: one follows from the other": (
            options.capacity_gib is not None and options.pressure is not None
        ),
        "--model and --kv-bytes-per-token exclude each other": (
            options.model is not None and options.kv_bytes_per_token is not None
        ),
        "--host-gib and --host-gbps need each other": (
            (options.host_gib is None) != (options.host_gbps is None)
        ),
        "--capacity-gib and --host-gib need --model or --kv-bytes-per-token": (
            has_memory and not has_bytes
        ),
        "--model and --kv-bytes-per-token need --capacity-gib or --host-gib": (
            has_bytes and not has_memory
        ),
        "--kv-dtype and --tensor-parallel need --model": (
            (options.kv_dtype is not None or options.tensor_parallel is not None)
            and options.model is None
        ),
    }
    for message, is_wrong in wrong.items():
        if is_wrong:
            raise SagaError(message)


def _names(words: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in words.split(",") if word.strip()))


def _numbers(option: str, words: str) -> tuple[float, ...]:
    try:
        return tuple(dict.fromkeys(float(word) for word in words.split(",")))
    except ValueError as error:
        raise SagaError(f"{option} {words}: expected numbers with commas between") from error


def _blocks(option: str, gib: float, block_bytes: int) -> int:
    if not 0 < gib < 2**30:
        raise SagaError(f"{option} {gib:g}: expected a number above 0")
    blocks = int(gib * _GIB / block_bytes)
    if blocks < 1:
        raise SagaError(f"{option} {gib:g} holds no block: one takes {block_bytes:,} bytes")
    return blocks


def _token_bytes(options: CacheOptions) -> int | None:
    """KV bytes of a token on one GPU; None when nothing needs them."""
    if options.kv_bytes_per_token is not None:
        if options.kv_bytes_per_token < 1:
            raise SagaError(f"--kv-bytes-per-token {options.kv_bytes_per_token}: at least 1")
        return options.kv_bytes_per_token
    if options.model is None:
        return None
    return kv_bytes_per_token(
        read_config(Path(options.model)),
        kv_dtype=options.kv_dtype or "auto",
        tensor_parallel=1 if options.tensor_parallel is None else options.tensor_parallel,
    )


def _hardware(options: CacheOptions, token_bytes: int | None) -> dict[str, Any]:
    if token_bytes is None:
        return {}
    return {
        "kv_bytes_per_token": token_bytes,
        "model": options.model,
        "kv_dtype": options.kv_dtype,
        "tensor_parallel": options.tensor_parallel,
        "capacity_gib": options.capacity_gib,
        "host_gib": options.host_gib,
        "host_gb_per_s": options.host_gbps,
    }


def _drawer(path: str | None) -> Callable[[CacheStudy, list[report.Row]], None] | None:
    """What draws the figure; only a figure needs matplotlib."""
    if path is None:
        return None
    from saga_sim import plots

    plots.check_suffix(Path(path))
    file = writable("--plot", path)
    assert file is not None
    return lambda study, rows: plots.plot_totals(rows, study.trace.name, file)


# Trace


def _profile(options: CacheOptions) -> str | None:
    """Name of the profile that is asked for instead of files."""
    profiles = [word for word in options.trace if word.startswith(PROFILE)]
    if not profiles:
        return None
    if len(options.trace) > 1:
        raise SagaError(f"{profiles[0]} is a whole trace: it does not go with others")
    if options.format is not None:
        raise SagaError(f"--format says how files are read; {profiles[0]} is none")
    return profiles[0].removeprefix(PROFILE)


def _trace(options: CacheOptions) -> Trace:
    profile = _profile(options)
    if profile is not None:
        block = {} if options.block_tokens is None else {"block_tokens": options.block_tokens}
        return make_profile(profile, sessions=PROFILE_SESSIONS, seed=PROFILE_SEED, **block)
    return read_trace(
        [Path(word) for word in options.trace],
        block_tokens=options.block_tokens,
        format=options.format or "auto",
    )


# Progress


def _console(file: Any) -> Console:
    """A console for the stream; where that is no terminal lines may be long."""
    console = Console(file=file)
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(file=file, width=_PLAIN_COLUMNS)


def _watched(study: CacheStudy) -> Iterator[PolicyRun]:
    """The study's results, with its progress on stderr: a bar on a terminal, lines elsewhere."""
    with _progress(study.num_runs) as advance:
        for run in study.run():
            advance(f"seed {run.cell.seed}, pressure {run.cell.pressure:.3g}, {run.policy}")
            yield run


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain_progress(total, console)
        return
    text = TextColumn("{task.description}", markup=False)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), text)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("preparing", total=total)
        yield lambda text: progress.update(task, advance=1, description=text)


def _plain_progress(total: int, console: Console) -> Callable[[str], None]:
    started_s = shown_s = monotonic()
    done = 0

    def advance(text: str) -> None:
        nonlocal done, shown_s
        done += 1
        now_s = monotonic()
        if done == total or now_s - shown_s >= _PLAIN_EVERY_S:
            shown_s = now_s
            _say(console, f"{done} of {total} runs, {now_s - started_s:.0f} s: {text}")

    return advance


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)
