"""vLLM's own scheduler and block manager on a virtual clock: a step takes what its caller says.

There are no weights and no token ids that mean anything: who submits a request says what its
blocks are, by hashes, so that prefix caching works as it does on real tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from gpu_backend import scheduler as plugin
from gpu_backend import virtual_decode
from gpu_backend.model_free import TOKEN
from gpu_backend.virtual_clock import VirtualClock
from gpu_backend.virtual_decode import DecodeRun
from gpu_backend.virtual_link import VirtualLink, in_order, loaded_blocks
from gpu_backend.virtual_shape import EngineShape
from saga_core.errors import SagaError
from saga_core.notices import Notice

_VARIABLES = "SAGA_"


@dataclass(slots=True)
class Served:
    """A request and what became of it; times on the virtual clock.

    Attributes:
        key: what the submitter knows it by.
        cached_tokens: prompt tokens found on the GPU when it was first admitted, or when the
            loading of others began; None before. loaded_tokens: of the prompt, from host memory.
        prefill_tokens: prompt tokens computed before any preemption.
        recomputed_tokens: tokens computed again after preemptions.
        known_tokens: of the prompt, those that count as computed before, somewhere.
    """

    key: Any
    request: Request
    last_token: int
    known_tokens: int = 0
    cached_tokens: int | None = None
    loaded_tokens: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    first_token_s: float | None = None
    end_s: float | None = None

    @property
    def hit_tokens(self) -> int:
        """Of the prompt, found on the GPU or in host memory."""
        return (self.cached_tokens or 0) + self.loaded_tokens


@dataclass(slots=True)
class Work:
    """What one step computes.

    Attributes:
        prefill_tokens: tokens of prompts, and those computed again after a preemption.
        prefill_attended: sum over these of the tokens that each attends to.
        decodes: requests that make one more token. decode_attended: tokens they attend to, in all.
        made_tokens: of answers; a prompt that is complete, be it again, makes one too.
        regret_tokens: of ``prefill_tokens``, those that count as computed before; not those of
            preempted requests.
        own_tokens: of ``prefill_tokens``, those of the plugin's own prefetches.
        wait_s: before it computes, for copies of the blocks that it overwrites.
    """

    prefill_tokens: int = 0
    prefill_attended: int = 0
    decodes: int = 0
    decode_attended: int = 0
    made_tokens: int = 0
    regret_tokens: int = 0
    own_tokens: int = 0
    wait_s: float = 0.0

    @property
    def computes(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self.prefill_tokens or self.decodes)


@dataclass(slots=True)
class VirtualEngine:
    """One scheduler. A step is ``start_step``, time that the caller lets pass, ``end_step``.

    Steps that only decode can be taken many at once: ``start_decodes``, time, ``end_decodes``.

    Args:
        config: from :meth:`EngineShape.config`.
        variables: SAGA_* variables that the plugin reads; None: vLLM without the plugin.

    Raises:
        SagaError: the plugin could not attach.
    """

    shape: EngineShape
    config: Any
    clock: VirtualClock
    variables: Mapping[str, str] | None
    scheduler: Any = field(init=False)
    link: VirtualLink | None = field(init=False, default=None)
    served: dict[str, Served] = field(init=False, default_factory=dict)
    steps: int = field(init=False, default=0)
    _number: int = field(init=False, default=0)
    _output: SchedulerOutput | None = field(init=False, default=None)
    _result: ModelRunnerOutput | None = field(init=False, default=None)
    # Whether the last step found no way to admit who waits, and nothing has changed since.
    _waits_in_vain: bool = field(init=False, default=False)
    # Whether a copy is done of which the connector may make something in the next step.
    _has_copied: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        spec = self.shape.kv_spec
        if self.shape.host_blocks:
            self.link = VirtualLink(self.shape.link_block_s, spec.page_size_bytes)
        has_plugin = self.variables is not None
        cls: Any = plugin.saga_scheduler_class(Scheduler) if has_plugin else Scheduler
        with _environment(self.variables or {}):
            self.scheduler = cls(
                vllm_config=self.config,
                kv_cache_config=KVCacheConfig(
                    num_blocks=self.shape.num_blocks + 1,
                    kv_cache_tensors=[],
                    kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
                ),
                structured_output_manager=StructuredOutputManager(self.config),
                block_size=self.shape.block_tokens,
                log_stats=False,
            )
        if has_plugin:
            if self.scheduler.saga is None:
                raise SagaError("the plugin could not attach to the scheduler")
            self.scheduler.saga.clock = lambda: self.clock.now_s

    def submit(
        self,
        key: Any,
        hashes: list[bytes],
        *,
        prompt_tokens: int,
        output_tokens: int,
        session_id: str | None,
        last_token: int = TOKEN,
        known_tokens: int = 0,
        arrival_s: float,
        priority: int = 0,
    ) -> None:
        """Queue a request, between two steps.

        Args:
            hashes: of the full blocks of the prompt with its answer, in order; a hash stands for
                all of the prefix that ends with its block.
            last_token: the answer's last token, which tells kinds of answers apart.
            known_tokens: prompt tokens that count as regret when they are computed.
            priority: lower goes first, where the config's scheduler knows priorities.
        """
        self._number += 1
        size = self.shape.block_tokens

        def hasher(request: Request) -> list[BlockHash]:
            have, full = len(request.block_hashes), request.num_tokens // size
            return cast("list[BlockHash]", hashes[have:full]) if have < full else []

        request = Request(
            request_id=f"r{self._number}",
            prompt_token_ids=[TOKEN] * prompt_tokens,
            sampling_params=SamplingParams(
                max_tokens=output_tokens, ignore_eos=True, detokenize=False
            ),
            pooling_params=None,
            arrival_time=arrival_s,
            block_hasher=hasher,
            session_id=session_id,
            priority=priority,
        )
        self.served[request.request_id] = Served(key, request, last_token, known_tokens)
        self.scheduler.add_request(request)
        self._waits_in_vain = False

    def notify(self, notices: Sequence[Notice]) -> None:
        """Tell the plugin, if there is one."""
        if self._saga is not None:
            self._saga.notify(notices)
            self._waits_in_vain = False

    def tick(self) -> float | None:
        """Let the plugin of an idle engine act; seconds until it wants to again, None: not yet."""
        if self.variables is None:
            return None
        wake_in_s: float | None = self.scheduler.saga_control({"tick": True})["wake_in_s"]
        return wake_in_s

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, be it the plugin's own, or KV is to be copied."""
        if self.link is not None:
            return bool(self.scheduler.has_requests())
        return bool(self.scheduler.has_unfinished_requests())

    def wake_s(self, tick_s: float) -> float | None:
        """Where the last step had nothing to compute: when another one may find something.

        None: nobody knows. A prefetch is looked for after ``tick_s`` at the earliest.
        """
        if self.link is None or self.link.wants_step or self.link.next_done_s is None:
            return None
        now_s, wake_s = self.clock.now_s, self.link.next_done_s
        if self.served:
            return wake_s  # Nothing is prefetched while clients wait.
        due_s = virtual_decode.prefetch_due_s(self._saga, now_s)
        return min(wake_s, max(due_s, now_s + tick_s))

    @property
    def queue(self) -> tuple[int, int]:
        """Requests that run, and that wait."""
        running, waiting = self.scheduler.get_request_counts()
        return running, waiting

    @property
    def used_share(self) -> float:
        """Share of the pool that running requests hold."""
        return float(self.scheduler.kv_cache_manager.usage)

    @property
    def cached_share(self) -> float:
        """Share of the pool that holds content which a request could read."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return len(pool.cached_block_hash_to_block) / self.shape.num_blocks

    def start_step(self) -> Work:
        """Schedule a batch. What it computes; nothing, where all that waits has to wait on."""
        if self.link is not None:
            self.scheduler.finished_req_ids = in_order(self.scheduler.finished_req_ids)
        output: SchedulerOutput = self.scheduler.schedule()
        self._note_hits(output)
        work = Work()
        sampled: list[list[int]] = []
        requests, known = self.scheduler.requests, self.served
        for request_id, tokens in output.num_scheduled_tokens.items():
            request, served = requests[request_id], known.get(request_id)
            end = request.num_computed_tokens
            if tokens == 1 and end > request.num_prompt_tokens and not request.is_prefill_chunk:
                work.decodes += 1
                work.decode_attended += end
            else:
                start = end - tokens
                work.prefill_tokens += tokens
                work.prefill_attended += tokens * start + tokens * (tokens + 1) // 2
                if served is None:
                    work.own_tokens += tokens
                elif request.num_preemptions:
                    served.recomputed_tokens += tokens
                else:
                    served.prefill_tokens += tokens
                    work.regret_tokens += max(0, min(end, served.known_tokens) - start)
            if request.is_prefill_chunk:
                sampled.append([])
            elif served is None:
                sampled.append([TOKEN])
            else:
                is_last = request.num_output_tokens + 1 == request.max_tokens
                sampled.append([served.last_token if is_last else TOKEN])
                work.made_tokens += 1
        ids = list(output.num_scheduled_tokens)
        self._output = output
        self._result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: place for place, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
        )
        if self.link is not None:
            meta: Any = output.kv_connector_metadata
            work.wait_s = self.link.start_step(meta, self.clock.now_s, computes=work.computes)
        self._waits_in_vain = not work.prefill_tokens and not output.preempted_req_ids
        self.steps += 1
        return work

    def end_step(self) -> list[Served]:
        """The batch is done, now; returns the requests whose answers are complete."""
        output, result = self._output, self._result
        assert output is not None
        assert result is not None
        self._output = self._result = None
        now_s, ended = self.clock.now_s, []
        if self.link is not None:
            result.kv_connector_output = self.link.end_step(now_s)
            self._has_copied = result.kv_connector_output is not None
        self.scheduler.update_from_output(output, result)
        for request_id, tokens in zip(result.req_ids, result.sampled_token_ids, strict=True):
            served = self.served.get(request_id)
            if served is None or not tokens:
                continue
            if served.first_token_s is None:
                served.first_token_s = now_s
            if served.request.is_finished():
                served.end_s = now_s
                del self.served[request_id]
                ended.append(served)
                self._waits_in_vain = False
        return ended

    def start_decodes(self) -> DecodeRun | None:
        """Start steps that only decode and need no scheduler; None: it has to be asked.

        The first one's blocks are taken. Where somebody waits that is so only as long as who is
        first in the queue fits as little as in the step before.
        """
        scheduler, link, now_s = self.scheduler, self.link, self.clock.now_s
        if len(scheduler.requests) != len(self.served):
            return None  # The plugin's own requests, and some that the connector still needs.
        if link is not None and (self._has_copied or link.wants_step or scheduler.finished_req_ids):
            return None
        waits = bool(self.queue[1])
        if waits and not self._waits_in_vain:
            return None
        # A connector is told of blocks by the scheduler.
        run = virtual_decode.plan_run(scheduler, may_take_blocks=link is None)
        if run is None:
            return None
        if waits and not virtual_decode.waits_on(scheduler, run, now_s):
            return None
        if link is not None and link.next_done_s is not None:
            run.ends_before_s = link.next_done_s
        if not waits and virtual_decode.prefetch_due_s(self._saga, now_s) <= now_s:
            return None
        if not virtual_decode.take_blocks(scheduler, run.changing):
            return None
        if not waits:  # Nothing is prefetched while clients wait. Who has lost blocks is due.
            run.next_starts_before_s = virtual_decode.prefetch_due_s(self._saga, now_s)
        return run

    def end_decodes(self, steps: int) -> None:
        """So many of these steps have passed, at least one."""
        virtual_decode.make_tokens(self.scheduler, steps)
        self.steps += steps

    def counters(self) -> dict[str, float]:
        """The plugin's totals, those of its prefetches among them; none without it."""
        if self._saga is None:
            return {}
        state = self._saga.state()
        prefetch = state.get("prefetch") or {}
        return {**state["counters"], **{f"prefetch_{name}": n for name, n in prefetch.items()}}

    def off_reason(self) -> str | None:
        """Why the plugin switched itself off; None when it is on, or was never there."""
        return None if self._saga is None else self._saga.off_reason

    @property
    def _saga(self) -> Any:
        return getattr(self.scheduler, "saga", None)

    def _note_hits(self, output: SchedulerOutput) -> None:
        """What the requests that begin found cached, on the GPU and in host memory."""
        meta: Any = output.kv_connector_metadata
        if meta is not None:
            for request_id, blocks in loaded_blocks(meta).items():
                served = self.served.get(request_id)
                if served is not None and served.cached_tokens is None:
                    served.loaded_tokens = blocks * self.shape.block_tokens
                    found = served.request.num_computed_tokens
                    served.cached_tokens = found - served.loaded_tokens
        for new in output.scheduled_new_reqs:
            served = self.served.get(new.req_id)
            if served is None or served.request.num_preemptions:
                continue
            if served.cached_tokens is None:
                served.cached_tokens = new.num_computed_tokens
            elif served.loaded_tokens:
                # Of a prompt that is there as a whole the last token is computed all the same.
                served.loaded_tokens = new.num_computed_tokens - served.cached_tokens


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Exactly these of the plugin's variables, for as long as it lasts."""
    before = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}
    for name in before:
        del os.environ[name]
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(before)
