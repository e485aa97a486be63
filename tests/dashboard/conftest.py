"""A gateway over stand-in workers, and a real browser in front of it."""

from __future__ import annotations

import asyncio

import pytest

from tests.gateway.conftest import (  # noqa: F401 - fixtures and a hook, found by their names
    _eventually,
    gateway,
    gateway2,
    pytest_asyncio_loop_factories,
    start_gateway,
    worker,
    workers,
)
from tests.system import require
from tools.headless_chromium import DRIVER, PROGRAMS, headless


@pytest.fixture(scope="session")
def chromium():
    """One browser for all tests; without Chromium they are not run."""
    require(*PROGRAMS)
    require(DRIVER)
    with headless() as driver:
        yield driver


class Browser:
    """A browser that is asked in another thread: the gateway runs in this one."""

    PATIENCE_S = 20.0

    def __init__(self, driver) -> None:
        self.driver = driver

    async def open(self, url: str) -> None:
        await asyncio.to_thread(self.driver.get, url)

    async def run(self, script: str):
        """What a function of this body returns in the page."""
        return await asyncio.to_thread(self.driver.execute_script, script)

    async def until(self, expression: str):
        """Wait until an expression is true in the page, and return it."""
        async with asyncio.timeout(self.PATIENCE_S):
            while not (value := await self.run(f"return {expression};")):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            return value

    async def text(self, selector: str) -> str:
        """The visible text of the first element."""
        return await self.run(f"return document.querySelector({selector!r}).innerText;")

    async def errors(self) -> list[str]:
        """What the console complains of since it was last asked."""
        entries = await asyncio.to_thread(self.driver.get_log, "browser")
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    async def resize(self, width: int, height: int) -> None:
        """Show the page at this size, smaller than a window can be."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await asyncio.to_thread(
            self.driver.execute_cdp_cmd, "Emulation.setDeviceMetricsOverride", size
        )

    async def emulate(self, **features: str) -> None:
        """Set media features, such as prefers_color_scheme."""
        named = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        await asyncio.to_thread(
            self.driver.execute_cdp_cmd, "Emulation.setEmulatedMedia", {"features": named}
        )


@pytest.fixture
async def browser(chromium):
    """The browser, at an empty page, and back there after the test."""
    opened = Browser(chromium)
    await opened.open("about:blank")
    await opened.errors()
    yield opened
    await opened.open("about:blank")
    await opened.emulate()
    await asyncio.to_thread(chromium.execute_cdp_cmd, "Emulation.clearDeviceMetricsOverride", {})
