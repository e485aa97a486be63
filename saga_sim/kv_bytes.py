"""Bytes that a token takes in a model's KV cache, worked out from the model's config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saga_core.errors import SettingsError

_DTYPE_BYTES = {"float16": 2, "half": 2, "bfloat16": 2, "float32": 2, "float": 2}
"""Bytes of an element by the model's dtype; vLLM runs a float32 model in 16 bits."""

KV_DTYPES = ("auto", "fp8")


def read_config(path: Path) -> dict[str, Any]:
    """A model's config; ``path`` is its config.json or the folder that holds one.

    Raises:
        SettingsError: there is no such file, or it is not a JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"model config {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise SettingsError(f"model config {file} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise SettingsError(f"model config {file} is not a JSON object")
    return config


def kv_bytes_per_token(
    config: Mapping[str, Any], *, kv_dtype: str = "auto", tensor_parallel: int = 1
) -> int:
    """KV bytes of a token on one GPU.

    2 · layers · KV heads · head size · bytes of an element, with the KV heads divided among
    ``tensor_parallel`` GPUs, at least one each. With multi-head latent attention (a
    ``kv_lora_rank``): layers · (kv_lora_rank + qk_rope_head_dim) · bytes of an element, on every
    GPU. A ``text_config`` inside the config goes before the config itself.

    Args:
        kv_dtype: "auto": the model's own dtype; "fp8": one byte an element.

    Raises:
        SettingsError: a field is missing or malformed, layers hold something else than the KV of
            all tokens, or the GPUs cannot share the heads; the message names it.
    """
    fields = _Fields(config)
    layers = fields.integer("num_hidden_layers")
    _check_layers(fields)
    element_bytes = _element_bytes(fields, kv_dtype)
    if tensor_parallel < 1:
        raise SettingsError(f"tensor_parallel={tensor_parallel} must be at least 1")
    if fields.get("kv_lora_rank") is not None:
        width = fields.integer("kv_lora_rank") + fields.integer("qk_rope_head_dim")
        return layers * width * element_bytes
    heads = fields.integer("num_key_value_heads", "num_attention_heads")
    if heads % tensor_parallel and tensor_parallel % heads:
        raise SettingsError(
            f"tensor_parallel={tensor_parallel} does not fit {heads} KV heads: one must divide "
            "the other"
        )
    head_size = _head_size(fields)
    return 2 * layers * max(1, heads // tensor_parallel) * head_size * element_bytes


@dataclass(frozen=True, slots=True)
class _Fields:
    """Fields of a config, those of its text model first."""

    config: Mapping[str, Any]

    def get(self, name: str) -> Any:
        text = self.config.get("text_config")
        inner = text.get(name) if isinstance(text, Mapping) else None
        return self.config.get(name) if inner is None else inner

    def integer(self, *names: str) -> int:
        """The first of ``names`` that is there."""
        for name in names:
            value = self.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SettingsError(f"model config: {name!r} is {value!r}; expected an integer")
            return value
        raise _missing(*names)


def _missing(*names: str) -> SettingsError:
    either = " and ".join(repr(name) for name in names)
    are = "is" if len(names) == 1 else "are both"
    return SettingsError(f"model config: {either} {are} missing; --kv-bytes-per-token goes without")


def _head_size(fields: _Fields) -> int:
    if fields.get("head_dim") is not None:
        return fields.integer("head_dim")
    if fields.get("hidden_size") is None:
        raise _missing("head_dim", "hidden_size")
    return fields.integer("hidden_size") // fields.integer("num_attention_heads")


def _check_layers(fields: _Fields) -> None:
    kinds = fields.get("layer_types")
    others = sorted(set(map(str, kinds or ())) - {"full_attention"})
    if others:
        raise SettingsError(
            f"model config: 'layer_types' has {', '.join(others)}, whose layers do not keep the KV "
            "of every token; give --kv-bytes-per-token instead"
        )


def _element_bytes(fields: _Fields, kv_dtype: str) -> int:
    if kv_dtype == "fp8":
        return 1
    if kv_dtype != "auto":
        raise SettingsError(f"kv_dtype is {kv_dtype!r}; expected one of {', '.join(KV_DTYPES)}")
    for name in ("dtype", "torch_dtype"):
        value = fields.get(name)
        if value is None:
            continue
        known = str(value).removeprefix("torch.")
        if known not in _DTYPE_BYTES:
            raise SettingsError(
                f"model config: {name!r} is {value!r}; expected one of {', '.join(_DTYPE_BYTES)}"
            )
        return _DTYPE_BYTES[known]
    raise _missing("dtype", "torch_dtype")
