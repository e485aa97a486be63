from __future__ import annotations

import json
from pathlib import Path

import pytest

from saga_cli.main import main

TINY = ["bench", "scheduler", "--sessions", "20", "--blocks", "600", "--pairs", "1"]


def test_bench_alone_shows_which_benchmarks_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    assert "scheduler" in capsys.readouterr().out


def test_bench_scheduler_prints_a_table_and_writes_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "scheduler.json"
    words = [*TINY, "--steps", "25", "--policy", "prefix-lru", "--json", str(path)]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert "policy prefix-lru" in printed.out
    assert "subclass ÷ stock" in printed.out
    summary = json.loads(path.read_text(encoding="utf-8"))
    for load in summary["loads"]:
        assert load["load"]["name"] in printed.out
        assert f"{load['load']['name']}: round 1 of 1" in printed.err
        assert load["arms"]["stock"]["ratio_to_stock"]["median"] == 1.0
    assert summary["options"]["steps"] == 25
    assert summary["versions"]["python"] in printed.out


def test_a_policy_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--policy", "belady"]) == 1
    assert "belady" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_before_the_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*TINY, "--json", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "--json" in printed.err
    assert "round" not in printed.err
