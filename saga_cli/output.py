"""Files that a command writes its results to."""

from __future__ import annotations

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
