"""How OpenHands reads calls from text: ``openhands/llm/fn_call_converter.py``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tools.tags import elements, through_last
from tools.types import ParseFailure, ToolCall

CONTINUE = (
    "Please continue working on the task on whatever approach you think is suitable.\n"
    "If you think you have solved the task, please first send your answer to user through message and then finish the "
    "interaction.\n"
    "IMPORTANT: YOU SHOULD NEVER ASK FOR HUMAN HELP.\n"
)
"""What a turn without a call is answered with: ``codeact_user_response`` of ``evaluation/utils/shared.py``."""

_NAME = re.compile(r"<function=([^>]+)>")
_PARAMETER = re.compile(r"<parameter=([^>]+)>")


class OpenHandsFormat:
    """Implements :class:`tools.types.ToolCallFormat`. A call that the turn ends in may lack its closing tag."""

    name = "openhands"

    def parse(self, text: str) -> ToolCall | ParseFailure:
        text = through_last(_closed(text), ">")
        named = next((tag for tag in _NAME.finditer(text) if text.startswith("\n", tag.end())), None)
        end = -1 if named is None else text.find("</function>", named.end() + 1)
        if named is None or end < 0:
            return ParseFailure(CONTINUE)
        found = elements(through_last(text[named.end() + 1 : end], ">"), _PARAMETER, "</parameter>")
        return ToolCall(named[1], {key: value.strip() for key, value in found})

    def render(self, call: ToolCall) -> str:
        parameters = "".join(
            f"<parameter={key}>{_written(value)}</parameter>\n" for key, value in call.arguments.items()
        )
        return f"<function={call.name}>\n{parameters}</function>"

    def describe(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Nothing: the interface's system prompt describes the tools."""
        return ""


def _closed(text: str) -> str:
    if text.count("<function=") != 1:
        return text
    return f"{text.rstrip()}function>" if text.endswith("</") else f"{text}\n</function>"


def _written(value: Any) -> str:
    return f"\n{value}\n" if isinstance(value, str) and "\n" in value else str(value)
