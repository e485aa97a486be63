"""A script for ``saga_sdk.testing`` that any number of agents can share: it keeps no state."""

from __future__ import annotations

from saga_sdk.testing import Request, Step, ToolCall


def follow_plan(request: Request) -> Step:
    """Answer as the last user message plans.

    ``read_file > run_python+fetch_url`` means one call of ``read_file``, then two parallel calls,
    then the answer ``done: <user message>``. What follows a ``#`` tells agents apart. Tools are
    called with the argument ``text``.
    """
    plan = request.user_text
    rounds = [r.strip() for r in plan.partition("#")[0].split(">") if r.strip()]
    if request.turn >= len(rounds) or not request.tool_names:
        return f"done: {plan}"
    return [ToolCall(name, {"text": "x"}) for name in rounds[request.turn].split("+")]
