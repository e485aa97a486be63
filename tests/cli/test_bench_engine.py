"""`saga bench engine`: its options, and the workers that its arms start."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from saga_cli import bench_engine
from saga_cli.bench_engine import ARMS, EngineOptions
from saga_cli.main import main
from saga_core.errors import SagaError
from saga_sim.engine_bench import Load, LoadOptions, make_load
from saga_sim.profiles import make_profile

CONFIG = {
    "dtype": "float32",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 256,
    "vocab_size": 500,
}


def options_of(**changes: object) -> EngineOptions:
    values: dict[str, object] = {
        "profile": "swe",
        "trace": None,
        "pressure": 2.0,
        "pairs": 1,
        "arms": "stock,saga",
        "host_pool_ratio": 0.0,
        "sessions": None,
        "seed": 0,
        "model": None,
        "scale": None,
        "time_scale": None,
        "no_sessions": False,
        "quick": False,
        "json": None,
    }
    return EngineOptions(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture
def load() -> Load:
    trace = make_profile("swe", sessions=40, seed=1)
    return make_load(trace, LoadOptions(scale=64, pool_tokens=32_768))


def command_of(arm: str, load: Load, folder: Path, **changes: object) -> list[str]:
    """The worker's command, with values joined to their options."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    options = options_of(arms=f"stock,{arm}" if arm != "stock" else arm, **changes)
    bench = bench_engine.Bench(options, make_profile("swe", sessions=1, seed=0), folder, folder)
    words = [str(word) for word in bench.worker(arm, load).command]
    joined: list[str] = []
    for word in words:
        if word.startswith("-") or not joined or not joined[-1].startswith("--"):
            joined.append(word)
        else:
            joined[-1] += f"={word}"
    return joined


@pytest.mark.parametrize(
    ("arm", "policy"),
    [
        ("stock", "vllm"),
        ("off", "off"),
        ("prefix-lru", "prefix-lru"),
        ("saga", "saga"),
        ("saga-noprefetch", "saga"),
        ("vllm-host", "vllm"),
    ],
)
def test_an_arm_is_a_policy_over_the_same_pool(
    arm: str, policy: str, load: Load, tmp_path: Path
) -> None:
    words = command_of(arm, load, tmp_path, host_pool_ratio=1.0)
    assert f"--saga-policy={policy}" in words
    assert f"--num-gpu-blocks-override={load.pool_blocks + 1}" in words
    assert f"--max-model-len={load.max_tokens}" in words
    assert ("--no-saga-prefetch" in words) == (arm == "saga-noprefetch")
    host = [word for word in words if word.startswith("--saga-host-gib")]
    assert len(host) == (arm not in ("stock", "off"))


def test_host_memory_is_the_pool_times_the_ratio(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_engine, "cpu_dtype", lambda: "float32")
    words = command_of("saga", load, tmp_path, host_pool_ratio=2.0)
    (host,) = (word for word in words if word.startswith("--saga-host-gib"))
    token_bytes = 2 * 4 * 2 * 64 * 4
    gib = float(host.partition("=")[2])
    assert gib * 2**30 == pytest.approx(2 * load.pool_tokens * token_bytes, abs=2.0)


def test_only_the_tiny_model_has_made_up_weights(load: Load, tmp_path: Path) -> None:
    assert "--load-format=dummy" in command_of("stock", load, tmp_path)
    given = command_of("stock", load, tmp_path, model=str(tmp_path))
    assert not [word for word in given if word.startswith(("--load-format", "--hf-overrides"))]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": "stock,turbo"}, "--arms stock,turbo: choose, each once, from stock, off"),
        ({"arms": "saga,saga"}, "choose, each once"),
        ({"arms": "stock,vllm-host"}, "the arm vllm-host needs --host-pool-ratio above 0"),
        ({"host_pool_ratio": -1.0}, "--host-pool-ratio -1 must be 0 or more"),
        ({"pairs": 0}, "--pairs 0: there must be at least one"),
    ],
)
def test_options_that_make_no_sense_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(SagaError, match=message):
        options_of(**changes).arm_names()


def test_every_arm_can_be_asked_for_together() -> None:
    options = options_of(arms=",".join(ARMS), host_pool_ratio=1.0)
    assert options.arm_names() == list(ARMS)


def test_quick_and_scales_shape_the_load() -> None:
    assert options_of(quick=True).load_options(vocabulary=9).scale == 64
    assert options_of(quick=True, scale=32).load_options(vocabulary=9).scale == 32
    asked = options_of(time_scale=3.0, sessions=5, pressure=4.0, seed=7).load_options(vocabulary=9)
    assert (asked.time_scale, asked.live_tasks, asked.pressure, asked.seed) == (3.0, 5, 4.0, 7)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--profile", "sew"], "unknown profile 'sew'; choose one of chat, swe, tree, web"),
        (["--trace", "/no/such/file"], "/no/such/file"),
        (["--json", "/no/such/folder/file"], "--json /no/such/folder/file cannot be written"),
        (["--sessions", "1"], "ask for more sessions"),
        (["--model", "/no/such/model"], "model config /no/such/model"),
    ],
)
def test_what_is_wrong_is_said_before_a_worker_starts(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "engine", *words]) == 1
    assert message in capsys.readouterr().err


def test_a_worker_that_cannot_start_is_reported_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho this worker has no engine\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(bench_engine.sys, "executable", os.fspath(python))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert main(["bench", "engine", "--quick", "--model", str(tmp_path)]) == 1
    shown = capsys.readouterr().err
    assert "the stock worker ended with exit code 3" in shown
    assert "this worker has no engine" in shown
