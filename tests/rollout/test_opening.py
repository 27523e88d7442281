"""How the agent is told its tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from agent_rl.rollout.initial_prompt import build_initial_prompt
from agent_rl.rollout.scripted_policies import ByteRenderer
from tools.formats import tool_format

MESSAGES = [{"role": "system", "content": "Be good."}, {"role": "user", "content": "Fix it."}]
SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks.",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    }
]


class TemplateWithTools(ByteRenderer):
    """A chat template that describes tools itself."""

    def initial_prompt(
        self, messages: Sequence[Mapping[str, str]], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[int]:
        return [*super().initial_prompt(messages, None), *(json.dumps(tools).encode() if tools else b"")]


def opened(renderer: ByteRenderer, fmt: str, *, messages: Any = MESSAGES, describe_tools: bool = True) -> Any:
    told, tokens = build_initial_prompt(renderer, tool_format(fmt), messages, SCHEMAS, describe_tools=describe_tools)
    return told, renderer.decode(tokens)


def test_a_template_that_describes_tools_does_so_for_hermes() -> None:
    told, text = opened(TemplateWithTools(), "hermes")
    assert told == MESSAGES
    assert text.count('"look"') == 1


@pytest.mark.parametrize(("renderer", "fmt"), [(ByteRenderer(), "hermes"), (TemplateWithTools(), "xml")])
def test_otherwise_the_system_message_does(renderer: ByteRenderer, fmt: str) -> None:
    told, text = opened(renderer, fmt)
    description = tool_format(fmt).describe(SCHEMAS)
    assert told == [{"role": "system", "content": f"Be good.\n\n{description}"}, MESSAGES[1]]
    assert text == f"Be good.\n\n{description}Fix it."


def test_a_system_message_is_made_where_there_is_none() -> None:
    told, _ = opened(ByteRenderer(), "xml", messages=MESSAGES[1:])
    assert [message["role"] for message in told] == ["system", "user"]


@pytest.mark.parametrize("fmt", ["hermes", "xml"])
def test_nothing_is_told_where_that_is_wanted(fmt: str) -> None:
    told, text = opened(TemplateWithTools(), fmt, describe_tools=False)
    assert (told, text) == (MESSAGES, "Be good.Fix it.")
