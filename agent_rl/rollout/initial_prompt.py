"""Builds the initial prompt. Tools are described by the chat template if it renders the format, else in the system
message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agent_rl.render.prefix_check import Role
from agent_rl.types import SampledCall, TokenIds
from tools import Reasoning, ToolCallFormat

Messages = list[Mapping[str, Any]]


class Renderer(Protocol):
    """Converts text to tokens and back, append-only. :class:`agent_rl.render.ChatRenderer` is the renderer for
    models."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn."""
        ...

    @property
    def reasoning(self) -> Reasoning:
        """The markers around the thoughts of a sampled turn."""
        ...

    @property
    def end_of_thoughts(self) -> TokenIds:
        """The tokens between a turn's thoughts and what it says; empty for a model without thoughts."""
        ...

    @property
    def tool_format(self) -> str:
        """The name of the format in which ``initial_prompt`` describes tools."""
        ...

    def initial_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[int]:
        """The tokens of ``messages`` up to the start of the agent's first turn."""
        ...

    def observation(
        self, text: str, role: Role | None = None, *, stop: int | None, call: SampledCall | None = None
    ) -> list[int]:
        """The tokens between the last sampled token and the agent's next turn. ``role`` is that of the message, None
        the renderer's choice. ``stop``: the last sampled token if it is a stop token. ``call``: the call whose result
        the observation is."""
        ...

    def decode(self, tokens: TokenIds) -> str:
        """The text of one sampled turn, without its stop token."""
        ...


def build_initial_prompt(
    renderer: Renderer,
    fmt: ToolCallFormat,
    messages: Sequence[Mapping[str, Any]],
    schemas: Sequence[Mapping[str, Any]],
    *,
    describe_tools: bool,
) -> tuple[Messages, list[int]]:
    """``(messages, tokens)`` of the initial prompt as the agent reads it.

    A chat template describes tools in its family's format, or ignores them. If it ignores them, and for other formats,
    the format's own description is appended to the system message. Without tools nothing is described.
    """
    plain = renderer.initial_prompt(messages, None)
    if not (describe_tools and schemas):
        return list(messages), plain
    if fmt.name == renderer.tool_format and (templated := renderer.initial_prompt(messages, schemas)) != plain:
        return list(messages), templated
    described = _append_to_system(messages, fmt.describe(schemas))
    return described, renderer.initial_prompt(described, None)


def _append_to_system(messages: Sequence[Mapping[str, Any]], text: str) -> Messages:
    if not messages or messages[0]["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    first = messages[0]
    return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
