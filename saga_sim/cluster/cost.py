"""How long a step of an engine takes, from what it computes.

The roofline: a step lasts its fixed overhead, plus the slower of reading the weights and computing
all tokens' linear layers, plus the attention of prompts, which is compute, plus the attention of
decoding requests, which is reading their KV. Peaks are those of data sheets; what of them is
achieved is an assumption, stated in the presets.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from saga_core.errors import SettingsError
from saga_sim.kv_bytes import kv_bytes_per_token


class StepCost(Protocol):
    """Says how long a step takes."""

    def step_s(
        self, prefill_tokens: int, prefill_attended: int, decodes: int, decode_attended: int
    ) -> float:
        """Seconds of a step.

        Args:
            prefill_tokens: prompt tokens that it computes.
            prefill_attended: sum over these of the tokens that each attends to.
            decodes: requests that make one more token.
            decode_attended: tokens that these attend to, in all.
        """

    @property
    def link_tokens_per_s(self) -> float:
        """Tokens of KV per second that get to host memory, or back; 0: not known."""

    def values(self) -> dict[str, Any]:
        """Its constants, for reports."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder with grouped-query attention.

    Attributes:
        parameters: all of them, about.
        weight_bytes: bytes of one parameter.
        kv_bytes_per_token: of the whole model, over all GPUs.
    """

    name: str
    parameters: float
    layers: int
    heads: int
    head_dim: int
    weight_bytes: int
    kv_bytes_per_token: int


_LLAMA_3_70B = {
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "dtype": "bfloat16",
}
LLAMA_3_70B = ModelShape(
    "Llama-3-70B, 16 bits",
    parameters=70.6e9,
    layers=80,
    heads=64,
    head_dim=128,
    weight_bytes=2,
    kv_bytes_per_token=kv_bytes_per_token(_LLAMA_3_70B),
)
"""Shape: the model's config.json; parameters: its model card."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """The GPUs of one worker.

    Attributes:
        gpus: that share the model by tensor parallelism.
        flops: dense 16-bit peak of one GPU, per second.
        memory_bytes_per_s: peak bandwidth of one GPU's memory.
        memory_bytes: of one GPU.
        compute_share: of the peak that prefill achieves, its all-reduces included.
        bandwidth_share: of the peak that decode achieves.
        overhead_s: of a step: launches, sampling, the latency of all-reduces.
        batched_tokens: most tokens of a step, vLLM's default for a server on this GPU.
        host_link_gib_per_s: of one GPU's link to host memory, each way, achieved; 0: not known.
    """

    name: str
    gpus: int
    flops: float
    memory_bytes_per_s: float
    memory_bytes: float
    compute_share: float
    bandwidth_share: float
    overhead_s: float
    batched_tokens: int
    host_link_gib_per_s: float = 0.0


# Peaks: NVIDIA's data sheets of the SXM modules, dense, BF16 or FP16 (those of H100 and H200 state
# twice as much, with sparsity). Achieved shares and overhead: assumed; prefill of 70B models at
# TP=4 runs at about half of the peak on A100 and less on Hopper, whose links did not grow as much
# as its compute, decode kernels read at about three quarters of the peak, and 160 all-reduces at
# 15 µs with the launch of the step make 4 ms. batched_tokens: vLLM's arg_utils, get_batch_defaults.
# Host link: PCIe x16, of which Gen 4 has 31.5 GB/s each way and Gen 5 has 63. On A100 SXM,
# nvbandwidth copies 24.8 GB/s from pinned memory (NVIDIA developer forum, thread 352186; with both
# ways in use at once one falls to 11, which is not modelled); of Gen 5 the same share is assumed.
# Each GPU moves its own quarter of the KV over a link of its own.
HARDWARE: dict[str, Hardware] = {
    "a100": Hardware("4 × A100 80 GB", 4, 312e12, 2.039e12, 80e9, 0.50, 0.75, 4e-3, 2048, 23.0),
    "h100": Hardware("4 × H100 80 GB", 4, 989e12, 3.35e12, 80e9, 0.40, 0.75, 3e-3, 8192, 46.5),
    "h200": Hardware("4 × H200 141 GB", 4, 989e12, 4.8e12, 141e9, 0.40, 0.75, 3e-3, 8192, 46.5),
}
"""Workers by name, each with tensor parallelism over four GPUs."""

_MEMORY_SHARE = 0.9
"""Share of a GPU's memory that vLLM takes: its default ``--gpu-memory-utilization``."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model on hardware; see the module."""

    model: ModelShape
    hardware: Hardware

    def step_s(
        self, prefill_tokens: int, prefill_attended: int, decodes: int, decode_attended: int
    ) -> float:
        m, h = self.model, self.hardware
        flops_per_s = h.gpus * h.flops * h.compute_share
        bytes_per_s = h.gpus * h.memory_bytes_per_s * h.bandwidth_share
        # A multiplication and an addition for each parameter, and in attention for each element
        # of the query against a key, and of the result against a value.
        linear_s = 2.0 * m.parameters * (prefill_tokens + decodes) / flops_per_s
        attention_flops = 4.0 * m.layers * m.heads * m.head_dim * prefill_attended
        weights_s = m.parameters * m.weight_bytes / bytes_per_s
        kv_s = m.kv_bytes_per_token * decode_attended / bytes_per_s
        return h.overhead_s + max(linear_s, weights_s) + attention_flops / flops_per_s + kv_s

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV that such a worker has room for, beside the weights."""
        m, h = self.model, self.hardware
        room = h.gpus * h.memory_bytes * _MEMORY_SHARE - m.parameters * m.weight_bytes
        return max(0, int(room / m.kv_bytes_per_token))

    @property
    def link_tokens_per_s(self) -> float:
        bytes_per_s = self.hardware.gpus * self.hardware.host_link_gib_per_s * 2**30
        return bytes_per_s / self.model.kv_bytes_per_token

    def values(self) -> dict[str, Any]:
        return {
            "kind": "roofline",
            "model": asdict(self.model),
            "hardware": asdict(self.hardware),
            "kv_tokens": self.kv_tokens,
        }


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured on an engine; lengths of contexts do not count.

    Attributes:
        prefill_tokens_per_s: prompt tokens computed per second.
        step_overhead_s: of a step, whatever it does.
        decode_s_per_sequence: of a step, for each request that makes a token.
        decode_s_per_context_token: of a step, for each token that these attend to.
        kv_bytes_per_token: of the whole model. host_link_gib_per_s: of all links to host memory,
            each way. With either 0 there can be no host tier.
    """

    prefill_tokens_per_s: float
    step_overhead_s: float
    decode_s_per_sequence: float
    decode_s_per_context_token: float = 0.0
    kv_bytes_per_token: float = 0.0
    host_link_gib_per_s: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 <= value < math.inf:
                raise SettingsError(f"{field.name}={value!r} must be a number, at least 0")
        if not self.prefill_tokens_per_s or not self.step_overhead_s:
            raise SettingsError("prefill_tokens_per_s and step_overhead_s must be above 0")

    def step_s(
        self, prefill_tokens: int, prefill_attended: int, decodes: int, decode_attended: int
    ) -> float:
        return (
            self.step_overhead_s
            + prefill_tokens / self.prefill_tokens_per_s
            + decodes * self.decode_s_per_sequence
            + decode_attended * self.decode_s_per_context_token
        )

    @property
    def link_tokens_per_s(self) -> float:
        if not self.kv_bytes_per_token:
            return 0.0
        return self.host_link_gib_per_s * 2**30 / self.kv_bytes_per_token

    def values(self) -> dict[str, Any]:
        return {"kind": "measured", **asdict(self)}


def read_cost(name: str) -> StepCost:
    """A preset by name, of Llama-3-70B, or the JSON file of a :class:`Measured`.

    Raises:
        SettingsError: it is neither; the message says what is wrong.
    """
    if name in HARDWARE:
        return Roofline(LLAMA_3_70B, HARDWARE[name])
    try:
        found = json.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        known = ", ".join(HARDWARE)
        raise SettingsError(f"cost {name!r}: choose {known}, or a JSON file") from error
    except ValueError as error:
        raise SettingsError(f"cost {name}: is not valid JSON: {error}") from error
    names = [field.name for field in fields(Measured)]
    if not isinstance(found, Mapping) or not set(found) <= set(names):
        raise SettingsError(f"cost {name}: expected an object with {', '.join(names)}")
    try:
        return Measured(**found)
    except TypeError as error:
        raise SettingsError(f"cost {name}: expected an object with {', '.join(names)}") from error
