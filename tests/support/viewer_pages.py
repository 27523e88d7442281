"""What tests of the viewer's page do with it."""

from __future__ import annotations

import time

from playwright.sync_api import Page, expect


def opened(page: Page, address: str, fragment: str = "#/") -> Page:
    page.goto(f"{address}{fragment}" if address.endswith(".html") else f"{address}/{fragment}")
    expect(page.locator("main")).to_be_visible()
    return page


def eventually(page: Page, condition: str) -> None:
    """Wait until ``condition`` (JavaScript) holds. The page's policy forbids playwright's own way to wait for it."""
    ends = time.monotonic() + 5
    while not page.evaluate(condition):
        assert time.monotonic() < ends, condition
        page.wait_for_timeout(20)
