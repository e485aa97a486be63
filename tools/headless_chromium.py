"""A headless Chromium with a profile of its own, which reaches for nothing but what it is shown."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

PROGRAMS = ("chromium", "chromium-browser")
DRIVER = "chromedriver"
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)
_PAGE_LOAD_S = 30


def installed() -> tuple[str, str] | None:
    """Paths of the browser and of its driver; None: one of them is missing."""
    browser = next(filter(None, map(shutil.which, PROGRAMS)), None)
    driver = shutil.which(DRIVER)
    return None if browser is None or driver is None else (browser, driver)


@contextmanager
def headless(*, width: int = 1280, height: int = 900) -> Iterator[webdriver.Chrome]:
    """A browser that ends with the block, its profile with it.

    Raises:
        FileNotFoundError: it is not installed.
    """
    found = installed()
    if found is None:
        raise FileNotFoundError("chromium and chromedriver are needed: make setup-system")
    with TemporaryDirectory(prefix="saga-chromium-") as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = found[0]
        for flag in (*_FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        log = str(Path(profile) / "driver.log")
        driver = webdriver.Chrome(options=options, service=Service(found[1], log_output=log))
        try:
            driver.set_page_load_timeout(_PAGE_LOAD_S)
            yield driver
        finally:
            driver.quit()
