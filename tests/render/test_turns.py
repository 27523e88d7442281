"""An assistant's turn as tokens: what the model would have sampled for its thoughts, text and calls."""

from __future__ import annotations

from functools import cache

import pytest
from support.family_templates import FORMS

from agent_rl.errors import TemplateError
from agent_rl.render import ChatRenderer
from tools import ToolCall, parse_turn, tool_format

CALL = ToolCall("bash", {"command": "grep '<|im_end|>' \"a b\" | head\n"})
TOOLS = [{"function": {"name": "bash", "parameters": {"properties": {"command": {"type": "string"}}}}}]


@cache
def renderer_of(kind: str) -> ChatRenderer:
    return ChatRenderer(FORMS[kind].chat_model(kind))


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("calls", [(), (CALL,)], ids=["text", "call"])
@pytest.mark.parametrize("thoughts", ["", "Where is it?"], ids=["", "thoughts"])
def test_a_turn_reads_as_what_it_was_made_of(kind: str, calls: tuple[ToolCall, ...], thoughts: str) -> None:
    renderer = renderer_of(kind)
    fmt = tool_format(renderer.tool_format)
    if thoughts and (kind == "deepseek_v3" or not renderer.end_of_thoughts):
        with pytest.raises(
            TemplateError, match=r"the turn has thoughts, and the (chat template has none|prompt closes them)"
        ):
            renderer.turn(fmt, thoughts, "Look.", calls)
        return
    tokens = renderer.turn(fmt, thoughts, "Look.", calls)
    assert tokens[-1] in renderer.stop_token_ids
    assert not set(tokens[:-1]) & set(renderer.stop_token_ids)
    turn = parse_turn(fmt, renderer.decode(tokens), TOOLS, renderer.reasoning)
    assert (turn.reasoning, turn.text, turn.calls) == (thoughts, "Look.", calls)
