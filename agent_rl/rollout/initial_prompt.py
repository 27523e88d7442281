"""How an agent is told its tools: by the chat template where that speaks the format, else in the system prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agent_rl.types import TokenIds
from tools import ToolCallFormat

Messages = list[Mapping[str, str]]


class Renderer(Protocol):
    """Text to tokens and back, append-only; :class:`agent_rl.render.ChatRenderer` is the one for models."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn."""
        ...

    def opening(self, messages: Sequence[Mapping[str, str]], tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        """The tokens of the opening messages, up to where the agent's first turn begins."""
        ...

    def observation(self, text: str, *, stop_included: bool) -> list[int]:
        """What stands between the last sampled token and the agent's next turn. ``stop_included``: whether that token
        was a stop token, which is not to be repeated."""
        ...

    def decode(self, tokens: TokenIds) -> str:
        """The text of one sampled turn, without its stop token."""
        ...


def open_conversation(
    renderer: Renderer,
    fmt: ToolCallFormat,
    messages: Sequence[Mapping[str, str]],
    schemas: Sequence[Mapping[str, Any]],
    *,
    describe_tools: bool,
) -> tuple[Messages, list[int]]:
    """The opening messages as the agent reads them, and their tokens.

    Chat templates describe tools in the Hermes format only, and some ignore them: then, and for other formats, the
    format's own description is appended to the system message. Where there are no tools nothing is described.
    """
    plain = renderer.opening(messages, None)
    if not (describe_tools and schemas):
        return list(messages), plain
    if fmt.name == "hermes" and (templated := renderer.opening(messages, schemas)) != plain:
        return list(messages), templated
    described = _append_to_system(messages, fmt.describe(schemas))
    return described, renderer.opening(described, None)


def _append_to_system(messages: Sequence[Mapping[str, str]], text: str) -> Messages:
    if not messages or messages[0]["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    first = messages[0]
    return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
