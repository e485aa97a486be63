"""Fixtures of the SDK's tests: the scripted server, and a clean switch around each test."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from langchain_openai.chat_models import _client_utils

import saga_sdk as saga
from saga_sdk import guard
from saga_sdk.context import calls, current_workflow
from saga_sdk.events import sender
from saga_sdk.runs import tracker
from saga_sdk.sessions import named_sessions
from saga_sdk.testing import ScriptedServer
from tests.plans import follow_plan


@pytest.fixture(autouse=True)
def clean_switch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start switched off; afterwards nothing may be left of any run."""
    for name in ("SAGA_BASE_URL", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setattr(guard, "_logged", set())
    # Named sessions go on counting for the life of a process: each test begins with none.
    named_sessions.clear()
    originals = (openai.OpenAI._prepare_request, openai.AsyncOpenAI._prepare_request)
    yield
    sender.stop()
    saga.uninstrument()
    assert (openai.OpenAI._prepare_request, openai.AsyncOpenAI._prepare_request) == originals
    tracker.check_integrity()
    assert (len(tracker), len(calls), current_workflow()) == (0, 0, None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """LangChain keeps async clients in a cache of its own, and closes none of them."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"))


@pytest.fixture(autouse=True, scope="module")
def forget_cached_clients() -> Iterator[None]:
    """What LangChain's cache holds goes before the next module's tests, which may not ignore it."""
    yield
    _client_utils._cached_async_httpx_client.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(follow_plan) as scripted:
        yield scripted


@pytest.fixture
def other_server() -> Iterator[ScriptedServer]:
    with ScriptedServer(follow_plan) as scripted:
        yield scripted
