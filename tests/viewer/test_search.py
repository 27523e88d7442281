"""Search in the texts of trajectories: where a text stands, and where a search ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.viewer_runs import damage, evaluation, write_run

from agent_rl.viewer import search as searching
from agent_rl.viewer.api import Resources


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "demo")


def search(directory: Path, **query: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Resources([directory]).body("0/search", query))
    return found


def places(found: dict[str, Any]) -> list[tuple[str, int | None, str]]:
    return [(hit["id"], hit["turn"], hit["part"]) for hit in found["hits"]]


def test_a_hit_names_the_trajectory_the_turn_and_the_text_around(run: Path) -> None:
    found = search(run, text="A.PY", n="1")
    assert places(found) == [(f"1-{number}", 0, "observation") for number in range(6)]
    assert (found["searched"], found["total"], found["notes"]) == (6, 6, [])
    hit = found["hits"][2]
    assert (hit["task"], hit["before"], hit["match"], hit["after"]) == ("task-1", "", "a.py", "")


def test_every_part_of_a_trajectory_is_searched_once(run: Path) -> None:
    texts = {"fix it": (None, "prompt"), "done": (1, "turn"), "a.py": (0, "observation"), "log": (None, "test_log")}
    for text, place in texts.items():
        assert places(search(run, text=text, n="2"))[0] == ("2-0", *place)
    assert search(run, text="[1 turn left]")["hits"] == []


def test_without_a_step_all_are_searched_newest_first(run: Path) -> None:
    found = search(run, text="look")
    assert [hit["id"] for hit in found["hits"]] == [f"{step}-{number}" for step in (2, 1) for number in range(6)]
    assert found["searched"] == found["total"] == 13


def test_the_logs_of_an_evaluation_are_searched(tmp_path: Path) -> None:
    directory = evaluation(tmp_path)
    assert places(search(directory, text="look")) == [("eval-0", 0, "turn")]
    assert places(search(directory, text="gone")) == [("eval-1", None, "error")]


@pytest.mark.parametrize(
    ("limit", "value", "note"),
    [
        ("MAX_HITS", 3, "ended at 3 hits, after 4 of 13 trajectories"),
        ("SECONDS", -1.0, "ended at -1 seconds, after 0 of 13 trajectories"),
        ("MAX_CHARS", 0, "ended at 0 MiB of text, after 0 of 13 trajectories"),
    ],
)
def test_a_search_ends_at_a_limit_and_says_so(
    run: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: float, note: str
) -> None:
    monkeypatch.setattr(searching, limit, value)
    found = search(run, text="look")
    assert found["notes"] == [note]
    assert len(found["hits"]) <= 3


def test_a_search_goes_on_after_a_damaged_file(run: Path) -> None:
    resources = Resources([run])
    resources.read("0/run")
    index = resources._runs[0].index
    damage(run / "trajectories" / "step-000002.jsonl.zst")
    found = searching.search(index, "look", "")
    assert any("2: searched up to a damaged row" in note for note in found["notes"])
    assert {hit["id"].partition("-")[0] for hit in found["hits"]} == {"1"}


def test_a_search_for_nothing_or_for_too_much_is_refused(run: Path) -> None:
    for text in ("", "  ", "x" * 201):
        assert search(run, text=text)["error"]["kind"] == "unknown"
