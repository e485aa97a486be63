"""The host tier on vLLM's OffloadingConnector: blocks that the GPU tier gives up are kept in host
memory, by the value of their run, and loaded back by vLLM's own lookup.

vLLM's connector copies every block as soon as it is computed; this one copies a block when it is
evicted, before the step that overwrites it, so that the two tiers do not hold the same blocks
twice. On CUDA the copies are vLLM's; on the CPU platform they are plain memory copies.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
    TransferJob,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    OffloadKey,
    ReqContext,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.outputs import KVConnectorOutput

from gpu_backend.host_tier import HostTier, Key
from gpu_backend.kv_retention import KVRetention

logger = logging.getLogger("vllm.saga")
_DEMOTION = "saga-demotion"


class SagaCachePolicy(CachePolicy):
    """Chunks of host memory by key; which of them goes is the :class:`HostTier`'s decision.

    Attributes:
        choose: gives up so many evictable keys, or none; until a tier is attached the least
            recently used go.
        on_clear: told when everything goes.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.chunks: OrderedDict[OffloadKey, ChunkStatus] = OrderedDict()
        self.choose: Callable[[int, Callable[[Key], bool]], list[Key] | None] = self._choose_oldest
        self.on_clear: Callable[[], None] | None = None

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        return self.chunks.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus) -> None:
        self.chunks[key] = chunk

    def remove(self, key: OffloadKey) -> None:
        del self.chunks[key]

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        for key in reversed(list(keys)):
            if key in self.chunks:
                self.chunks.move_to_end(key)

    def evict(
        self, n: int, protected: set[OffloadKey]
    ) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        def is_evictable(key: Key) -> bool:
            chunk = self.chunks.get(OffloadKey(key))
            return chunk is not None and chunk.ref_cnt == 0 and key not in protected

        chosen = self.choose(n, is_evictable)
        if chosen is None:
            return None
        return [(OffloadKey(key), self.chunks.pop(OffloadKey(key))) for key in chosen]

    def clear(self) -> None:
        self.chunks.clear()
        if self.on_clear is not None:
            self.on_clear()

    def _choose_oldest(self, count: int, is_evictable: Callable[[Key], bool]) -> list[Key] | None:
        chosen: list[Key] = list(itertools.islice(filter(is_evictable, self.chunks), count))
        return chosen if len(chosen) == count else None


class DemotingScheduler(OffloadingConnectorScheduler):
    """Stores what is evicted, not what is computed; :func:`attach_host_tier` makes it of vLLM's.

    Attributes:
        demoted: keys of blocks that lose their content in this step, with the GPU block.
        on_refused: told the key of a block that found no room in the host tier after all.
        demotions: by job, its keys and how many workers still copy.
        loaded_blocks, load_s: loaded so far, and the seconds that a worker's copies took.
    """

    demoted: dict[OffloadKey, int]
    on_refused: Callable[[Key], None]
    loaded_blocks: int
    load_s: float
    demotions: dict[int, tuple[list[OffloadKey], int]]

    def _build_store_jobs(self, scheduler_output: SchedulerOutput) -> dict[int, TransferJob]:
        if not self.demoted:
            return {}
        demoted = dict(self.demoted)
        self.demoted.clear()
        output = self.manager.prepare_store(list(demoted), ReqContext(req_id=_DEMOTION))
        stored = [] if output is None else output.keys_to_store
        for key in demoted.keys() - set(stored):
            self.on_refused(key)
        if output is None or not stored:
            return {}
        blocks = [demoted[key] for key in stored]
        job_id = self._generate_job_id()
        self.demotions[job_id] = (stored, self.config.num_workers)
        # The blocks are overwritten by this very step: their copies have to come first.
        self._current_batch_jobs_to_flush.add(job_id)
        src = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])
        return {job_id: TransferJob(req_id=_DEMOTION, src_spec=src, dst_spec=output.store_spec)}

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, OffloadingWorkerMetadata):
            self.load_s += meta.transfer_stats.load.time / self.config.num_workers
            for job_id in meta.completed_jobs.keys() & self._jobs.keys():
                if self._jobs[job_id].pending_count == meta.completed_jobs[job_id]:
                    self.loaded_blocks += len(self._jobs[job_id].keys)
            for job_id in [job for job in meta.completed_jobs if job in self.demotions]:
                keys, pending = self.demotions.pop(job_id)
                pending -= meta.completed_jobs.pop(job_id)
                if pending:
                    self.demotions[job_id] = (keys, pending)
                else:
                    self.manager.complete_store(keys, ReqContext(req_id=_DEMOTION))
        super().update_connector_output(connector_output)

    def has_pending_push_work(self) -> bool:
        return bool(self.demotions) or super().has_pending_push_work()

    def reset_cache(self) -> None:
        super().reset_cache()  # Completions of the jobs so far are stale from now on.
        self._current_batch_jobs_to_flush.update(self.demotions)
        self.demotions.clear()
        self.demoted.clear()


class SagaOffloadingConnector(OffloadingConnector):
    """vLLM's connector under a name of ours: its scheduler side can be made to demote."""


def attach_host_tier(connector: object, saga: KVRetention) -> bool:
    """Let the retention decide what host memory holds. False: there is none, or vLLM decides."""
    if not isinstance(connector, SagaOffloadingConnector) or saga.index is None:
        return False
    scheduler = connector.scheduler
    manager = scheduler.manager
    if not isinstance(manager, CPUOffloadingManager):
        return False
    policy = manager._policy
    if not isinstance(policy, SagaCachePolicy):
        return False
    config = scheduler.config
    if len(config.kv_group_configs) != 1 or config.blocks_per_chunk != 1:
        logger.warning(
            "The host tier is vLLM's own: SAGA's needs one KV cache group and chunks of one block"
        )
        return False
    tier = HostTier(policy.cache_capacity, saga.index.make_policy())
    scheduler.__class__ = DemotingScheduler
    assert isinstance(scheduler, DemotingScheduler)
    scheduler.demoted, scheduler.demotions = {}, {}
    scheduler.loaded_blocks, scheduler.load_s = 0, 0.0
    scheduler.on_refused = tier.remove
    policy.choose = saga.choose_host_victims
    policy.on_clear = tier.clear
    demoted = scheduler.demoted
    saga.attach_host(
        tier,
        copy=lambda key, block: demoted.__setitem__(OffloadKey(key), block),
        loaded=lambda: (scheduler.loaded_blocks, scheduler.load_s),
    )
    return True


class SagaOffloadingSpec(CPUOffloadingSpec):
    """vLLM's host memory; on the CPU platform, where vLLM has no copies, with plain ones."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        return MemcpyWorker(kv_caches, self.num_chunks, self.blocks_per_chunk)


class MemcpyWorker(OffloadingWorker):
    """Copies between the KV cache and host memory at once; a job is done when it is submitted.

    Args:
        kv_caches: tensors whose first dimension is the block.
        num_chunks: chunks of host memory; a chunk is one block.

    Raises:
        ValueError: chunks of several blocks.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, num_chunks: int, blocks_per_chunk: int
    ) -> None:
        if blocks_per_chunk != 1:
            raise ValueError("the CPU platform's host tier needs blocks_per_chunk 1")
        self._groups = [
            sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs
        ]
        self._device = [part.tensor for part in kv_caches.tensors]
        self._host = [tensor.new_empty((num_chunks, *tensor.shape[1:])) for tensor in self._device]
        self._done: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        assert isinstance(dst_spec, CPULoadStoreSpec)
        return self._copy(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        assert isinstance(src_spec, CPULoadStoreSpec)
        return self._copy(job_id, dst_spec, src_spec, is_store=False)

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Every submitted job is done."""

    def _copy(
        self, job_id: int, device: GPULoadStoreSpec, host: CPULoadStoreSpec, *, is_store: bool
    ) -> bool:
        started_s = time.perf_counter()
        copied_bytes = start = 0
        for size, tensors in zip(device.group_sizes, self._groups, strict=True):
            blocks = torch.from_numpy(device.block_ids[start : start + size]).long()
            chunks = torch.from_numpy(host.chunk_ids[start : start + size]).long()
            start += size
            for index in tensors:
                here, there = self._device[index], self._host[index]
                if is_store:
                    there[chunks] = here[blocks]
                else:
                    here[blocks] = there[chunks]
                copied_bytes += size * here[0].nbytes
        copy_s = time.perf_counter() - started_s
        self._done.append(TransferResult(job_id, True, copied_bytes, copy_s))
        return True
