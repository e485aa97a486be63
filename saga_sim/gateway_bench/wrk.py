"""Whole answers asked for with wrk, a compiled client that costs less than any gateway."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from saga_core.errors import SagaError
from saga_sim.gateway_bench.client import SESSION_MARK, Load, body_of

_SCRIPT = """
local number, parts = 0, {}
function init(args)
  local file = io.open(args[1], "rb")
  for part in string.gmatch(file:read("*a") .. "%MARK%", "(.-)%MARK%") do
    table.insert(parts, part)
  end
  file:close()
end
function request()
  number = (number + 1) % %SESSIONS%
  local headers = {
    ["Content-Type"] = "application/json",
    ["Authorization"] = "Bearer none",
  }
  if %NAMED% then headers["X-Session-ID"] = "session-" .. number end
  local body = table.concat(parts, string.format("#%07d", number))
  return wrk.format("POST", "/v1/chat/completions", headers, body)
end
function done(summary, latency)
  local errors = summary.errors
  io.stderr:write(string.format(
    '{"requests": %d, "failed": %d, "seconds": %f, "first_ms": [%f, %f], "whole_ms": [%f, %f]}',
    summary.requests, errors.connect + errors.read + errors.write + errors.status + errors.timeout,
    summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    latency:percentile(50) / 1e3, latency:percentile(99) / 1e3))
end
"""


def find_wrk() -> str | None:
    """The program, where it is installed."""
    return shutil.which("wrk")


def _write(folder: Path, load: Load) -> tuple[Path, Path]:
    script, body = folder / "load.lua", folder / "body.json"
    values = {"SESSIONS": load.sessions, "NAMED": str(load.named).lower(), "MARK": SESSION_MARK}
    text = _SCRIPT
    for name, value in values.items():
        text = text.replace(f"%{name}%", str(value))
    script.write_text(text)
    body.write_text(body_of(load))
    return script, body


async def run(port: int, load: Load, seconds: int) -> dict[str, Any]:
    """Send the load's requests for so long; what was seen, as the other client says it.

    Raises:
        SagaError: wrk failed.
    """
    wrk = find_wrk()
    assert wrk is not None
    with tempfile.TemporaryDirectory() as folder:
        script, body = _write(Path(folder), load)
        process = await asyncio.create_subprocess_exec(
            wrk,
            *("-t1", f"-c{load.at_a_time}", f"-d{seconds}s", "--timeout", "30s"),
            *("-s", str(script), f"http://127.0.0.1:{port}", "--", str(body)),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, output = await process.communicate()
    if process.returncode or not output.startswith(b"{"):
        raise SagaError(f"wrk ended with exit code {process.returncode}: {output.decode()[-500:]}")
    seen: dict[str, Any] = json.loads(output)
    return seen
