"""The guard that keeps SAGA's own failures out of the program, and says them once."""

from __future__ import annotations

import logging
import threading
from types import TracebackType

_logger = logging.getLogger("saga_sdk")
_lock = threading.Lock()
_logged: set[str] = set()


def warn_once(kind: str, message: str, *, exc_info: BaseException | None = None) -> None:
    """Log a warning, the first time that its kind occurs in the process."""
    with _lock:
        if kind in _logged:
            return
        _logged.add(kind)
    _logger.warning("%s (said once)", message, exc_info=exc_info)


class Guard:
    """A block whose exceptions are logged once per kind and go no further.

    It is for SAGA's own work only: the user's code never runs inside it. KeyboardInterrupt and
    the like pass.
    """

    __slots__ = ("_kind",)

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(exc, Exception):
            return False
        warn_once(self._kind, f"SAGA's {self._kind} failed; going on without hints", exc_info=exc)
        return True
