"""What a reply may say: forced calls and JSON schemas of a request as a form, which the engine converts to a grammar.

::

    tool_choice required, or a tool          a call of an offered tool, or of that tool
    response_format without tools, or none   JSON of the schema
    response_format with tools               either
    strict tools that may be called          text; after the beginning of a call of such a tool, a call of its schema
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from agent_rl.endpoint.forced_calls import forced_tools
from agent_rl.endpoint.messages import ChatRequest, RequestRejected
from agent_rl.engine.grammars import convert
from agent_rl.engine.types import Engine
from agent_rl.errors import GrammarRefused, GrammarsUnsupported
from tools import ToolCallFormat
from tools.formats.grammars import call_parts, dispatch, json_value, literal, one_of, sequence, without_rules
from tools.types import ConstrainsCalls, Form, WritesTurns


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
