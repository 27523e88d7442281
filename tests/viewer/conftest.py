"""A browser, and a window of it that may not write an error to its console or ask another host for anything."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A window; a test fails where the page writes an error to the console, or asks another host for something."""
    opened = browser.new_context(viewport={"width": 1280, "height": 860})
    wrong: list[str] = []
    opened.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    opened.on("weberror", lambda error: wrong.append(str(error.error)))
    opened.on("request", lambda request: None if _local(request.url) else wrong.append(request.url))
    yield opened
    opened.close()
    assert wrong == []


@pytest.fixture
def page(context: BrowserContext) -> Page:
    return context.new_page()


def _local(url: str) -> bool:
    return url.startswith(("http://127.0.0.1:", "file:///", "data:", "blob:"))
