"""How large a virtual engine is, as vLLM is told."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from gpu_backend.config import WorkerConfig, kv_transfer_config
from gpu_backend.model_free import make_config
from gpu_backend.shadow import STOCK_ORDER


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What a virtual engine is given.

    Attributes:
        num_blocks: blocks of the KV pool that can hold something.
        block_tokens: tokens in a block.
        batched_tokens: most tokens of a step. max_seqs: most requests that run.
        max_model_len: longest prompt with its answer, tokens.
        host_blocks: blocks of its host memory; 0: none.
        link_block_s: seconds that a block takes to or from there, above 0 with host memory.
    """

    num_blocks: int
    block_tokens: int
    batched_tokens: int = 8192
    max_seqs: int = 256
    max_model_len: int = 131_072
    host_blocks: int = 0
    link_block_s: float = 0.0

    @property
    def kv_spec(self) -> FullAttentionSpec:
        """The only KV cache group: the smallest there can be, since nothing is stored."""
        return FullAttentionSpec(
            block_size=self.block_tokens, num_kv_heads=1, head_size=1, dtype=torch.float32
        )

    def config(self, model: Path, *, prefix_caching: bool = True, policy: str = STOCK_ORDER) -> Any:
        """A VllmConfig for engines of this shape.

        Args:
            model: a folder with a config.json.
            policy: of the plugin; with ``STOCK_ORDER`` host memory is vLLM's own LRU.
        """
        config = make_config(
            model,
            max_batched_tokens=self.batched_tokens,
            max_seqs=min(self.max_seqs, self.batched_tokens),  # More cannot run in a step.
        )
        # Past the checks of arguments: the model here only has to have a config.
        config.model_config.max_model_len = self.max_model_len
        config.scheduler_config.max_model_len = self.max_model_len
        config.scheduler_config.async_scheduling = False
        config.cache_config = copy(config.cache_config)
        config.cache_config.block_size = self.block_tokens
        config.cache_config.num_gpu_blocks = self.num_blocks + 1
        config.cache_config.enable_prefix_caching = prefix_caching
        if self.host_blocks:
            options = kv_transfer_config(WorkerConfig(policy=policy, host_gib=1.0))
            align = CPUOffloadingSpec.BLOCK_SIZE_ALIGNMENT
            chunk_bytes = -(-self.kv_spec.page_size_bytes // align) * align
            options["kv_connector_extra_config"]["cpu_bytes_to_use"] = (
                self.host_blocks * chunk_bytes
            )
            config.kv_transfer_config = KVTransferConfig(**options)
        return config
