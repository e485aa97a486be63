"""`saga bench gateway`, small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from saga_cli.bench_gateway import SCENARIOS
from saga_cli.main import main


def test_every_gateway_serves_every_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gateway.json"
    words = ["bench", "gateway", "--rounds", "1", "--scale", "0.01", "--json", str(path)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    summary = json.loads(path.read_text())
    assert {"direct", "pass-through", "saga"} <= summary["gateways"].keys()
    for by_scenario in summary["gateways"].values():
        assert list(by_scenario) == [scenario.name for scenario in SCENARIOS]
        assert all(each["failed"] == 0 for each in by_scenario.values())
        assert all(each["whole_p50_ms"] > 0 for each in by_scenario.values())
    saga = summary["gateways"]["saga"]
    assert all(each["cpu_us"] > 0 for each in saga.values())
    # A stream's first byte comes long before its last.
    streams = [each for name, each in saga.items() if "events" in name]
    assert all(each["first_p50_ms"] < each["whole_p50_ms"] / 2 for each in streams)
    assert summary["memory_mb_after_100000_sessions"]["saga"] > 0
    for name in ("pass-through", "saga", *(scenario.name for scenario in SCENARIOS)):
        assert name in printed


@pytest.mark.parametrize("words", [["--rounds", "0"], ["--scale", "0"]])
def test_options_that_make_no_sense_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "gateway", *words]) == 1
    assert "--rounds" in capsys.readouterr().err
