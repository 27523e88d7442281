"""The viewer's page in a real browser: tokens, keyboard, filters, curves, hostile text, changes, exports."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import BrowserContext, Page, expect
from support.viewer_pages import eventually, opened
from support.viewer_runs import branched, episode
from support.viewer_samples import SampleRun, SampleSource, Served

from agent_rl.evaluation.directory import EvaluationDirectory
from agent_rl.evaluation.report import EpisodeResult
from agent_rl.rollout.records import read_trajectories, step_stem, write_trajectories
from agent_rl.rollout.token_details import read_detail
from agent_rl.viewer.api import Resources
from agent_rl.viewer.export import export

pytestmark = pytest.mark.browser

HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[31m\u202eevil\u2066\x00\ud800 & <b>bold</b>"
SHOWN = "</script><img src=x onerror=alert(1)>␛[31m⎕evil⎕␀⎕ & <b>bold</b>"
"""The same with a sign in place of each character that would not be seen or would reorder the others."""
CAPTURED = Path(__file__).parent.parent / "captured" / "quickstart"
PAGES = (
    *(
        "#/",
        "#/trajectories/0",
        "#/t/0/1-3?by=gap_without_replay",
        "#/t/0/1-3?view=chat",
        "#/group/0/1/0",
        "#/step/0/1",
    ),
    "#/pair/0/1-3/0/1-2",
)
EXPORTED = (
    *("#/", "#/trajectories/0?sort=-worst_gap_without_replay", "#/t/0/2-61?by=gap_without_replay", "#/group/0/2/7"),
    *("#/step/0/2", "#/eval/0/step-6%2Fsampled", "#/evals"),
)


DENSE = {"name": "without-replay", "model": "dense", "train": {"lr": 2e-4}}
TWO_RUNS = SampleSource(SampleRun(), SampleRun("without-replay", metrics=6, config=DENSE))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(TWO_RUNS) as server:
        yield server


def test_the_token_with_the_largest_gap_and_its_layer_in_four_clicks(page: Page, captured: str) -> None:
    details = {(step, k): read_detail(step_stem(CAPTURED, step), k) for step in (1, 2) for k in range(96)}
    gaps = {at: np.abs(detail.gap_without_replay) for at, detail in details.items() if detail}
    step, k = max(gaps, key=lambda at: gaps[at].max())
    sampled = read_trajectories(CAPTURED, step)[k // 8].trajectories[k % 8].loss_mask.nonzero()[0]
    token = int(sampled[gaps[step, k].argmax()])
    differs = details[step, k].differs_without_replay
    layers = differs.layers[token - 1].nonzero()[0]

    opened(page, captured)
    page.get_by_role("link", name="Trajectories", exact=True).click()
    page.get_by_role("button", name="gap without replay").click()
    page.locator("tbody a").first.click()
    page.get_by_role("button", name="Largest gap without replay").click()
    panel = page.get_by_role("complementary", name="Token")
    expect(panel.locator("h2")).to_contain_text(f"Token {token} ")
    expect(panel.locator("[data-value=layers_without_replay]")).to_have_text(", ".join(map(str, layers)) or "none")
    shown = float(panel.locator("[data-value=gap_without_replay]").inner_text())
    assert abs(shown) == pytest.approx(float(gaps[step, k].max()), rel=1e-3)
    assert page.url.endswith(f"#/t/0/{step}-{k}?by=gap_without_replay&token={token}")


READ_TOKENS = """async (tokens) => {
    const read = (name) => document.querySelector(`[data-value=${name}]`)?.textContent;
    const rows = [];
    for (const token of tokens) {
        location.hash = location.hash.replace(/[?].*/, `?token=${token}`);
        await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
        const names = ["sampled", "layers_without_replay", "layers", "version", "logprob", "gap", "gap_without_replay"];
        rows.push([document.querySelector("aside h2").textContent.split(" ")[1], ...names.map(read)]);
    }
    return rows;
}"""


def test_a_hundred_tokens_are_what_the_files_hold(page: Page, captured: str) -> None:
    """A hundred that were sampled, and some that were not."""
    rng = np.random.default_rng(0)
    checked, groups = 0, read_trajectories(CAPTURED, 2)
    for k in rng.permutation([k for k in range(96) if read_detail(step_stem(CAPTURED, 2), k)]).tolist():
        if checked >= 100:
            break
        one, detail = groups[k // 8].trajectories[k % 8], read_detail(step_stem(CAPTURED, 2), k)
        sampled, shown = one.loss_mask.nonzero()[0], (~one.loss_mask).nonzero()[0][1:]
        places = rng.permutation(len(sampled))[:25]
        tokens = [*sampled[places].tolist(), *rng.permutation(shown)[:5].tolist()]
        checked += len(places)
        opened(page, captured, f"#/t/0/2-{k}?token=1")
        expect(page.locator("[data-value=layers_without_replay]")).to_be_visible()
        expect(page.get_by_text("Layers x tokens")).to_be_visible()
        rows = page.evaluate(READ_TOKENS, tokens)
        differing = detail.differs_without_replay.layers, detail.differs.layers
        for token, row in zip(tokens, rows, strict=True):
            layers = [", ".join(map(str, found[token - 1].nonzero()[0])) or "none" for found in differing]
            assert row[:4] == [f"{token}", "yes" if one.loss_mask[token] else "no", *layers]
        for place, row in zip(places, rows, strict=False):  # the sampled ones come first
            (version,) = {span.version for span in one.versions if span.start <= sampled[place] < span.stop}
            assert row[4] == version
            values = one.logprobs[sampled[place]], detail.gap[place], detail.gap_without_replay[place]
            assert [float(text) for text in row[5:]] == pytest.approx([float(value) for value in values], rel=6e-3)
        assert {tuple(row[4:]) for row in rows[len(places) :]} == {(None,) * 4}


def test_parts_of_the_reward_and_answers_of_judges_are_on_the_page(page: Page, served: Served) -> None:
    opened(page, served.address, "#/t/0/1-3")
    expect(page.locator(".facts")).to_contain_text("reward/right")
    expect(page.locator(".facts")).to_contain_text("env/words")
    expect(page.locator("#model_calls")).to_contain_text("Judge j, 0.3 s")
    expect(page.locator("#model_calls")).to_contain_text("[answer] It is fine.")


def test_tokens_are_coloured_and_clickable_without_an_element_each(page: Page, served: Served) -> None:
    opened(page, served.address, "#/t/0/1-3?by=gap_without_replay")
    count = "[...CSS.highlights].filter(([name, h]) => name.startsWith('bin-') && h.size).length"
    eventually(page, f"{count} > 2")
    assert page.locator(".tokens .text *").count() == 0
    page.get_by_label("Colour tokens by").select_option("mask")
    eventually(page, "CSS.highlights.get('bin-0').size === 3 && CSS.highlights.get('bin-15').size === 0")
    page.locator(".prompt .text").click(position={"x": 16, "y": 14})
    expect(page.locator("aside h2")).to_contain_text("Token 0 ")
    assert page.evaluate("CSS.highlights.get('selected').priority > CSS.highlights.get('bin-15').priority")


def test_thoughts_are_folded_until_one_of_their_tokens_is_selected(page: Page, tmp_path: Path) -> None:
    run = branched(tmp_path)
    (group,) = read_trajectories(run, 1)
    first, *others = group.trajectories[0].turns
    turns = (replace(first, thinking_tokens=3, thinking_chars=2), *others)
    member = replace(group.trajectories[0], turns=turns, turn_rewards=(0.25, *[0.0] * len(others)))
    write_trajectories(run, 1, [replace(group, trajectories=(member,))])
    with Served(Resources([run])) as server:
        opened(page, server.address, "#/t/0/1-0")
        thoughts = page.locator(".thoughts details")
        expect(thoughts.locator("summary")).to_have_text("thoughts: 3 tokens")
        expect(thoughts).not_to_have_attribute("open", "")
        assert page.locator(".thoughts h2, .sampled h2").count() == 2
        expect(page.locator(".thoughts h2")).to_contain_text("to run, reward 0.25, weights")
        opened(page, server.address, "#/t/0/1-0?token=6")
        expect(thoughts).to_have_attribute("open", "")
        (run / "tokenizer.json").unlink()
        opened(page, server.address, "#/t/0/1-0")
        page.reload()
        expect(page.locator("details summary", has_text="thoughts")).to_have_text("thoughts: 2 characters")
        expect(page.get_by_label("Text of turn 1", exact=True)).to_have_text("ok")
        expect(page.locator("#turn-1 h2")).to_contain_text("to run, reward 0.25")
        page.goto("about:blank")  # before the server stops


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


def test_filters_and_order_stay_in_the_address(page: Page, served: Served) -> None:
    opened(page, served.address, "#/trajectories/0?step=2..3&sort=-worst_gap")
    expect(page.locator(".count")).to_have_text("16 of 48 trajectories")
    page.get_by_role("combobox", name="resolved", exact=True).select_option("true")
    page.get_by_role("textbox", name="turns", exact=True).fill("4..")
    expect(page.locator(".count")).to_have_text("0 of 48 trajectories")
    page.get_by_role("textbox", name="turns", exact=True).fill("many")
    expect(page.get_by_role("textbox", name="turns", exact=True)).to_have_attribute("aria-invalid", "true")
    assert "resolved=true" in page.url
    page.get_by_role("link", name="Clear").click()
    expect(page.locator(".count")).to_have_text("48 of 48 trajectories")


def test_a_filter_takes_numbers_of_any_length(page: Page, served: Served) -> None:
    gaps = SampleRun().columns["worst_gap_without_replay"]
    for text in ("0.25..0.75", "0.1..", "..0.55", "-1..12", "0.75"):
        opened(page, served.address, f"#/trajectories/0?worst_gap_without_replay={text}")
        low, dots, high = text.partition("..")
        least, most = float(low or "-inf"), float(high or "inf") if dots else float(low)
        kept = sum(least <= gap <= most for gap in gaps)
        expect(page.locator(".count")).to_have_text(f"{kept} of 48 trajectories")
        expect(page.get_by_role("textbox", name="worst gap without replay")).to_have_attribute("aria-invalid", "false")


def test_a_step_without_loads_says_so_and_shows_its_groups(page: Page, captured: str) -> None:
    opened(page, captured, "#/step/0/eval-6-sampled")
    expect(page.get_by_text("no expert loads were recorded")).to_be_visible()
    expect(page.get_by_role("region", name="Table of groups").get_by_role("row").nth(1)).to_be_visible()


def test_runs_with_other_metrics_are_laid_over_each_other(page: Page, served: Served) -> None:
    opened(page, served.address)
    expect(page.get_by_role("group", name="reward/mean")).to_contain_text("quickstart 0.")
    expect(page.get_by_role("group", name="reward/mean")).to_contain_text("without-replay 0.")
    expect(page.get_by_role("group", name="extra_0/metric_1")).to_contain_text("last")
    expect(page.get_by_role("row", name="train.lr")).to_contain_text("0.0002")
    expect(page.get_by_role("row", name="model")).to_contain_text("dense")
    page.get_by_role("checkbox", name="without-replay").uncheck()
    expect(page.get_by_role("group", name="extra_0/metric_1")).to_have_count(0)
    page.get_by_role("combobox", name="by", exact=True).select_option("time")
    expect(page.get_by_role("group", name="reward/mean").locator("canvas")).to_be_visible()


class Rewards(SampleSource):
    """1,000 steps whose rewards are ``rewards`` where it has one; the guard said nothing."""

    def __init__(self, rewards: Mapping[int, float | None]) -> None:
        super().__init__(SampleRun(steps=1000, groups=0, resumes=()))
        self._rewards = rewards

    def read(self, path: str, query: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
        found = super().read(path, query)
        if path == "0/metrics":
            column = found["columns"]["reward/mean"]
            column[:] = [self._rewards.get(step, reward) for step, reward in enumerate(column, 1)]
        return {**found, "guard": []} if path == "0/run" else found


DRAWN = """(canvas) => {
    const { width, height } = canvas;
    const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
    const blue = (x, y) => data[4 * (y * width + x) + 2] > data[4 * (y * width + x)] + 60;
    const columns = (from, to) => [...Array(width).keys()].filter((x) => {
        for (let y = from; y < to; y++) if (blue(x, y)) return true;
    });
    return [columns(0, height), columns(0, height / 2)];
}"""


def drawn(context: BrowserContext, rewards: Mapping[int, float | None]) -> tuple[list[int], list[int]]:
    """The columns of pixels that a narrow chart of ``rewards`` fills, and those that it fills in its upper half."""
    with Served(Rewards(rewards)) as server:
        page = opened(context.new_page(), server.address, "#/?metric=reward/mean")
        canvas = page.get_by_role("group", name="reward/mean").locator("canvas")
        page.set_viewport_size({"width": 420, "height": 860})
        expect(canvas).to_be_visible()
        eventually(page, "document.querySelector('.chart canvas').width < 400")
        every, high = canvas.evaluate(DRAWN)
        context.close()
    assert len(every) > 250
    assert every == list(range(every[0], every[-1] + 1))
    return every, high


def test_a_curve_of_more_points_than_pixels_is_whole(context: BrowserContext) -> None:
    every, high = drawn(context, {500: 5.0})
    assert len(high) < 6
    assert abs(np.mean(high) - np.mean([every[0], every[-1]])) < 3


def test_a_curve_of_more_points_than_pixels_leads_straight_over_a_gap(context: BrowserContext) -> None:
    """The first column after the gap does not reach up to the last value before it."""
    before, gap = dict.fromkeys(range(1, 401), 1.0), dict.fromkeys(range(401, 600))
    _, high = drawn(context, {**before, **gap, **dict.fromkeys(range(600, 1001), 0.0)})
    assert high == list(range(high[0], high[-1] + 1))


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


def test_a_tab_that_takes_over_reads_everything_again(context: BrowserContext) -> None:
    source = SampleSource(SampleRun())
    with Served(source) as server:
        first, second = (opened(context.new_page(), server.address) for _ in range(2))
        for page in (first, second):
            expect(page.get_by_role("status").filter(has_text="live")).to_be_visible()
        source.runs[0] = SampleRun(steps=7)  # no stamp changes: the server tells of nothing
        first.close()
        expect(second.locator(".runs")).to_contain_text("7 of 7 steps")
        context.close()


def test_hostile_text_is_shown_and_does_nothing(page: Page, tmp_path: Path) -> None:
    """From an export: its file must hold such text too."""
    export(SampleSource(SampleRun(steps=1, groups=1, hostile=HOSTILE)), tmp_path / "run.html", 4)
    page.on("dialog", lambda dialog: pytest.fail("a script of the text ran"))
    for place in PAGES:
        opened(page, (tmp_path / "run.html").as_uri(), place)
        expect(page.get_by_text(SHOWN).first).to_be_attached()
        assert page.locator("img, main b:text-is('bold')").count() == 0
        assert not page.evaluate("/[\\u0000\\u001b\\u202e\\u2066\\ud800-\\udfff]/.test(document.body.innerText)")


def test_hostile_text_of_an_evaluation_does_nothing(page: Page, tmp_path: Path) -> None:
    """Its task, what the agent wrote, and what a search finds of it. JSON has no lone surrogates."""
    text, shown = HOSTILE.replace("\ud800", ""), SHOWN.replace("␀⎕", "␀")
    first = replace(episode(1).turns[0], text=text, observation=text, arguments={"cmd": text})
    result = EpisodeResult(text, 0, True, "submitted", 2, 1.0, patch=text, error=text)
    directory = EvaluationDirectory(tmp_path / "run", {"env": "mini"})
    directory.record(result, replace(episode(1), turns=(first,), task_id=text))
    page.on("dialog", lambda dialog: pytest.fail("a script of the text ran"))
    with Served(Resources([tmp_path / "run"])) as server:
        for place in ("#/", "#/evals", "#/t/0/eval-0", "#/group/0/eval/0", "#/search/0?text=onerror"):
            opened(page, server.address, place)
            expect(page.get_by_text(shown).first).to_be_attached()
            assert page.locator("img, main b:text-is('bold')").count() == 0
        page.locator("tbody tr").first.click()
        expect(page.locator("#prompt, [id^=turn]").first).to_be_attached()
        page.goto("about:blank")  # before the server stops


ONLY = re.compile("; this export opens 16 of them|search in texts")
"""What an export says besides, and what it leaves out."""


def test_an_export_shows_the_same_text_and_asks_for_nothing(
    context: BrowserContext, captured: str, captured_runs: Path, tmp_path: Path
) -> None:
    export(Resources([captured_runs / "quickstart"]), tmp_path / "run.html", 16)
    file = (tmp_path / "run.html").as_uri()
    pages, asked = {address: context.new_page() for address in (captured, file)}, set[str]()
    pages[file].on("request", lambda request: asked.add(request.url.partition("#")[0]))
    for place in EXPORTED:
        for address, page in pages.items():
            opened(page, address, place)
            expect(page.locator("main :is(canvas, table, .text, article ol)").first).to_be_visible()
            expect(page.get_by_text("Reading …")).to_have_count(0)
        ends = time.monotonic() + 5
        while len(texts := {ONLY.sub("", page.locator("main").text_content()) for page in pages.values()}) > 1:
            assert time.monotonic() < ends, texts  # some parts come later
    assert asked == {file}
