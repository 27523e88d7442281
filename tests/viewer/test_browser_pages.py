"""Every page of the viewer in a real browser, wide and narrow, light and dark, on a real run and real evaluations.

``AGENT_RL_SCREENSHOTS=docs/view`` keeps the pictures of the documentation there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page, expect
from support.viewer_pages import eventually, opened
from support.viewer_runs import evaluation
from support.viewer_samples import Served

from agent_rl.viewer.api import Resources

pytestmark = pytest.mark.browser

SCREENSHOTS = os.environ.get("AGENT_RL_SCREENSHOTS", "") and Path(os.environ["AGENT_RL_SCREENSHOTS"]).resolve()
RUN_PAGES = {
    "curves": "#/",
    "trajectories": "#/trajectories/0?sort=-worst_gap_without_replay",
    "trajectory": "#/t/0/2-61?by=logprob&token=160",
    "chat": "#/t/0/2-61?view=chat",
    "tokens": "#/t/0/2-61?view=tokens",
    "group": "#/group/0/2/0",
    "step": "#/step/0/2",
    "evaluation": "#/eval/0/step-6%2Fsampled",
    "evaluations of a run": "#/evals",
    "search": "#/search/0?text=str_replace&n=2",
    "found": "#/t/0/2-61?at=turn-2&find=old_str",
}
EVALUATION_PAGES = {
    "evaluations": "#/",
    "result": "#/eval/0/eval",
    "result of a task": "#/t/0/eval-1",
    "pair": "#/pair/0/eval-22/1/eval-10",
}
PICTURES = ("curves", "trajectories", "trajectory", "group", "step", "evaluation", "evaluations", "pair")
"""The pages whose pictures the documentation shows."""
WIDTHS = (1400, 390)
"""The pictures have the first."""
PAPER = {"light": "rgb(253, 253, 251)", "dark": "rgb(21, 23, 27)"}

NAMELESS = """() => [...document.querySelectorAll("button, a, input, select, canvas, [tabindex='0']")]
    .filter((e) => !e.closest("[aria-hidden]"))
    .filter((e) => !(e.ariaLabel || e.title || e.labels?.length || e.textContent.trim())).map((e) => e.outerHTML)"""
FAINT = """() => {
    const parts = (color) => color.match(/[0-9.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
        .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const paper = (e) => {
        for (; e; e = e.parentElement) {
            const found = parts(getComputedStyle(e).backgroundColor);
            if (found.length === 3 || found[3] === 1) return found;
        }
    };
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const faint = new Set();
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
        const e = node.parentElement;
        if (!node.nodeValue.trim() || e.closest("button:disabled, option") || !e.checkVisibility()) continue;
        const [ink, ground] = [light(parts(getComputedStyle(e).color)), light(paper(e))];
        const ratio = (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
        if (ratio < 4.5) faint.add(`${ratio.toFixed(1)} ${e.tagName}.${e.className}: ${node.nodeValue.slice(0, 40)}`);
    }
    return [...faint];
}"""
"""Texts whose contrast to their background is less than 4.5."""
WIDTH = "document.scrollingElement.scrollWidth"


def check_page(page: Page, address: str, name: str, fragment: str) -> None:
    opened(page, address, fragment)
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 760})
        expect(page.locator("main :is(canvas, table, .text, article)").first).to_be_visible()
        expect(page.get_by_text("Reading …")).to_have_count(0)
        expect(page.get_by_role("status").filter(has_text="live")).to_be_visible()
        page.wait_for_timeout(100)  # colours and curves are drawn after the texts
        assert page.evaluate(NAMELESS) == []
        assert page.locator("h1").count() == 1
        for scheme, paper in PAPER.items():
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") == paper
            assert page.evaluate(WIDTH) <= width
            assert page.evaluate(FAINT) == []
            if SCREENSHOTS and (scheme, width) == ("light", WIDTHS[0]) and name in PICTURES:
                page.screenshot(path=SCREENSHOTS / f"{name}-light.png")


@pytest.mark.long
@pytest.mark.parametrize("name", RUN_PAGES)
def test_page_of_a_run_fits_and_is_readable(page: Page, captured: str, name: str) -> None:
    check_page(page, captured, name, RUN_PAGES[name])


@pytest.mark.parametrize("name", EVALUATION_PAGES)
def test_page_of_evaluations_fits_and_is_readable(page: Page, evaluated: str, name: str) -> None:
    check_page(page, evaluated, name, EVALUATION_PAGES[name])


# Rows


def test_a_click_in_a_row_opens_it_and_a_middle_click_opens_a_tab(context: BrowserContext, captured: str) -> None:
    page = opened(context.new_page(), captured, "#/trajectories/0")
    cell = page.locator("tbody tr:has(a)").nth(2).locator("td.reward")
    with context.expect_page() as tab:
        cell.click(button="middle")
    expect(tab.value.locator("h1")).to_contain_text("mini-train")
    assert page.url.endswith("#/trajectories/0")
    cell.click()
    expect(page.get_by_role("heading", name="Turn 1").first).to_be_visible()
    assert tab.value.url == page.url


def test_the_link_of_a_row_opens_by_the_keyboard(page: Page, captured: str) -> None:
    opened(page, captured, "#/step/0/2")
    page.get_by_role("region", name="Table of groups").get_by_role("link", name="group 3").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_text("Group 3 of")).to_be_visible()


# The conversation


def test_chat_shows_calls_edits_and_output_beside_the_tokens(page: Page, captured: str) -> None:
    page.set_viewport_size({"width": 1400, "height": 860})
    opened(page, captured, "#/t/0/2-61")
    turn = page.locator("#turn-2")
    expect(turn.get_by_role("group", name="Call of file_editor")).to_contain_text("str_replace")
    expect(turn.locator("pre .removed")).to_have_text("-if v != num:\n")
    expect(turn.locator("pre .added")).to_have_text("+if v == num:\n")
    expect(turn.get_by_label("Output of turn 2")).to_have_text("not found")
    expect(turn.locator(".sampled .text")).to_contain_text("<parameter=old_str>if v != num:</parameter>")
    page.get_by_role("button", name="Chat", exact=True).click()
    expect(page.locator(".text")).to_have_count(0)
    page.get_by_role("button", name="Tokens", exact=True).click()
    expect(page.locator(".chat")).to_have_count(0)
    assert "view=tokens" in page.url


def test_a_selected_token_is_not_behind_the_panel_of_a_narrow_window(page: Page, captured: str) -> None:
    page.set_viewport_size({"width": 390, "height": 760})
    opened(page, captured, "#/t/0/2-61?by=logprob&token=160")
    place = "[...CSS.highlights.get('selected')][0].getBoundingClientRect().bottom"
    panel = "document.querySelector('.panel').getBoundingClientRect().top"
    eventually(page, f"CSS.highlights.get('selected')?.size && {place} > 0 && {place} < {panel}")


def test_long_output_is_collapsed(page: Page, tmp_path: Path) -> None:
    run = evaluation(tmp_path)
    log = next((run / "logs").rglob("0.json"))
    log.write_text(log.read_text().replace('"a.py"', '"' + "x" * 5000 + '"'))
    with Served(Resources([run])) as server:
        opened(page, server.address, "#/t/0/eval-0")
        output = page.get_by_label("Output of turn 1")
        expect(output).to_have_text("x" * 1200)
        page.get_by_role("button", name="Show all 5,000 characters").click()
        expect(output).to_have_text("x" * 5000)
        page.get_by_role("button", name="Show less").click()
        expect(output).to_have_text("x" * 1200)
        page.goto("about:blank")  # before the server stops


# Groups


def test_a_group_shows_where_its_samples_part(page: Page, captured: str) -> None:
    opened(page, captured, "#/group/0/2/0")
    tree = page.get_by_role("region", name="Where the samples part")
    expect(tree.locator("li").first).to_contain_text(
        "8 samples, 4 resolved, agree on 129 tokens and part in turn 2, token 129"
    )
    expect(tree.get_by_role("link")).to_have_count(8)
    tree.get_by_role("link", name="2-4").click()
    expect(page.get_by_role("complementary", name="Token").locator("h2")).to_contain_text("Token 151 ")


def test_samples_without_tokens_part_by_turns(page: Page, evaluated: str) -> None:
    opened(page, evaluated, "#/group/0/eval/0")
    tree = page.get_by_role("region", name="Where the samples part")
    expect(tree.locator("li").first).to_contain_text(
        re.compile("2 samples, . resolved, (agree on . turns?|are the same)")
    )


# Search


def test_a_hit_of_a_search_opens_at_its_place(page: Page, captured: str) -> None:
    opened(page, captured, "#/trajectories/0?n=2")
    page.get_by_role("link", name="search in texts").click()
    page.get_by_role("searchbox", name="text").fill("IF V != NUM")
    page.keyboard.press("Enter")
    expect(page.get_by_role("status").filter(has_text="96 of 96 trajectories searched")).to_be_visible()
    page.locator("tbody tr").filter(has_text="2-61").filter(has_text="written").locator("mark").click()
    expect(page.locator("#turn-2")).to_be_in_viewport()
    eventually(page, "[...CSS.highlights.get('found')].map(String).join() === 'if v != num'")


def test_a_search_is_not_run_before_it_has_a_text(page: Page, captured: str) -> None:
    requests = list[str]()
    page.on("request", lambda request: requests.append(request.url))
    opened(page, captured, "#/search/0")
    expect(page.get_by_role("searchbox", name="text")).to_be_visible()
    assert not [url for url in requests if "/search" in url]


# Pins


def test_pinned_charts_stay_at_the_top_of_their_run(page: Page, captured: str) -> None:
    opened(page, captured)
    page.get_by_role("button", name="Pin train/grad_norm", exact=True).click()
    top = page.locator("main section").first
    expect(top.locator("h2")).to_have_text("pinned")
    page.reload()
    expect(top.get_by_role("group", name="train/grad_norm")).to_be_visible()
    expect(page.get_by_role("group", name="train/grad_norm")).to_have_count(1)
    page.get_by_role("button", name="Pin train/grad_norm", exact=True).click()
    expect(page.get_by_role("heading", name="pinned")).to_have_count(0)


# Evaluations


def test_an_evaluation_opens_to_its_result(page: Page, captured_runs: Path) -> None:
    with Served(Resources([captured_runs / "tiny-moe"])) as server:
        opened(page, server.address)
        expect(page.locator("h1")).to_have_text("Evaluation tiny-moe")
        facts = page.locator(".facts")
        for text in ("37.5 %", "16.5 % to 64.6 %", "12 of 12 tasks graded", "Pass@2"):
            expect(facts).to_contain_text(text)
        expect(page.get_by_role("navigation", name="Pages").get_by_role("link")).to_have_text(
            ["Evaluations", "Trajectories"]
        )
        page.get_by_role("combobox", name="verdict").select_option("resolved")
        expect(page.get_by_role("region", name="Table of tasks").locator("tbody tr")).to_have_count(2)
        page.goto("about:blank")  # before the server stops


def test_tokens_and_cost_are_shown_where_an_evaluation_has_them(
    page: Page, captured_runs: Path, tmp_path: Path
) -> None:
    with Served(Resources([with_usage(captured_runs / "gold", tmp_path / "priced")])) as server:
        opened(page, server.address, "#/?sort=-cost")
        shown = ["3 of 3 tasks graded; 12 available, 1,000 requested", "50.0 % [25.0 %, 75.0 %]"]
        for text in (*shown, "600 in, 60 out", "$0.06", "some-model"):
            expect(page.locator(".facts")).to_contain_text(text)
        first = page.get_by_role("region", name="Table of tasks").locator("tbody tr").first
        expect(first).to_contain_text("$0.03")
        page.goto("about:blank")  # before the server stops


def with_usage(directory: Path, out: Path) -> Path:
    """The first three tasks of an evaluation with tokens and costs."""
    shutil.copytree(directory, out)
    report = json.loads((out / "report.json").read_text())
    report["outcomes"] = report["outcomes"][:3]
    for number, outcome in enumerate(report["outcomes"], 1):
        outcome |= {"usage": usage(100 * number), "cost": number / 100, "seconds_mean": 1.5}
    report |= {"tasks": 3, "graded": 3, "available": 12, "requested": 1000, "model": "some-model"}
    report |= {"usage": usage(600), "cost": 0.06}
    report["pass_at_k"] = {"1": 1.0, "2": {"rate": 0.5, "interval": [0.25, 0.75], "tasks": 3}}
    (out / "report.json").write_text(json.dumps(report))
    return out


def usage(prompt: int) -> dict[str, int]:
    return {"requests": 3, "prompt": prompt, "completion": prompt // 10, "cached": 0, "reasoning": 0}


def test_a_cell_of_the_table_opens_its_trajectory(page: Page, evaluated: str) -> None:
    opened(page, evaluated)
    row = page.get_by_role("region", name="Table of tasks by evaluations").locator("tbody tr").nth(1)
    expect(row.locator("td")).to_have_count(4)
    row.locator("td").nth(2).get_by_role("link").click()
    expect(page.locator("h1")).to_have_text("mini-heldout-0-00001")
    assert "#/t/2/eval-" in page.url


def test_two_trajectories_of_a_task_stand_side_by_side(page: Page, evaluated: str) -> None:
    opened(page, evaluated, "#/?show=differing")
    page.get_by_role("combobox", name="compare, right").select_option("tiny-moe-greedy")
    page.get_by_role("link", name="side by side").first.click()
    expect(page.get_by_text(re.compile("They differ from turn . on|All turns are the same"))).to_be_visible()
    first = page.locator(".row.both").nth(1).locator(".cell")
    expect(first).to_have_count(2)
    assert first.nth(0).inner_text() == first.nth(1).inner_text()  # the task


def test_evaluations_leave_and_enter_the_table(page: Page, evaluated: str) -> None:
    opened(page, evaluated, "#/evals")
    table = page.get_by_role("region", name="Table of tasks by evaluations")
    expect(table.locator("thead th")).to_have_count(5)
    page.get_by_role("checkbox", name="gold in the table").uncheck()
    expect(table.locator("thead th")).to_have_count(4)
    page.reload()
    expect(table.locator("thead th")).to_have_count(4)
