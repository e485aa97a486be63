"""vLLM's own scheduler and block pool in a loop with no model: every step "computes" at once."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from gpu_backend.scheduler import saga_scheduler_class

BLOCK_TOKENS = 16
TOKEN = 7
STOP_TOKEN = 3


def write_tiny_model(folder: Path) -> Path:
    """A Llama of a few layers: a config and a word-level tokenizer, no weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1024,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=True,
        dtype="float32",
    ).save_pretrained(folder)
    vocabulary = {f"<{number}>": number for number in range(1024)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token="<1>",
        eos_token="<2>",
        pad_token="<2>",
        unk_token="<0>",
        chat_template="{% for m in messages %}{{ m['content'] }} {% endfor %}",
    ).save_pretrained(folder)
    return folder


def make_config(
    model: Path, max_batched_tokens: int = 512, max_seqs: int = 16, max_model_len: int = 4096
) -> Any:
    """A VllmConfig for ``model``; it can be used for many schedulers, one after another."""
    init_none_hash(sha256)
    return EngineArgs(
        model=str(model),
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_batched_tokens,
        max_num_seqs=max_seqs,
        enable_prefix_caching=True,
    ).create_engine_config()


def plain_subclass(base: type = Scheduler) -> type:
    """A scheduler class that differs from ``base`` in nothing."""
    return type(f"Plain{base.__name__}", (base,), {})


@dataclass(slots=True)
class Engine:
    """One scheduler over ``num_blocks`` blocks.

    The retention policy comes from the environment, as `saga worker` sets it.

    Args:
        config: from :func:`make_config`.
        num_blocks: size of the KV pool.
        with_plugin: False leaves the scheduler as vLLM has it.
        base: vLLM's scheduler class.
        batches_in_flight: batches that are scheduled before the first of them is done; more than
            one, as on CUDA, needs an ``AsyncScheduler``.
    """

    config: Any
    num_blocks: int
    with_plugin: bool = True
    base: type = Scheduler
    batches_in_flight: int = 1
    requests: dict[str, Request] = field(default_factory=dict)
    scheduler: Any = field(init=False)
    _in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = field(
        init=False, default_factory=deque
    )
    _stop_after: dict[str, int] = field(init=False, default_factory=dict)
    _number: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        is_async = issubclass(self.base, AsyncScheduler)
        if self.batches_in_flight > 1 and not is_async:
            raise ValueError(f"{self.base.__name__} cannot have several batches in flight")
        self.config.cache_config.num_gpu_blocks = self.num_blocks
        # vLLM refuses it where no GPU is when a config is made, but its scheduler does not mind.
        self.config.scheduler_config.async_scheduling = is_async
        spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        cls = saga_scheduler_class(self.base) if self.with_plugin else self.base
        self.scheduler = cls(
            vllm_config=self.config,
            kv_cache_config=KVCacheConfig(
                num_blocks=self.num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK_TOKENS,
            log_stats=True,
        )

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def saga(self) -> Any:
        return self.scheduler.saga

    def make_request(
        self,
        tokens: list[int],
        *,
        session_id: str | None = None,
        output_tokens: int = 1,
        stop_after: int | None = None,
    ) -> Request:
        """A request that is not queued yet; it ends in a stop token, the ``stop_after``-th."""
        self._number += 1
        request_id = f"r{self._number}"
        if stop_after is not None:
            self._stop_after[request_id] = stop_after
        return Request(
            request_id=request_id,
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(
                max_tokens=output_tokens, ignore_eos=True, stop_token_ids=[STOP_TOKEN]
            ),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
            session_id=session_id,
        )

    def add(
        self,
        tokens: list[int],
        *,
        session_id: str | None = None,
        output_tokens: int = 1,
        stop_after: int | None = None,
    ) -> Request:
        """Queue a request, and keep it in ``requests``."""
        request = self.make_request(
            tokens, session_id=session_id, output_tokens=output_tokens, stop_after=stop_after
        )
        self.requests[request.request_id] = request
        self.scheduler.add_request(request)
        return request

    def abort(self, request: Request) -> None:
        """The client has gone; what is in flight for the request is of no use."""
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> SchedulerOutput:
        """One engine step: schedule a batch, and take in the oldest when enough are in flight."""
        output = self.schedule()
        self._in_flight.append((output, self.compute(output)))
        # A batch of nothing means that all waits for what is in flight.
        room = self.batches_in_flight - 1 if output.total_num_scheduled_tokens else 0
        while len(self._in_flight) > room:
            self.update(*self._in_flight.popleft())
        return output

    def schedule(self) -> SchedulerOutput:
        """The scheduler's next batch."""
        output: SchedulerOutput = self.scheduler.schedule()
        return output

    def compute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """What a model returns for the batch just scheduled: a token where a prompt is complete."""
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[self._sample(self.scheduler.requests[id_]) for id_ in ids],
        )

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """The batch is done: its tokens go to their requests."""
        self.scheduler.update_from_output(output, result)

    def _sample(self, request: Request) -> list[int]:
        if request.is_prefill_chunk:
            return []
        position = request.num_computed_tokens - request.num_prompt_tokens + 1
        stop_after = self._stop_after.get(request.request_id)
        return [STOP_TOKEN if position == stop_after else TOKEN]

    def steps(self, limit: int = 10_000) -> Iterator[SchedulerOutput]:
        """Step until nothing is left to do; AssertionError after ``limit`` steps."""
        for _ in range(limit):
            if not self.scheduler.has_unfinished_requests() and not self._in_flight:
                return
            yield self.step()
        raise AssertionError(f"{limit} steps and requests are still waiting or running")

    def run(
        self, tokens: list[int], *, session_id: str | None = None, output_tokens: int = 1
    ) -> int:
        """Serve one request to its end; returns the prompt tokens it found cached."""
        request = self.add(tokens, session_id=session_id, output_tokens=output_tokens)
        hit = -1
        for output in self.steps():
            for new in output.scheduled_new_reqs:
                if new.req_id == request.request_id:
                    hit = new.num_computed_tokens
        return hit


def load_counters(engine: Engine) -> dict[str, Any]:
    """Counters as the control API gives them."""
    counters: dict[str, Any] = json.loads(json.dumps(engine.scheduler.saga_control({})))["counters"]
    return counters
