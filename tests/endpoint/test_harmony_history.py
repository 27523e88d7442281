"""The history of a gpt-oss model: thoughts and calls of earlier turns become messages with control tokens."""

from __future__ import annotations

from typing import Any

import pytest
from support.chat_templates import tokenizer
from support.endpoint_sessions import BASH, CHAT, HELLO, served
from tokenizers import AddedToken, Tokenizer

from agent_rl.render import ChatModel, ChatRenderer

CONTROL = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>", "<|constrain|>"]
# The published template in few words.
TEMPLATE = """
{%- set last = namespace(name=none) %}
{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}
{%- set last.name = m.tool_calls[0].function.name %}
{%- if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}
{%- if m.content or m.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}{% endif %}
{{- '<|start|>assistant to=functions.' + last.name + '<|channel|>commentary json<|message|>' }}
{{- (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}
{%- elif m.role == 'assistant' %}{% set last.name = none %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'tool' %}{% if last.name is none %}{{ raise_exception('no call') }}{% endif %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- (m.content | tojson) + '<|end|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

THOUGHT = "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{"command": "ls"}'
RENDERED_CALL = (
    "<|start|>assistant<|channel|>analysis<|message|>I look.<|end|><|start|>assistant to=functions.bash<|channel|>"
    'commentary json<|message|>{"command": "ls"}<|call|>'
)
RESULT = '<|start|>functions.bash to=assistant<|channel|>commentary<|message|>"seen"<|end|>'


@pytest.fixture(scope="module")
def gpt_oss() -> ChatRenderer:
    made = Tokenizer.from_str(tokenizer().to_str())
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    eos = tuple(made.token_to_id(text) for text in ("<|return|>", "<|call|>"))
    return ChatRenderer(ChatModel(made, TEMPLATE, eos_token_ids=eos, model_type="gpt_oss"))


def called(*calls: str, **fields: Any) -> dict[str, Any]:
    """A program's message with calls of bash."""
    functions = [{"name": "bash", "arguments": f'{{"command": "{command}"}}'} for command in calls]
    listed = [{"id": f"x{n}", "type": "function", "function": each} for n, each in enumerate(functions)]
    return {"role": "assistant", "content": None, "tool_calls": listed, **fields}


SEEN = {"role": "tool", "tool_call_id": "x0", "content": "seen"}


@pytest.mark.parametrize(
    ("message", "results", "expected"),
    [
        (called("ls", reasoning_content="I look."), [SEEN], RENDERED_CALL + RESULT),
        (called("ls", content="I look."), [SEEN], RENDERED_CALL + RESULT),
        (
            called("ls", "pwd", reasoning_content="I look."),
            [SEEN, SEEN],
            RENDERED_CALL
            + '<|start|>assistant to=functions.bash<|channel|>commentary json<|message|>{"command": "pwd"}<|call|>'
            + RESULT * 2,
        ),
        (
            {"role": "assistant", "content": "Yes.", "reasoning_content": "So."},
            [*HELLO],
            "<|start|>assistant<|channel|>final<|message|>Yes.<|end|><|start|>user<|message|>u<|end|>",
        ),
    ],
)
async def test_a_history_that_a_program_invented_has_the_family_s_form(
    gpt_oss: ChatRenderer, message: Any, results: Any, expected: str
) -> None:
    async with served(gpt_oss, "ok", fmt="harmony", history="follow") as opened:
        assert (await opened.post(CHAT, messages=[*HELLO, message, *results], tools=[BASH])).status_code == 200
        (branch,) = opened.session.tree.branches()
        end = f"<|start|>user<|message|>u<|end|>{expected}<|start|>assistant"
        assert branch.tokens[~branch.loss_mask].tolist()[-len(encoded(gpt_oss, end)) :] == encoded(gpt_oss, end)


async def test_a_sampled_turn_that_is_rendered_again_has_the_family_s_form(gpt_oss: ChatRenderer) -> None:
    async with served(gpt_oss, THOUGHT + CALL, "ok", fmt="harmony") as opened:
        reply = await opened.reply(HELLO, tools=[BASH])
        assert (reply["content"], reply["reasoning_content"]) == (None, "I look.")
        changed = [{"role": "user", "content": "other"}, reply, SEEN]
        assert (await opened.post(CHAT, messages=changed, tools=[BASH])).status_code == 200
        _, second = opened.session.tree.branches()
        expected = encoded(gpt_oss, RENDERED_CALL + RESULT + "<|start|>assistant")
        assert second.tokens[~second.loss_mask].tolist()[-len(expected) :] == expected


async def test_closed_thoughts_of_gpt_oss_are_followed_by_a_call(gpt_oss: ChatRenderer) -> None:
    open_thoughts, rest = "<|channel|>analysis<|message|>" + "I wonder. " * 30, CALL.partition("commentary")[2]
    async with served(
        gpt_oss, open_thoughts, "and so on " * 9, rest, fmt="harmony", max_thinking_tokens=20, max_new_tokens=400
    ) as opened:
        reply = await opened.reply(HELLO, tools=[BASH])
        assert reply["tool_calls"][0]["function"] == {"name": "bash", "arguments": '{"command":"ls"}'}
        assert reply["content"] is None
        assert reply["reasoning_content"].startswith("I wonder. I wonder.")
        (turn,) = opened.session.turns()
        assert turn.inserted_tokens == len(gpt_oss.end_of_thoughts)


def encoded(renderer: ChatRenderer, text: str) -> list[int]:
    return renderer._encoder.encode(text)
