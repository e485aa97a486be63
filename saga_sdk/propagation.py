"""Where a function's work is done: in a tool, or in the context of another thread or task."""

from __future__ import annotations

import contextvars
import functools
import inspect
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

# Runs one step of a generator or coroutine: its method, and what is passed to it.
RunStep = Callable[[Callable[[Any], Any], Any], Any]


def wrap(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function run in the context of this place, whoever calls it, in any thread.

    For what the standard library starts in an empty context: ``executor.submit(saga.wrap(work))``,
    ``executor.map(saga.wrap(work), items)``, ``loop.run_in_executor(None, saga.wrap(work))``,
    ``Thread(target=saga.wrap(work))``. Each call has a copy of the context of its own. A coroutine
    function's whole work is done there, also in another event loop.
    """
    captured = contextvars.copy_context()
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def run_async(*args: P.args, **kwargs: P.kwargs) -> Any:
            context = captured.copy()
            return await _driven(context.run(function, *args, **kwargs), context.run)

        return cast("Callable[P, R]", run_async)

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        return captured.copy().run(function, *args, **kwargs)

    return run


@types.coroutine
def _driven(coroutine: Coroutine[Any, Any, R], run: RunStep) -> Generator[Any, Any, R]:
    result: R = yield from drive(coroutine, run)
    return result


def drive(steps: Any, run: RunStep) -> Generator[Any, Any, Any]:
    """Run a generator or coroutine step by step, each step by ``run(method, value)``.

    What is sent, thrown and returned passes through, as with ``yield from``.
    """
    method, value = steps.send, None
    while True:
        try:
            item = run(method, value)
        except StopIteration as stop:
            return stop.value
        try:
            method, value = steps.send, (yield item)
        except GeneratorExit:
            run(_close, steps)
            raise
        except BaseException as error:  # noqa: BLE001 (it is the generator's to handle)
            method, value = steps.throw, error


def _close(steps: Any) -> None:
    steps.close()
