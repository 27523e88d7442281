"""R2E-Gym's text format of calls: ``src/r2egym/agenthub/agent/agent.py`` (``parse_response``), ``action/action.py``.

The parser is lenient. It takes the text from the first ``<function=...>`` to the first ``</function>`` and ignores text
between the parameters. An unclosed parameter extends to the next closing tag; without one it is ignored. The last of
several parameters with one name counts. Values are stripped. ``<think>`` blocks are not skipped.
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
"""``CONTINUE_MSG`` of ``src/r2egym/agenthub/__init__.py``, unchanged."""

_OPEN, _CLOSE = "<function=", "</function>"
_NAME = re.compile(r"<function\s*=\s*([^>]+)>")
_PARAMETER = re.compile(r"<parameter\s*=\s*([^>]+)>")


class R2EGymFormat:
    """Implements :class:`tools.types.ToolCallFormat`. Values are strings."""

    name = "r2egym"

    def parse(self, text: str) -> ToolCall | ParseFailure:
        start = text.find(_OPEN)
        end = text.find(_CLOSE, start)
        block = text[start : end + len(_CLOSE)] if 0 <= start < end else ""
        name_tag = _NAME.search(block)
        if name_tag is None or not name_tag[1].strip():
            return ParseFailure(CONTINUE)
        parameters = elements(block, _PARAMETER, "</parameter>")
        return ToolCall(name_tag[1].strip(), {key.strip(): value.strip() for key, value in parameters})

    def render(self, call: ToolCall) -> str:
        """The layout of past turns in R2E-Gym's training data."""
        parameters = [f"  <parameter={key}>{value}</parameter>\n" for key, value in call.arguments.items()]
        return f"<function={call.name}>\n{''.join(parameters)}</function>"

    def describe(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Empty: the scaffold's system prompt describes the tools."""
        return ""
