"""The types of the program's tools, by name."""

from __future__ import annotations

from collections.abc import Mapping

from saga_core.errors import SettingsError
from saga_core.types import ToolType, parse_tool_type, tool_type_of

_said: dict[str, ToolType] = {}


def tool_types(types: Mapping[str, str]) -> None:
    """Say what kind of work tools do whose names do not tell it.

    Args:
        types: tool name → type: ``file_io``, ``code_exec``, ``web_api``, ``db_query``,
            ``subagent``, ``human`` or ``other``, or ``io``, ``code``, ``web``, ``db`` for short.
            Names that were said before keep their types unless they are here again.

    Raises:
        SettingsError: a type is none of these; nothing of the mapping is taken.
    """
    read = {str(name): parse_tool_type(str(kind)) for name, kind in types.items()}
    for name, kind in read.items():
        if kind is None:
            known = ", ".join(ToolType)
            raise SettingsError(f"type of tool {name!r} must be one of {known}")
    _said.update({name: kind for name, kind in read.items() if kind is not None})


def tool_type(name: str) -> ToolType:
    """The type of a tool: as it was said, else by the words of its name, else ``OTHER``."""
    return _said.get(name) or tool_type_of(name)
