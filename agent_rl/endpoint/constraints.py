"""What a reply may say: forced calls and JSON schemas of a request as a form, which the engine converts to a grammar.

::

    tool_choice required, or a tool          a call of an offered tool, or of that tool
    response_format without tools, or none   JSON of the schema
    response_format with tools               either
    strict tools that may be called          text; after the beginning of a call of such a tool, a call of its schema

The endpoint begins such a reply with the tokens with which every such call begins; the engine samples the rest, under
the grammar if it has one. For example in the format hermes for the named tool ``bash``::

    opening    <tool_call>\\n{"name": "bash", "arguments":      part of the prompt, not trained
    sampled     {"command": "ls"}}\\n</tool_call>             trained
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

from agent_rl.endpoint.messages import ChatRequest, RequestRejected
from agent_rl.engine.grammars import convert
from agent_rl.engine.types import Engine
from agent_rl.errors import GrammarRefused, GrammarsUnsupported
from agent_rl.types import TokenIds
from tools import Reasoning, ToolCall, ToolCallFormat
from tools.formats.grammars import call_parts, dispatch, json_value, literal, one_of, sequence, without_rules
from tools.types import ConstrainsCalls, Form, WritesTurns

_EXAMPLES: tuple[dict[str, str], ...] = ({}, {"a": "b"}, {"Z": ""})
"""Arguments of which no two begin alike, so that the common beginning of the calls ends before the arguments."""


class Constraint(NamedTuple):
    """The ``grammar`` of a reply: from its beginning, or from the first of ``heads`` on."""

    grammar: str
    heads: tuple[str, ...] = ()


async def constraint_of(engine: Engine, fmt: ToolCallFormat, request: ChatRequest) -> Constraint | None:
    """The constraint of the reply to ``request``; None if it may say anything, or if only its opening can be forced.

    The calls of a tool follow its schema; if no grammar expresses that and the tool is not strict, they have its
    arguments with any JSON as values. Raises RequestRejected for what can be neither constrained nor forced.
    """
    forced = request.tool_choice == "required"
    if not forced and request.response_schema is None:
        return await _strict_calls(engine, fmt, request)
    if forced and not isinstance(fmt, ConstrainsCalls):
        return None
    called = _called(request)
    free = [name for name in called if name not in request.strict_tools]
    refusal = ""
    for without in ([], free) if free else ([],):
        try:
            return Constraint(await convert(engine, _form(fmt, request, called, without)))
        except (GrammarRefused, ValueError) as error:
            refusal = str(error)
        except GrammarsUnsupported as error:
            if forced:
                return None
            raise RequestRejected("bad", f"response_format: {error}") from None
    where = "tool_choice" if forced else "response_format"
    raise RequestRejected("bad", f"{where}: no grammar expresses the schema: {refusal}")


async def _strict_calls(engine: Engine, fmt: ToolCallFormat, request: ChatRequest) -> Constraint | None:
    """Text in which what follows the beginning of a call of a strict tool has its schema."""
    strict = [(name, schema) for name, schema in _called(request).items() if name in request.strict_tools]
    if not strict or not isinstance(fmt, ConstrainsCalls):
        return None
    try:
        calls = dict(call_parts(fmt.call_form(name, schema)) for name, schema in strict)
        return Constraint(await convert(engine, dispatch(calls)), tuple(calls))
    except (GrammarRefused, ValueError) as error:
        raise RequestRejected("bad", f"tools: a strict tool: no grammar expresses the schema: {error}") from None
    except GrammarsUnsupported:
        return None


def _called(request: ChatRequest) -> dict[str, Any]:
    """The schemas of the arguments of the tools that the reply may call, by name."""
    tools: Sequence[Mapping[str, Any]] = ()
    if request.tool_choice == "required":
        tools = forced_tools(request)
    elif request.tool_choice == "auto":
        tools = [*request.tools, *request.deferred_tools]
    return {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}


def _form(fmt: ToolCallFormat, request: ChatRequest, called: dict[str, Any], without: Collection[str]) -> Form:
    """``without``: tools whose calls need not follow their schemas. Raises ValueError for what cannot be written."""
    forms = []
    if request.tool_choice != "required" and request.response_schema is not None:
        value = json_value(request.response_schema)
        turn = fmt.render_turn("", "{}", ()) if isinstance(fmt, WritesTurns) else "{}"
        before = turn.partition("{}")[0]
        forms.append(sequence(literal(before), value) if before else value)
    for name, parameters in called.items():
        if not isinstance(fmt, ConstrainsCalls):
            raise ValueError(f"the format {fmt.name} has no form of calls")
        forms.append(fmt.call_form(name, without_rules(parameters) if name in without else parameters))
    return one_of(forms)


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
