"""``rollout.harness.train_if``: which replies are trained, and that the others are recorded."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.endpoint_sessions import BASH, HELLO, Saying, call, served

from agent_rl.commands.show import show
from agent_rl.config import HarnessConfig
from agent_rl.endpoint.server import EndpointServer
from agent_rl.render import ChatRenderer
from agent_rl.rollout.metrics import harness_metrics
from agent_rl.rollout.records import write_trajectories
from agent_rl.types import BranchCause, Group, StopReason
from agent_rl.viewer.api import Resources

TITLE = [{"role": "system", "content": "Write a title."}, *HELLO]
SAID = ["A title", "Look. " + call("ls"), "A summary", "A page", "Done."]


async def an_episode(opened: Any) -> None:
    """A title, a turn, a compaction without tools, a page summarized by a small model, and a turn after them."""
    await opened.reply(TITLE, model="small")
    reply = await opened.reply(HELLO, tools=[BASH], model="main")
    seen = [*HELLO, reply, {"role": "tool", "tool_call_id": "x", "content": "seen"}]
    await opened.reply([*seen, {"role": "user", "content": "Summarize."}], model="main")
    await opened.reply([{"role": "user", "content": "Summarize this page."}], model="small")
    await opened.reply([{"role": "user", "content": "So far: a summary"}], tools=[BASH], model="main")


@pytest.mark.parametrize(
    ("rules", "left_out"),
    [
        ({}, [0, 3]),
        ({"requests": "all"}, []),
        ({"requests": "with-tools"}, [0, 2, 3]),
        ({"requests": "all", "models": ["main"]}, [0, 3]),
        ({"branches": "first"}, [0, 2, 3, 4]),
    ],
)
async def test_rules_choose_the_trained_replies(
    renderer: ChatRenderer, rules: dict[str, Any], left_out: Sequence[int]
) -> None:
    harness = HarnessConfig.model_validate({"command": "true", "train_if": rules})
    async with served(renderer, engine=Saying(renderer, SAID), harness=harness) as opened:
        await an_episode(opened)
        session = opened.session
        session.apply_training_rules()
        turns, branches = session.turns(), session.tree.branches()
        assert [number for number, turn in enumerate(turns) if turn.left_out] == list(left_out)
        trained = sorted(token for branch in branches for token in branch.tokens[branch.loss_mask].tolist())
        kept = [node for number, node in enumerate(session.tree.nodes) if number not in left_out]
        assert trained == sorted(token for node in kept for token in node.sampled)
        assert branches[0].cause is BranchCause.START


async def test_an_episode_without_tools_has_no_side_requests(serve: Any) -> None:
    async with serve("a") as opened:
        await opened.reply(HELLO)
        opened.session.apply_training_rules()
        assert [turn.left_out for turn in opened.session.turns()] == [""]


async def test_a_left_out_reply_is_recorded_shown_and_counted(
    endpoint: EndpointServer, drive: Any, say: Any, tmp_path: Path
) -> None:
    program = "import json, os, urllib.request as u\nurl = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
    program += "\n".join(
        f"u.urlopen(u.Request(url, json.dumps({body!r}).encode())).read()"
        for body in ({"messages": TITLE}, {"messages": HELLO, "tools": [BASH]})
    )
    (tmp_path / "program.py").write_text(program)
    harness = HarnessConfig(command=f"python3 {tmp_path}/program.py", location="host")
    trajectory = await drive(say(*SAID), harness)
    assert (trajectory.stop, len(trajectory.branches)) == (StopReason.SUBMITTED, 1)
    assert trajectory.harness == {"rewrites": 0, "retries": 0, "echo_differs": 0}
    first, second = (turn.completion_tokens for turn in trajectory.turns)
    assert harness_metrics([trajectory])["harness/left_out_token_fraction"] == first / (first + second)
    write_trajectories(tmp_path, 1, [Group("t", (trajectory,))])
    console = Console(file=io.StringIO(), width=200)
    show(tmp_path, step=None, task=None, sample=None, as_list=False, console=console)
    assert console.file.getvalue().count("not trained: requests: a side request") == 1  # type: ignore[attr-defined]
    turns = Resources([tmp_path]).read("0/t/1-0")["turns"]
    assert [(turn["left_out"], turn["span"] is None) for turn in turns] == [
        ("requests: a side request", True),
        ("", False),
    ]
