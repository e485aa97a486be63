from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from saga_cli import simulate_cluster
from saga_core.errors import SagaError, SettingsError
from saga_sim.cluster.arms import arms_of
from saga_sim.cluster.load import make_load
from saga_sim.cluster.scenarios import SCENARIOS, scenario_of

SMALL = "--workers 2 --tasks 10 --live-tasks 6 --pressure 1 --scale 16 --block-tokens 16"


def words(text: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    simulate_cluster.add_words(parser)
    return parser.parse_args(text.split())


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_can_be_played_at_its_pressure(name: str) -> None:
    scenario = SCENARIOS[name]
    load = make_load(scenario.load)
    pool_tokens = load.options.workers * load.blocks_per_worker * load.options.block_tokens
    pressure = load.live_tasks * load.footprint_tokens / pool_tokens
    assert pressure == pytest.approx(scenario.load.pressure, rel=0.01)
    assert load.cut_tasks <= len(load.tasks) / 4
    assert scenario.reference in scenario.arms
    arms_of(scenario.arms)
    assert f"pressure {scenario.load.pressure:g}" in scenario.line
    full = scenario.at({}, is_full=True, seed=3)
    assert (full.seed, full.pressure) == (3, scenario.load.pressure)
    assert full.workers >= 16


def test_what_is_asked_for_stands_above_the_scenario() -> None:
    load = scenario_of("web").at({"tasks": 7, "workers": 2}, is_full=True, seed=5)
    assert (load.profile, load.tasks, load.workers, load.live_tasks) == ("web", 7, 2, 128)
    with pytest.raises(SettingsError, match="choose one of swe, web"):
        scenario_of("none")


def test_the_paper_has_ten_tenants() -> None:
    load = make_load(SCENARIOS["tenants"].load)
    assert len({owner.tenant for owner in load.owners}) == 10
    steps = {owner.kind: len(task) for owner, task in zip(load.owners, load.tasks, strict=True)}
    assert steps == {"heavy": 100, "medium": 30, "light": 10}


def test_the_command_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate_cluster.run(words("--scenario list")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(SCENARIOS)
    assert all("pressure" in line for line in lines)


def test_full_is_of_a_scenario() -> None:
    with pytest.raises(SagaError, match="--scenario says which"):
        simulate_cluster.run(words("--full"))


def test_the_command_plays_tenants_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    file, folder = tmp_path / "results.json", tmp_path / "plots"
    asked = f"--scenario tenants {SMALL} --arms vllm-apc,saga-coordinator"
    assert simulate_cluster.run(words(f"{asked} --json {file} --plots {folder}")) == 0
    found = json.loads(file.read_text())
    assert (found["scenario"], found["reference"]) == ("tenants", "vllm-apc")
    assert list(found["comparisons"]) == ["saga-coordinator"]
    for arm in found["arms"].values():
        assert list(arm["slo_median"]) == ["heavy", "medium", "light"]
        (run,) = arm["runs"]
        assert len(run["tct_s"]) == run["tasks"]
    assert "tasks on time, heavy" in capsys.readouterr().out
    names = {path.name for path in folder.iterdir()}
    assert {
        f"{name}{suffix}" for name in ("completion", "on_time") for suffix in (".png", ".svg")
    } <= names
    assert len(names) == 12
    assert all(path.stat().st_size > 1000 for path in folder.iterdir())
