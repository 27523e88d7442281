"""What becomes of small real evaluations of ``mini``: comparison, diff of two episodes, leaderboard output."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from support.local_server import serving
from typer.testing import CliRunner

from agent_rl.cli import app
from agent_rl.errors import UserError
from tools import ToolCall
from tools.formats import tool_format

pytestmark = [pytest.mark.bubblewrap, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
TASK = "mini-heldout-0-00000"
PRICES = "- {model: '*', input: 1, output: 10}\n"


async def scripted(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    """Model "org/look-and-submit" looks at a file first; model "org/submit" submits at once."""
    calls = [ToolCall("execute_bash", {"command": "ls"})] * ("look" in body["model"])
    calls.append(ToolCall("finish", {"command": "submit"}))
    said = sum(message["role"] == "assistant" for message in body["messages"])
    text = tool_format("xml").render(calls[min(said, len(calls) - 1)])
    message = {"message": {"content": text}, "finish_reason": "stop"}
    return 200, orjson.dumps({"choices": [message], "usage": {"prompt_tokens": 1000, "completion_tokens": 100}})


async def evaluate_all(directory: Path) -> None:
    """Two samples of two tasks by two models at one endpoint, and by the reference fix."""
    (directory / "prices.yaml").write_text(PRICES)
    async with serving(scripted) as url:
        endpoint = ["--policy", f"{url}/v1", "--prices", str(directory / "prices.yaml"), "--model"]
        for name, policy in {
            "look": [*endpoint, "org/look-and-submit"],
            "submit": [*endpoint, "org/submit"],
            "gold": ["--policy", "gold"],
        }.items():
            command = ["eval", "configs/quickstart.yaml", *policy, "--tasks", "2", "--samples", "2"]
            command += ["--out", str(directory / name), f"runs_dir={directory}"]
            process = await asyncio.create_subprocess_exec(sys.executable, "-m", "agent_rl.cli", *command, cwd=ROOT)
            assert await asyncio.wait_for(process.wait(), 120) == 0


@pytest.fixture(scope="module")
def evaluations(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The directories of evaluations "look", "submit" and "gold"."""
    directory = tmp_path_factory.mktemp("evaluations")
    asyncio.run(evaluate_all(directory))
    return {name: str(directory / name) for name in ("look", "submit", "gold")}


def output_of(*arguments: str) -> str:
    answer = CliRunner().invoke(app, ["eval", *arguments], catch_exceptions=False, env={"COLUMNS": "140"})
    assert answer.exit_code == 0, answer.output
    return answer.output


def test_models_of_one_endpoint_are_compared_by_name(evaluations: Mapping[str, str]) -> None:
    text = output_of("compare", *evaluations.values(), "--tasks")
    header = next(line for line in text.splitlines() if "submit" in line)
    assert re.search(r"org/look-and-submit .* org/submit .* gold ", header), header
    assert re.search(r"tokens out, a task .* 400 .* 200 .* unknown", text)
    assert re.search(r"cost, a task .* 0\.0080 USD .* 0\.0040 USD .* unknown", text)
    assert re.search(rf"{TASK} .* 0/2 .* 0/2 .* 2/2", text)
    assert "2 of 2 tasks differ" in text
    assert re.search(r"Pass@2 .* 0\.0% \[0\.0%, 65\.8%\] .* 100\.0% \[34\.2%, 100\.0%\]", text)


def test_diff_shows_where_two_episodes_of_a_task_differ(evaluations: Mapping[str, str]) -> None:
    text = output_of("diff", evaluations["look"], evaluations["gold"], TASK, "--other", "1")
    for part in (
        "org/look-and-submit, sample 0", "gold, sample 1", "2,000 in, 200 out",
        "first differences: initial prompt, text in turn 1, call in turn 1, observation in turn 1",
        "execute_bash ls", "execute_bash printf", "no result and PASSED",
        "--- patch of org/look-and-submit, sample 0", "+diff --git a/",
    ):  # fmt: skip
        assert part in text, (part, text)
    same = output_of("diff", evaluations["look"], evaluations["look"], TASK, "--other", "1")
    assert "first differences: none, the conversations are equal" in same
    assert "neither has a patch" in same
    assert re.search(r"1 .* execute_bash ls .* = ", same)


def test_diff_of_a_missing_or_linked_episode_is_one_line(evaluations: Mapping[str, str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no graded episode of task nowhere, sample 0"):
        output_of("diff", evaluations["look"], evaluations["gold"], "nowhere")
    linked = Path(shutil.copytree(evaluations["gold"], tmp_path / "linked"))
    shutil.move(linked / "logs" / TASK, tmp_path / "elsewhere")
    (linked / "logs" / TASK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="linked: no readable episode"):
        output_of("diff", evaluations["look"], str(linked), TASK)


def test_report_names_each_denominator(evaluations: Mapping[str, str]) -> None:
    report = json.loads((Path(evaluations["look"]) / "report.json").read_text())
    assert (report["graded"], report["tasks"], report["requested"]) == (2, 2, 2)
    assert report["available"] > 2
    assert report["pass_at_k"]["2"]["tasks"] == 2
    assert [outcome["cost"] for outcome in report["outcomes"]] == pytest.approx([0.008, 0.008])


SUBMISSION = {"all_preds.jsonl", "logs", "metadata.yaml", "trajs", "README.md", "results"}
"""What analysis/get_results.py of SWE-bench/experiments keeps in a submission, and the directory that it writes."""


def graded_again(submission: Path, tasks: list[str]) -> dict[str, list[str]]:
    """How analysis/get_results.py sorts the tasks; it reads swebench's report in place of pytest's summary."""
    results: dict[str, list[str]] = {"no_generation": [], "no_logs": [], "resolved": []}
    for task in tasks:
        logs = submission / "logs" / task
        if not (logs / "patch.diff").exists():
            results["no_generation"].append(task)
        elif not (logs / "test_output.txt").exists():
            results["no_logs"].append(task)
        elif not re.search("^(FAILED|ERROR)", (logs / "test_output.txt").read_text(), re.MULTILINE):
            results["resolved"].append(task)
    return results


@pytest.mark.parametrize("name", ["gold", "look"])
def test_submission_has_the_form_of_the_leaderboard(evaluations: Mapping[str, str], tmp_path: Path, name: str) -> None:
    out = tmp_path / "20260101_model"
    assert "2 predictions" in output_of("submission", evaluations[name], str(out), "--sample", "1")
    assert {path.name for path in out.iterdir()} | {"logs"} == SUBMISSION
    rows = [json.loads(line) for line in (out / "all_preds.jsonl").read_text().splitlines()]
    tasks = [row["instance_id"] for row in rows]
    assert {tuple(row) for row in rows} == {("instance_id", "model_name_or_path", "model_patch")}
    assert tasks == [TASK, "mini-heldout-0-00001"]
    assert json.loads((out / "results/results.json").read_text()) == graded_again(out, tasks)
    assert len(graded_again(out, tasks)["resolved" if name == "gold" else "no_generation"]) == 2
    for task in tasks:
        trajectory = json.loads((out / "trajs" / f"{task}.json").read_text())
        assert trajectory["turns"]
        assert "tests" not in trajectory, "the names of hidden tests stay out"
    metadata = yaml.safe_load((out / "metadata.yaml").read_text())
    assert metadata["tags"]["system"]["attempts"] == "1"
    assert metadata["tags"]["model"] == [rows[0]["model_name_or_path"]]
    assert {"name", "site", "report"} <= metadata["info"].keys()
    if name == "gold":
        report = json.loads((out / f"logs/{TASK}/report.json").read_text())[TASK]
        assert report["resolved"] is report["patch_successfully_applied"] is True
        assert (out / f"logs/{TASK}/patch.diff").read_text() == rows[0]["model_patch"]
    with pytest.raises(UserError, match="not empty; give a new directory"):
        output_of("submission", evaluations[name], str(out))


def test_submission_of_a_directory_without_an_evaluation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected the directory of a finished `agent-rl eval`"):
        output_of("submission", str(tmp_path), str(tmp_path / "out"))
