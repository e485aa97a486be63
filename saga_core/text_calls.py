"""Tool calls that a model writes as text, for agents that use no tool API."""

from __future__ import annotations

import re

from saga_core.hints import clean

_TAIL_CHARS = 8192
_SHELLS = frozenset({"bash", "sh", "shell", "zsh", "console", "terminal", "powershell"})
_CODE = frozenset({"python", "py", "tool_code", "ipython"})
_NAME = r"[A-Za-z_][\w.-]{0,63}"
# The last fenced block, with at most a closing tag behind it: an agent stops there and waits.
_FENCE = re.compile(
    r"```[ \t]*+([A-Za-z_]*+)[^\n`]*+\n(?:(?!```).)*```\s*(?:</[\w-]+>\s*)*\Z", re.S
)
# ReAct: "Action: search[tides]", or the name and "Action Input:" on the next line.
_ACTION = re.compile(rf"^[ \t*]*Action[ \t*]*:[ \t*`]*({_NAME})", re.M)
_FINAL = re.compile(r"^[ \t*]*Final Answer[ \t*]*:", re.M)
# <tool_call>{"name": ...}, [TOOL_CALLS] [{"name": ...}], <function=name>, or an object alone.
_TAGGED = re.compile(
    rf"(?:<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>)[\s\[]*\{{\s*\"(?:name|function)\"\s*:\s*"
    rf"\"({_NAME})\"|<function=({_NAME})>"
)
_TAGS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<function=")
_OBJECT = re.compile(
    rf"\A\s*(?:```(?:json)?\s*)?\{{\s*\"(?:name|tool|action|function)\"\s*:\s*\"({_NAME})\"\s*,"
    r"\s*\"(?:parameters|arguments|args|action_input|input|tool_input)\"\s*:"
)


def tool_in_text(text: str) -> str | None:
    """Name of the tool that an answer's text calls, as a legal hint value; None: none.

    Read are fenced commands at the end of the answer ("bash", "python"), ReAct's "Action:", tagged
    calls as open models write them, and an answer that is nothing but a JSON call.
    """
    tail = text[-_TAIL_CHARS:]
    found = _OBJECT.match(text)
    if found is None and any(tag in tail for tag in _TAGS):
        found = _last(_TAGGED, tail)
    if found is None and "Action" in tail:
        found = _last(_ACTION, tail)
        if found is not None and _FINAL.search(tail, found.end()):
            return None
    if found is not None:
        return clean(next(name for name in found.groups() if name))
    fence = _FENCE.search(tail) if "```" in tail else None
    language = "" if fence is None else fence[1].lower()
    if language in _SHELLS:
        return "bash"
    return "python" if language in _CODE else None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = None
    for found in pattern.finditer(text):  # noqa: B007 - the last one is wanted
        pass
    return found
