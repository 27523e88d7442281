"""The index of a run: a hundred thousand trajectories are filtered within a tenth of a second."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import zstandard

from agent_rl.rollout.step_index import FORMAT, step_index_path
from agent_rl.viewer import index as module
from agent_rl.viewer.index import Index, select

STEPS, A_STEP = 200, 500
SECONDS = 0.1


def step_index(step: int) -> bytes:
    """Random columns for the trajectories of a step."""
    random = np.random.default_rng(step)
    wins = random.random(A_STEP) < 0.4
    columns: dict[str, Any] = {
        "group": (np.arange(A_STEP) // 8).tolist(),
        "task": [f"repository__project-{step * 31 + at // 8}" for at in range(A_STEP)],
        "reward": wins.astype(float).tolist(),
        "resolved": wins.tolist(),
        "stop": np.where(random.random(A_STEP) < 0.8, "submitted", "max_turns").tolist(),
        "training_status": np.where(random.random(A_STEP) < 0.7, "trained", "uniform").tolist(),
        "advantage": random.normal(0, 1, A_STEP).tolist(),
        "seconds": random.random(A_STEP).tolist(),
        "began": [None] * A_STEP,
        "worst_gap": random.random(A_STEP).tolist(),
        "worst_gap_without_replay": [None if gap < 0.1 else gap for gap in random.random(A_STEP).tolist()],
    }
    counts = ("turns", "tokens", "sampled", "hacks", "branches", "versions", "failures", "format")
    columns |= {name: random.integers(0, 60, A_STEP).tolist() for name in counts}
    found = {"format": FORMAT, "columns": columns, "places": [(0, at) for at in range(A_STEP)]}
    return zstandard.ZstdCompressor(level=1).compress(orjson.dumps(found))


def file_step(directory: Path, step: int) -> None:
    (directory / "trajectories").mkdir(exist_ok=True)
    stem = directory / "trajectories" / f"step-{step:06d}"
    Path(f"{stem}.jsonl.zst").touch()
    step_index_path(stem).write_bytes(step_index(step))


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    directory = tmp_path_factory.mktemp("long")
    for step in range(1, STEPS + 1):
        file_step(directory, step)
    found = Index(directory)
    found.refresh()
    assert len(found.table["id"]) == STEPS * A_STEP
    return found


@pytest.mark.parametrize(
    "query",
    [
        {"task": "project-31"},
        {"stop": "max_turns", "training_status": "trained", "resolved": "true"},
        {"worst_gap_without_replay": "0.999..", "sort": "-worst_gap_without_replay", "limit": "200"},
        {"step": "20..80", "turns": "50..", "reward": "1", "sort": "seconds", "limit": "200"},
        {"hacks": "59", "branches": "2..", "versions": "..30", "n": "1,2,3"},
    ],
)
def test_a_hundred_thousand_trajectories_are_filtered_at_once(index: Index, query: dict[str, str]) -> None:
    spent = []
    for _ in range(3):
        started = time.thread_time()
        rows, found = select(index.table, query)
        spent.append(time.thread_time() - started)
    assert min(spent) < SECONDS
    assert 0 < found < STEPS * A_STEP
    assert len(rows) <= found


def test_missing_values_are_in_no_range_and_sort_last(index: Index) -> None:
    rows, found = select(index.table, {"worst_gap_without_replay": "..9", "sort": "worst_gap_without_replay"})
    values = index.table["worst_gap_without_replay"][rows]
    assert found == int(np.isfinite(index.table["worst_gap_without_replay"]).sum())
    assert (np.diff(values) >= 0).all()
    rows, _ = select(index.table, {"sort": "-worst_gap_without_replay", "limit": "100"})
    assert np.isfinite(index.table["worst_gap_without_replay"][rows]).all()


def test_a_step_that_ends_while_the_table_is_made_is_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_step(tmp_path, 1)
    found = Index(tmp_path)
    found.refresh()
    making, go_on, column = threading.Event(), threading.Event(), module._column

    def held(*arguments: Any) -> Any:
        making.set()
        assert go_on.wait(10)
        return column(*arguments)

    monkeypatch.setattr(module, "_column", held)
    with ThreadPoolExecutor() as threads:
        threads.submit(lambda: found.table)
        assert making.wait(10)
        file_step(tmp_path, 2)
        wait([threads.submit(found.refresh)], timeout=0.2)  # without a lock it is done by now
        go_on.set()
    assert {name: len(values) for name, values in found.table.items()} == dict.fromkeys(module.SHOWN, 2 * A_STEP)
