"""Represents a chat conversation as the token sequence that the episode loop works on.

The loop is token-in, token-out; a chat endpoint takes messages. So the conversation is encoded as UTF-8 bytes (tokens 0
to 255) with a role token before each message::

    <system> S y s <user> f i x <assistant>        initial prompt: the endpoint generates what follows
    <system> S y s <user> f i x <assistant> o k <stop> <user> d o n e <assistant>

If the endpoint supports tool calls, the tools' schemas come first as JSON after a role token of their own. A call of
the endpoint is stored in the turn's text in the Hermes format, which the loop parses. In the next request it becomes a
``tool_calls`` field again, and the observation after it a message with role ``tool``.

The field ``reasoning_content`` of a response comes first in its turn, between the markers of :data:`tools.THINK`. It is
kept in the transcript and is not sent back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agent_rl.render.prefix_check import Role
from agent_rl.types import SampledCall, TokenIds
from tools import THINK, ParseFailure, ToolCall, parse_call
from tools.formats import HermesFormat

STOP = 256
_ROLES = {"system": 257, "user": 258, "assistant": 259, "tools": 260}
_END_OF_REASONING = 261
_ROLE_OF_TOKEN = {mark: role for role, mark in _ROLES.items()}
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class ChatTextRenderer:
    """Implements :class:`agent_rl.rollout.initial_prompt.Renderer` with bytes and role tokens; observations have role
    user.

    ``native_tools``: send the tools to the endpoint. Otherwise they are not rendered and the loop describes them in the
    system message.
    """

    stop_token_ids = (STOP,)
    reasoning, tool_format = THINK, "hermes"
    end_of_thoughts = ()  # the endpoint closes its own

    def __init__(self, *, native_tools: bool = False) -> None:
        self._native_tools = native_tools

    def initial_prompt(
        self, messages: Sequence[Mapping[str, str]], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[int]:
        tool_tokens = [_ROLES["tools"], *encode(json.dumps(list(tools)))] if tools and self._native_tools else []
        return [*tool_tokens, *self.extension(messages, stop=STOP)]

    def observation(
        self, text: str, role: Role | None = None, *, stop: int | None, call: SampledCall | None = None
    ) -> list[int]:
        return self.extension([{"role": "user", "content": text}], stop=stop)

    history_fields = False

    def extension(self, messages: Sequence[Mapping[str, Any]], *, stop: int | None) -> list[int]:
        """As :meth:`observation` for any messages; results of tools have role user."""
        end = [STOP] if stop is None else []
        roles = ({"tool": "user"}.get(message["role"], message["role"]) for message in messages)
        tokens = [
            token for role, m in zip(roles, messages, strict=True) for token in (_ROLES[role], *encode(m["content"]))
        ]
        return [*end, *tokens, _ROLES["assistant"]]

    def plain_text(self, text: str) -> list[int]:
        return list(encode(text))

    written = plain_text

    def decode(self, tokens: TokenIds) -> str:
        return bytes(token for token in tokens if token < STOP).decode(errors="replace")


class NativeToolCalls(HermesFormat):
    """Parses a turn whose call came in the endpoint's ``tool_calls`` field; its messages do not mention the tags."""

    def parse(self, text: str) -> ToolCall | ParseFailure:
        if _OPEN not in text:
            return ParseFailure("no tool call found; call one of the tools", words=True)
        return super().parse(text)


def encode(text: str) -> bytes:
    return text.encode(errors="replace")


def read_messages(tokens: TokenIds) -> list[dict[str, str]]:
    """The messages in ``tokens``, without the empty last one that the endpoint is to write."""
    return [{"role": role, "content": text} for role, text in _parts(tokens) if role != "tools"]


def read_native(tokens: TokenIds) -> dict[str, Any]:
    """The request's fields ``messages`` and ``tools``, with earlier calls as ``tool_calls``."""
    fields: dict[str, Any] = {"messages": []}
    for role, text in _parts(tokens):
        if role == "tools":
            fields["tools"] = json.loads(text)
        else:
            fields["messages"].append(_native_message(role, text, fields["messages"]))
    return fields


def message_tokens(message: Mapping[str, Any]) -> list[int]:
    """The tokens of a turn: the reasoning and content of the endpoint's ``message`` and its first tool call.

    Raises AttributeError, KeyError, IndexError or TypeError for a message of another form.
    """
    said = encode(_spoken_text(message))
    if not (reasoning := message.get("reasoning_content")):
        return list(said)
    unclosed = reasoning.replace(THINK.close, "<\\/think>")  # must not end the thoughts before their end
    return [*encode(f"{THINK.open}\n{unclosed}\n{THINK.close}\n\n"), _END_OF_REASONING, *said]


def _spoken_text(message: Mapping[str, Any]) -> str:
    text = message.get("content") or ""
    if not message.get("tool_calls"):
        return str(text)
    function = message["tool_calls"][0]["function"]
    arguments = function["arguments"] or "{}"
    # As the endpoint wrote them: the loop's parser reports arguments that are not JSON to the model.
    raw = arguments if isinstance(arguments, str) else json.dumps(arguments)
    call = f'{_OPEN}\n{{"name": {json.dumps(function["name"])}, "arguments": {raw}}}\n{_CLOSE}'
    return f"{text}\n{call}" if text else call


def _native_message(role: str, text: str, before: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One message of a request; ``before`` are the messages before it."""
    if role == "user" and before and "tool_calls" in before[-1]:
        return {"role": "tool", "tool_call_id": before[-1]["tool_calls"][0]["id"], "content": text}
    call = parse_call(NativeToolCalls(), text) if role == "assistant" else None
    if not isinstance(call, ToolCall):
        return {"role": role, "content": text}
    function = {"name": call.name, "arguments": json.dumps(dict(call.arguments))}
    # Nine letters and digits: some chat templates accept no other identifiers.
    tool_call = {"id": f"call{len(before):05d}", "type": "function", "function": function}
    return {"role": role, "content": text.partition(_OPEN)[0].rstrip(), "tool_calls": [tool_call]}


def _parts(tokens: TokenIds) -> Iterator[tuple[str, str]]:
    """``(role, text)`` of each message in ``tokens``, without reasoning; assistant messages without text are
    skipped."""
    role, text = "", bytearray()
    for token in [*tokens, _ROLES["assistant"]]:
        if token in _ROLE_OF_TOKEN:
            if role and (text or role != "assistant"):
                yield role, text.decode(errors="replace")
            role = _ROLE_OF_TOKEN[token]
            text.clear()
        elif token == _END_OF_REASONING:
            text.clear()
        elif token < STOP:
            text.append(token)
