"""Work that waits for the program to import a module, so that nothing is imported before it."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from saga_sdk.guard import Guard


class ImportWatch:
    """Calls a function as soon as a module has been imported, or now when it has been already.

    It is a finder at the head of ``sys.meta_path`` that finds nothing by itself: of the watched
    modules it takes the spec that the other finders give, and extends the loader's ``exec_module``
    for this one execution. An import that fails stays as it was, and the next one is watched again;
    so is a reload. A namespace package has nothing to execute and is not watched.

    The function runs in the thread that imports, under that module's import lock, and not under a
    lock of ours. It may run again for the same module, and in two threads at once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[str, Callable[[ModuleType], None]] = {}
        self._executing: set[str] = set()

    def watch(self, name: str, imported: Callable[[ModuleType], None]) -> None:
        """Call ``imported(module)`` after each import of the module, and now when it is there."""
        with self._lock:
            self._watched[name] = imported
            if self not in sys.meta_path:
                sys.meta_path.insert(0, self)
        module = sys.modules.get(name)
        # Another thread that is executing it will report it, and must not be waited for here.
        if module is not None and name not in self._executing:
            self._report(module, name)

    def stop(self) -> None:
        """Watch nothing any more."""
        with self._lock:
            self._watched = {}
            if self in sys.meta_path:
                sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The watched module's spec with its loader extended; None for every other module."""
        if name not in self._watched:
            return None
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            # Not guarded: what a finder raises is the program's own affair.
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                with Guard(f"watch for the import of {name}"):
                    self._extend(spec)
                return spec
        return None

    def _extend(self, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        if loader is None:
            return
        original = loader.exec_module

        @functools.wraps(original)
        def exec_module(module: ModuleType) -> None:
            # A loader may serve several modules.
            if module.__name__ != spec.name:
                original(module)
                return
            loader.__dict__.pop("exec_module", None)
            self._executing.add(spec.name)
            try:
                original(module)
            finally:
                self._executing.discard(spec.name)
            self._report(module, spec.name)

        # On the object, so that its type, and what else it can do, stay as they are.
        loader.exec_module = exec_module

    def _report(self, module: ModuleType, name: str) -> None:
        imported = self._watched.get(name)
        if imported is not None:
            with Guard(f"installation for {name}"):
                imported(module)
