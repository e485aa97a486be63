"""vLLM's own scheduler and block pool in a loop with no model: every step "computes" at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from gpu_backend.scheduler import saga_scheduler_class

BLOCK_TOKENS = 16
TOKEN = 7


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


def make_config(model: Path, max_batched_tokens: int = 512, max_seqs: int = 16) -> Any:
    """A VllmConfig for ``model``; it can be used for many schedulers."""
    init_none_hash(sha256)
    return EngineArgs(
        model=str(model),
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        max_model_len=4096,
        max_num_batched_tokens=max_batched_tokens,
        max_num_seqs=max_seqs,
        enable_prefix_caching=True,
    ).create_engine_config()


@dataclass(slots=True)
class Admission:
    """A waiting request that has just been given its blocks."""

    request: Request
    hit_tokens: int


@dataclass(slots=True)
class Engine:
    """One scheduler over ``num_blocks`` blocks; ``policy`` None leaves it stock.

    ``policy`` is set through the environment, as `saga worker` does, by the caller.
    """

    config: Any
    num_blocks: int
    with_plugin: bool = True
    base: type = Scheduler
    requests: dict[str, Request] = field(default_factory=dict)
    scheduler: Any = field(init=False)
    _number: int = 0

    def __post_init__(self) -> None:
        self.config.cache_config.num_gpu_blocks = self.num_blocks
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

    def add(
        self, tokens: list[int], *, session_id: str | None = None, output_tokens: int = 1
    ) -> Request:
        """Queue a request."""
        self._number += 1
        request = Request(
            request_id=f"r{self._number}",
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(max_tokens=output_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
            session_id=session_id,
        )
        self.requests[request.request_id] = request
        self.scheduler.add_request(request)
        return request

    def step(self) -> SchedulerOutput:
        """One engine step: schedule, "run", update."""
        output: SchedulerOutput = self.scheduler.schedule()
        ids = list(output.num_scheduled_tokens)
        sampled = []
        for request_id in ids:
            request = self.requests[request_id]
            done = request.num_computed_tokens >= request.num_tokens
            sampled.append([TOKEN] if done else [])
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
                sampled_token_ids=sampled,
            ),
        )
        return output

    def steps(self, limit: int = 10_000) -> Iterator[SchedulerOutput]:
        """Step until nothing is left to do; AssertionError after ``limit`` steps."""
        for _ in range(limit):
            if not self.scheduler.has_unfinished_requests():
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
