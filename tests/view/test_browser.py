"""The viewer's page in a real browser: every page, keyboard and names, light and dark, hostile text, changes, exports.

``AGENT_RL_SCREENSHOTS=docs/view`` keeps the pictures of the documentation there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
from view_samples import SampleRun, SampleSource, Served

from agent_rl.view.export import export

pytestmark = pytest.mark.browser

HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[31m\u202eevil\u2066\x00\ud800 & <b>bold</b>"
SHOWN = "</script><img src=x onerror=alert(1)>␛[31m⎕evil⎕␀⎕ & <b>bold</b>"
"""The same with a sign in place of each character that would not be seen or would reorder the others."""
PAGES = {
    "curves": "#/",
    "trajectories": "#/trajectories/0",
    "trajectory": "#/t/0/1-3?by=native_gap",
    "group": "#/group/0/1/0",
    "step": "#/step/0/1",
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    other = SampleRun("without-replay", metrics=6, config={"name": "without-replay", "train": {"lr": 2e-4}})
    with Served(SampleSource(SampleRun(), other)) as server:
        yield server


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


def _local(url: str) -> bool:
    return url.startswith(("http://127.0.0.1:", "file:///", "data:", "blob:"))


@pytest.fixture
def page(context: BrowserContext) -> Page:
    return context.new_page()


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


NAMELESS = """() => [...document.querySelectorAll("button, a, input, select, canvas, [tabindex='0']")]
    .filter((e) => !e.closest("[aria-hidden]"))
    .filter((e) => !(e.ariaLabel || e.title || e.labels?.length || e.textContent.trim())).map((e) => e.outerHTML)"""
PAPER = {"light": "rgb(253, 253, 251)", "dark": "rgb(21, 23, 27)"}


@pytest.mark.parametrize("name", PAGES)
def test_every_page_in_light_and_dark_with_names(page: Page, served: Served, name: str, tmp_path: Path) -> None:
    folder = Path(os.environ.get("AGENT_RL_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    opened(page, served.address, PAGES[name])
    expect(page.locator("main :is(canvas, table, .text, article ol)").first).to_be_visible()
    expect(page.get_by_text("Reading …")).to_have_count(0)
    assert page.evaluate(NAMELESS) == []
    assert page.locator("h1").count() == 1
    for scheme, paper in PAPER.items():
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == paper
        assert len(page.screenshot(path=folder / f"{name}-{scheme}.png")) > 10_000


def test_the_token_with_the_largest_gap_and_its_layer_in_four_clicks(page: Page, served: Served) -> None:
    opened(page, served.address)
    run = served.source.runs[0]
    columns = run.columns
    worst = max(range(run.trajectories), key=lambda row: columns["worst_native_gap"][row])
    page.get_by_role("link", name="Trajectories", exact=True).click()
    page.get_by_role("button", name="gap without replay").click()
    page.locator("tbody a").first.click()
    page.get_by_role("button", name="Largest gap without replay").click()
    panel = page.get_by_role("complementary", name="Token")
    expect(panel.locator("h2")).to_contain_text(f"Token {run.worst_token()}")
    expect(panel.locator("[data-value=native_gap]")).to_have_text("0.75")
    expect(panel.locator("[data-value=native_layers]")).to_have_text("2")
    assert page.url.endswith(f"t/0/{columns['id'][worst]}?by=native_gap&token={run.worst_token()}")


def test_the_panel_shows_what_the_resource_holds(page: Page, served: Served) -> None:
    branch = served.source.read("0/t/2-1")["branches"][0]
    places = [token for start, stop in branch["sampled"] for token in range(start, stop)]
    opened(page, served.address, "#/t/0/2-1?token=0")
    for number in (0, 7, 55, 119):
        page.evaluate(f"location.hash = '#/t/0/2-1?token={places[number]}'")
        expect(page.locator("aside h2")).to_contain_text(f"Token {places[number]}")
        read = {key: page.locator(f"[data-value={key}]").inner_text() for key in ("logprob", "gap", "native_gap")}
        wanted = [branch["logprobs"][number], branch["detail"]["gap"][number], branch["detail"]["native_gap"][number]]
        assert [float(text) for text in read.values()] == pytest.approx(wanted, rel=1e-2)


def test_tokens_are_coloured_without_an_element_each(page: Page, served: Served) -> None:
    opened(page, served.address, "#/t/0/1-3?by=native_gap")
    count = "[...CSS.highlights].filter(([name, h]) => name.startsWith('bin-') && h.size).length"
    eventually(page, f"{count} > 2")
    assert page.locator(".tokens .text *").count() == 0
    page.get_by_label("Colour tokens by").select_option("mask")
    eventually(page, "CSS.highlights.get('bin-0').size === 3 && CSS.highlights.get('bin-15').size === 0")


def test_by_keyboard_alone(page: Page, served: Served) -> None:
    """To the list, to a trajectory, from token to token, and back out."""
    opened(page, served.address)
    page.get_by_role("link", name="Trajectories", exact=True).focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="gap with replay").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("columnheader", name="gap with replay")).to_have_attribute("aria-sort", "descending")
    page.locator("tbody a").first.focus()
    page.keyboard.press("Enter")
    page.get_by_role("group", name="Text of the trajectory").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    expect(page.locator("aside h2")).to_contain_text("Token 1 ")
    page.keyboard.press("Escape")
    expect(page.locator("aside")).to_contain_text("Click a token")


def test_a_click_selects_the_token_below_it(page: Page, served: Served) -> None:
    opened(page, served.address, "#/t/0/1-3")
    page.locator(".prompt .text").click(position={"x": 16, "y": 14})
    expect(page.locator("aside h2")).to_contain_text("Token 0 ")


def test_filters_and_order_stay_in_the_address(page: Page, served: Served) -> None:
    opened(page, served.address, "#/trajectories/0?step=2..3&sort=-worst_gap")
    expect(page.get_by_role("status").filter(has_text="of 48")).to_contain_text("16 of 48")
    page.get_by_role("combobox", name="resolved", exact=True).select_option("true")
    page.get_by_role("textbox", name="turns", exact=True).fill("4..")
    expect(page.get_by_role("status").filter(has_text="of 48")).to_contain_text("0 of 48")
    page.get_by_role("textbox", name="turns", exact=True).fill("many")
    expect(page.get_by_role("textbox", name="turns", exact=True)).to_have_attribute("aria-invalid", "true")
    assert "resolved=true" in page.url
    page.get_by_role("link", name="Clear").click()
    expect(page.get_by_role("status").filter(has_text="of 48")).to_contain_text("48 of 48")


def test_runs_with_other_metrics_are_laid_over_each_other(page: Page, served: Served) -> None:
    opened(page, served.address)
    expect(page.get_by_role("group", name="reward/mean")).to_contain_text("quickstart 0.")
    expect(page.get_by_role("group", name="reward/mean")).to_contain_text("without-replay 0.")
    expect(page.get_by_role("group", name="extra_0/metric_1")).to_contain_text("last")
    expect(page.get_by_role("row", name="train.lr")).to_contain_text("0.0002")
    page.get_by_role("checkbox", name="without-replay").uncheck()
    expect(page.get_by_role("group", name="extra_0/metric_1")).to_have_count(0)
    page.get_by_role("combobox", name="by", exact=True).select_option("time")
    expect(page.get_by_role("group", name="reward/mean").locator("canvas")).to_be_visible()


def test_a_finished_step_shows_and_the_place_stays(context: BrowserContext) -> None:
    source = SampleSource(SampleRun(groups=8))
    with Served(source) as server:
        page = opened(context.new_page(), server.address, "#/trajectories/0?stop=submitted")
        other = opened(context.new_page(), server.address)  # hears by way of the first
        expect(page.get_by_role("status").filter(has_text="live")).to_be_visible()
        page.locator(".table").evaluate("(e) => (e.scrollTop = 900)")
        before = page.locator(".count").inner_text()
        source.runs[0] = SampleRun(groups=8, steps=7)
        source.revisions |= {"0/steps/7": "new", "0/metrics": "new", "0/run": "new"}
        expect(page.locator(".count")).not_to_have_text(before, timeout=2000)
        expect(other.locator(".runs")).to_contain_text("7 of 7 steps")
        assert page.locator(".table").evaluate("(e) => e.scrollTop") == 900
        assert "stop=submitted" in page.url
        context.close()  # before the server goes: a page would complain of the lost connection


def test_episodes_of_the_running_step_show(context: BrowserContext) -> None:
    episode = {"task": "mini-1", "reward": 1.0, "resolved": True, "stop": "submitted", "turns": 2, "tokens": 90}
    source = SampleSource(SampleRun(live=[{**episode, "sampled": 30, "seconds": 1.5, "began": 1.7e9}]))
    with Served(source) as server:
        page = opened(context.new_page(), server.address, "#/trajectories/0")
        expect(page.get_by_text("Step 7 is running: 1 episode of 8 ended, 1 resolved")).to_be_visible()
        context.close()


def test_hostile_text_is_shown_and_does_nothing(page: Page, tmp_path: Path) -> None:
    """From an export: its file must hold such text too."""
    export(SampleSource(SampleRun(steps=1, groups=1, hostile=HOSTILE)), tmp_path / "run.html", 4)
    page.on("dialog", lambda dialog: pytest.fail("a script of the text ran"))
    for place in PAGES.values():
        opened(page, (tmp_path / "run.html").as_uri(), place)
        expect(page.get_by_text(SHOWN).first).to_be_attached()
        assert page.locator("img, main b:text-is('bold')").count() == 0
        assert not page.evaluate("/[\\u0000\\u001b\\u202e\\u2066\\ud800-\\udfff]/.test(document.body.innerText)")


def test_an_export_shows_the_same_text(context: BrowserContext, served: Served, tmp_path: Path) -> None:
    export(served.source, tmp_path / "run.html", 48)
    pages = {address: context.new_page() for address in (served.address, (tmp_path / "run.html").as_uri())}
    for place in (PAGES["curves"], PAGES["trajectory"], PAGES["step"]):
        texts = []
        for address, page in pages.items():
            opened(page, address, place)
            expect(page.locator("main :is(canvas, .text)").first).to_be_visible()
            expect(page.get_by_text("Reading …")).to_have_count(0)
            texts.append(page.locator("main").inner_text())
        assert texts[0] == texts[1]
