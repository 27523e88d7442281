"""gpt-oss's harmony format: messages with a header that names a channel and, for a call, its recipient.

The generation prompt ends in ``<|start|>assistant``, so a turn begins inside a header. Messages of the channel
``analysis`` are thoughts: they are neither calls nor text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tools.formats.grammars import json_call
from tools.formats.json_calls import decode_json, make_call
from tools.formats.turns import check_name, describe_as_json, first_call
from tools.split_reasoning import Reasoning
from tools.types import CallBlock, Form, ParseFailure, ToolCall

HARMONY = Reasoning("<|channel|>analysis<|message|>", "<|end|>", prompt_opens=False)
_MESSAGE, _CALL = "<|message|>", "<|call|>"
_ENDS = re.compile(r"<\|(?:end|call|return|start)\|>")
_RECIPIENT = re.compile(r"(?<![^\s>])to=(?:functions\.)?([^\s<>]+)(?=\s|<\||$)")
_EMPTY = re.compile(r"\s*<\|call\|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyFormat:
    """A call is a message outside of the channel ``analysis`` to ``functions.NAME`` with a JSON object."""

    name = "harmony"

    def parse(self, text: str) -> ToolCall | ParseFailure:
        return first_call(self, text, "no tool call found; write a message to=functions.NAME with a JSON object")

    def scan(self, content: str, position: int) -> CallBlock | ParseFailure | None:
        for start, header, body in _messages(content, position):
            recipient = _RECIPIENT.search(header)
            if recipient is None or _channel(header) in (None, "analysis"):
                continue
            return _read_call(content, start, recipient[1], body)
        return None

    def plain_text(self, content: str) -> str:
        """The text of the messages that are neither thoughts nor calls."""
        if _MESSAGE not in content:
            return content
        texts = []
        for _, header, body in _messages(content, 0):
            if _channel(header) != "analysis":
                ended = _ENDS.search(content, body)
                texts.append(content[body : ended.start() if ended else None].strip())
        return "\n".join(texts)

    def render(self, call: ToolCall) -> str:
        """Raises ``ValueError`` for a name that a header cannot hold."""
        check_name(call.name)
        body = json.dumps(dict(call.arguments), ensure_ascii=False)
        return f"<|channel|>commentary to=functions.{call.name} <|constrain|>json{_MESSAGE}{body}{_CALL}"

    def call_form(self, name: str, parameters: Mapping[str, Any]) -> Form:
        """See :class:`tools.types.ConstrainsCalls`."""
        return json_call(lambda call: self.render(call).removesuffix(_CALL), name, parameters)

    def render_turn(self, thoughts: str, text: str, calls: Sequence[ToolCall]) -> str:
        """Thoughts, text and the call are a message each. Raises ``ValueError`` for more than one call."""
        if len(calls) > 1:
            raise ValueError("a turn has one call")
        said = {"analysis": thoughts, "commentary" if calls else "final": text}
        messages = [f"<|channel|>{channel}{_MESSAGE}{body}" for channel, body in said.items() if body]
        rendered = "<|end|><|start|>assistant".join([*messages, *map(self.render, calls)])
        return rendered if calls else rendered + "<|return|>"

    def describe(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        example = f"<|channel|>commentary to=functions.NAME <|constrain|>json{_MESSAGE}<a JSON object>{_CALL}"
        return describe_as_json(schemas, example)


def _channel(header: str) -> str | None:
    match = _CHANNEL.search(header)
    return match[1] if match else None


def _read_call(content: str, start: int, name: str, body: int) -> CallBlock | ParseFailure:
    """The call in the message at ``start`` whose text begins at ``body``. No text means no arguments."""
    arguments: Any = {}
    end = body
    if not _EMPTY.match(content, body):
        decoded = decode_json(content, body)
        if isinstance(decoded, ParseFailure):
            return decoded
        arguments, end = decoded
    ended = _ENDS.search(content, end)
    if content[end : ended.start() if ended else None].strip():
        return ParseFailure(f"only a JSON object may stand in the message to functions.{name}")
    call = make_call(name, arguments)
    return call if isinstance(call, ParseFailure) else ((call,), start, ended.end() if ended else end)


def _messages(content: str, position: int) -> Iterator[tuple[int, str, int]]:
    """The start, the header and the start of the body of each message from ``position`` on."""
    while (mark := content.find(_MESSAGE, position)) >= 0:
        body = mark + len(_MESSAGE)
        ends = list(_ENDS.finditer(content, position, mark))
        position = _after(ends[-1]) if ends else position  # an earlier message without its marker
        yield position, content[position:mark], body
        ended = _ENDS.search(content, body)
        if ended is None:
            return
        position = _after(ended)


def _after(ended: re.Match[str]) -> int:
    """Where a message starts that follows ``ended``: ``<|start|>`` belongs to it."""
    return ended.start() if ended[0] == "<|start|>" else ended.end()
