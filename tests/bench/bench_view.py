"""The viewer's page on large runs, in chromium: charts, filters, a long trajectory.

The runs are made up (tests/view_samples.py). A figure ends when the browser has painted what was asked for.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from playwright.sync_api import Page, sync_playwright
from view_samples import SampleRun, SampleSource, Served

PAINTED = "await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));"
REPEATS = 5


def timed(page: Page, action: str) -> float:
    """Seconds from ``action`` (JavaScript) to the paint after it, the median of some."""
    code = f"async (i) => {{ const begun = performance.now(); {action}; {PAINTED} return performance.now() - begun; }}"
    return median(page.evaluate(code, i) for i in range(REPEATS)) / 1000


def opening(page: Page, address: str, done: str) -> float:
    """Seconds from asking for a page, its data included, to the paint after ``done`` holds (JavaScript)."""
    page.goto("about:blank")
    page.goto(address, wait_until="commit")
    return (
        page.evaluate(f"async () => {{ while (!({done})) {{ {PAINTED} }} {PAINTED} return performance.now(); }}") / 1000
    )


def report(name: str, seconds: float, goal: float) -> None:
    print(f"{name}: {seconds:.3f} s (goal {goal} s){'' if seconds <= goal else '  MISSED'}", flush=True)


def curves(page: Page, address: str) -> None:
    drawn = "document.querySelectorAll('.chart canvas').length"
    page.set_viewport_size({"width": 1280, "height": 860})
    report("1,000 steps x 120 metrics, those in sight", opening(page, address, f"{drawn} >= 4"), 1.0)
    page.set_viewport_size({"width": 1280, "height": 20_000})
    report("1,000 steps x 120 metrics, all at once", opening(page, address, f"{drawn} >= 122"), 1.0)
    page.set_viewport_size({"width": 1280, "height": 860})


def filters(page: Page, address: str) -> None:
    seconds = opening(page, f"{address}/#/trajectories/0", "document.querySelectorAll('tbody a').length > 8")
    print(f"the list of 100,000 trajectories opened: {seconds:.3f} s")
    change = (
        "const input = document.querySelector('input[placeholder=\"{}\"]'); input.value = {}; "
        "input.dispatchEvent(new InputEvent('input', {{bubbles: true}}))"
    )
    report("100,000 trajectories filtered by a number", timed(page, change.format("0.1..", "`0.${i + 1}..`")), 0.1)
    task = "const input = document.querySelector('input[type=search]'); input.value = `0000${i}`; "
    task += "input.dispatchEvent(new InputEvent('input', {bubbles: true}))"
    report("100,000 trajectories filtered by a text", timed(page, task), 0.1)
    page.evaluate("location.hash = '#/trajectories/0'")
    report("100,000 trajectories sorted", timed(page, "document.querySelectorAll('th button')[9].click()"), 0.1)


def tokens(page: Page, address: str) -> None:
    opened = "CSS.highlights.get('bin-8')?.size > 100"
    page.goto(f"{address}/#/")
    report("a trajectory of 65,549 tokens opened", opening(page, f"{address}/#/t/0/1-1", opened), 2.0)
    names = "['gap', 'native_gap', 'entropy', 'version', 'logprob']"
    change = (
        f"const select = document.querySelector('.toolbar select'); select.value = {names}[i]; "
        "select.dispatchEvent(new Event('change', {bubbles: true}))"
    )
    report("its tokens coloured anew", timed(page, change), 0.5)


def served(run: SampleRun, measure: Callable[[str], None]) -> None:
    with Served(SampleSource(run)) as server:
        measure(server.address)


def main() -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        served(SampleRun(steps=1000, groups=1, metrics=120), lambda address: curves(page, address))
        served(SampleRun(steps=1000, groups=25), lambda address: filters(page, address))
        served(SampleRun(turns=50, turn_tokens=649), lambda address: tokens(page, address))
        browser.close()


if __name__ == "__main__":
    main()
