"""Wrapped methods of other people's classes, and the way back."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Method = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Patch:
    owner: type
    name: str
    wrapper: Method
    # What stands in the class: the wrapper, or a static method of it.
    put: Any
    # None: the method was inherited, and nothing stood in the class itself.
    original: Any | None


class Patches:
    """Methods that were wrapped together, and are restored together. Thread-safe.

    A wrapper should carry its original as ``__wrapped__``, as :func:`functools.wraps` sets it:
    by that it is found below the wrappers of others, and is not put there twice.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._patches: list[_Patch] = []

    def wrap(self, owner: type, name: str, wrapper_of: Callable[[Method], Method]) -> None:
        """Put ``wrapper_of(original)`` in the place of a method, unless one of ours is there.

        Raises:
            AttributeError: the class has no such method.
        """
        with self._lock:
            original = getattr(owner, name)
            ours = {id(patch.wrapper) for patch in self._patches}
            layer = original
            while layer is not None:
                if id(layer) in ours:
                    return
                layer = getattr(layer, "__wrapped__", None)
            wrapper = wrapper_of(original)
            is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
            put = staticmethod(wrapper) if is_static else wrapper
            self._patches.append(_Patch(owner, name, wrapper, put, vars(owner).get(name)))
            setattr(owner, name, put)

    def undo(self) -> None:
        """Restore the methods. One that somebody has wrapped since stays below their wrapper."""
        with self._lock:
            kept = []
            for patch in reversed(self._patches):
                if vars(patch.owner).get(patch.name) is not patch.put:
                    kept.append(patch)
                elif patch.original is None:
                    delattr(patch.owner, patch.name)
                else:
                    setattr(patch.owner, patch.name, patch.original)
            self._patches = kept[::-1]
