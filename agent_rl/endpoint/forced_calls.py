"""Forces a reply to be a tool call (``tool_choice``: required, or a named tool) with an engine that constrains nothing.

The endpoint writes the tokens with which every such call begins and the engine samples the rest, for example in the
format hermes for the named tool ``bash``::

    opening    <tool_call>\\n{"name": "bash", "arguments":      part of the prompt, not trained
    sampled     {"command": "ls"}}\\n</tool_call>             trained
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol

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


def forced_opening(renderer: CallRenderer, fmt: ToolCallFormat, request: ChatRequest) -> list[int]:
    """The tokens with which the reply to ``request`` begins; empty if no call is forced. Raises RequestRejected.

    They are the common prefix of the tokens of whole calls, so that they are tokens as the model writes them. Thoughts
    that the prompt opens are closed before.
    """
    if request.tool_choice != "required":
        return []
    offered = [tool["function"]["name"] for tool in (*request.tools, *request.deferred_tools)]
    names = offered if request.forced_tool is None else [name for name in offered if name == request.forced_tool]
    if not names:
        missing = "no tool" if request.forced_tool is None else f"no tool {request.forced_tool!r}"
        raise RequestRejected("bad", f"tool_choice: {missing} is offered")
    try:
        calls = [fmt.render(ToolCall(name, arguments)) for name in names for arguments in _EXAMPLES]
    except KeyError:  # a format of one tool with one argument
        raise RequestRejected("bad", f"tool_choice: no call can be forced in the format {fmt.name}") from None
    opening = _common_prefix([renderer.written(call) for call in calls])
    return [*(renderer.end_of_thoughts if renderer.reasoning.prompt_opens else ()), *opening]


def _common_prefix(sequences: Sequence[Sequence[int]]) -> list[int]:
    return [column[0] for column in takewhile(lambda tokens: len(set(tokens)) == 1, zip(*sequences, strict=False))]
