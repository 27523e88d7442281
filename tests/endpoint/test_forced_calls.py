"""Forced tool calls: what the endpoint writes, what is sampled and trained, and what the program receives."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest
from support.endpoint_sessions import BASH, CHAT, HELLO, MODEL, Saying, served

from agent_rl.endpoint.constraints import forced_opening
from agent_rl.endpoint.messages import ChatRequest
from agent_rl.render import ChatRenderer
from tools import Reasoning, ToolCall, tool_format
from tools.formats import TOOL_FORMATS

SUBMIT = {"type": "function", "function": {"name": "submit", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "bash"}}
FORMATS = [name for name in TOOL_FORMATS.built_in if name != "mini-swe-agent"]


def rest_of(renderer: ChatRenderer, fmt: str, forced: str | None, command: str) -> str:
    """What a model writes after the opening."""
    form = tool_format(fmt)
    request = ChatRequest([], [BASH, SUBMIT], None, False, "m", tool_choice="required", forced_tool=forced)
    opening = renderer.decode(forced_opening(renderer, form, request)).removeprefix("\n</think>\n\n")
    whole = form.render(ToolCall("bash", {"command": command}))
    assert whole.startswith(opening)
    return whole.removeprefix(opening)


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format_has_openings_that_name_the_tool_and_leave_its_arguments(renderer: ChatRenderer, fmt: str) -> None:
    whole = tool_format(fmt).render(ToolCall("bash", {"command": "ls"}))
    named, required = (rest_of(renderer, fmt, forced, "ls") for forced in ("bash", None))
    assert "bash" not in named
    assert "command" in named
    assert named in required
    assert required != whole


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("fmt", ["hermes", "qwen3-coder"])
async def test_a_forced_call_is_completed_and_continued(renderer: ChatRenderer, fmt: str, choice: Any) -> None:
    forced = None if choice == "required" else "bash"
    engine = Saying(renderer, [rest_of(renderer, fmt, forced, command) for command in ("ls", "cat a")])
    async with served(renderer, engine=engine, fmt=fmt) as opened:
        messages: list[Any] = [*HELLO]
        for command in ("ls", "cat a"):
            reply = await opened.reply(messages, tools=[BASH, SUBMIT], tool_choice=choice)
            (tool_call,) = reply["tool_calls"]
            assert tool_call["function"]["name"] == "bash"
            assert f'"{command}"' in tool_call["function"]["arguments"]
            messages += [reply, {"role": "tool", "tool_call_id": tool_call["id"], "content": "seen"}]
        (branch,) = opened.session.tree.branches()
        sampled = [token for node in opened.session.tree.nodes for token in node.sampled]
        assert branch.tokens[branch.loss_mask].tolist() == sampled, "the opening is not trained"
        written = renderer.decode(branch.tokens.tolist())
        assert all(tool_format(fmt).render(ToolCall("bash", {"command": c})) in written for c in ("ls", "cat a"))
        assert engine.scripted.rows_sent == len(branch.tokens) - 1


async def test_a_forced_call_closes_the_thoughts_that_the_prompt_opens() -> None:
    thinking = ChatRenderer(MODEL)
    thinking.reasoning = Reasoning("<think>", "</think>", prompt_opens=True)
    thinking.end_of_thoughts = tuple(thinking._encoder.encode("\n</think>\n\n"))
    engine = Saying(thinking, [rest_of(thinking, "hermes", "bash", "ls")])
    async with served(thinking, engine=engine, max_thinking_tokens=2) as opened:
        reply = await opened.reply(HELLO, tools=[BASH], tool_choice=NAMED)
        assert reply["tool_calls"][0]["function"] == {"name": "bash", "arguments": '{"command":"ls"}'}
        (turn,) = opened.session.turns()
        assert (turn.thinking_tokens, turn.inserted_tokens) == (0, 0)


async def test_the_other_dialects_force_calls(renderer: ChatRenderer) -> None:
    engine = Saying(renderer, [rest_of(renderer, "hermes", "bash", "ls")])
    async with served(renderer, engine=engine) as opened:
        claude = await opened.clients(anthropic.AsyncAnthropic(base_url=opened.url, api_key="x"))
        tools: Any = [{"name": "bash", "input_schema": BASH["function"]["parameters"]}]
        for choice in ({"type": "any"}, {"type": "tool", "name": "bash"}):
            request: Any = {"model": "m", "max_tokens": 99, "messages": HELLO, "tools": tools, "tool_choice": choice}
            reply = await claude.messages.create(**request)
            assert (reply.stop_reason, reply.content[-1].input) == ("tool_use", {"command": "ls"})
        client = await opened.clients(openai.AsyncOpenAI(base_url=f"{opened.url}/v1", api_key="x"))
        request = {"model": "m", "input": HELLO, "tools": [{"type": "function", **BASH["function"]}]}
        items = (await client.responses.create(**request, tool_choice={"type": "function", "name": "bash"})).output
        assert items[-1].arguments == '{"command":"ls"}'


@pytest.mark.parametrize(
    ("fmt", "choice", "line"),
    [
        ("hermes", {"type": "function", "function": {"name": "none"}}, "tool_choice: no tool 'none' is offered"),
        ("hermes", {"type": "allowed_tools"}, "tool_choice 'allowed_tools': not supported"),
        ("hermes", 3, "tool_choice 3: not supported"),
        (
            "mini-swe-agent",
            "required",
            "tool_choice: no grammar expresses the schema: mini-swe-agent writes calls of the tool bash",
        ),
    ],
)
async def test_a_choice_that_cannot_be_forced_is_refused(serve: Any, fmt: str, choice: Any, line: str) -> None:
    async with serve("ok", fmt=fmt) as opened:
        answer = await opened.post(CHAT, messages=HELLO, tools=[BASH, SUBMIT], tool_choice=choice)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(line)
        assert opened.engine.requests == 0
