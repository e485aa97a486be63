"""Words of the domain that several decisions share."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache


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

# Checked in order; the first kind that has a word of the tool's name decides.
_NAME_WORDS: tuple[tuple[ToolType, str], ...] = (
    (ToolType.SUBAGENT, "agent subagent coworker delegate handoff transfer task"),
    (ToolType.HUMAN, "human approval approve confirm ask"),
    (ToolType.DB_QUERY, "sql database db table vector retriever"),
    (ToolType.CODE_EXEC, "python bash shell exec execute run terminal test tests code repl"),
    (ToolType.WEB_API, "web http browse browser fetch url api crawl scrape internet"),
    (ToolType.FILE_IO, "file files read write edit editor grep glob search list ls directory"),
)
_MAX_NAME_CHARS = 256
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


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
    """Guess the type of a tool from the words of its name; ``OTHER`` when none is known.

    Words are parted as in ``read_file``, ``read-file`` and ``ReadFile``. Of a name the first 256
    characters count.
    """
    return _tool_type_of(name[:_MAX_NAME_CHARS])


@lru_cache(maxsize=1024)
def _tool_type_of(name: str) -> ToolType:
    words = {word.lower() for word in _WORD.findall(name)}
    for tool, known in _NAME_WORDS:
        if not words.isdisjoint(known.split()):
            return tool
    return ToolType.OTHER


@dataclass(frozen=True, slots=True)
class Pause:
    """What is known of one pause: the time from a step's end to its session's next step.

    Attributes:
        p_reuse: probability that the session comes back and reads its cached prefix, 0 to 1.
        pause_p95_s: 95th percentile of the pause's length, seconds.
        tool_name: the tool that the session waits for; None when the step called none.
        pause_p50_s: a forecast of this very pause, seconds; None when nobody knows more than how
            long such pauses last as a rule.
    """

    p_reuse: float
    pause_p95_s: float
    tool_name: str | None = None
    pause_p50_s: float | None = None
