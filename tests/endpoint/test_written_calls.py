"""Calls that come back as text, as smolagents writes them, stand for the sampled tokens."""

from __future__ import annotations

from typing import Any

import pytest
from support.endpoint_sessions import BASH, HELLO, call

from agent_rl.endpoint.messages import OPENING, with_read_calls
from agent_rl.rollout.conversation_tree import ChatMessage
from tools import ToolCall

ID = "call_00112233445566ff_0"


def listed(identifier: str, command: str = "ls") -> str:
    function = {"name": "bash", "arguments": {"command": command}}
    return f"{OPENING}{[{'id': identifier, 'type': 'function', 'function': function}]}"


def test_the_calls_are_read() -> None:
    read = with_read_calls(ChatMessage("assistant", "I look. " + listed(ID, "echo 'a \"b'")))
    assert read == ChatMessage(
        "assistant", "I look. ", (ToolCall("bash", {"command": "echo 'a \"b'"}),), "", "00112233445566ff"
    )


@pytest.mark.parametrize(
    "message",
    [
        ChatMessage("user", listed(ID)),
        ChatMessage("assistant", listed("other")),
        ChatMessage("assistant", OPENING),
        ChatMessage("assistant", f"{OPENING}[{{'id': 1}}]"),
        ChatMessage("assistant", f"{OPENING}{'[' * 5000}"),
        ChatMessage("assistant", f"{OPENING}None"),
        ChatMessage("assistant", f"{OPENING}[{{'id': '{ID}'}}]"),
    ],
    ids=["user", "other-id", "empty", "number", "nested", "none", "no-function"],
)
def test_other_text_is_left_as_it_is(message: ChatMessage) -> None:
    assert with_read_calls(message) is message


@pytest.mark.parametrize(("command", "branches"), [("ls", 1), ("ls -a", 2)])
async def test_a_conversation_continues_if_the_calls_are_those_sampled(serve: Any, command: str, branches: int) -> None:
    async with serve(call("ls"), "Done.") as served:
        first = await served.reply(HELLO, tools=[BASH])
        again = {"role": "assistant", "content": listed(first["tool_calls"][0]["id"], command)}
        await served.reply([*HELLO, again, {"role": "user", "content": "seen"}], tools=[BASH])
        assert len(served.session.tree.branches()) == branches
