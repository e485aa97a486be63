"""The engine loop without a model, with a record of what every KV block holds.

A block's content is known by who wrote it and stands for the hash of its prefix. A step fails when
a request is about to read a block that does not hold what it should, so a copy that comes too late
or goes astray is found.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
    TransferJob,
    TransferStats,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from gpu_backend.config import WorkerConfig, kv_transfer_config
from gpu_backend.model_free import BLOCK_TOKENS, Engine

Content = tuple[list[bytes], int]
"""Block hashes of the request that computed the block, and the block's position in it."""

CHUNK_BYTES = SharedOffloadRegion.BLOCK_SIZE_ALIGNMENT
"""A block is smaller here than the least that vLLM gives a chunk."""


def with_host_tier(config: Any, num_blocks: int, policy: str = "saga") -> Any:
    """Let engines of ``config`` keep ``num_blocks`` blocks in host memory."""
    options = kv_transfer_config(WorkerConfig(policy=policy, host_gib=1.0))
    options["kv_connector_extra_config"]["cpu_bytes_to_use"] = num_blocks * CHUNK_BYTES
    config.kv_transfer_config = KVTransferConfig(**options)
    return config


@dataclass(slots=True)
class ContentEngine(Engine):
    """See above. ``loads`` counts blocks loaded from host memory, ``stores`` those copied there."""

    load_s_per_block: float = 1e-4
    loads: int = 0
    stores: int = 0
    _gpu: dict[int, Content] = field(default_factory=dict)
    _host: dict[int, Content] = field(default_factory=dict)
    _stores: dict[int, TransferJob] = field(default_factory=dict)
    _done: dict[int, int] = field(default_factory=dict)

    def compute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        result = Engine.compute(self, output)
        meta: Any = output.kv_connector_metadata
        if meta is not None:
            self._stores.update(meta.store_jobs)
            for job_id in meta.jobs_to_flush or ():
                self._store(job_id)
        for request_id, count in output.num_scheduled_tokens.items():
            self._forward(request_id, count)
        if meta is not None:
            for job_id in list(self._stores.keys() - meta.store_jobs.keys()):
                self._store(job_id)
            before, stats = self.loads, TransferStats()
            loaded = {self._load(*job) for job in meta.load_jobs.items()}
            if loaded:
                blocks = self.loads - before
                stats.load.record(blocks * CHUNK_BYTES, blocks * self.load_s_per_block)
            result.kv_connector_output = KVConnectorOutput(
                finished_recving=loaded,
                kv_connector_worker_meta=OffloadingWorkerMetadata(self._done, stats),
            )
            self._done = {}
        return result

    def _forward(self, request_id: str, count: int) -> None:
        request = self.scheduler.requests[request_id]
        (blocks,) = self.scheduler.kv_cache_manager.get_blocks(request_id).blocks
        # With batches in flight what is scheduled here has been counted as computed already.
        end = request.num_computed_tokens
        first, last = (end - count) // BLOCK_TOKENS, end // BLOCK_TOKENS
        for block, expected in zip(blocks[:first], request.block_hashes, strict=False):
            held = self._hash_of(self._gpu[block.block_id])
            assert held == expected, f"{request_id} reads block {block.block_id}: wrong content"
        for position in range(first, min(last + 1, len(blocks))):
            self._gpu[blocks[position].block_id] = (request.block_hashes, position)

    @staticmethod
    def _hash_of(content: Content) -> object:
        """Tokens of a batch in flight are not known when the block is written."""
        hashes, position = content
        return hashes[position] if position < len(hashes) else None

    def _store(self, job_id: int) -> None:
        job = self._stores.pop(job_id, None)
        if job is None:
            return
        source: Any = job.src_spec
        target: Any = job.dst_spec
        for block, chunk in zip(source.block_ids, target.chunk_ids, strict=True):
            self._host[int(chunk)] = self._gpu[int(block)]
            self.stores += 1
        self._done[job_id] = 1

    def _load(self, job_id: int, job: TransferJob) -> str:
        source: Any = job.src_spec
        target: Any = job.dst_spec
        for chunk, block in zip(source.chunk_ids, target.block_ids, strict=True):
            self._gpu[int(block)] = self._host[int(chunk)]
            self.loads += 1
        self._done[job_id] = 1
        return job.req_id
