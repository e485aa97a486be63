"""vLLM's own scheduler and block manager on a virtual clock: a step takes what its caller says.

There are no weights and no token ids that mean anything: who submits a request says what its
blocks are, by hashes, so that prefix caching works as it does on real tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from gpu_backend import scheduler as plugin
from gpu_backend.model_free import TOKEN, make_config
from saga_core.errors import SagaError
from saga_core.notices import Notice

_VARIABLES = "SAGA_"
_TIME = "time"


@dataclass(slots=True)
class VirtualClock:
    """The time of a simulation; ``now_s`` is set by who runs it."""

    now_s: float = 0.0

    @contextmanager
    def stands_in(self) -> Iterator[None]:
        """Let the plugin's scheduler read this clock where it reads the wall clock for run times.

        For all schedulers of the process: simulations do not run beside each other.
        """
        real: Any = getattr(plugin, _TIME)
        read = SimpleNamespace(
            time=lambda: self.now_s, monotonic=lambda: self.now_s, thread_time=real.thread_time
        )
        setattr(plugin, _TIME, read)
        try:
            yield
        finally:
            setattr(plugin, _TIME, real)


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What a virtual engine is given.

    Attributes:
        num_blocks: blocks of the KV pool that can hold something.
        block_tokens: tokens in a block.
        batched_tokens: most tokens of a step. max_seqs: most requests that run.
        max_model_len: longest prompt with its answer, tokens.
    """

    num_blocks: int
    block_tokens: int
    batched_tokens: int = 8192
    max_seqs: int = 256
    max_model_len: int = 131_072

    def config(self, model: Path, *, prefix_caching: bool = True) -> Any:
        """A VllmConfig for engines of this shape; ``model`` is a folder with a config.json."""
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
        return config


@dataclass(slots=True)
class Served:
    """A request and what became of it; times on the virtual clock.

    Attributes:
        key: what the submitter knows it by.
        cached_tokens: prompt tokens found cached when it was first admitted; None before.
        prefill_tokens: prompt tokens computed before any preemption.
        recomputed_tokens: tokens computed again after preemptions.
        known_tokens: of the prompt, those that count as computed before, somewhere.
    """

    key: Any
    request: Request
    last_token: int
    known_tokens: int = 0
    cached_tokens: int | None = None
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    first_token_s: float | None = None
    end_s: float | None = None


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
    """

    prefill_tokens: int = 0
    prefill_attended: int = 0
    decodes: int = 0
    decode_attended: int = 0
    made_tokens: int = 0
    regret_tokens: int = 0
    own_tokens: int = 0


@dataclass(slots=True)
class VirtualEngine:
    """One scheduler. A step is ``start_step``, time that the caller lets pass, ``end_step``.

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
    served: dict[str, Served] = field(init=False, default_factory=dict)
    steps: int = field(init=False, default=0)
    _number: int = field(init=False, default=0)
    _output: SchedulerOutput | None = field(init=False, default=None)
    _result: ModelRunnerOutput | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        spec = FullAttentionSpec(
            block_size=self.shape.block_tokens, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
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
    ) -> None:
        """Queue a request, between two steps.

        Args:
            hashes: of the full blocks of the prompt with its answer, in order; a hash stands for
                all of the prefix that ends with its block.
            last_token: the answer's last token, which tells kinds of answers apart.
            known_tokens: prompt tokens that count as regret when they are computed.
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
        )
        self.served[request.request_id] = Served(key, request, last_token, known_tokens)
        self.scheduler.add_request(request)

    def notify(self, notices: Sequence[Notice]) -> None:
        """Tell the plugin, if there is one."""
        saga = getattr(self.scheduler, "saga", None)
        if saga is not None:
            saga.notify(notices)

    def tick(self) -> float | None:
        """Let the plugin of an idle engine act; seconds until it wants to again, None: not yet."""
        if self.variables is None:
            return None
        wake_in_s: float | None = self.scheduler.saga_control({"tick": True})["wake_in_s"]
        return wake_in_s

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, be it the plugin's own."""
        return bool(self.scheduler.has_unfinished_requests())

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
        output: SchedulerOutput = self.scheduler.schedule()
        for new in output.scheduled_new_reqs:
            served = self.served.get(new.req_id)
            if served is not None and served.cached_tokens is None:
                served.cached_tokens = new.num_computed_tokens
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
        self.steps += 1
        return work

    def end_step(self) -> list[Served]:
        """The batch is done, now; returns the requests whose answers are complete."""
        output, result = self._output, self._result
        assert output is not None
        assert result is not None
        self._output = self._result = None
        now_s, ended = self.clock.now_s, []
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
        return ended

    def counters(self) -> dict[str, float]:
        """The plugin's totals, those of its prefetches among them; none without it."""
        saga = getattr(self.scheduler, "saga", None)
        if saga is None:
            return {}
        state = saga.state()
        prefetch = state.get("prefetch") or {}
        return {**state["counters"], **{f"prefetch_{name}": n for name, n in prefetch.items()}}

    def off_reason(self) -> str | None:
        """Why the plugin switched itself off; None when it is on, or was never there."""
        saga = getattr(self.scheduler, "saga", None)
        return None if saga is None else saga.off_reason


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
