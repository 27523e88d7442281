"""Who describes the tools to the agent: the chat template, the system message, or nobody."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent_rl.rollout.initial_prompt import build_initial_prompt
from agent_rl.rollout.scripted_policies import ByteRenderer
from tools.formats import tool_format

MESSAGES = [{"role": "system", "content": "Be good."}, {"role": "user", "content": "Fix it."}]
PARAMETERS = {"type": "object", "properties": {}, "required": []}
SCHEMAS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": PARAMETERS}}]


class TemplateWithTools(ByteRenderer):
    """A chat template that describes tools itself."""

    def initial_prompt(self, messages: Any, tools: Any) -> list[int]:
        return [*super().initial_prompt(messages, None), *(json.dumps(tools).encode() if tools else b"")]


def opened(renderer: ByteRenderer, fmt: str, *, messages: Any = MESSAGES, describe_tools: bool = True) -> Any:
    shown, tokens = build_initial_prompt(renderer, tool_format(fmt), messages, SCHEMAS, describe_tools=describe_tools)
    return shown, renderer.decode(tokens)


@pytest.mark.parametrize("fmt", ["hermes", "glm"])
def test_a_template_with_tools_describes_them_in_the_format_of_its_family(fmt: str) -> None:
    renderer = TemplateWithTools()
    renderer.tool_format = fmt
    shown, text = opened(renderer, fmt)
    assert shown == MESSAGES
    assert text.count('"look"') == 1


@pytest.mark.parametrize(("renderer", "fmt"), [(ByteRenderer(), "hermes"), (TemplateWithTools(), "xml")])
def test_otherwise_the_system_message_describes_them(renderer: ByteRenderer, fmt: str) -> None:
    shown, text = opened(renderer, fmt)
    description = tool_format(fmt).describe(SCHEMAS)
    assert shown == [{"role": "system", "content": f"Be good.\n\n{description}"}, MESSAGES[1]]
    assert text == f"Be good.\n\n{description}Fix it."


def test_a_missing_system_message_is_added() -> None:
    shown, _ = opened(ByteRenderer(), "xml", messages=MESSAGES[1:])
    assert [message["role"] for message in shown] == ["system", "user"]


@pytest.mark.parametrize("fmt", ["hermes", "xml"])
def test_describe_tools_false_leaves_the_prompt_unchanged(fmt: str) -> None:
    shown, text = opened(TemplateWithTools(), fmt, describe_tools=False)
    assert (shown, text) == (MESSAGES, "Be good.Fix it.")
