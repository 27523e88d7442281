"""Calls that a program sends back as text.

smolagents' ToolCallingAgent writes an earlier reply as a line and the list of its calls, as Python prints it::

    Calling tools:
    [{'id': 'call_00112233445566ff_0', 'type': 'function', 'function': {'name': 'shell', 'arguments': {...}}}]

The ids are the endpoint's, so the message stands for the sampled tokens.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from agent_rl.endpoint.messages import issued_reply_id
from agent_rl.rollout.conversation_tree import ChatMessage
from tools import ToolCall

OPENING = "Calling tools:\n"
_MAX_CHARS = 1 << 20


def with_read_calls(message: ChatMessage) -> ChatMessage:
    """``message`` with the calls that its text lists, if the endpoint issued their ids; else unchanged."""
    text, opening, listed = message.text.rpartition(OPENING)
    if message.role != "assistant" or message.calls or not opening or len(listed) > _MAX_CHARS:
        return message
    try:
        calls: list[Mapping[str, Any]] = ast.literal_eval(listed.strip())
        reply = issued_reply_id(*(call["id"] for call in calls))
        functions = [call["function"] for call in calls]
        read = tuple(ToolCall(str(each["name"]), dict(each["arguments"])) for each in functions)
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError):
        return message
    return ChatMessage("assistant", text, read, message.reasoning, reply) if reply else message
