from __future__ import annotations

import json
from pathlib import Path

import pytest

from saga_cli.main import main

TINY = ["bench", "sdk", "--pairs", "2", "--calls", "5", "--runs", "40"]


def test_it_prints_a_table_and_writes_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "sdk.json"
    assert main([*TINY, "--json", str(path)]) == 0
    summary = json.loads(path.read_text(encoding="utf-8"))
    printed = capsys.readouterr().out
    for each in summary["added_us_per_call"]:
        assert f"{each['name']}: added to a call" in printed
        assert each["without_us"]["median"] > 0
        assert each["added_us"]["low"] <= each["added_us"]["median"] <= each["added_us"]["high"]
    assert summary["memory"]["open_runs"] == summary["memory"]["open_calls"] == 0
    assert summary["import"]["loads_a_framework"] is False
    assert summary["import"]["ms"]["median"] > 0
    assert summary["options"] == {"pairs": 2, "calls": 5, "runs": 40}
    assert "no framework loaded" in printed


@pytest.mark.parametrize("option", ["--pairs", "--calls", "--runs"])
def test_numbers_that_measure_nothing_are_refused(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, option, "0"]) == 1
    assert "must be" in capsys.readouterr().err
