"""The hosts that may see hints."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

from saga_core.errors import SettingsError
from saga_sdk.guard import Guard, warn_once
from saga_sdk.headers import origin_of

ENV_VARS = ("SAGA_BASE_URL", "OPENAI_BASE_URL")

Origin = tuple[str, str, int]


class AllowList:
    """Hosts by scheme, host and port. Changed under a lock, read without it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._origins: frozenset[Origin] = frozenset()

    def __bool__(self) -> bool:
        return bool(self._origins)

    def __contains__(self, url: str) -> bool:
        """Whether the URL's host is in the list; text that is no URL is not."""
        try:
            return bool(self._origins) and origin_of(url) in self._origins
        except SettingsError:
            return False

    def add(self, base_urls: str | Iterable[str] | None) -> None:
        """Add the hosts of base URLs, by default of those in the environment.

        Raises:
            SettingsError: a URL in ``base_urls`` is not an absolute http or https one.
        """
        if base_urls is None:
            found = _origins_of_environment()
        else:
            urls = [base_urls] if isinstance(base_urls, str) else base_urls
            found = {origin_of(str(url)) for url in urls}
        with self._lock:
            self._origins |= found
            if not self._origins:
                warn_once(
                    "allow list", f"no base URL is given, nor in {ENV_VARS}: no hints are sent"
                )

    def clear(self) -> None:
        """Forget all hosts."""
        with self._lock:
            self._origins = frozenset()


def _origins_of_environment() -> set[Origin]:
    found: set[Origin] = set()
    for name in ENV_VARS:
        for url in os.environ.get(name, "").split(","):
            if url.strip():
                with Guard(f"reading of {name}"):
                    found.add(origin_of(url))
        if found:
            break
    return found


allowed = AllowList()
