"""The tokens with which the endpoint begins a reply that is constrained or must be a tool call.

They are those with which every such call begins; the engine samples the rest, under a grammar if it has one
(``constraints.py``). For example in the format hermes for the named tool ``bash``::

    opening    <tool_call>\\n{"name": "bash", "arguments":      part of the prompt, not trained
    sampled     {"command": "ls"}}\\n</tool_call>             trained
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Protocol

from agent_rl.endpoint.messages import ChatRequest, RequestRejected
from agent_rl.types import TokenIds
from tools import Reasoning, ToolCall, ToolCallFormat

_EXAMPLES: tuple[dict[str, str], ...] = ({}, {"a": "b"}, {"Z": ""})
"""Arguments of which no two begin alike, so that the common beginning of the calls ends before the arguments."""


class CallRenderer(Protocol):
    """Converts the text of calls to tokens."""

    @property
    def reasoning(self) -> Reasoning: ...

    @property
    def end_of_thoughts(self) -> TokenIds: ...

    def written(self, text: str) -> list[int]: ...


def forced_tools(request: ChatRequest) -> list[Mapping[str, Any]]:
    """The offered tools of which the reply must call one. Raises RequestRejected if there is none."""
    offered, named = [*request.tools, *request.deferred_tools], request.forced_tool
    tools = [tool for tool in offered if named in (None, tool["function"]["name"])]
    if not tools:
        missing = "no tool" if named is None else f"no tool {named!r}"
        raise RequestRejected("bad", f"tool_choice: {missing} is offered")
    return tools


def forced_opening(
    renderer: CallRenderer, fmt: ToolCallFormat, request: ChatRequest, *, constrained: bool = False
) -> list[int]:
    """The tokens with which the reply to ``request`` begins; empty if no call is forced and it is not ``constrained``
    by a grammar. Raises RequestRejected.

    They are the common prefix of the tokens of whole calls, so that they are tokens as the model writes them. Thoughts
    that the prompt opens are closed before.
    """
    forced = request.tool_choice == "required"
    closing = renderer.end_of_thoughts if renderer.reasoning.prompt_opens and (forced or constrained) else ()
    return [*closing, *(_call_opening(renderer, fmt, request, constrained) if forced else ())]


def _call_opening(renderer: CallRenderer, fmt: ToolCallFormat, request: ChatRequest, constrained: bool) -> list[int]:
    names = [tool["function"]["name"] for tool in forced_tools(request)]
    try:
        calls = [fmt.render(ToolCall(name, arguments)) for name in names for arguments in _EXAMPLES]
    except KeyError:  # a format of one tool with one argument
        if constrained:
            return []
        raise RequestRejected("bad", f"tool_choice: no call can be forced in the format {fmt.name}") from None
    return _common_prefix([renderer.written(call) for call in calls])


def _common_prefix(sequences: Sequence[Sequence[int]]) -> list[int]:
    return [column[0] for column in takewhile(lambda tokens: len(set(tokens)) == 1, zip(*sequences, strict=False))]
