"""Demonstrations with the real tools in real sandboxes, and what they become for the trainer."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from agent_rl.config.loader import install_model
from agent_rl.render.chat import ChatRenderer
from envs import EnvContext
from envs.mini import generate
from scripts.train_demo_model import Demonstrator, encode, record_demonstrations
from tools import ToolCall, tool_format


def test_the_demonstrator_keeps_its_fractions_of_mistakes() -> None:
    tasks = [task for task in generate("train", 1200, seed=0) if task.decoys]
    rng = random.Random(0)
    demonstrator = Demonstrator(unedited=0.4, careless=0.15)
    turns = [demonstrator.turns(task, rng) for task in tasks]
    unedited = np.mean([len(some) == 2 for some in turns])
    edits = [f"<parameter=new_str>{task.new}</parameter>" for task in tasks]
    right = np.mean([len(some) == 3 and edit in some[1] for edit, some in zip(edits, turns, strict=True)])
    assert abs(unedited - 0.4) < 0.07
    assert abs(right - 0.45) < 0.07


def sampled_turns() -> list[str]:
    """More than 500 calls, of demonstrations of all kinds."""
    rng, demonstrator = random.Random(0), Demonstrator(unedited=0.2, careless=0.4)
    return [turn for task in generate("train", 250, seed=1) for turn in demonstrator.turns(task, rng)]


def test_the_text_of_the_calls_that_the_starting_model_learned() -> None:
    """The shipped weights learned this text; a call written otherwise would be new to them."""
    task, start = generate("train", 1, seed=0)[0], "<function=file_editor><parameter=command>"
    path = f"<parameter=path>{task.path}</parameter>"
    edit = f"<parameter=old_str>{task.old}</parameter><parameter=new_str>{task.new}</parameter>"
    assert Demonstrator(0.0, 0.0).turns(task, random.Random(0)) == [
        f"{start}view</parameter>{path}</function>",
        f"{start}str_replace</parameter>{path}{edit}</function>",
        "<function=finish></function>",
    ]


def hermes(call: ToolCall) -> str:
    """The text that Qwen's models are trained to write: one line of JSON between the tags."""
    body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def test_a_parsed_call_is_rendered_to_the_same_text() -> None:
    turns = sampled_turns()
    assert len(turns) > 500
    for turn in turns:
        call = tool_format("xml").parse(turn)
        assert tool_format("xml").render(call) == turn
        text = hermes(call)
        assert tool_format("hermes").render(tool_format("hermes").parse(text)) == text


@pytest.mark.bubblewrap
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
        assert renderer.decode(spoken).replace("<|im_end|>", "") == said
        assert spoken.count(renderer.end_of_turn_id) == 3
