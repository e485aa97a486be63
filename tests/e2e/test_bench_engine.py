"""`saga bench engine` on real engines: a small load, one pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from saga_cli.main import main

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_both_arms_serve_the_same_load_and_the_log_agrees_with_the_workers_own_counters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "result.json"
    assert main(["bench", "engine", "--quick", "--profile", "swe", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    (load,) = result["loads"]
    (stock,), (saga,) = (result["arms"][name]["runs"] for name in ("stock", "saga"))
    for run in (stock, saga):
        counters = run["counters"]
        assert run["requests"] == counters["requests"] == load["calls"]
        assert run["prompt_tokens"] == counters["prompt_tokens"] == stock["prompt_tokens"]
        assert run["prefill_tokens"] == counters["computed_tokens"]
        # The log counts at the client; the worker knows the order in which it admitted.
        assert run["regret_tokens"] == pytest.approx(counters["regret_tokens"], rel=0.05)
        assert 0 <= run["belady_regret_tokens"] <= run["regret_tokens"]
        assert run["engine_cpu_s"] > 0
    assert stock["regret_tokens"] > 0.2 * stock["prefill_tokens"]
    assert stock["counters"]["chosen_blocks"] == 0 < saga["counters"]["chosen_blocks"]
    assert "stock ÷ saga" in capsys.readouterr().out
