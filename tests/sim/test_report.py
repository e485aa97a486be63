"""What a study shows: its JSON, its table, its figure, and KV bytes from a model's config."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from saga_core.errors import SagaError, SettingsError
from saga_sim import plots, report
from saga_sim.kv_bytes import kv_bytes_per_token, read_config
from saga_sim.report import Spread, label_of, rows_of, summarise, write_json
from saga_sim.study import CacheStudy
from tests.sim.test_study import TINY, tiny_trace


@pytest.fixture(scope="module")
def study():
    return CacheStudy(tiny_trace(), TINY)


@pytest.fixture(scope="module")
def rows(study):
    return rows_of(study.run())


def printed(study, rows, *, width=150, profile=None):
    console = Console(file=io.StringIO(), width=width)
    report.print_report(study, rows, console, profile=profile)
    return console.file.getvalue()


# Rows


def test_rows_stand_by_capacity_policy_and_signals(rows):
    keys = [(row.pressure, row.first.policy, row.first.signals) for row in rows]
    policies = [("prefix-lru", "none"), ("saga", "none"), ("saga", "all")]
    assert keys == [(pressure, *policy) for pressure in (1.5, 3.0) for policy in policies]
    assert all([run.cell.seed for run in row.runs] == [0, 1] for row in rows)


def test_a_spread_leaves_out_seeds_without_a_figure():
    assert Spread.of([3.0, None, 1.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([None]) is None


def test_shares_of_victims_are_of_all_seeds_together(rows):
    row = rows[-1]
    assert list(row.victims) == list(report.VICTIMS)
    assert sum(row.victims.values()) == pytest.approx(1.0)
    ended = [run.victims.get("ended", 0) for run in row.runs]
    total = sum(sum(run.victims.values()) for run in row.runs)
    assert row.victims["ended"] == sum(ended) / total > 0


def test_forecasts_are_called_injected():
    assert label_of("none") == "none"
    assert label_of("forecast") == "injected forecast (log σ 0.5)"
    assert label_of("all") == "all + injected forecast (log σ 0.5)"


# JSON


def keys_of(value):
    """Names of an object's fields, in order, with those of the first item of a list."""
    if isinstance(value, dict):
        return {name: keys_of(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [keys_of(inner) for inner in value[:1]]
    return type(value).__name__


USAGE = {"hit_tokens": "int", "loaded_tokens": "int", "prefilled_tokens": "int"}
FIGURES = ("total_ratio", "regen_ratio", "gap_closed", "hit_rate", "retained_share")


def test_the_json_has_these_fields(study, rows):
    values = keys_of(summarise(study, rows, {"kv_bytes_per_token": 4}))
    assert " ".join(values) == (
        "version saga_version python_version trace options hardware cells results paper"
    )
    assert values["version"] == "int"
    assert " ".join(values["trace"]) == "name sessions calls block_tokens clock notes"
    assert list(values["options"]) == list(TINY.__slots__)
    assert values["hardware"] == {"kv_bytes_per_token": "int"}
    (cell,) = values["cells"]
    reference = USAGE | {"hit_rate": "float", "regen_tokens": "int"}
    assert cell.pop("belady") == cell.pop("lru") == reference
    assert cell.pop("pressure") == "float"
    assert set(cell.values()) == {"int"}
    assert " ".join(cell) == (
        "seed point capacity_tokens footprint_tokens calls measured_calls input_tokens first_tokens"
    )


def test_the_json_of_a_result_has_these_fields(study, rows):
    (result,) = keys_of(summarise(study, rows)["results"])
    (seed,) = result.pop("seeds")
    spread = {"median": "float", "least": "float", "most": "float"}
    assert result == {
        "point": "int",
        "pressure": "float",
        "policy": "str",
        "signals": "str",
        "injected_forecast_log_sigma": "NoneType",
        **dict.fromkeys(FIGURES, spread),
        "victims": dict.fromkeys(report.VICTIMS, "float"),
    }
    assert seed.pop("victim_blocks").keys() <= set(report.VICTIMS)
    assert seed == {
        "seed": "int",
        **USAGE,
        "regen_tokens": "int",
        **dict.fromkeys(FIGURES, "float"),
        "retained_tokens": "float",
        "overcommitted_calls": "int",
    }


def test_the_json_holds_the_figures(study, rows):
    values = summarise(study, rows)
    assert values["version"] == 1
    assert len(values["cells"]) == 4
    assert [result["injected_forecast_log_sigma"] for result in values["results"][:3]] == [
        *(None, None, 0.5)
    ]
    for result, row in zip(values["results"], rows, strict=True):
        assert [seed["total_ratio"] for seed in result["seeds"]] == [
            run.total_ratio for run in row.runs
        ]
        assert result["total_ratio"]["median"] == row.spread("total_ratio").median
    assert values["paper"]["values"]["swe"] == {"prefix-lru": 1.97, "wa-lru": 1.31}


def test_equal_studies_give_equal_files(study, rows, tmp_path):
    write_json(summarise(study, rows), tmp_path / "a.json")
    write_json(summarise(study, rows_of(study.run())), tmp_path / "b.json")
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert text == (tmp_path / "b.json").read_text(encoding="utf-8")
    assert json.loads(text)["results"] == summarise(study, rows)["results"]


# Table


def test_the_table_has_the_figures(study, rows):
    text = printed(study, rows)
    lines = [line.split() for line in text.splitlines()]
    for row in rows:
        total = row.spread("total_ratio")
        (line,) = (
            line
            for line in lines
            if line[:3] == [f"{row.pressure:g}", row.first.policy, row.first.signals]
        )
        shown = " ".join(line)
        assert f" {total.median:.3f} ({total.least:.2f}..{total.most:.2f}) " in shown
        assert f" {100 * row.spread('gap_closed').median:.0f} " in shown
        assert f" {100 * row.spread('hit_rate').median:.1f} " in shown
        assert line[-1] == "/".join(f"{100 * share:.0f}" for share in row.victims.values())
    assert sum(line[1:2] == ["Bélády"] for line in lines) == 2
    assert "all + injected forecast (log σ 0.5)" in text


def test_the_lines_around_the_table_say_what_was_simulated(study, rows):
    text = printed(study, rows)
    footprint = sum(run.cell.footprint_tokens for run in rows[0].runs) / 2
    capacity = sum(run.cell.capacity_tokens for run in rows[0].runs) / 2
    assert "tiny: 12 sessions, 72 calls, blocks of 16 tokens" in text
    assert "6 sessions alive on average, 2 seeds" in text
    assert f"live footprint {footprint:,.0f} tokens" in text
    assert f"pressure 1.5: capacity {capacity:,.0f} tokens" in text
    assert "arXiv 2605.00528, their workload: prefix LRU 1.97 (SWE) and 1.74 (Web)" in text
    assert "WA-LRU 1.31 and 1.28" in text


@pytest.mark.parametrize(("profile", "figure"), [("swe", "1.97"), ("web", "1.74")])
def test_a_profile_stands_beside_the_papers_figures(study, rows, profile, figure):
    text = printed(study, rows, profile=profile)
    lines = [line.split() for line in text.splitlines() if "prefix-lru  none" in line]
    assert [line[-1] for line in lines] == [figure, figure]
    assert "paper's  " in text
    assert "paper's  " not in printed(study, rows, profile="chat")


@pytest.mark.parametrize("width", [80, 100, 130])
def test_no_figure_is_cut_in_a_narrow_terminal(study, rows, width):
    text = printed(study, rows, width=width, profile="swe")
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for row in rows:
        assert f"{row.spread('total_ratio').median:.3f}" in text


def test_a_figure_that_no_seed_has_is_a_dash():
    options = replace(TINY, policies=("prefix-lru",), pressures=(0.001,), seeds=1)
    study = CacheStudy(tiny_trace(), options)
    (line,) = (
        line
        for line in printed(study, rows_of(study.run())).splitlines()
        if "prefix-lru  none" in line
    )
    assert line.split()[3:6] == ["1.000", "-", "-"]


def test_a_host_tier_has_its_column():
    options = replace(TINY, seeds=1, host_blocks=50, host_blocks_per_s=1e6)
    study = CacheStudy(tiny_trace(), options)
    text = printed(study, rows_of(study.run()))
    assert "host, %" in text
    assert "Bélády has no such tier" in text


# Figure


@pytest.mark.parametrize(
    ("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".SVG", b"<?xml")]
)
def test_a_figure_is_drawn(rows, tmp_path, suffix, start):
    path = tmp_path / f"figure{suffix}"
    plots.plot_totals(rows, "tiny", path)
    first = path.read_bytes()
    assert first.startswith(start)
    assert len(first) > 5_000
    plots.plot_totals(rows, "tiny", path)
    assert path.read_bytes() == first


def test_another_suffix_is_refused(rows, tmp_path):
    with pytest.raises(SagaError, match=r"figure.pdf: the name must end in .png or .svg"):
        plots.plot_totals(rows, "tiny", tmp_path / "figure.pdf")
    assert list(tmp_path.iterdir()) == []


# KV bytes

LLAMA_70B = {
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "torch_dtype": "float16",
}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}
NESTED = {
    "dtype": "bfloat16",
    "num_hidden_layers": 1,
    "text_config": {"num_hidden_layers": 4, "num_attention_heads": 6, "head_dim": 32},
}


@pytest.mark.parametrize(
    ("config", "settings", "expected"),
    [
        (LLAMA_70B, {}, 327_680),
        (LLAMA_70B | {"head_dim": 64}, {}, 163_840),
        (LLAMA_70B, {"tensor_parallel": 4}, 81_920),
        (LLAMA_70B, {"tensor_parallel": 16}, 40_960),
        (LLAMA_70B, {"kv_dtype": "fp8"}, 163_840),
        (LLAMA_70B | {"torch_dtype": "float32"}, {}, 327_680),
        (LLAMA_70B | {"torch_dtype": None, "dtype": "torch.bfloat16"}, {}, 327_680),
        (DEEPSEEK_V3, {}, 61 * 576 * 2),
        (DEEPSEEK_V3, {"tensor_parallel": 8}, 61 * 576 * 2),
        (NESTED, {}, 2 * 4 * 6 * 32 * 2),
    ],
)
def test_kv_bytes(config, settings, expected):
    assert kv_bytes_per_token(config, **settings) == expected


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"num_hidden_layers": None}, {}, "'num_hidden_layers' is missing"),
        (
            {"num_key_value_heads": None, "num_attention_heads": None},
            {},
            "'num_key_value_heads' and 'num_attention_heads' are both missing",
        ),
        ({"hidden_size": None}, {}, "'head_dim' and 'hidden_size' are both missing"),
        ({"torch_dtype": None}, {}, "'dtype' and 'torch_dtype' are both missing"),
        ({"kv_lora_rank": 512}, {}, "'qk_rope_head_dim' is missing"),
        ({"torch_dtype": "int3"}, {}, "'torch_dtype' is 'int3'; expected one of float16"),
        ({"num_hidden_layers": "80"}, {}, "'num_hidden_layers' is '80'; expected an integer"),
        (
            {"layer_types": ["full_attention", "linear_attention"]},
            {},
            "'layer_types' has linear_attention",
        ),
        ({}, {"tensor_parallel": 3}, "tensor_parallel=3 does not fit 8 KV heads"),
        ({}, {"tensor_parallel": 0}, "tensor_parallel=0 must be at least 1"),
        ({}, {"kv_dtype": "int3"}, "kv_dtype is 'int3'; expected one of auto, fp8"),
    ],
)
def test_a_config_that_does_not_say_is_refused(changes, settings, message):
    with pytest.raises(SettingsError, match=message):
        kv_bytes_per_token(LLAMA_70B | changes, **settings)


def test_a_config_is_read_from_its_folder_or_by_its_name(tmp_path):
    file = tmp_path / "config.json"
    with pytest.raises(SettingsError, match=r"config.json cannot be read: No such file"):
        read_config(tmp_path)
    file.write_text(json.dumps(LLAMA_70B))
    assert read_config(tmp_path) == read_config(file) == LLAMA_70B
    file.write_text("[]")
    with pytest.raises(SettingsError, match="is not a JSON object"):
        read_config(tmp_path)
    file.write_text("{")
    with pytest.raises(SettingsError, match="is not valid JSON"):
        read_config(tmp_path)
