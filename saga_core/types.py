"""Words of the domain that several decisions share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ToolType(StrEnum):
    """What kind of work a paused agent waits for."""

    FILE_IO = "file_io"
    CODE_EXEC = "code_exec"
    WEB_API = "web_api"
    DB_QUERY = "db_query"
    SUBAGENT = "subagent"
    HUMAN = "human"
    OTHER = "other"


_ALIASES = {
    "io": ToolType.FILE_IO,
    "code": ToolType.CODE_EXEC,
    "web": ToolType.WEB_API,
    "db": ToolType.DB_QUERY,
}

# Checked in order; the first word that the tool's name contains decides.
_NAME_WORDS: tuple[tuple[ToolType, tuple[str, ...]], ...] = (
    (ToolType.SUBAGENT, ("agent", "delegate", "handoff", "transfer_to", "task")),
    (ToolType.HUMAN, ("human", "ask_user", "approval", "confirm")),
    (ToolType.DB_QUERY, ("sql", "database", "db_", "_db", "query_table", "vector")),
    (ToolType.CODE_EXEC, ("python", "bash", "shell", "exec", "run_", "terminal", "test", "code")),
    (ToolType.WEB_API, ("web", "http", "browse", "fetch", "url", "api", "crawl")),
    (ToolType.FILE_IO, ("file", "read", "write", "edit", "grep", "glob", "search", "list", "ls")),
)


def parse_tool_type(value: str) -> ToolType | None:
    """Read a tool type or one of its aliases, in any case; None when it is neither."""
    lowered = value.lower()
    if lowered in _ALIASES:
        return _ALIASES[lowered]
    try:
        return ToolType(lowered)
    except ValueError:
        return None


def tool_type_of(name: str) -> ToolType:
    """Guess the type of a tool from words in its name; ``OTHER`` when no word is known."""
    lowered = name.lower()
    for tool, words in _NAME_WORDS:
        if any(word in lowered for word in words):
            return tool
    return ToolType.OTHER


@dataclass(frozen=True, slots=True)
class Pause:
    """What is known of one pause: the time from a step's end to its session's next step.

    Attributes:
        p_reuse: probability that the session comes back and reads its cached prefix, 0 to 1.
        pause_p95_s: 95th percentile of the pause's length, seconds.
        tool_name: the tool that the session waits for; None when the step called none.
    """

    p_reuse: float
    pause_p95_s: float
    tool_name: str | None = None
