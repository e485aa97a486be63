from __future__ import annotations

import json
from pathlib import Path

import pytest

from saga_core.errors import SettingsError
from saga_sim.cluster.cost import (
    HARDWARE,
    LLAMA_3_70B,
    Hardware,
    Measured,
    ModelShape,
    Roofline,
    read_cost,
)

MODEL = ModelShape(
    "m", 10e9, layers=10, heads=8, head_dim=64, weight_bytes=2, kv_bytes_per_token=1000
)
GPUS = Hardware(
    "g",
    gpus=2,
    flops=100e12,
    memory_bytes_per_s=1e12,
    memory_bytes=80e9,
    compute_share=0.5,
    bandwidth_share=0.5,
    overhead_s=0.001,
    batched_tokens=2048,
)
COST = Roofline(MODEL, GPUS)
# Of both GPUs, achieved: 100e12 operations and 1e12 bytes a second; 20e9 bytes of weights.


def test_few_tokens_cost_the_reading_of_the_weights() -> None:
    assert COST.step_s(0, 0, 1, 0) == pytest.approx(0.001 + 0.020)
    assert COST.step_s(10, 0, 0, 0) == COST.step_s(0, 0, 10, 0) == COST.step_s(0, 0, 1, 0)


def test_many_tokens_cost_two_operations_for_each_parameter() -> None:
    assert COST.step_s(1000, 0, 0, 0) == pytest.approx(0.001 + 2 * 10e9 * 1000 / 100e12)
    assert COST.step_s(900, 0, 100, 0) == COST.step_s(1000, 0, 0, 0)


def test_attention_of_prompts_is_compute_and_that_of_decodes_is_reading() -> None:
    attended = 1000 * 5000
    prompts_s = 4 * 10 * 8 * 64 * attended / 100e12
    assert COST.step_s(1000, attended, 0, 0) - COST.step_s(1000, 0, 0, 0) == pytest.approx(
        prompts_s
    )
    assert COST.step_s(0, 0, 4, 8000) - COST.step_s(0, 0, 4, 0) == pytest.approx(8000 * 1000 / 1e12)


def test_room_for_kv_is_what_the_weights_leave_of_nine_tenths() -> None:
    assert COST.kv_tokens == int((2 * 80e9 * 0.9 - 20e9) / 1000)


def test_the_presets_are_of_llama_3_70b() -> None:
    assert LLAMA_3_70B.kv_bytes_per_token == 327_680
    a100 = Roofline(LLAMA_3_70B, HARDWARE["a100"])
    # 141.2 GB of weights at 4 · 2.039 TB/s · 0.75, and 4 ms.
    assert a100.step_s(0, 0, 1, 0) == pytest.approx(0.0271, abs=1e-4)
    # 2 · 70.6e9 · 2048 operations at 4 · 312e12 · 0.5.
    assert a100.step_s(2048, 0, 0, 0) == pytest.approx(0.4674, abs=1e-4)
    assert a100.kv_tokens == 447_998
    times_s = [Roofline(LLAMA_3_70B, HARDWARE[name]).step_s(0, 0, 8, 160_000) for name in HARDWARE]
    assert times_s == sorted(times_s, reverse=True)


def test_measured_figures_add_up() -> None:
    cost = Measured(1000.0, 0.01, 0.002, 1e-6)
    assert cost.step_s(500, 999_999, 3, 10_000) == pytest.approx(0.01 + 0.5 + 0.006 + 0.01)


def test_a_cost_is_a_name_or_a_file(tmp_path: Path) -> None:
    assert read_cost("h100") == Roofline(LLAMA_3_70B, HARDWARE["h100"])
    file = tmp_path / "cost.json"
    given = {"prefill_tokens_per_s": 900, "step_overhead_s": 0.01, "decode_s_per_sequence": 0.001}
    file.write_text(json.dumps(given))
    assert read_cost(str(file)) == Measured(900, 0.01, 0.001)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, "choose a100"),
        ("{", "not valid JSON"),
        ("[]", "expected an object"),
        ('{"prefill": 1}', "expected an object"),
        ('{"prefill_tokens_per_s": 1}', "expected an object"),
        (
            '{"prefill_tokens_per_s": 0, "step_overhead_s": 1, "decode_s_per_sequence": 0}',
            "above 0",
        ),
        (
            '{"prefill_tokens_per_s": "1", "step_overhead_s": 1, "decode_s_per_sequence": 0}',
            "must be a number",
        ),
    ],
)
def test_what_is_no_cost_is_refused(tmp_path: Path, text: str | None, named: str) -> None:
    file = tmp_path / "cost.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SettingsError, match=named):
        read_cost(str(file))
