"""``agent-rl show``: the episodes of a run, an evaluation or a file, in any terminal."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from support.call_formats import JSON_FORMATS, TAG_FORMATS
from support.trajectories import trajectory

from agent_rl.commands.show import show
from agent_rl.errors import UserError
from agent_rl.evaluation.directory import EvaluationDirectory
from agent_rl.evaluation.report import EpisodeResult
from agent_rl.rollout.records import write_trajectories
from agent_rl.types import Group, Trajectory, Turn
from tools import ToolCall, tool_format


def episode(reward: float, task: str = "fix-sum") -> Trajectory:
    call, seen = {"cmd": "cat sum.py", "timeout": 3}, "def sum(a, b):\n\x1b[31mred [bold]"
    turn = Turn("I look. <call>", "execute_bash", call, None, seen, 3, 2, 4, 0, "0", 0.25, 0.5)
    lost = replace(turn, text="no call", tool=None, arguments={}, parse_failure="no tool call found")
    messages = ({"role": "system", "content": "You fix bugs."}, {"role": "user", "content": "sum is wrong"})
    said = ({"role": "assistant", "content": "I look. <call>"},)
    return replace(trajectory(reward), task_id=task, turns=(turn, lost), messages=messages + said, seconds=2.0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's directory: step 1 has one episode, step 2 has two of one task and one of another."""
    write_trajectories(tmp_path / "run", 1, [Group("fix-sum", (episode(1.0),))])
    groups = [Group("fix-sum", (episode(0.0), episode(1.0))), Group("other", (episode(0.5, "other"),))]
    write_trajectories(tmp_path / "run", 2, groups)
    return tmp_path / "run"


def output_of(path: Path, *, width: int = 100, terminal: bool = False, **choice: object) -> str:
    out = io.StringIO()
    options = {"step": None, "task": None, "sample": None, "as_list": False} | choice
    show(path, console=Console(file=out, width=width, force_terminal=terminal, highlight=False), **options)
    return out.getvalue()


def test_episode_is_printed_turn_by_turn(run: Path) -> None:
    text = output_of(run, step=1)
    for part in (
        "You fix bugs.", "sum is wrong", "turn 1 calls execute_bash (2 tokens, generation 0.2 s, tool 0.5 s)",
        "I look. <call>", "cat sum.py", "def sum(a, b):", "red [bold]", "turn 2 makes no call",
        "fix-sum, sample 0: resolved, reward 1; submitted; 2 turns in 2.0 s",
    ):  # fmt: skip
        assert part in text, part
    assert "\x1b" not in text, "what a command printed does not steer the terminal"


@pytest.mark.parametrize(
    ("usage", "printed"),
    [(None, "(2 tokens,"), ({"completion": 9}, "(9 tokens,"), ({}, "(an unknown number of tokens,")],
)
def test_sampled_tokens_are_those_that_the_endpoint_counted(tmp_path: Path, usage: object, printed: str) -> None:
    whole = episode(1.0)
    counted = replace(whole, turns=tuple(replace(turn, usage=usage) for turn in whole.turns))
    write_trajectories(tmp_path, 1, [Group("fix-sum", (counted,))])
    assert printed in output_of(tmp_path)


def test_thoughts_are_folded_into_one_line(tmp_path: Path) -> None:
    thought = "Is it [red]?\n</think>"
    known = episode(1.0)
    turn = replace(known.turns[0], text=f"{thought}\n\nI look.", thinking_tokens=5, thinking_chars=len(thought))
    members = [replace(known, turns=(replace(turn, inserted_tokens=count),)) for count in (0, 3)]
    write_trajectories(tmp_path, 1, [Group("fix-sum", tuple(members))])
    text = output_of(tmp_path, sample=0)
    assert re.search(r"thoughts: 21 characters\s*\nI look\.", text)
    assert not re.search("Is it|</think>", text)
    assert "thoughts: 21 characters, closed at the limit" in output_of(tmp_path, sample=1)


@pytest.mark.parametrize("name", [*JSON_FORMATS, *TAG_FORMATS, "r2egym", "openhands"])
def test_a_call_is_cut_from_the_text_in_every_format(tmp_path: Path, name: str) -> None:
    written = tool_format(name).render(ToolCall("execute_bash", {"cmd": "cat sum.py"}))
    text = f"<|channel|>commentary<|message|>I look.<|end|>{written}" if name == "harmony" else f"I look.\n{written}"
    known = episode(1.0)
    rows = Group("fix-sum", (replace(known, turns=(replace(known.turns[0], text=text),)),))
    write_trajectories(tmp_path, 1, [rows])
    assert re.search(r"\n *I look\. *\n *cmd: *\n", output_of(tmp_path))


def test_several_episodes_are_listed(run: Path) -> None:
    text = output_of(run)
    assert "step-000002.jsonl.zst" in text, "the last step"
    assert [line.count("fix-sum") for line in text.splitlines() if "not resolved" in line][:1] == [1]
    assert f"to show one: agent-rl show {run} --task fix-sum --sample 0" in text.replace("\n", "")
    assert "steps: 1 to 2" in text
    assert "not resolved, reward 0;" in output_of(run, task="fix-sum", sample=0)
    assert "resolved, reward 1;" in output_of(run, task="fix-sum", sample=1)
    assert "other, sample 0" in output_of(run / "trajectories" / "step-000002.jsonl.zst", task="other")
    assert "outcome" in output_of(run, step=1, as_list=True)


def test_an_evaluation_and_one_of_its_logs(tmp_path: Path) -> None:
    directory = EvaluationDirectory(tmp_path / "run" / "eval" / "gold", {"policy": "gold"})
    for name in ("a/b", "c"):
        done = episode(1.0, name)
        directory.record(EpisodeResult(name, 0, True, "submitted", 2, 2.0), done)
    assert "a/b" in output_of(directory.path)
    assert "a/b, sample 0: resolved; submitted" in output_of(directory.path, task="a/b")
    log = directory.log_of(EpisodeResult("c", 0, True, "submitted", 2, 2.0))
    assert "c, sample 0: resolved; submitted" in output_of(log)
    with pytest.raises(UserError, match=r"expected the directory of a run .*; found some in .*eval/gold$"):
        output_of(tmp_path / "run")


def test_a_narrow_terminal_without_colours(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    for choice in ({"step": 1}, {"step": 2}):
        text = output_of(run, width=40, terminal=True, **choice)
        assert not re.search(r"\x1b\[[39]\d", text), "no colour"
        lines = [line for line in re.sub(r"\x1b\[\d*m", "", text).splitlines() if "agent-rl show" not in line]
        assert max(map(len, lines)) <= 40


def test_missing_or_invalid_input_is_a_user_error(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--step 9: .* has trajectories of steps 1 to 2"):
        output_of(run, step=9)
    with pytest.raises(UserError, match="no episode matches"):
        output_of(run, task="nothing")
    with pytest.raises(UserError, match="expected the directory of a run"):
        output_of(tmp_path / "absent")
    for text in ("{}", "[1]", "nonsense", json.dumps({"task_id": "t"})):
        (tmp_path / "wrong.json").write_text(text)
        with pytest.raises(UserError, match=r"wrong\.json: no readable trajectories"):
            output_of(tmp_path / "wrong.json")
