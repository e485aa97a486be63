"""A vLLM in which something has moved is named, and served as stock."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from vllm.config.scheduler import SchedulerConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.kv_offload.base import LookupResult

import gpu_backend
from gpu_backend import compat
from gpu_backend.config import WorkerConfig
from gpu_backend.model_free import Engine
from gpu_backend.register import register
from gpu_backend.scheduler import SagaSchedulerMixin
from gpu_backend.symbols import Symbol, find_moved, resolve

EVERY = (
    *compat.RETENTION,
    *compat.PREFETCH,
    *compat.PREEMPTION,
    *compat.ENDPOINT,
    *compat.HOST_TIER,
)
MakeEngine = Callable[..., Engine]


@pytest.fixture(autouse=True)
def enabled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plugin is asked for; what registering changes in vLLM is undone after each test."""
    monkeypatch.setenv("VLLM_PLUGINS", "saga")
    monkeypatch.setenv("SAGA_PREFETCH", "1")
    monkeypatch.setenv("SAGA_PREEMPT_WAITING", "0")
    changed = (
        (SchedulerConfig, "get_scheduler_cls"),
        (EngineArgs, "create_engine_config"),
        (EngineCore, "saga_control"),
        (AsyncMPClient, "call_utility_all_async"),
    )
    before = [vars(cls).get(name) for cls, name in changed]
    yield
    for (cls, name), value in zip(changed, before, strict=True):
        if value is not None:
            setattr(cls, name, value)
        elif name in vars(cls):
            delattr(cls, name)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.WARNING, "vllm.saga")
    return lambda: caplog.text


def _ids(symbols: Sequence[Symbol]) -> list[str]:
    return [symbol.path.partition(":")[2] for symbol in symbols]


def _owner(path: str) -> tuple[Any, str]:
    """Class or module that holds what ``path`` names, and its name there."""
    module, _, names = path.partition(":")
    *outer, name = names.split(".")
    owner = resolve(f"{module}:{'.'.join(outer)}") if outer else importlib.import_module(module)
    return owner, name


def _remove(path: str, patch: pytest.MonkeyPatch) -> None:
    owner, name = _owner(path)
    for base in inspect.getmro(owner)[:-1] if inspect.isclass(owner) else (owner,):
        if name in vars(base):
            patch.delattr(base, name)


def _aspects(symbol: Symbol) -> Iterator[tuple[Symbol, str]]:
    """The symbol with one thing that is relied on at a time, and what is said when it is gone."""
    path = symbol.path
    if symbol.takes:
        yield Symbol(path, takes=symbol.takes), f"{path} takes ("
    for name in symbol.accepts.split():
        yield Symbol(path, accepts=name), f"{path} takes no {name}"
    for name in symbol.has.split():
        yield Symbol(path, has=name), f"{path} has no {name}"
    for name in symbol.uses.split():
        yield Symbol(path, uses=name), f"{path} does not use {name}"


class _Moved:
    """Stands in for a function or a class that is not what it was."""

    def __init__(self, *, moved: None) -> None:
        del moved

    __call__ = __init__


# What is found


def test_nothing_has_moved_in_this_vllm() -> None:
    assert compat.is_supported(compat.vllm_version())
    assert compat.find_mismatch() is None
    assert compat.find_prefetch_mismatch() is None
    assert compat.find_preemption_mismatch() is None
    assert compat.find_endpoint_mismatch() is None
    assert compat.find_offload_mismatch() is None


@pytest.mark.parametrize("symbol", EVERY, ids=_ids(EVERY))
def test_what_has_moved_is_named(symbol: Symbol, monkeypatch: pytest.MonkeyPatch) -> None:
    for aspect, flaw in _aspects(symbol):
        assert find_moved([aspect]) is None
        with monkeypatch.context() as patch:
            patch.setattr(*_owner(symbol.path), _Moved)
            assert (find_moved([aspect]) or "").startswith(flaw)
    _remove(symbol.path, monkeypatch)
    assert symbol.path in (find_moved([symbol]) or "")


def test_the_check_knows_what_an_instance_has(monkeypatch: pytest.MonkeyPatch) -> None:
    class Base:
        def __init__(self) -> None:
            self.own = 0

    @dataclass
    class Record(Base):
        needed: int
        given: int = 0

    module = ModuleType("a_module")
    vars(module)["Record"] = Record
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert find_moved([Symbol("a_module:Record", has="own needed given")]) is None
    assert (
        find_moved([Symbol("a_module:Record", has="own other")]) == "a_module:Record has no other"
    )
    assert find_moved([Symbol("no_such_module:Record")]) == (
        "no_such_module:Record is gone (No module named 'no_such_module')"
    )


# Behaviour that has changed under the same names


def _break(path: str, fault: Callable[..., Any], patch: pytest.MonkeyPatch) -> None:
    original = resolve(path)

    @functools.wraps(original)
    def broken(*args: Any, **kwargs: Any) -> Any:
        return fault(original, *args, **kwargs)

    patch.setattr(*_owner(path), broken)


def _reversed(original: Any, pool: Any, blocks: Any) -> None:
    original(pool, reversed(list(blocks)))


def _one_further(original: Any, pool: Any, num_blocks: int) -> Any:
    pool.free_block_queue.append(pool.free_block_queue.popleft())
    return original(pool, num_blocks)


_BLOCKS = "vllm.v1.core.block_pool"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_HOST = "vllm.v1.kv_offload.cpu.manager:CPUOffloadingManager"
POOL_FAULTS: dict[str, Callable[..., Any]] = {
    f"{_BLOCKS}:BlockPool.free_blocks": _reversed,
    f"{_BLOCKS}:BlockPool.get_new_blocks": _one_further,
    f"{_BLOCKS}:BlockHashToBlockMap.get_one_block": lambda original, cache, key: None,
    "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.prepend_n": (
        lambda original, queue, blocks: queue.append_n(blocks)
    ),
    f"{_SCHEDULER}._request_blocks_can_be_freed": (lambda original, scheduler, request: True),
}
HOST_FAULTS: dict[str, Callable[..., Any]] = {
    f"{_HOST}.prepare_store": lambda original, manager, keys, context: None,
    f"{_HOST}.lookup": lambda original, manager, key, context: LookupResult.HIT,
    f"{_HOST}.complete_store": lambda original, manager, keys, context: None,
    f"{_HOST}.reset_cache": lambda original, manager: None,
    "vllm.v1.kv_offload.base:make_offload_key": lambda original, block_hash, group: b"",
}


@pytest.mark.parametrize("path", POOL_FAULTS, ids=lambda path: path.rpartition(".")[2])
def test_changed_behaviour_is_named_and_the_engine_serves_as_stock(
    path: str,
    monkeypatch: pytest.MonkeyPatch,
    log: Callable[[], str],
    engine_config: Any,
    make_engine: MakeEngine,
) -> None:
    with monkeypatch.context() as patch:
        _break(path, POOL_FAULTS[path], patch)
        register()
    assert "SAGA is off, vLLM serves as stock" in log()
    assert path.partition(":")[2] in log()
    base = engine_config.scheduler_config.get_scheduler_cls()
    assert base is Scheduler
    engine = make_engine(30, None, base=base)
    assert type(engine.pool) is BlockPool
    assert [engine.run([5] * 40) for _ in range(2)] == [0, 32]


@pytest.mark.parametrize("path", HOST_FAULTS, ids=lambda path: path.rpartition(".")[2])
def test_changed_behaviour_of_host_memory_is_named(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _break(path, HOST_FAULTS[path], monkeypatch)
    assert (compat.find_offload_mismatch() or "").startswith(path.partition(":")[2])


# What follows from it


def _is_on() -> bool:
    """Whether registering has changed what vLLM runs; the configuration hook stays harmless."""
    return hasattr(EngineCore, "saga_control")


@pytest.mark.parametrize("symbol", compat.RETENTION, ids=_ids(compat.RETENTION))
def test_without_a_symbol_the_plugin_stays_off_and_says_which(
    symbol: Symbol, monkeypatch: pytest.MonkeyPatch, log: Callable[[], str]
) -> None:
    with monkeypatch.context() as patch:
        _remove(symbol.path, patch)
        stock = vars(SchedulerConfig).get("get_scheduler_cls")
        register()
        assert vars(SchedulerConfig).get("get_scheduler_cls") is stock
    assert not _is_on()
    assert "SAGA is off, vLLM serves as stock: vLLM" in log()
    assert symbol.path.rpartition(":")[2].rpartition(".")[2] in log()


def test_a_check_that_raises_leaves_vllm_stock(
    monkeypatch: pytest.MonkeyPatch, log: Callable[[], str]
) -> None:
    def fail() -> None:
        raise RuntimeError("nothing is as it was")

    monkeypatch.setattr(compat, "find_mismatch", fail)
    register()
    assert not _is_on()
    assert "RuntimeError: nothing is as it was" in log()


def test_on_a_known_vllm_the_plugin_is_on_and_silent(
    log: Callable[[], str], engine_config: Any
) -> None:
    register()
    register()
    cls = engine_config.scheduler_config.get_scheduler_cls()
    assert cls.__mro__[1:3] == (SagaSchedulerMixin, Scheduler)
    assert _is_on()
    assert log() == ""


def test_a_vllm_that_was_not_tested_is_told_of(
    monkeypatch: pytest.MonkeyPatch, log: Callable[[], str]
) -> None:
    monkeypatch.setattr("vllm.__version__", "0.99.0")
    register()
    assert _is_on()
    assert "SAGA is not tested on vLLM 0.99.0, only on 0.31, 0.32" in log()


@pytest.mark.parametrize(
    ("name", "field", "gone"),
    [
        ("SAGA_PREFETCH", "prefetch", f"{_SCHEDULER}.finish_requests"),
        ("SAGA_PREEMPT_WAITING", "preempt_waiting", f"{_SCHEDULER}._preempt_request"),
    ],
)
def test_a_part_that_does_not_fit_is_off_and_the_rest_is_on(
    monkeypatch: pytest.MonkeyPatch, log: Callable[[], str], name: str, field: str, gone: str
) -> None:
    monkeypatch.setenv(name, "1")
    assert getattr(WorkerConfig.from_environment(), field) is True
    with monkeypatch.context() as patch:
        patch.setattr(*_owner(gone), _renamed)
        register()
    assert _is_on()
    assert getattr(WorkerConfig.from_environment(), field) is False
    assert f"{gone} takes ('self', 'moved')" in log()


def _renamed(self: Any, moved: Any) -> None:
    """As vLLM's Scheduler._preempt_request, under another parameter."""
    self._free_request_blocks(moved)


def _host_tier_after(monkeypatch: pytest.MonkeyPatch, module: str) -> object:
    """The connector with which an engine is configured that was asked for one of ``module``."""
    monkeypatch.setattr(EngineArgs, "create_engine_config", lambda args: args.kv_transfer_config)
    register()
    asked = SimpleNamespace(kv_connector_module_path=module)
    args: Any = SimpleNamespace(kv_transfer_config=asked)
    return EngineArgs.create_engine_config(args)


# Without it nobody can be asked for a host tier, and the retention is off as well.
_HOST_TIER = [symbol for symbol in compat.HOST_TIER if not symbol.path.endswith(":EngineArgs")]


@pytest.mark.parametrize("symbol", _HOST_TIER, ids=_ids(_HOST_TIER))
def test_without_a_symbol_the_host_tier_is_dropped_and_the_retention_stays(
    symbol: Symbol, monkeypatch: pytest.MonkeyPatch, log: Callable[[], str]
) -> None:
    with monkeypatch.context() as patch:
        _remove(symbol.path, patch)
        assert _host_tier_after(monkeypatch, "gpu_backend.offload") is None
    assert _is_on()
    assert "SAGA's host tier is off: vLLM" in log()
    assert symbol.path in log()


def test_without_the_retention_there_is_no_host_tier(
    monkeypatch: pytest.MonkeyPatch, log: Callable[[], str]
) -> None:
    with monkeypatch.context() as patch:
        _remove(f"{_BLOCKS}:BlockPool.free_blocks", patch)
        assert _host_tier_after(monkeypatch, "gpu_backend.offload") is None
    assert not _is_on()
    assert "SAGA's host tier is off" in log()


@pytest.mark.parametrize("module", ["gpu_backend.offload", "somebody.elses"])
def test_a_connector_that_fits_is_kept(
    monkeypatch: pytest.MonkeyPatch, log: Callable[[], str], module: str
) -> None:
    assert _host_tier_after(monkeypatch, module) is not None
    assert log() == ""


async def test_an_older_release_gets_the_call_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def call(method: str, *args: object, engine: str) -> str:
        return f"{engine}: {method}{args}"

    monkeypatch.delattr(AsyncMPClient, "call_utility_all_async", raising=False)
    compat.backport()
    client: Any = SimpleNamespace(core_engines=["a", "b"], _call_utility_async=call)
    answers = await vars(AsyncMPClient)["call_utility_all_async"](client, "saga_control", "{}")
    assert answers == ["a: saga_control('{}',)", "b: saga_control('{}',)"]


# The lists are complete

# Not private: documented, or a name of the platform that runs.
PUBLIC = {"current_platform", "envs"}
HOOKS = (
    "admission",
    "block_pool",
    "endpoint",
    "offload",
    "preempt",
    "replay",
    "residence",
    "scheduler",
)


def _known() -> set[str]:
    return {symbol.path for symbol in EVERY}


@pytest.mark.parametrize("module", HOOKS)
def test_every_import_from_vllm_is_checked(module: str) -> None:
    path = Path(str(gpu_backend.__file__)).with_name(f"{module}.py")
    imported = {
        f"{node.module}:{alias.name}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm")
        for alias in node.names
        if alias.name not in PUBLIC
    }
    heads = {path.partition(".__")[0] for path in _known()}
    assert {name for name in imported if name not in heads} == set()


@pytest.mark.parametrize("module", HOOKS)
def test_every_override_of_vllm_is_checked(module: str) -> None:
    names = vars(importlib.import_module(f"gpu_backend.{module}"))
    known = {path.partition(":")[2] for path in _known()}
    overridden = {
        f"{base.__name__}.{name}"
        for cls in names.values()
        if inspect.isclass(cls) and cls.__module__ == f"gpu_backend.{module}"
        for base in (Scheduler, *cls.__mro__)
        if base.__module__.startswith("vllm.")
        and (base is not Scheduler or cls is SagaSchedulerMixin)
        for name in vars(cls).keys() & vars(base).keys()
        if inspect.isfunction(vars(cls)[name]) and not name.startswith("__")
    }
    assert overridden - known == set()
