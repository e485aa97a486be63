"""Work that waits for an import: what is seen, when, and what other importers notice of it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from saga_sdk.imports import ImportWatch

NAME = "saga_watched_module"


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ImportWatch]:
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    imports = ImportWatch()
    yield imports
    imports.stop()
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]
    assert sys.meta_path == finders


def write(folder: Path, source: str) -> None:
    (folder / f"{NAME}.py").write_text(source)
    importlib.invalidate_caches()


def test_the_call_comes_after_the_import(watch: ImportWatch, tmp_path: Path) -> None:
    write(tmp_path, "value = 1")
    seen: list[int] = []
    watch.watch(NAME, lambda module: seen.append(module.value))
    assert seen == []
    module = importlib.import_module(NAME)
    assert seen == [1]
    assert module.__spec__ is not None
    assert type(module.__spec__.loader) is type(module.__loader__) is SourceFileLoader
    assert "exec_module" not in vars(module.__loader__)
    importlib.import_module(NAME)
    assert seen == [1]
    # What is there already is reported at once.
    watch.watch(NAME, lambda module: seen.append(module.value + 1))
    assert seen == [1, 2]


def test_a_reload_is_seen(watch: ImportWatch, tmp_path: Path) -> None:
    write(tmp_path, "class A: pass")
    seen: list[type] = []
    watch.watch(NAME, lambda module: seen.append(module.A))
    module = importlib.import_module(NAME)
    importlib.reload(module)
    assert len(seen) == 2
    assert seen[0] is not seen[1] is module.A


def test_an_import_that_fails_stays_as_it_was(watch: ImportWatch, tmp_path: Path) -> None:
    write(tmp_path, "raise ZeroDivisionError")
    seen: list[ModuleType] = []
    watch.watch(NAME, seen.append)
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(NAME)
    assert (seen, NAME in sys.modules) == ([], False)
    write(tmp_path, "value = 'longer than before'")
    assert seen == [importlib.import_module(NAME)]


def test_what_is_not_there_is_not_there(watch: ImportWatch, tmp_path: Path) -> None:
    watch.watch(NAME, pytest.fail)
    assert importlib.util.find_spec(NAME) is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(NAME)
    # A namespace package executes nothing.
    (tmp_path / NAME).mkdir()
    importlib.invalidate_caches()
    importlib.import_module(NAME)


def test_a_fault_of_ours_does_not_reach_the_import(
    watch: ImportWatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "value = 1")

    def fail(module: ModuleType) -> None:
        raise ZeroDivisionError

    watch.watch(NAME, fail)
    assert importlib.import_module(NAME).value == 1
    assert [r.getMessage() for r in caplog.records if r.name == "saga_sdk"] == [
        f"SAGA's installation for {NAME} failed; going on without hints (said once)"
    ]


def test_only_the_watched_module_is_touched(watch: ImportWatch, tmp_path: Path) -> None:
    package = tmp_path / NAME
    package.mkdir()
    (package / "__init__.py").write_text("from . import inner")
    (package / "inner.py").write_text("value = 1")
    importlib.invalidate_caches()
    order: list[str] = []
    watch.watch(NAME, lambda module: order.append(f"{module.__name__} {module.inner.value}"))
    importlib.import_module(f"{NAME}.inner")
    assert order == [f"{NAME} 1"]


def test_a_lazy_import_is_seen_when_it_happens(watch: ImportWatch, tmp_path: Path) -> None:
    write(tmp_path, "value = 1")
    seen: list[str] = []
    watch.watch(NAME, lambda module: seen.append(module.__name__))
    spec = importlib.util.find_spec(NAME)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    assert seen == []
    assert module.value == 1
    assert seen == [NAME]


@pytest.mark.timeout(60)
def test_imports_of_many_threads_are_seen_once(watch: ImportWatch, tmp_path: Path) -> None:
    write(tmp_path, "import threading\nready = threading.Event()\nready.wait(0.05)")
    seen: list[ModuleType] = []
    watch.watch(NAME, seen.append)
    together = threading.Barrier(8)
    got: list[ModuleType] = []

    def work(number: int) -> None:
        together.wait(30)
        if number % 2:
            got.append(importlib.import_module(NAME))
        else:
            watch.watch("another", pytest.fail)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 1
    assert got == seen * 4


def test_after_stop_nothing_is_seen(watch: ImportWatch, tmp_path: Path) -> None:
    write(tmp_path, "value = 1")
    watch.watch(NAME, pytest.fail)
    spec = importlib.util.find_spec(NAME)
    watch.stop()
    assert importlib.import_module(NAME).value == 1
    # Nor in an import that was under way.
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
