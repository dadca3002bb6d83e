"""A real browser over pages of runs, and what goes wrong in it."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
IS_HERE = CHROMIUM is not None and importlib.util.find_spec("playwright") is not None


def require_browser() -> None:
    """Skip a test where there is no browser; with SLIME_REQUIRE_BROWSER=1 that is a failure."""
    if not IS_HERE:
        why = "there is no Chromium, or no playwright: apt-get install chromium; pip install -r requirements-dev.txt"
        (pytest.fail if os.environ.get("SLIME_REQUIRE_BROWSER") else pytest.skip)(why)


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield started
        started.close()


class Visitor:
    """A tab on a dashboard; what its console says and which hosts it asks is noted.

    Args:
        browser: of `chromium`.
        address: with its token.
    """

    def __init__(self, browser: Any, address: str) -> None:
        self.base = address.partition("?")[0]
        self.wrong: list[str] = []
        self.tab = browser.new_page(viewport={"width": 1200, "height": 900})
        self.tab.on("console", lambda message: self.wrong.append(message.text))
        self.tab.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.tab.on("request", self._note)
        self.tab.goto(address)
        self.tab.wait_for_selector("h1")

    def _note(self, request: Any) -> None:
        if not request.url.startswith(("data:", "blob:")) and urlsplit(request.url).hostname != "127.0.0.1":
            self.wrong.append(f"asked {request.url}")

    def show(self, address: str) -> Any:
        """Go to a page."""
        self.tab.goto(f"{self.base}{address}")
        self.tab.wait_for_selector("main:not([aria-busy]) h1")
        return self.tab
