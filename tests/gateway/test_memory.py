"""What a gateway remembers is bounded, in bytes too."""

import subprocess
import sys

PROGRAM = """
import resource
from saga_core.hints import Hints
from saga_gateway.answers import Answer
from saga_gateway.responses import Made, Responses
from saga_gateway.sessions import SessionTable
from saga_gateway.settings import GatewaySettings
import saga_gateway.app  # All of what a gateway loads.

settings = GatewaySettings(("http://127.0.0.1:9",))
sessions = SessionTable(settings.max_sessions, settings.session_silent_s)
responses = Responses(settings.max_sessions)
answer = Answer(("bash",), "tool_calls")

def megabytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20

for number in range(1_000_000):
    said = Hints(session_id=f"3f2a9c1e-{number:012d}-session", workflow_id="w")
    session = sessions.begin(said.session_id, said, 0.001 * number)
    session.home = "10.0.0.1:8000"
    sessions.end_step(session, answer, final=False, now_s=0.001 * number)
    responses.put("tenant", f"resp_{number:032d}", Made("10.0.0.1:8000", None))
    if number == 200_000:
        full = megabytes()
print(full, megabytes())
"""


def test_a_million_session_ids_take_no_more_room_than_the_table():
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True
    ).stdout
    full_mb, after_mb = map(float, output.split())
    assert after_mb < 1.2 * full_mb  # A table is resized now and then.
    assert after_mb < 150
