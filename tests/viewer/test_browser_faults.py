"""The viewer's page on incomplete, damaged and changing runs: a line says so, and the rest is shown."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect
from support.trajectories import trajectory
from support.viewer_pages import eventually, opened
from support.viewer_runs import branched, damage, detail, episode, evaluation, write_run, write_step
from support.viewer_samples import SampleRun, SampleSource, Served

from agent_rl.config.loader import MODELS
from agent_rl.monitoring.metrics_log import MetricsLog
from agent_rl.render import ChatRenderer
from agent_rl.rollout.jsonl_zst import encode_frame
from agent_rl.rollout.records import encode_trajectory, rows_path, step_stem, write_trajectories
from agent_rl.types import Group, StopReason, TrainingDecision, TrainingStatus, Trajectory, VersionSpan
from agent_rl.viewer.api import Resources
from agent_rl.viewer.export import export

pytestmark = pytest.mark.browser

Make = Callable[[Path], object]
LARGE = 10_000_000


def with_journal(run: Path, episodes: int) -> Path:
    """The journal of step 3 with so many episodes, and a half of the next."""
    frames = [encode_frame(b"{}\n" + encode_trajectory(episode(number))) for number in range(episodes + 1)]
    path = run / "journal" / "step-000003.journal"
    path.parent.mkdir()
    path.write_bytes(encode_frame(b"{}") + b"".join(frames)[: -len(frames[-1]) // 2])
    return path


def half_a_step(run: Path) -> None:
    """Killed between the arrays of a step and its rows."""
    with_journal(write_run(run), 1)
    write_step(run, 3)
    rows_path(step_stem(run, 3)).unlink()


def rewritten(*, routes: bool = True, details: bool = True) -> Make:
    def make(run: Path) -> None:
        write_run(run)
        write_step(run, 1, routes=routes, details=details)

    return make


def cut_off(name: str) -> Make:
    return lambda run: damage(next(write_run(run).rglob(name)))


def not_a_number(run: Path) -> None:
    log = MetricsLog(write_run(run))
    log.append(3, {"reward/mean": float("nan")})
    log.close()


def holding(one: Trajectory) -> Make:
    """A run of one trajectory, with the texts of its tokens."""

    def make(run: Path) -> None:
        run.mkdir()
        shutil.copy(MODELS["tiny-moe"] / "tokenizer.json", run)
        decisions = [TrainingDecision(TrainingStatus.TRAINED, 0.5)]
        write_trajectories(run, 1, [Group("t", (one,), 4)], decisions=decisions, details={})

    return make


def without_texts(make: Make) -> Make:
    def made(run: Path) -> None:
        make(run)
        (run / "tokenizer.json").unlink()

    return made


def split_characters() -> Trajectory:
    """Its sampled tokens are the bytes of a character each."""
    ids = ChatRenderer(MODELS["tiny-moe"])._encoder.encode("漢€")
    assert len(ids) > 2
    mask = np.arange(3 + len(ids)) >= 3
    tokens = np.concatenate([[1, 2, 3], ids]).astype(np.int32)
    turn = replace(episode(0).turns[0], prompt_tokens=3, completion_tokens=len(ids))
    arrays = {"tokens": tokens, "loss_mask": mask, "logprobs": -mask.astype(np.float32)}
    return replace(trajectory(1.0), **arrays, versions=(VersionSpan(3, len(tokens), "0"),), turns=(turn,))


NO_TURN = replace(trajectory(0.0), loss_mask=np.zeros(5, bool), logprobs=np.zeros(5, np.float32), versions=())
BROKEN = replace(trajectory(0.0, stop=StopReason.SANDBOX_FAILURE), reward=None)
LONG = replace(episode(0), turns=(replace(episode(0).turns[0], observation="x" * LARGE), *episode(0).turns[1:]))
TWO_VERSIONS = replace(episode(0), versions=(VersionSpan(5, 7, "6"), VersionSpan(7, 9, "7"), VersionSpan(11, 14, "7")))
TRAIN = "step-000001.train.safetensors"
FAULTS: dict[str, tuple[Make, dict[str, str]]] = {
    "half-a-step": (half_a_step, {"trajectories": "13 of 13", "trajectories/": "Step 3 was under way: 1 episode of 6"}),
    "without-routes": (rewritten(routes=False), {"step": "no expert loads", "t": "Largest gap without replay"}),
    "without-detail": (rewritten(details=False), {"t": "token_detail was off", "t?by=gap": "Not kept"}),
    "rows-cut-off": (cut_off("step-000001.jsonl.zst"), {"trajectories": "1: cannot be read", "t": "1: cannot be read"}),
    "arrays-cut-off": (cut_off("step-000001.safetensors"), {"t": "tokens cannot be read", "trajectories": "13 of 13"}),
    "detail-cut-off": (cut_off(TRAIN), {"t": f"{TRAIN}: damaged", "step": f"{TRAIN}: damaged"}),
    "metrics-cut-off": (cut_off("metrics.jsonl"), {"": "metrics.jsonl, line 1: damaged; shown up to there"}),
    "not-a-number": (not_a_number, {"": "reward/mean: not a number in step 3"}),
    "infrastructure-only": (holding(BROKEN), {"": "infrastructure failures only", "t": "sandbox_failure"}),
    "evaluation": (evaluation, {"t/eval-0": "an evaluation has no tokens", "eval/eval": "it is running or was"}),
    "empty": (Path.mkdir, {"": "no step has finished yet", "trajectories": "0 of 0 trajectories"}),
    "no-turn": (holding(NO_TURN), {"t": "Prompt", "group": "Group 0 of 1"}),
    "long": (holding(LONG), {"t": "Turn 2: calls submit", "group": "x" * 500 + " …"}),
    "long-without-texts": (without_texts(holding(LONG)), {"t": "Show all 10,000,000 characters"}),
    "two-versions": (holding(TWO_VERSIONS), {}),
    "split-characters": (holding(split_characters()), {"t?token=5": "漢€"}),
    "branches": (lambda run: branched(write_run(run)), {}),
}
"""How each run is made, and by page a text that it must show."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of all runs, in their order."""
    root = tmp_path_factory.mktemp("faults")
    for name, (make, _) in FAULTS.items():
        make(root / name)
    with Served(Resources([root / name for name in FAULTS])) as server:
        yield server.address


def fragment(name: str, place: str) -> str:
    """The address of a page of a run; of a trajectory, a group or a step, the first."""
    number = list(FAULTS).index(name)
    page, mark, query = place.partition("?")
    first = {"t": "1-0", "group": "1/0", "step": "1"}.get(page)
    kind, _, rest = page.partition("/")
    return f"#/{kind}/{number}/{first or rest}{mark}{query}" if page else "#/"


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, (_, shown) in FAULTS.items() if shown])
def test_what_a_directory_lacks_is_a_line(page: Page, served: str, name: str) -> None:
    for place, text in FAULTS[name][1].items():
        opened(page, served, fragment(name, place))
        expect(page.get_by_text(text).first).to_be_visible()


def test_two_versions_within_a_turn_have_two_colours(page: Page, served: str) -> None:
    opened(page, served, fragment("two-versions", "t?by=version"))
    eventually(page, "CSS.highlights.get('bin-0')?.size === 1 && CSS.highlights.get('bin-1').size === 2")


@pytest.mark.parametrize("exported", [False, True])
def test_each_branch_has_its_own_tokens_and_layers(page: Page, served: str, tmp_path: Path, exported: bool) -> None:
    """The largest gap is the second branch's, and is found from the first."""
    whole = detail(9)
    token = 7 + int(np.abs(whole.gap_without_replay).argmax())
    layers = np.unpackbits(whole.differs_without_replay[token - 1]).nonzero()[0]
    place = fragment("branches", "t")
    if exported:
        export(Resources([branched(tmp_path)]), tmp_path / "run.html", 1)
        served, place = (tmp_path / "run.html").as_uri(), "#/t/0/1-0"
    opened(page, served, place)
    expect(page.get_by_label("Branch")).to_have_value("0")
    page.get_by_role("button", name="Largest gap without replay").click()
    expect(page.get_by_label("Branch")).to_have_value("1")
    expect(page.locator("aside h2")).to_contain_text(f"Token {token} ")
    expect(page.locator("[data-value=layers_without_replay]")).to_contain_text(", ".join(map(str, layers)) or "none")
    gap = str(np.float16(whole.gap_without_replay[token - 7]))
    expect(page.locator("[data-value=gap_without_replay]")).to_have_text(gap)
    expect(page.get_by_text("Turn 3: calls bash")).to_be_visible()
    expect(page.get_by_text("Turn 2:")).to_have_count(0)


def test_an_episode_of_the_running_step_shows_within_five_seconds(context: BrowserContext, tmp_path: Path) -> None:
    """And the place and the filters stay."""
    run = write_run(tmp_path / "run")
    journal = with_journal(run, 1)
    with Served(Resources([run])) as server:
        page = opened(context.new_page(), server.address, "#/trajectories/0?resolved=true")
        expect(page.get_by_role("status").filter(has_text="live")).to_be_visible()
        expect(page.get_by_text("1 episode of 6 ended, 0 resolved")).to_be_visible()
        whole = encode_frame(b"{}\n" + encode_trajectory(episode(1)))
        with journal.open("ab") as file:
            file.write(whole[len(whole) // 2 :])
        expect(page.get_by_text("2 episodes of 6 ended, 1 resolved")).to_be_visible(timeout=5000)
        expect(page.locator(".count")).to_have_text("7 of 13 trajectories")
        context.close()


@pytest.fixture
def window(browser: Browser) -> Iterator[Page]:
    """A window in which the browser may report missing resources and a missing server."""
    with closing(browser.new_context()) as opened:
        yield opened.new_page()


def test_a_step_that_vanishes_and_returns(window: Page, tmp_path: Path) -> None:
    """A run that is resumed does the steps after its checkpoint again."""
    run = write_run(tmp_path / "run")
    with Served(Resources([run])) as server:
        page = opened(window, server.address, "#/t/0/2-0")
        expect(page.get_by_role("status").filter(has_text="live")).to_be_visible()
        expect(page.locator("h1")).to_have_text("task-0")
        for path in (run / "trajectories").glob("step-000002.*"):
            path.unlink()
        expect(page.get_by_role("alert")).to_contain_text("no trajectories of 2")
        expect(page.locator("h1")).to_have_text("task-0")
        write_trajectories(run, 2, [Group("again", (replace(episode(0), task_id="again"),))])
        expect(page.locator("h1")).to_have_text("again")
        expect(page.get_by_role("alert")).to_have_count(0)


def test_a_directory_that_is_deleted_while_it_is_viewed(window: Page, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with Served(Resources([run])) as server:
        page = opened(window, server.address, "#/trajectories/0")
        expect(page.get_by_role("status").filter(has_text="live")).to_be_visible()
        expect(page.locator(".count")).to_have_text("13 of 13 trajectories")
        shutil.rmtree(run)
        expect(page.get_by_role("alert")).to_contain_text("no longer exists")
        expect(page.locator(".count")).to_have_text("13 of 13 trajectories")


def test_a_page_whose_server_is_cut_off_goes_on_with_the_next(window: Page) -> None:
    source = SampleSource(SampleRun())
    with Served(source) as first:
        page = opened(window, first.address)
        expect(page.get_by_role("status").filter(has_text="live")).to_be_visible()
    expect(page.get_by_text("the server does not answer")).to_be_visible()
    source.runs[0] = SampleRun(steps=7)
    with Served(source, first.port):
        expect(page.locator(".runs")).to_contain_text("7 of 7 steps")
        expect(page.get_by_role("status").filter(has_text="live")).to_be_visible()


@pytest.mark.long
@pytest.mark.parametrize("tabs", [8, pytest.param(50, marks=pytest.mark.exhaustive)])
def test_many_tabs_hear_of_a_change(context: BrowserContext, tabs: int) -> None:
    """More than the six connections that a browser opens to one server."""
    source = SampleSource(SampleRun())
    with Served(source) as server:
        pages = [opened(context.new_page(), server.address) for _ in range(tabs)]
        for page in pages:
            expect(page.get_by_role("status").filter(has_text="live")).to_be_visible()
        source.runs[0] = SampleRun(steps=7)
        source.revisions |= {"0/metrics": "new", "0/run": "new"}
        for page in pages:
            expect(page.locator(".runs")).to_contain_text("7 of 7 steps")
        context.close()
