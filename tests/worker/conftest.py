from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu_backend.config import POLICY_VARIABLE

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from gpu_backend.model_free import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def engine_config(tiny_model: Path) -> Any:
    from gpu_backend.model_free import make_config

    return make_config(tiny_model)


@pytest.fixture
def make_engine(engine_config: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    from gpu_backend.model_free import Engine

    def make(num_blocks: int, policy: str | None = "wa-lru-ttl", **options: Any) -> Engine:
        if policy is not None:
            monkeypatch.setenv(POLICY_VARIABLE, policy)
        return Engine(engine_config, num_blocks, with_plugin=policy is not None, **options)

    return make
