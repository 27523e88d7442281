"""``rollout.max_thinking_tokens`` with an agent program: its reply, and what is trained of it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from support.endpoint_sessions import BASH, CHAT, HELLO, LAYOUT, MODEL, Saying, call, drive, served
from support.scripted_engine import scripted_rows

from agent_rl.config import HarnessConfig
from agent_rl.endpoint.server import EndpointServer
from agent_rl.render import ChatRenderer
from agent_rl.rollout.records import write_trajectories
from agent_rl.types import Group
from agent_rl.viewer.api import Resources
from tools import Reasoning

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture
def thinking() -> ChatRenderer:
    """A renderer whose prompts open thoughts."""
    renderer = ChatRenderer(MODEL)
    renderer.reasoning = Reasoning("<think>", "</think>", prompt_opens=True)
    renderer.end_of_thoughts = tuple(renderer._encoder.encode("\n</think>\n\n"))
    return renderer


async def test_closed_thoughts_of_a_program_s_reply_are_not_trained(thinking: ChatRenderer) -> None:
    engine = Saying(thinking, ["why " * 40, call("ls"), "so</think>Done."])
    async with served(thinking, engine=engine, max_thinking_tokens=12, max_new_tokens=300) as opened:
        answer = (await opened.post(CHAT, messages=HELLO, tools=[BASH])).json()
        reply, close = answer["choices"][0]["message"], list(thinking.end_of_thoughts)
        assert reply["tool_calls"][0]["function"]["name"] == "bash"
        assert reply["reasoning_content"].startswith("why why")
        messages = [*HELLO, reply, {"role": "tool", "tool_call_id": "x", "content": "seen"}]
        assert (await opened.reply(messages, tools=[BASH]))["content"] == "Done."
        opened.session.tree.deliver(opened.session.tree.nodes[-1])
        (branch,) = opened.session.tree.branches()
        first, second = opened.session.turns()
        start, stop = first.prompt_tokens + 12, first.prompt_tokens + 12 + len(close)
        assert branch.tokens[start:stop].tolist() == close
        trained = np.flatnonzero(branch.loss_mask).tolist()
        ends = (turn.prompt_tokens + turn.completion_tokens + turn.inserted_tokens for turn in (first, second))
        spans = zip((first.prompt_tokens, second.prompt_tokens), ends, strict=True)
        assert trained == [at for a, b in spans for at in range(a, b) if at not in range(start, stop)]
        assert np.array_equal(branch.logprobs, np.where(branch.loss_mask, np.float32(-0.5), 0))
        assert np.array_equal(branch.routing.experts[:-1], scripted_rows(0, len(branch.tokens) - 1, LAYOUT))
        assert branch.routes_missing == 0
        assert [turn.inserted_tokens for turn in (first, second)] == [len(close), 0]
        assert first.thinking_tokens == 12 + len(close)
        assert answer["usage"]["completion_tokens"] == first.completion_tokens + first.inserted_tokens


async def test_the_viewer_finds_the_turns_of_each_branch(
    thinking: ChatRenderer, endpoint: EndpointServer, tmp_path: Path
) -> None:
    engine = Saying(thinking, ["why " * 40, call("ls")] * 3)
    command = shlex.join([sys.executable, str(PROGRAMS / "talk.py"), "compacts"])
    harness = HarnessConfig(command=command, location="host")
    driven = await drive(endpoint, thinking, engine, harness, max_turns=5, max_thinking_tokens=12)
    assert [turn.inserted_tokens for turn in driven.turns] == [len(thinking.end_of_thoughts)] * 3
    write_trajectories(tmp_path, 1, [Group("t", (driven,))])
    found = Resources([tmp_path]).read("0/t/1-0")
    assert [turn["branch"] for turn in found["turns"]] == [0, 0, 1]
    for shown, turn in zip(found["turns"], driven.turns, strict=True):
        length = turn.completion_tokens + turn.inserted_tokens
        assert shown["span"] == [turn.prompt_tokens, turn.prompt_tokens + length]
