"""A real Chromium for tests that click, and where their screenshots go."""

from __future__ import annotations

import base64
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

FLAGS = (
    "--headless",
    "--no-sandbox",  # tests may run as root, for whom the sandbox refuses to start
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)

WAIT_SECONDS = 30


class Browser:
    """One Chromium window. ``driver`` is selenium's; the rest are the few things that our tests do with it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, address: str) -> None:
        self.driver.get(address)

    def look(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Set the size of the screen and the colours that its user prefers. Below 600 pixels it is a phone."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        preference = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [preference]})

    def find(self, selector: str, text: str = "") -> Any:
        """The first visible element of a CSS selector whose text contains ``text``; waits for it."""
        from selenium.common.exceptions import StaleElementReferenceException
        from selenium.webdriver.support.ui import WebDriverWait

        def shown(driver: Any) -> Any:
            for element in driver.find_elements("css selector", selector):
                try:
                    if element.is_displayed() and text in element.text:
                        return element
                except StaleElementReferenceException:
                    continue  # the page replaced it meanwhile; look again
            return None

        waiting = WebDriverWait(self.driver, WAIT_SECONDS, poll_frequency=0.1)
        return waiting.until(shown, f"no visible {selector!r} with {text!r} at {self.driver.current_url}")

    def click(self, selector: str, text: str = "") -> None:
        element = self.find(selector, text)
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait until ``condition()`` is true, and return it."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, WAIT_SECONDS, poll_frequency=0.1).until(lambda _: condition(), what)

    def run(self, script: str) -> Any:
        """What a piece of JavaScript returns."""
        return self.driver.execute_script(script)

    def complaints(self) -> list[str]:
        """What the page logged as errors since it was opened."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def screenshot(self, file: Path, *, whole: bool = False, height: int = 0) -> None:
        """A picture of the window; ``whole``: of the whole page, at most ``height`` pixels of it if given."""
        metrics = self.driver.execute_cdp_cmd("Page.getLayoutMetrics", {})
        size = metrics["cssContentSize"] if whole else metrics["cssVisualViewport"]
        width = size.get("width") or size["clientWidth"]
        tall = size.get("height") or size["clientHeight"]
        clip = {"x": 0, "y": 0, "width": width, "height": min(tall, height or tall), "scale": 1}
        picture = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        file.write_bytes(base64.b64decode(picture["data"]))

    def pdf(self, file: Path) -> None:
        """What the print dialogue would give on A4."""
        options = {"paperWidth": 8.27, "paperHeight": 11.69, "printBackground": False}
        file.write_bytes(base64.b64decode(self.driver.execute_cdp_cmd("Page.printToPDF", options)["data"]))


@pytest.fixture(scope="session")
def _chromium() -> Iterator[Browser]:
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("Chromium is not here: apt-get install chromium chromium-driver (see tests/packages.txt)")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options=options, service=Service(chromedriver))
        try:
            yield Browser(driver)
        finally:
            driver.quit()


@pytest.fixture
def browser(_chromium: Browser) -> Browser:
    """The session's Chromium, on an empty page, in a desktop window with light colours."""
    _chromium.open("about:blank")
    _chromium.look()
    _chromium.complaints()  # reading empties the log
    return _chromium


@pytest.fixture(scope="session")
def pictures() -> Path:
    """Where screenshots go: LORA_TUNE_SCREENSHOTS, such as docs/images, or build/screenshots of the repository."""
    path = Path(os.environ.get("LORA_TUNE_SCREENSHOTS") or REPOSITORY / "build" / "screenshots")
    path.mkdir(parents=True, exist_ok=True)
    return path
