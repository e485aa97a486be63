"""Programs of the system that some tests need, such as Chromium; `make setup-system` installs them.

Without one such a test is not run, and says so; with SAGA_REQUIRE_SYSTEM=1, as in CI, it fails.
"""

from __future__ import annotations

import os
import shutil

import pytest

REQUIRE = "SAGA_REQUIRE_SYSTEM"


def require(*programs: str) -> str:
    """The path of the first of the programs that is installed.

    Ends the test when none is: as not run, or as failed where the environment says so.
    """
    found = next(filter(None, map(shutil.which, programs)), None)
    if found is not None:
        return found
    reason = f"not run: {' or '.join(programs)} is not installed (make setup-system)"
    if os.environ.get(REQUIRE, "") not in ("", "0"):
        pytest.fail(f"{reason}, and {REQUIRE} is set", pytrace=False)
    pytest.skip(reason)
