"""Where commands write: their results, and what they can make again."""

from __future__ import annotations

import os
from pathlib import Path

from saga_core.errors import SagaError


def writable(option: str, path: str | None) -> Path | None:
    """The file to write, refused now rather than after ten minutes.

    Raises:
        SagaError: it cannot be written; the message names ``option`` and the reason.
    """
    if path is None:
        return None
    try:
        with open(path, "a", encoding="utf-8"):
            return Path(path)
    except OSError as error:
        raise SagaError(f"{option} {path} cannot be written: {error.strerror}") from error


def cache_folder() -> Path:
    """Where SAGA keeps what it can make again: $XDG_CACHE_HOME/saga, ~/.cache/saga by default."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "saga"
