"""The form of constrained text: what a reply may say, as data from which the engine makes a grammar.

A form is a ``format`` of XGrammar's structural tags (xgrammar.mlc.ai, 0.2.7), of which only the kinds below are used.
JSON in it is written as ``json.dumps`` writes it, without other white space.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tools.schema import accepts_string
from tools.types import Form, ToolCall

_TEXT_RULES = ("pattern", "format", "minLength", "maxLength")


def literal(text: str) -> Form:
    return {"type": "const_string", "value": text}


def sequence(*parts: Form) -> Form:
    return {"type": "sequence", "elements": list(parts)}


def one_of(forms: Sequence[Form]) -> Form:
    return forms[0] if len(forms) == 1 else {"type": "or", "elements": list(forms)}


def call_parts(call: Form) -> tuple[str, Form]:
    """The text with which the form of a ``call`` begins, and the form of what follows."""
    head, *following = call["elements"]
    return head["value"], sequence(*following)


def dispatch(calls: Mapping[str, Form]) -> Form:
    """Any text, in which each key of ``calls`` is followed by its form."""
    return {"type": "dispatch", "rules": [[head, following] for head, following in calls.items()], "loop": True}


def json_value(schema: Mapping[str, Any]) -> Form:
    return {"type": "json_schema", "json_schema": dict(schema)}


def json_call(render: Callable[[ToolCall], str], name: str, parameters: Mapping[str, Any]) -> Form:
    """A call of ``name`` in a format that writes the arguments as one JSON object."""
    before, _, after = render(ToolCall(name, {})).rpartition("{}")
    return sequence(literal(before), json_value(parameters), *([literal(after)] if after else ()))


def tagged_call(
    head: str,
    argument: Callable[[str, Mapping[str, Any]], tuple[str, str]],
    tail: str,
    parameters: Mapping[str, Any],
    excluded: Sequence[str],
) -> Form:
    """A call whose arguments stand between tags, in the order of the schema.

    ``argument`` gives the text before and after the value of an argument with a schema. A value is text without the
    markers ``excluded`` where the schema accepts a string, JSON otherwise, as the parser reads it. Raises ValueError
    for a schema that restricts the characters of such text.
    """
    required = parameters.get("required") or ()
    shared = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    arguments = []
    for key, given in (parameters.get("properties") or {}).items():
        schema = given if isinstance(given, Mapping) else {}
        before, after = argument(key, schema)
        whole = sequence(literal(before), _value(key, schema, shared, excluded), literal(after))
        arguments.append(whole if key in required else {"type": "optional", "content": whole})
    return sequence(literal(head), *arguments, literal(tail))


def _value(key: str, schema: Mapping[str, Any], shared: Mapping[str, Any], excluded: Sequence[str]) -> Form:
    if not accepts_string(schema):
        return json_value({**shared, **schema})
    choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if choices:
        texts = [choice if isinstance(choice, str) else json.dumps(choice) for choice in choices]
        if any(not text or marker in text for text in texts for marker in excluded):
            raise ValueError(f"argument {key!r}: a value of its enum cannot stand between tags")
        return one_of([literal(text) for text in texts])
    if rules := [rule for rule in _TEXT_RULES if rule in schema]:
        raise ValueError(f"argument {key!r}: {rules[0]} of a text between tags is not supported")
    return {"type": "any_text", "excludes": list(excluded)}


def without_rules(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of the same arguments with any JSON as values, for a tool whose schema no grammar expresses."""
    properties, required = parameters.get("properties"), parameters.get("required")
    names = list(properties) if isinstance(properties, Mapping) else []
    needed = [name for name in required if name in names] if isinstance(required, list) else []
    schema = {"type": "object", "properties": {name: {} for name in names}, "required": needed}
    return schema if names else {"type": "object"}
