"""`saga simulate`: from words to a table and files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from saga_cli import simulate
from saga_cli.main import main
from saga_sim import study
from saga_sim.traces import write_trace
from tests.sim.test_study import tiny_trace

QUICK = ("--calls", "200", "--live-sessions", "6", "--seeds", "2", "--pressure", "1.5,3")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "tiny.jsonl.gz"
    write_trace(tiny_trace(), path)
    return str(path)


def model_folder(tmp_path: Path) -> str:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = {"num_hidden_layers": 2, "torch_dtype": "float16", **heads}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_simulate_alone_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate"]) == 0
    output = capsys.readouterr().out
    assert "usage: saga simulate" in output
    assert "cache" in output


def test_a_trace_becomes_a_table_json_and_a_figure(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]
    assert main(["simulate", "cache", trace, *QUICK, *words]) == 0
    captured = capsys.readouterr()
    assert "tiny.jsonl.gz: 12 sessions, 72 calls" in captured.out
    result = json.loads((tmp_path / "out.json").read_text())
    assert [row["policy"] for row in result["results"][:9]] == [
        *("prefix-lru", *["wa-lru"] * 4, *["saga"] * 4)
    ]
    for row in result["results"]:
        assert f"{row['total_ratio']['median']:.3f}" in captured.out
    assert str(tmp_path / "out.json") in captured.out
    assert (tmp_path / "out.png").stat().st_size > 5_000
    assert "36 of 36 runs" in captured.err


def test_policies_signals_and_seeds_are_chosen(trace: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = ["--policies", "gdsf, saga,saga", "--signals", "close", "--json", str(out)]
    assert main(["simulate", "cache", trace, *QUICK, *words]) == 0
    results = json.loads(out.read_text())["results"]
    rows = [(row["pressure"], row["policy"], row["signals"]) for row in results]
    each = [("gdsf", "none"), ("saga", "close")]
    assert rows == [(pressure, *row) for pressure in (1.5, 3.0) for row in each]
    assert [seed["seed"] for seed in results[0]["seeds"]] == [0, 1]


def test_a_profile_takes_the_place_of_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulate, "PROFILE_SESSIONS", 20)
    quick = ["--calls", "100", "--live-sessions", "5", "--seeds", "1", "--pressure", "2"]
    words = [*quick, "--policies", "prefix-lru", "--block-tokens", "32"]
    assert main(["simulate", "cache", "profile:web", *words]) == 0
    output = capsys.readouterr().out
    assert "web: 20 sessions" in output
    assert "blocks of 32 tokens" in output
    assert "1.74\n" in output.replace(" ", "")


def test_a_capacity_in_gib_sets_the_pressure(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    memory = ["--capacity-gib", "0.001", "--model", model_folder(tmp_path)]
    words = [*QUICK[:-2], "--policies", "prefix-lru", *memory, "--json", str(out)]
    assert main(["simulate", "cache", trace, *words]) == 0
    result = json.loads(out.read_text())
    assert result["hardware"]["kv_bytes_per_token"] == 2 * 2 * 2 * 32 * 2
    blocks = int(0.001 * 2**30 / (512 * 16))
    assert result["options"]["capacity_blocks"] == blocks
    for cell in result["cells"]:
        assert cell["capacity_tokens"] == blocks * 16
        assert cell["pressure"] == pytest.approx(cell["footprint_tokens"] / (blocks * 16), rel=0.01)
    pressure = result["results"][0]["pressure"]
    assert f"pressure {pressure:.3g}: capacity {blocks * 16:,} tokens" in capsys.readouterr().out


def test_a_host_tier_loads(trace: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    host = ["--host-gib", "0.001", "--host-gbps", "10", "--kv-bytes-per-token", "512"]
    words = [*QUICK, "--policies", "prefix-lru", *host, "--json", str(out)]
    assert main(["simulate", "cache", trace, *words]) == 0
    result = json.loads(out.read_text())
    assert result["options"]["host_blocks_per_s"] == pytest.approx(10e9 / (512 * 16))
    assert all(seed["loaded_tokens"] > 0 for row in result["results"] for seed in row["seeds"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--policies best", "unknown policy 'best'; choose from"),
        ("--signals loud", "unknown signals 'loud'; choose from none, close"),
        ("--policies ,", "policies are empty"),
        ("--pressure 2,0", "pressure 0 must be above 0"),
        ("--pressure 2,much", "--pressure 2,much: expected numbers with commas between"),
        ("--format best", "format is 'best'; expected auto, saga"),
        ("--capacity-gib 1", "--capacity-gib and --host-gib need --model"),
        ("--kv-bytes-per-token 9", "need --capacity-gib or --host-gib"),
        ("--model .", "need --capacity-gib or --host-gib"),
        ("--model . --kv-bytes-per-token 9", "exclude each other"),
        ("--capacity-gib 1 --kv-bytes-per-token 9 --pressure 2", "exclude each other"),
        ("--capacity-gib 0 --kv-bytes-per-token 9", "--capacity-gib 0: expected a number above 0"),
        ("--capacity-gib 1e-9 --kv-bytes-per-token 9", "holds no block: one takes"),
        ("--capacity-gib 1 --kv-bytes-per-token 0", "--kv-bytes-per-token 0: at least 1"),
        ("--capacity-gib 1 --model /no/model", "model config /no/model cannot be read"),
        ("--host-gib 1 --kv-bytes-per-token 9", "--host-gib and --host-gbps need each other"),
        ("--kv-dtype fp8", "--kv-dtype and --tensor-parallel need --model"),
        ("--json /no/such/folder/a.json", "--json /no/such/folder/a.json cannot be written"),
        ("--plot /no/such/folder/a.png", "--plot /no/such/folder/a.png cannot be written"),
        ("--plot a.pdf", "a.pdf: the name must end in .png or .svg"),
        ("--seeds 0", "seeds=0 must be at least 1"),
    ],
)
def test_wrong_options_are_named(
    words: str, message: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "cache", trace, *words.split()]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("/no/such/trace.jsonl", "/no/such/trace.jsonl: cannot be read"),
        ("profile:sew", "unknown profile 'sew'; choose one of chat, swe, tree, web"),
        ("profile:swe profile:web", "profile:swe is a whole trace"),
        ("profile:swe --format saga", "--format says how files are read"),
    ],
)
def test_wrong_traces_are_named(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "cache", *words.split()]) == 1
    assert message in capsys.readouterr().err


def test_a_policy_better_than_the_optimum_is_an_error(
    trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        study, "optimal_hits", lambda workload, schedule, blocks: [0] * len(workload.calls)
    )
    assert main(["simulate", "cache", trace, *QUICK]) == 1
    assert "Bélády beaten: prefix-lru" in capsys.readouterr().err


def test_without_matplotlib_only_a_figure_is_refused(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "saga_sim.plots", raising=False)
    monkeypatch.delattr("saga_sim.plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["simulate", "cache", trace, "--plot", str(tmp_path / "a.png")]) == 1
    message = capsys.readouterr().err
    assert "matplotlib is missing: pip install 'saga-sdk[sim]'" in message
    assert not (tmp_path / "a.png").exists()
    assert main(["simulate", "cache", trace, *QUICK, "--policies", "prefix-lru"]) == 0


def test_interrupted_it_says_so(
    trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "build_workload", interrupt)
    assert main(["simulate", "cache", trace]) == 130
    assert "saga simulate: stopped" in capsys.readouterr().err
