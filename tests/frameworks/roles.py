"""What the tests of agent frameworks share: agents that follow a role, and a look at the hints."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

from saga_core.hints import Hints
from saga_sdk.events import sender
from saga_sdk.testing import Request, ScriptedServer, Step, ToolCall

# Of a request: its node, its step, and the tool whose result it carries.
Said = tuple[str | None, int | None, str | None]
_ROLE = re.compile(r"plan:(.*?)#(\w*)")
TWO_STEPS: list[Said] = [("coder", 0, None), ("coder", 1, "read_file")]


def role_of(name: str, plan: str, tag: str = "") -> str:
    """A system prompt for :func:`follow_role`; the tag tells agents of one name apart."""
    return f"You are {name}. plan: {plan} #{tag}"


def tag_of(request: Request) -> str:
    return _role_in(request)[1]


def _role_in(request: Request) -> tuple[str, str]:
    found = _ROLE.search(request.text)
    return (found[1], found[2]) if found else ("", "")


def follow_role(request: Request) -> Step:
    """Answer as the system prompt plans: ``read_file > run_python+fetch_url``, then a text.

    The plan begins anew after each message of a user. Tools are called with ``task`` when one of
    them takes it, else with ``text``.
    """
    plan, tag = _role_in(request)
    rounds = [r.strip() for r in plan.split(">") if r.strip()]
    if request.turn >= len(rounds) or not request.tool_names:
        return f"done {tag}"
    argument = "task" if "'task'" in str(request.body["tools"]) else "text"
    return [ToolCall(name, {argument: "x"}) for name in rounds[request.turn].split("+")]


def said(hints: list[Hints]) -> list[Said]:
    return [(h.node, h.step, h.tool_name) for h in hints]


def sessions_by_node(hints: list[Hints]) -> dict[str | None, set[str | None]]:
    nodes = {h.node for h in hints}
    return {node: {h.session_id for h in hints if h.node == node} for node in nodes}


def events_of(server: ScriptedServer) -> list[tuple[str, str | None, str | None]]:
    """What gateways were told: the kind of each event, its session and its tool."""
    assert sender.flush()
    return [(e["event"], e.get("session_id"), e.get("tool_name")) for e in server.events]


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop go on until something is so."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise TimeoutError


class Broken(Exception):
    """A fault of ours."""


def broken(*args: Any, **kwargs: Any) -> Any:
    raise Broken
