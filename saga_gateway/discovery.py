"""Where workers are found: lists that may change while the gateway runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Protocol

from saga_core.errors import SettingsError
from saga_gateway.settings import GatewaySettings, worker_address

logger = logging.getLogger(__name__)

Found = dict[str, str]
"""Base URLs of workers by their ids."""


class Discovery(Protocol):
    """A source of workers."""

    def now(self) -> Found:
        """The workers at the start, before the event loop runs; none, where they are not known yet.

        Raises:
            SettingsError: they cannot be found; the message says why.
        """

    def changes(self) -> AsyncGenerator[Found, None]:
        """All workers, whenever there are others than before. It never ends.

        A source that fails changes nothing: it says so in the log, once, and tries again.
        """


class FileDiscovery:
    """A file with one URL a line; what follows a ``#`` is a comment.

    Args:
        every_s: how often it is looked at.
    """

    def __init__(self, path: Path, every_s: float) -> None:
        self._path = path
        self._every_s = every_s
        self._last: Found = {}

    def now(self) -> Found:
        """See :class:`Discovery`."""
        self._last = self._read()
        return self._last

    async def changes(self) -> AsyncGenerator[Found, None]:
        """See :class:`Discovery`."""
        last_error = ""
        while True:
            await asyncio.sleep(self._every_s)
            try:
                found = self._read()
            except SettingsError as error:
                if str(error) != last_error:
                    logger.error("the workers stay as they were: %s", error)
                last_error = str(error)
                continue
            last_error = ""
            if found != self._last:
                self._last = found
                yield found

    def _read(self) -> Found:
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise SettingsError(f"cannot read {self._path}: {error}") from None
        urls = (line.partition("#")[0].strip() for line in lines)
        return dict(worker_address(url) for url in urls if url)


def sources_of(settings: GatewaySettings) -> tuple[Discovery, ...]:
    """The sources that the settings name, besides the workers that they name themselves."""
    sources: list[Discovery] = []
    if settings.workers_file is not None:
        sources.append(FileDiscovery(Path(settings.workers_file), settings.reload_s))
    if settings.uses_kubernetes:
        from saga_gateway.discovery_kubernetes import Endpoints, KubernetesDiscovery

        sources.append(KubernetesDiscovery(Endpoints.of(settings)))
    return tuple(sources)
