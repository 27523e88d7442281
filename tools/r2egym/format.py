"""How R2E-Gym's agent reads calls: ``src/r2egym/agenthub/agent/agent.py`` (``parse_response``), ``action/action.py``.

It is lenient: the first ``<function=...>`` up to the first ``</function>`` is taken, whatever stands between the
parameters; an unclosed parameter reaches to the next closing tag, or is none; of two of one name the last counts;
values lose the white space around them. Thinking is not skipped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tools.tags import elements
from tools.types import ParseFailure, ToolCall

CONTINUE = """
You forgot to use a function call in your response. 
YOU MUST USE A FUNCTION CALL IN EACH RESPONSE.

IMPORTANT: YOU SHOULD NEVER ASK FOR HUMAN HELP.
"""
"""``CONTINUE_MSG`` of ``src/r2egym/agenthub/__init__.py``, to the character."""

_OPEN, _CLOSE = "<function=", "</function>"
_NAME = re.compile(r"<function\s*=\s*([^>]+)>")
_PARAMETER = re.compile(r"<parameter\s*=\s*([^>]+)>")


class R2EGymFormat:
    """Implements :class:`tools.types.ToolCallFormat`. Values are strings, and stay so."""

    name = "r2egym"

    def parse(self, text: str) -> ToolCall | ParseFailure:
        start = text.find(_OPEN)
        end = text.find(_CLOSE, start)
        block = text[start : end + len(_CLOSE)] if 0 <= start < end else ""
        named = _NAME.search(block)
        if named is None or not named[1].strip():
            return ParseFailure(CONTINUE)
        found = elements(block, _PARAMETER, "</parameter>")
        return ToolCall(named[1].strip(), {key.strip(): value.strip() for key, value in found})

    def render(self, call: ToolCall) -> str:
        """The layout in which R2E-Gym's agent writes the turns of a history down, on which its models are trained."""
        parameters = [f"  <parameter={key}>{value}</parameter>\n" for key, value in call.arguments.items()]
        return f"<function={call.name}>\n{''.join(parameters)}</function>"

    def describe(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Nothing: the interface's system prompt describes the tools."""
        return ""
