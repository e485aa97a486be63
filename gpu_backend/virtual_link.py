"""The worker side of vLLM's OffloadingConnector on a virtual clock: copies that only take time.

Jobs are taken as vLLM's worker takes them. One link each way, first come, first served:

- stores wait for the next step, so as not to delay this one's tokens; those whose GPU blocks are
  about to be overwritten are copied before the step computes, and the step waits for them;
- loads wait for the computation of the step that asks for them.

What is done is told at the end of a step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    TransferJob,
)
from vllm.v1.outputs import KVConnectorOutput


@dataclass(frozen=True, slots=True)
class _Copy:
    job_id: int
    request_id: str
    blocks: int
    done_s: float


@dataclass(slots=True)
class OneWay:
    """A link in one direction.

    Attributes:
        block_s: that a block takes.
        blocks: that were copied or are about to be. busy_s: what that took, or will have.
    """

    block_s: float
    blocks: int = 0
    busy_s: float = 0.0
    _free_s: float = 0.0
    _copies: deque[_Copy] = field(default_factory=deque)

    def submit(self, job_id: int, request_id: str, blocks: int, now_s: float) -> float:
        """Queue a job; when it will be done."""
        took_s = blocks * self.block_s
        self._free_s = max(now_s, self._free_s) + took_s
        self.blocks += blocks
        self.busy_s += took_s
        self._copies.append(_Copy(job_id, request_id, blocks, self._free_s))
        return self._free_s

    def take_done(self, now_s: float) -> list[_Copy]:
        """Jobs that are done by now, each told once."""
        done = []
        while self._copies and self._copies[0].done_s <= now_s:
            done.append(self._copies.popleft())
        return done

    @property
    def next_done_s(self) -> float | None:
        """When the next job will be done; None: there is none."""
        return self._copies[0].done_s if self._copies else None

    def done_s(self, job_ids: set[int]) -> float:
        """When all of these will be done that are under way; 0: none is."""
        return max((copy.done_s for copy in self._copies if copy.job_id in job_ids), default=0.0)


class VirtualLink:
    """Both directions between one engine and its host memory.

    Args:
        block_s: seconds that one block takes either way, above 0.
        block_bytes: of a block, for statistics of transfers.
    """

    def __init__(self, block_s: float, block_bytes: int) -> None:
        self.loads, self.stores = OneWay(block_s), OneWay(block_s)
        self._block_bytes = block_bytes
        self._later_stores: dict[int, TransferJob] = {}
        self._later_loads: dict[int, TransferJob] = {}

    def start_step(
        self, meta: OffloadingConnectorMetadata, now_s: float, *, computes: bool
    ) -> float:
        """A step has been scheduled with these jobs; seconds that it waits before it computes.

        Args:
            computes: whether the step has tokens to compute.
        """
        flushed = meta.jobs_to_flush or set()
        stores = dict(meta.store_jobs)
        first = {job_id: stores.pop(job_id) for job_id in sorted(flushed & stores.keys())}
        for job_id, job in (self._later_stores | first).items():
            self.stores.submit(job_id, job.req_id, _blocks(job.src_spec), now_s)
        self._later_stores = stores
        self._later_loads = dict(meta.load_jobs)
        wait_s = max(0.0, self.stores.done_s(flushed) - now_s) if flushed else 0.0
        if not computes and not wait_s:
            self._start_loads(now_s)
        return wait_s

    def end_step(self, now_s: float) -> KVConnectorOutput | None:
        """The step is over: what is done by now; None: nothing."""
        loads, stores = self.loads.take_done(now_s), self.stores.take_done(now_s)
        self._start_loads(now_s)
        if not loads and not stores:
            return None
        meta = OffloadingWorkerMetadata()
        for copies, way, stats in (
            (loads, self.loads, meta.transfer_stats.load),
            (stores, self.stores, meta.transfer_stats.store),
        ):
            for copy in copies:
                meta.mark_completed(copy.job_id)
                stats.record(copy.blocks * self._block_bytes, copy.blocks * way.block_s)
        # Blocks of those who are gone meanwhile are freed in this order, not in that of a set.
        ids = cast("set[str]", dict.fromkeys(copy.request_id for copy in loads))
        return KVConnectorOutput(finished_recving=ids, kv_connector_worker_meta=meta)

    @property
    def next_done_s(self) -> float | None:
        """When the next job of either direction will be done; None: nothing is under way."""
        times_s = [way.next_done_s for way in (self.loads, self.stores)]
        return min((at_s for at_s in times_s if at_s is not None), default=None)

    @property
    def wants_step(self) -> bool:
        """Whether stores wait for the next step."""
        return bool(self._later_stores)

    def _start_loads(self, now_s: float) -> None:
        for job_id, job in self._later_loads.items():
            self.loads.submit(job_id, job.req_id, _blocks(job.dst_spec), now_s)
        self._later_loads = {}


class _InOrder(dict[str, None]):
    """What vLLM uses of a set of ids, with an order."""

    def add(self, request_id: str) -> None:
        self[request_id] = None


def in_order(request_ids: set[str]) -> _InOrder:
    """The ids by number: the connector goes through them, and of a set the order is any."""
    return _InOrder((id_, None) for id_ in sorted(request_ids, key=lambda id_: (len(id_), id_)))


def loaded_blocks(meta: OffloadingConnectorMetadata) -> dict[str, int]:
    """Blocks that this step begins to load, by request."""
    return {job.req_id: _blocks(job.dst_spec) for job in meta.load_jobs.values()}


def _blocks(gpu_side: Any) -> int:
    return len(gpu_side.block_ids)
