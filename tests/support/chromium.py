"""A real Chromium, driven by Playwright."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="no chromium here: tools/install_test_programs.sh installs it")


@contextmanager
def browsing() -> Iterator[Browser]:
    """Start a headless Chromium."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(OPTIONS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opening(browser: Browser, *, allow: str = "", **context: Any) -> Iterator[Page]:
    """Open a page; in the end nothing was wrong on its console, but for what `allow` matches, and nothing was asked
    of any other place."""
    problems: list[str] = []
    asked: list[str] = []
    own = browser.new_context(**context)
    page = own.new_page()
    page.on("console", lambda told: problems.append(told.text) if told.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    try:
        yield page
        assert [one for one in problems if not allow or not re.search(allow, one)] == []
        origin = "/".join(page.url.split("/")[:3])
        assert [one for one in asked if not one.startswith(f"{origin}/")] == []
    finally:
        own.close()
