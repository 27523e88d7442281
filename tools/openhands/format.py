"""OpenHands' text format of calls: ``openhands/llm/fn_call_converter.py``."""

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
"""The observation after a turn without a call: ``codeact_user_response`` of ``evaluation/utils/shared.py``."""

_NAME = re.compile(r"<function=([^>]+)>")
_PARAMETER = re.compile(r"<parameter=([^>]+)>")


class OpenHandsFormat:
    """Implements :class:`tools.types.ToolCallFormat`. The closing tag may be missing at the end of a turn."""

    name = "openhands"

    def parse(self, text: str) -> ToolCall | ParseFailure:
        text = through_last(_close_tag(text), ">")
        name_tag = next((tag for tag in _NAME.finditer(text) if text.startswith("\n", tag.end())), None)
        end = -1 if name_tag is None else text.find("</function>", name_tag.end() + 1)
        if name_tag is None or end < 0:
            return ParseFailure(CONTINUE)
        parameters = elements(through_last(text[name_tag.end() + 1 : end], ">"), _PARAMETER, "</parameter>")
        return ToolCall(name_tag[1], {key: value.strip() for key, value in parameters})

    def render(self, call: ToolCall) -> str:
        fields = "".join(
            f"<parameter={key}>{_render_value(value)}</parameter>\n" for key, value in call.arguments.items()
        )
        return f"<function={call.name}>\n{fields}</function>"

    def describe(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Empty: the scaffold's system prompt describes the tools."""
        return ""


def _close_tag(text: str) -> str:
    if text.count("<function=") != 1:
        return text
    return f"{text.rstrip()}function>" if text.endswith("</") else f"{text}\n</function>"


def _render_value(value: Any) -> str:
    return f"\n{value}\n" if isinstance(value, str) and "\n" in value else str(value)
