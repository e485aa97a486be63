"""Ends process groups when the process that keeps them is gone, however it went.

A program of its own, which reads standard input: ``+N`` begins to guard the group N, ``-N`` ends
that. At the end of input it ends what it guards, politely at first. A child that is told of its
parent's death by the kernel cannot do this: its own children would live on.
"""

from __future__ import annotations

import os
import signal
import sys
import time

_GRACE_S = 3.0
_POLL_S = 0.1


def main() -> None:
    """Guard until the input ends."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    groups = {group for group in groups if _reaches(group, signal.SIGTERM)}
    deadline_s = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline_s and any(_reaches(group, 0) for group in groups):
        time.sleep(_POLL_S)
    for group in groups:
        _reaches(group, signal.SIGKILL)


def _reaches(group: int, number: int) -> bool:
    """Send a signal to a group; whether there is somebody in it."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    main()
