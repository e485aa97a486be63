"""Runs that wrapped methods report."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator
from typing import Any

import pytest

import saga_sdk as saga
from saga_core.hints import Hints
from saga_sdk import reporting
from saga_sdk.context import calls, current_call, current_workflow
from saga_sdk.patches import Patches
from saga_sdk.reporting import Conversation, Run, current_run, wrap_subclasses
from saga_sdk.runs import RunKind, tracker


def hints_of_call(**kwargs: Any) -> Hints:
    """Make a call here, and say what its request would carry."""
    call = Run(RunKind.CALL, None, **kwargs)
    with call:
        found = calls.get(call.id)
    assert found is not None
    return found.hints


def test_what_begins_inside_is_below() -> None:
    with Run(RunKind.CHAIN, "boss", node="boss", conversation=Conversation("s-1")):
        first = hints_of_call()
        with Run(RunKind.TOOL, "ask_helper"), Run(RunKind.CHAIN, "helper", node="helper"):
            inner = hints_of_call()
        second = hints_of_call()
    assert (first.session_id, first.step, first.node) == ("s-1", 0, "boss")
    assert (inner.parent_session_id, inner.step, inner.node) == ("s-1", 0, "helper")
    assert (second.session_id, second.step, second.tool_name) == ("s-1", 1, "ask_helper")
    assert len({h.task_id for h in (first, inner, second)}) == 1
    assert {h.workflow_id for h in (first, inner, second)} == {"boss"}
    assert (len(tracker), current_run()) == (0, None)


def test_a_run_of_the_same_subject_is_the_same_run() -> None:
    subject = object()
    with Run(RunKind.CHAIN, "agent", subject=subject):
        outer = current_run()
        with Run(RunKind.CHAIN, "agent", subject=subject):
            assert current_run() is outer
            assert len(tracker) == 1
            with Run(RunKind.TOOL, "tool"), Run(RunKind.CHAIN, "agent", subject=subject):
                assert len(tracker) == 3
        assert current_run() is outer


def test_a_run_ends_once_and_has_nothing_below_it_then() -> None:
    run = Run(RunKind.CHAIN, "agent")
    with run:
        pass
    run.end()
    with run.entered():
        assert current_run() is None
        assert hints_of_call().session_id is None


def test_a_call_inside_a_call_leaves_the_outer_one_to_be_sent() -> None:
    outer = Run(RunKind.CALL, None)
    with saga.workflow("swe"), outer:
        hints_of_call(conversation=Conversation("s-2"))
        sent = current_call(is_retry=False)
        assert sent is calls.get(outer.id)
    assert sent is not None
    assert sent.hints.session_id != "s-2"


async def test_a_stream_is_in_its_run_and_its_reader_is_not() -> None:
    seen: list[Run | None] = []

    async def count() -> AsyncIterator[int]:
        for number in range(2):
            seen.append(current_run())
            yield number

    run = Run(RunKind.CHAIN, "agent")
    async for _ in reporting.stream(lambda: run)(count)():
        assert current_run() is None
        assert len(tracker) == 1
    assert seen == [run, run]
    assert len(tracker) == 0


async def test_a_stream_that_is_left_early_is_closed_in_time() -> None:
    closed = asyncio.Event()

    async def forever() -> AsyncIterator[int]:
        try:
            while True:
                yield 0
        finally:
            closed.set()

    stream = reporting.stream(lambda: Run(RunKind.CHAIN, "agent"))(forever)()
    await anext(stream)
    await stream.aclose()
    assert closed.is_set()
    assert len(tracker) == 0


def test_a_run_has_its_block_wherever_it_is_entered() -> None:
    run = Run(RunKind.CHAIN, "team")
    with saga.workflow("job") as job:
        run.begin()

        def handler() -> tuple[Any, Any, Any]:
            with saga.workflow("server") as server:
                with run.entered():
                    inside = current_workflow()
                return inside, current_workflow(), server

        inside, after, server = contextvars.Context().run(handler)
        assert inside is job
        assert after is server
        run.end()


def test_an_error_of_the_program_passes() -> None:
    with pytest.raises(ZeroDivisionError), Run(RunKind.CHAIN, "agent"):
        raise ZeroDivisionError
    assert (len(tracker), current_run()) == (0, None)


def test_classes_are_wrapped_when_they_are_defined() -> None:
    class Base:
        pass

    class Now(Base):
        pass

    class Deeper(Now):
        pass

    patches, seen = Patches(), []
    wrap_subclasses(patches, Base, seen.append)

    class Later(Now):
        pass

    patches.undo()

    class TooLate(Base):
        pass

    assert seen == [Now, Deeper, Later]
    assert "__init_subclass__" not in vars(Base)


def test_the_hook_of_a_class_of_its_own_is_kept() -> None:
    named = []

    class Base:
        def __init_subclass__(cls, name: str = "", **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            named.append(name)

    patches, seen = Patches(), []
    wrap_subclasses(patches, Base, seen.append)

    class Later(Base, name="later"):
        pass

    patches.undo()

    class TooLate(Base, name="too late"):
        pass

    assert seen == [Later]
    assert named == ["later", "too late"]
