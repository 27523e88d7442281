"""The viewer on a large run, in chromium: charts, filters, a long trajectory, and what ends while it is looked at.

Run: ``python benchmarks/bench_view.py``

The run is written by the product's own writers: 1,000 steps of 120 metrics and 100 trajectories each, and a step of one
trajectory of 65,536 tokens and 50 turns with the routes of 48 layers of top-8. ``agent-rl view`` serves it in a process
of its own. A figure ends when the browser has painted what was asked for.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np
import orjson
from playwright.sync_api import Page, sync_playwright

from agent_rl.config.loader import MODELS
from agent_rl.monitoring.metrics import METRICS
from agent_rl.rollout.jsonl_zst import encode_frame
from agent_rl.rollout.records import encode_trajectory, write_trajectories
from agent_rl.types import (
    Group,
    StopReason,
    TokenDetail,
    TrainingDecision,
    TrainingStatus,
    Trajectory,
    Turn,
    VersionSpan,
)
from agent_rl.viewer.api import Resources
from agent_rl.viewer.server import POLL_SECONDS
from r3.routing import Routing, Span, SpanKind

PAINTED = "await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));"
REPEATS = 5
STEPS, GROUPS, GROUP = 1000, 10, 10
NAMES = [name for metric in METRICS for name in metric.names if name != "time/ended"][:120]
TURNS, LAYERS, TOP_K, EXPERTS = 50, 48, 8, 128


def long_trajectory(tokens: int, random: np.random.Generator) -> Trajectory:
    """Half of its tokens are sampled, in 50 turns."""
    length = tokens // (2 * TURNS)
    starts = [2 * length * turn + tokens % length for turn in range(TURNS)]
    mask = np.zeros(tokens, bool)
    for start in starts:
        mask[start : start + length] = True
    first = random.integers(0, EXPERTS, (tokens, LAYERS, 1))
    experts = ((first + np.arange(TOP_K) * 5) % EXPERTS).astype(np.uint8)
    spans = Span(0, tokens - 1, "6", "http://e", SpanKind.SAMPLED), Span(tokens - 1, tokens, "", "", SpanKind.MISSING)
    turns = tuple(
        Turn("I look.", "bash", {"command": "ls"}, None, "a.py", start, length, length, 0, "6", 0.6, 0.2, 0, 0.9 * turn)
        for turn, start in enumerate(starts)
    )
    return Trajectory(
        "long", "mini", random.integers(0, 400, tokens).astype(np.int32), mask,
        np.where(mask, -random.gamma(0.5, 1.0, tokens), 0).astype(np.float32),
        Routing(experts, np.arange(tokens) < tokens - 1, spans, EXPERTS), StopReason.SUBMITTED, 1.0, True,
        turns, (), (VersionSpan(0, tokens, "6"),),
    )  # fmt: skip


def detail_of(one: Trajectory, random: np.random.Generator) -> TokenDetail:
    """Gaps of all sampled tokens; one router in a thousand differs."""
    sampled = int(one.loss_mask.sum())
    bits = np.packbits(random.random((len(one.tokens), LAYERS)) < 0.001, axis=1)
    gaps = random.normal(0, 0.02, (2, sampled)).astype(np.float32)
    entropy, flags = random.random(sampled).astype(np.float16), np.zeros(sampled, np.uint8)
    return TokenDetail(gaps[0], gaps[1], entropy, flags, LAYERS, np.zeros_like(bits), bits)


def short_trajectory(number: int) -> Trajectory:
    mask = np.arange(5) >= 3
    return Trajectory(
        f"mini-train-0-{number:05d}", "mini", np.arange(5, dtype=np.int32), mask, -mask.astype(np.float32), None,
        StopReason.SUBMITTED, float(number % 2), bool(number % 2), (), (), (VersionSpan(3, 5, "0"),),
    )  # fmt: skip


class Run:
    """The directory of a run, which grows."""

    def __init__(self, directory: Path) -> None:
        self.directory, self._random, self._step = directory, np.random.default_rng(0), 0
        shutil.copy(MODELS["tiny-moe"] / "tokenizer.json", directory)
        (directory / "journal").mkdir()
        (directory / "config.yaml").write_text(f"rollout: {{tasks_per_step: {GROUPS}, group_size: {GROUP}}}\n")
        for _ in range(STEPS):
            self.end_step()
        one = long_trajectory(65_536, self._random)
        details = {(0, 0): detail_of(one, self._random)}
        decisions = [TrainingDecision(TrainingStatus.TRAINED, 0.5)]
        write_trajectories(directory, STEPS + 1, [Group("long", (one,))], decisions=decisions, details=details)
        self._step += 1
        self._episode = encode_frame(b"{}\n" + encode_trajectory(long_trajectory(16_384, self._random)))

    def end_step(self) -> None:
        """Write the trajectories of the next step, and its metrics."""
        self._step += 1
        first = self._step * GROUPS
        groups = [Group("t", tuple(short_trajectory(first + at) for _ in range(GROUP))) for at in range(GROUPS)]
        decisions = [
            TrainingDecision(TrainingStatus.TRAINED, float(advantage))
            for advantage in self._random.random(GROUPS * GROUP)
        ]
        write_trajectories(self.directory, self._step, groups, decisions=decisions)
        values = dict(zip(NAMES, self._random.random(len(NAMES)).tolist(), strict=True))
        with (self.directory / "metrics.jsonl").open("ab") as file:
            file.write(orjson.dumps({"step": self._step, **values, "time/ended": 1.7e9 + self._step}) + b"\n")

    def end_episode(self) -> None:
        """Add an episode of 16,384 tokens to the journal of the step that is under way."""
        journal = self.directory / "journal" / f"step-{self._step + 1:06d}.journal"
        with journal.open("ab") as file:
            file.write(self._episode if journal.stat().st_size else encode_frame(b"{}") + self._episode)


def timed(page: Page, action: str) -> float:
    """Seconds from ``action`` (JavaScript) to the paint after it, the median of some."""
    code = f"async (i) => {{ const begun = performance.now(); {action}; {PAINTED} return performance.now() - begun; }}"
    return median(page.evaluate(code, i) for i in range(REPEATS)) / 1000


def shown(page: Page, condition: str) -> float:
    """Wait until ``condition`` (JavaScript) holds and is painted; seconds since the page was asked for."""
    late = f"if (performance.now() > 6e4) throw Error({orjson.dumps(condition).decode()});"
    code = f"async () => {{ while (!({condition})) {{ {late} {PAINTED} }} {PAINTED} return performance.now(); }}"
    return float(page.evaluate(code)) / 1000


def opening(page: Page, address: str, condition: str) -> float:
    """Seconds from asking for a page, its data included, to the paint after ``condition`` holds; the median of some."""

    def once() -> float:
        page.goto("about:blank")
        page.goto(address, wait_until="commit")
        return shown(page, condition)

    return median(once() for _ in range(REPEATS))


def report(name: str, seconds: float, goal: float) -> None:
    print(f"{name}: {seconds:.3f} s (goal {goal} s){'' if seconds <= goal else '  MISSED'}", flush=True)


def curves(page: Page, address: str) -> None:
    drawn = f"document.querySelectorAll('.chart canvas').length >= {len(NAMES)}"
    page.set_viewport_size({"width": 1280, "height": 20_000})
    report("1,000 steps x 120 metrics, all in the window", opening(page, address, drawn), 1.0)
    page.set_viewport_size({"width": 1280, "height": 860})
    in_sight = "document.querySelectorAll('.chart canvas').length >= 4"
    report("1,000 steps x 120 metrics, those in sight", opening(page, address, in_sight), 1.0)


def filters(page: Page, address: str) -> None:
    seconds = opening(page, f"{address}#/trajectories/0", "document.querySelectorAll('tbody a').length > 8")
    print(f"the list of 100,000 trajectories opened: {seconds:.3f} s")
    change = (
        "const input = document.querySelector('input[placeholder=\"{}\"]'); input.value = {}; "
        "input.dispatchEvent(new InputEvent('input', {{bubbles: true}}))"
    )
    report("100,000 trajectories filtered by a number", timed(page, change.format("3..9", "`${100 * i}..`")), 0.1)
    task = "const input = document.querySelector('input[type=search]'); input.value = `0000${i}`; "
    task += "input.dispatchEvent(new InputEvent('input', {bubbles: true}))"
    report("100,000 trajectories filtered by a text", timed(page, task), 0.1)
    page.evaluate("location.hash = '#/trajectories/0'")
    report("100,000 trajectories sorted", timed(page, "document.querySelectorAll('th button')[5].click()"), 0.1)


def tokens(page: Page, address: str) -> None:
    opened = "CSS.highlights.get('bin-8')?.size > 100"
    seconds = opening(page, f"{address}#/t/0/{STEPS + 1}-0", opened)
    report("a trajectory of 65,536 tokens and 50 turns opened", seconds, 2.0)
    names = "['gap', 'gap_without_replay', 'entropy', 'version', 'logprob']"
    change = (
        f"const select = document.querySelector('.toolbar select'); select.value = {names}[i]; "
        "select.dispatchEvent(new Event('change', {bubbles: true}))"
    )
    report("its tokens coloured anew", timed(page, change), 0.5)


def following(page: Page, address: str, run: Run) -> None:
    """From when a step's last file, or an episode's last byte, is written."""
    opening(page, f"{address}#/trajectories/0", "document.querySelector('.live.true')")

    def wait_for(write: Callable[[], None], element: str) -> float:
        text = f"document.querySelector('{element}')?.textContent"
        before = page.evaluate(text)
        write()
        began = time.monotonic()
        shown(page, f"{text} !== {orjson.dumps(before).decode()}")
        return time.monotonic() - began

    run.end_episode()
    shown(page, "document.querySelector('.episodes')")
    ended = [wait_for(run.end_episode, ".episodes summary") for _ in range(10)]
    report("an episode of the running step shows, the latest of 10", max(ended), 5.0)
    steps = [wait_for(run.end_step, ".count") for _ in range(3)]
    report("a finished step shows in the list of 100,000, the latest of 3", max(steps), 2.0)
    opening(page, f"{address}#/", "document.querySelectorAll('.chart canvas').length >= 4")
    steps = [wait_for(run.end_step, ".runs") for _ in range(3)]
    report("a finished step shows in the curves, the latest of 3", max(steps), 2.0)


def looks(directory: Path) -> None:
    """What a server does again and again while a page is open."""
    source, began = Resources([directory]), time.process_time()
    for _ in range(REPEATS):
        source.stamps()
    spent = (time.process_time() - began) / REPEATS
    print(f"a look at the run's files: {spent * 1000:.1f} ms of processor time, each {POLL_SECONDS} s", flush=True)


@contextmanager
def serving(directory: Path) -> Iterator[tuple[str, Callable[[], float]]]:
    """The address of a server, and what tells the most memory that it has held, in MiB."""
    command = [sys.executable, "-m", "agent_rl.cli", "view", str(directory), "--port", "0", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        status = Path(f"/proc/{process.pid}/status")
        address = process.stdout.readline().split()[0]
        yield address, lambda: int(status.read_text().split("VmHWM:")[1].split()[0]) / 1024
        process.terminate()


def main() -> None:
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        run = Run(Path(directory))
        looks(run.directory)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        with serving(run.directory) as (address, held):
            for measure in (curves, filters, tokens):
                measure(page, address)
                print(f"the server has held {held():.0f} MiB at most (goal 300)", flush=True)
            following(page, address, run)
            print(f"the server has held {held():.0f} MiB at most (goal 300)", flush=True)
            page.goto("about:blank")
        browser.close()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
