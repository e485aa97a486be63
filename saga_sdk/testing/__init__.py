"""A scripted OpenAI-compatible server to test agents with: no model, no network, no framework.

from saga_sdk.testing import ScriptedServer, ToolCall

with ScriptedServer([ToolCall("read_file", {"path": "a.py"}), "It prints 1."]) as server:
    answer = my_agent(base_url=server.base_url).run("What does a.py do?")
assert answer == "It prints 1."
assert [hints.step for hints in server.hints] == [0, 1]
"""

from saga_sdk.testing.script import (
    Dropped,
    Failure,
    Held,
    Malformed,
    Reply,
    Request,
    Script,
    ScriptError,
    Step,
    ToolCall,
)
from saga_sdk.testing.server import ScriptedServer

__all__ = [
    "Dropped",
    "Failure",
    "Held",
    "Malformed",
    "Reply",
    "Request",
    "Script",
    "ScriptError",
    "ScriptedServer",
    "Step",
    "ToolCall",
]
