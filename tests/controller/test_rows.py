"""Episodes as chat rows: messages as an engine's chat API has them, and the tokens that were sampled."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.trajectories import trajectory
from tokenizers import Tokenizer
from typer.testing import CliRunner

from agent_rl.cli import app
from agent_rl.commands.rows import RowChoice, write_rows
from agent_rl.errors import UserError
from agent_rl.rollout.records import write_trajectories
from agent_rl.types import Group, Turn
from tools import ToolCall, tool_format
from tools.formats import TOOL_FORMATS

CAPTURED = Path(__file__).resolve().parents[1] / "captured"
ARGUMENTS = {"command": "ls -l 'a b'"}


def rows_of(source: Path, out: Path, *options: object) -> tuple[list[Any], str]:
    result = CliRunner().invoke(app, ["rows", *map(str, (source, out, *options))])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in out.read_text().splitlines()], result.output


def test_rows_of_a_run_have_the_sampled_tokens_and_the_messages(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(CAPTURED / "quickstart/tokenizer.json"))
    rows, output = rows_of(CAPTURED / "quickstart", tmp_path / "rows.jsonl")
    assert f"{len(rows)} rows of {len({row['task_id'] for row in rows})} tasks" in output
    assert all(row["resolved"] for row in rows)
    for row in rows[:20]:
        tokens, mask = np.array(row["tokens"]), np.array(row["loss_mask"], bool)
        assert len(tokens) == len(mask)
        sampled = tokenizer.decode(tokens[mask].tolist(), skip_special_tokens=True)
        assistants = [message for message in row["messages"] if message["role"] == "assistant"]
        for message in assistants:
            assert message["content"] in sampled
            for call in message.get("tool_calls", ()):
                for value in json.loads(call["function"]["arguments"]).values():
                    assert str(value) in sampled
        ids = [call["id"] for message in assistants for call in message.get("tool_calls", ())]
        answered = [message["tool_call_id"] for message in row["messages"] if message["role"] == "tool"]
        assert len(set(ids)) == len(ids)
        assert set(answered) <= set(ids)


def test_rows_of_an_evaluation_are_chosen_by_outcome_and_task(tmp_path: Path) -> None:
    source = CAPTURED / "evaluations/tiny-moe"
    resolved, _ = rows_of(source, tmp_path / "resolved.jsonl")
    every, output = rows_of(source, tmp_path / "all.jsonl", "--all")
    assert len(resolved) < len(every)
    assert "left out: none" in output
    one, _ = rows_of(source, tmp_path / "one.jsonl", "--per-task", 1)
    assert set(Counter(row["task_id"] for row in one).values()) == {1}
    assert {row["task_id"] for row in one} == {row["task_id"] for row in resolved}


@pytest.mark.parametrize("name", TOOL_FORMATS.built_in)
def test_thoughts_and_calls_of_every_format_are_fields(name: str, tmp_path: Path) -> None:
    thoughts, call = "<think>\nWhere?\n</think>", tool_format(name).render(ToolCall("bash", ARGUMENTS))
    turn = Turn(
        thoughts + call, "bash", ARGUMENTS, None, "edited", 3, 2, 1, 0, "0", 0.0, 0.0, thinking_chars=len(thoughts)
    )
    messages = [{"role": "user", "content": "Fix."}, {"role": "assistant", "content": turn.text}]
    observed = {"role": "tool", "content": "edited"}
    episode = replace(trajectory(1.0), turns=(turn,), messages=(*messages, observed))
    write_trajectories(tmp_path, 1, [Group("t", (episode,))])
    ((row,), _) = rows_of(tmp_path, tmp_path / "rows.jsonl")
    _, assistant, result = row["messages"]
    assert assistant["reasoning_content"] == "Where?"
    (made,) = assistant["tool_calls"]
    assert (made["function"]["name"], json.loads(made["function"]["arguments"])) == ("bash", ARGUMENTS)
    assert result == observed | {"tool_call_id": made["id"]}
    assert (row["tokens"], row["loss_mask"]) == ([0, 1, 2, 3, 4], [0, 0, 0, 1, 1])


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "there.jsonl").write_text("")
    for source, out, line in (
        (tmp_path, "rows.jsonl", "expected the directory of a run with trajectories"),
        (CAPTURED / "quickstart", "there.jsonl", "exists already"),
    ):
        with pytest.raises(UserError, match=line):
            write_rows(source, tmp_path / out, RowChoice())
