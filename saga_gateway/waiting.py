"""Requests that wait for a worker with room."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


class RoomFullError(Exception):
    """As many wait as may."""


@dataclass(slots=True, eq=False)
class _Waiter(Generic[T]):
    choose: Callable[[], T | None]
    chosen: asyncio.Future[T]


class WaitingRoom(Generic[T]):
    """First come, first served, among those whom what is free can serve.

    What a choice has reserved is given back with ``release`` when its waiter has left meanwhile.
    """

    def __init__(self, max_waiting: int, release: Callable[[T], None]) -> None:
        self._max_waiting = max_waiting
        self._release = release
        self._waiters: deque[_Waiter[T]] = deque()

    def __len__(self) -> int:
        return len(self._waiters)

    async def wait(self, choose: Callable[[], T | None], timeout_s: float) -> T | None:
        """The first choice that is one; None when the time is over.

        ``choose`` is asked now, and whenever something may have become free. What it raises ends
        the wait. What is free now is of no use to those who wait already: nobody is overtaken.

        Raises:
            RoomFullError: so many wait that this one may not.
        """
        chosen = choose()
        if chosen is not None:
            return chosen
        if len(self._waiters) >= self._max_waiting:
            raise RoomFullError
        waiter = _Waiter(choose, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(waiter.chosen)
        except TimeoutError:
            return self._taken(waiter)
        except asyncio.CancelledError:
            taken = self._taken(waiter)
            if taken is not None:
                self._release(taken)
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            waiter.chosen.cancel()

    def wake(self) -> None:
        """Something may have become free."""
        for waiter in list(self._waiters):
            try:
                chosen = waiter.choose()
            except Exception as error:  # noqa: BLE001 - it is the waiter's, and raised there
                waiter.chosen.set_exception(error)
            else:
                if chosen is None:
                    continue
                waiter.chosen.set_result(chosen)
            self._waiters.remove(waiter)

    @staticmethod
    def _taken(waiter: _Waiter[T]) -> T | None:
        # The choice was made in the moment in which its waiter gave up.
        future = waiter.chosen
        is_made = future.done() and not future.cancelled() and future.exception() is None
        return future.result() if is_made else None
