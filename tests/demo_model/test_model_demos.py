"""Demonstrations with the real tools in real sandboxes, and what they become for the trainer."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from agent_rl.config.builtin import install_model
from agent_rl.render.chat import ChatRenderer
from envs import EnvContext
from envs.mini import generate
from scripts.train_demo_model import Demonstrator, encode, record_demonstrations
from tools import ToolCall, tool_format


def test_the_shares_of_the_demonstrator_are_what_it_says() -> None:
    tasks = [task for task in generate("train", 1200, seed=0) if task.decoys]
    rng = random.Random(0)
    demonstrator = Demonstrator(unedited=0.4, careless=0.15)
    turns = [demonstrator.turns(task, rng) for task in tasks]
    unedited = np.mean([len(some) == 2 for some in turns])
    right = np.mean(
        [
            len(some) == 3 and f"<parameter=new_str>{task.new}</parameter>" in some[1]
            for task, some in zip(tasks, turns, strict=True)
        ]
    )
    assert abs(unedited - 0.4) < 0.07
    assert abs(right - 0.45) < 0.07


def sampled_turns() -> list[str]:
    """More than 500 calls, of demonstrations of all kinds."""
    rng, demonstrator = random.Random(0), Demonstrator(unedited=0.2, careless=0.4)
    return [turn for task in generate("train", 250, seed=1) for turn in demonstrator.turns(task, rng)]


def test_the_starting_model_was_shown_calls_in_exactly_this_text() -> None:
    """The weights that are shipped learned this text; a call written otherwise would be new to them."""
    task = generate("train", 1, seed=0)[0]
    view, edit, submit = Demonstrator(0.0, 0.0).turns(task, random.Random(0))
    assert view == (
        f"<function=file_editor><parameter=command>view</parameter><parameter=path>{task.path}</parameter></function>"
    )
    assert edit == (
        f"<function=file_editor><parameter=command>str_replace</parameter><parameter=path>{task.path}</parameter>"
        f"<parameter=old_str>{task.old}</parameter><parameter=new_str>{task.new}</parameter></function>"
    )
    assert submit == "<function=finish></function>"


def test_a_call_of_the_starting_model_read_and_written_again_is_the_same_text() -> None:
    fmt, turns = tool_format("xml"), sampled_turns()
    assert len(turns) > 500
    for turn in turns:
        call = fmt.parse(turn)
        assert isinstance(call, ToolCall)
        assert fmt.render(call) == turn


def test_a_hermes_call_read_and_written_again_is_the_same_text() -> None:
    """The same calls in the text that Qwen's models are trained to write: one line of JSON between the tags."""
    hermes, xml = tool_format("hermes"), tool_format("xml")
    for turn in sampled_turns():
        call = xml.parse(turn)
        assert isinstance(call, ToolCall)
        body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
        text = f"<tool_call>\n{body}\n</tool_call>"
        parsed = hermes.parse(text)
        assert isinstance(parsed, ToolCall)
        assert hermes.render(parsed) == text


def test_calls_are_written_as_the_parser_reads_them() -> None:
    task = generate("train", 1, seed=0)[0]
    view, edit, submit = Demonstrator(0.0, 0.0).turns(task, random.Random(0))
    parse = tool_format("xml").parse
    assert parse(view) == ToolCall("file_editor", {"command": "view", "path": task.path})
    assert parse(edit) == ToolCall(
        "file_editor", {"command": "str_replace", "path": task.path, "old_str": task.old, "new_str": task.new}
    )
    assert parse(submit) == ToolCall("finish", {})


@pytest.mark.bubblewrap
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
async def test_a_demonstration_is_encoded_as_an_episode_would_be(tmp_path: Path) -> None:
    from sandbox.bubblewrap.backend import BubblewrapBackend

    tasks = generate("train", 2, seed=0)
    backend = BubblewrapBackend(run_id="test-demos")
    try:
        dialogues = await record_demonstrations(EnvContext(backend), tasks, Demonstrator(0.0, 0.0), seed=0)
    finally:
        await backend.close()
    install_model(tmp_path / "model")
    renderer = ChatRenderer(tmp_path / "model")
    for task, dialogue, (tokens, weights) in zip(tasks, dialogues, encode(dialogues, tmp_path / "model"), strict=True):
        seen = [message["content"] for message in dialogue if message["role"] == "tool"]
        assert seen == [task.files[task.path].rstrip("\n"), "edited"]
        said = "".join(message["content"] for message in dialogue if message["role"] == "assistant")
        spoken = tokens[weights == 1.0].tolist()
        assert renderer.decode(spoken) == said
        assert spoken.count(renderer.end_of_turn_id) == 3
