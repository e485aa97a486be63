"""The hosts that may see hints."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import Any

from saga_core.errors import SettingsError
from saga_sdk.guard import Guard, warn_once
from saga_sdk.headers import events_url, is_llm_path, origin_of

ENV_VARS = ("SAGA_BASE_URL", "OPENAI_BASE_URL")

MAX_REMEMBERED = 1024

Origin = tuple[str, str, int]


class _Memory:
    """What is known of URLs under one set of hosts. Bounded: when it is full, it begins anew."""

    def __init__(self, origins: frozenset[Origin]) -> None:
        self.origins = origins
        self._allowed: dict[str, bool] = {}
        self._events_urls: dict[str, str | None] = {}

    def is_allowed(self, url: str) -> bool:
        known = self._allowed.get(url)
        if known is None:
            try:
                known = origin_of(url) in self.origins
            except SettingsError:
                known = False
            self._put(self._allowed, url, known)
        return known

    def events_url(self, url: str) -> str | None:
        if url in self._events_urls:
            return self._events_urls[url]
        found = events_url(url) if is_llm_path(url) and self.is_allowed(url) else None
        self._put(self._events_urls, url, found)
        return found

    def _put(self, memory: dict[str, Any], url: str, value: object) -> None:
        if len(memory) >= MAX_REMEMBERED:
            memory.clear()
        memory[url] = value


class AllowList:
    """Hosts by scheme, host and port. Changed under a lock, read without it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # Replaced together with the hosts that it was made for.
        self._memory = _Memory(frozenset())
        self._base_events_urls: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._memory.origins)

    def __contains__(self, url: str) -> bool:
        """Whether the URL's host is in the list; text that is no URL is not."""
        return self._memory.is_allowed(url)

    def events_url(self, url: str) -> str | None:
        """Where the server that an LLM call goes to takes events.

        None when the URL's host is not in the list, or the URL is not one of LLM calls.
        """
        return self._memory.events_url(url)

    @property
    def base_events_urls(self) -> tuple[str, ...]:
        """Where the servers behind the base URLs take events, in the order they were added."""
        return self._base_events_urls

    def add(self, base_urls: str | Iterable[str] | None) -> None:
        """Add the hosts of base URLs, by default of those in the environment.

        Raises:
            SettingsError: a URL in ``base_urls`` is not an absolute http or https one.
        """
        if base_urls is None:
            found = _urls_of_environment()
        else:
            urls = [base_urls] if isinstance(base_urls, str) else base_urls
            found = {str(url).strip(): origin_of(str(url)) for url in urls}
        with self._lock:
            origins = self._memory.origins.union(found.values())
            if origins != self._memory.origins:
                self._memory = _Memory(origins)
            taken = [events_url(f"{url.rstrip('/')}/") for url in found]
            self._base_events_urls = tuple(dict.fromkeys((*self._base_events_urls, *taken)))
            if not origins:
                warn_once(
                    "allow list", f"no base URL is given, nor in {ENV_VARS}: no hints are sent"
                )

    def clear(self) -> None:
        """Forget all hosts."""
        with self._lock:
            self._memory = _Memory(frozenset())
            self._base_events_urls = ()

    def after_fork(self) -> None:
        """Trust no lock in a child process."""
        self._lock = threading.RLock()


def _urls_of_environment() -> dict[str, Origin]:
    found: dict[str, Origin] = {}
    for name in ENV_VARS:
        for url in os.environ.get(name, "").split(","):
            if url.strip():
                with Guard(f"reading of {name}"):
                    found[url.strip()] = origin_of(url)
        if found:
            break
    return found


allowed = AllowList()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=allowed.after_fork)
