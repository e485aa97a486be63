from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from saga_cli import bench_coordinator as bench
from saga_core.errors import SagaError


def words(**changed: object) -> argparse.Namespace:
    given: dict[str, object] = {
        "workers": bench.WORKERS,
        "sessions": bench.SESSIONS,
        "events": bench.EVENTS,
        "quick": True,
        "seed": 0,
        "json": None,
    }
    return argparse.Namespace(**(given | changed))


def test_it_prints_a_table_and_writes_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "coordinator.json"
    assert bench.run(words(json=str(path))) == 0
    summary = json.loads(path.read_text(encoding="utf-8"))
    assert [(size["workers"], size["sessions"]) for size in summary["sizes"]] == [
        (4, 200),
        (4, 400),
        (8, 200),
        (8, 400),
    ]
    for size in summary["sizes"]:
        every, *kinds = size["costs"]
        assert every["kind"] == "all"
        assert every["number"] == sum(cost["number"] for cost in kinds) == bench.QUICK_EVENTS
        assert all(0.0 < cost["median_us"] <= cost["p99_us"] for cost in size["costs"])
        assert size["waiting"] > 0  # It is crowded, as it is meant to be.
    assert "RequestArrived" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changed", [{"workers": "0"}, {"sessions": "many"}, {"workers": "1,,2"}, {"events": 10}]
)
def test_what_measures_nothing_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(SagaError, match="must be"):
        bench.run(words(quick=False, **({"workers": "1", "sessions": "1"} | changed)))
