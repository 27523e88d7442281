"""A browser, and a window of it that may not write an error to its console or ask another host for anything."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright
from support.viewer_samples import Served

from agent_rl.viewer.api import Resources

CAPTURED = Path(__file__).parent.parent / "captured"
EVALUATIONS = ("tiny-moe", "tiny-moe-greedy", "gold")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def captured_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of a real run (two steps and an evaluation of a quickstart of six steps) and of three evaluations.
    It is relative, so that pictures show no one's directories."""
    root = tmp_path_factory.mktemp("captured")
    shutil.copytree(CAPTURED / "quickstart", root / "runs" / "quickstart")  # with the tokenizer, which is a link there
    for name in EVALUATIONS:
        shutil.copytree(CAPTURED / "evaluations" / name, root / "runs" / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        yield Path("runs")


@pytest.fixture(scope="module")
def captured(captured_runs: Path) -> Iterator[str]:
    """The address of the run."""
    with Served(Resources([captured_runs / "quickstart"])) as server:
        yield server.address


@pytest.fixture(scope="module")
def evaluated(captured_runs: Path) -> Iterator[str]:
    """The address of the evaluations."""
    with Served(Resources([captured_runs / name for name in EVALUATIONS])) as server:
        yield server.address


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
