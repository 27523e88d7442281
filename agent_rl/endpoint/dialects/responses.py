"""OpenAI's Responses: ``POST /v1/responses``, without state: every request brings its whole conversation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from agent_rl.endpoint.dialects.chat import Chat, read_arguments, write_arguments
from agent_rl.endpoint.messages import (
    Ask,
    Loose,
    Refusal,
    Reply,
    bounded,
    joined,
    minted,
    offered,
    read_body,
    refuse_unless,
)
from agent_rl.rollout.conversation_tree import ChatMessage
from tools import ToolCall

_TEXT = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
_OURS = ("reasoning", "function_call")


class _Tool(Loose):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Request(Loose):
    input: str | list[dict[str, Any]]
    model: str = ""
    instructions: str | None = None
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    previous_response_id: str | None = None
    text: dict[str, Any] | None = None
    top_logprobs: int | None = None


class Responses:
    """See :class:`agent_rl.endpoint.messages.Dialect`. Of tools, functions alone are offered."""

    def read(self, body: bytes) -> Ask:
        asked = read_body(_Request, body)
        refuse_unless(asked.previous_response_id is None, "previous_response_id")
        refuse_unless(asked.tool_choice in (None, "auto"), "a forced tool_choice")
        refuse_unless(((asked.text or {}).get("format") or {}).get("type", "text") == "text", "text.format")
        refuse_unless(not asked.top_logprobs, "top_logprobs")
        items = [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else asked.input
        system = [ChatMessage("system", asked.instructions)] if asked.instructions else []
        messages = system + _messages(items)
        tools = [
            offered(tool.name, tool.description, tool.parameters)
            for tool in asked.tools or ()
            if tool.type == "function"
        ]
        return Ask(messages, tools, bounded(asked.max_output_tokens), bool(asked.stream), asked.model)

    def reply(self, reply: Reply) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if reply.finish == "length" else None
        status = "incomplete" if cut else "completed"
        return {**_head(reply, status), "incomplete_details": cut, "output": _output(reply), "usage": _usage(reply)}

    def events(self, reply: Reply, ask: Ask) -> Iterator[bytes]:
        begun = {**_head(reply, "in_progress"), "incomplete_details": None, "output": [], "usage": None}
        whole = self.reply(reply)
        last = "response.incomplete" if reply.finish == "length" else "response.completed"
        events = [("response.created", {"response": begun}), ("response.in_progress", {"response": begun})]
        for index, item in enumerate(whole["output"]):
            events += _item_events(index, item)
        events.append((last, {"response": whole}))
        for number, (kind, data) in enumerate(events):
            written = orjson.dumps({"type": kind, "sequence_number": number, **data})
            yield b"event: %s\ndata: %s\n\n" % (kind.encode(), written)

    def refusal(self, refusal: Refusal) -> dict[str, Any]:
        return Chat().refusal(refusal)


def _messages(items: list[dict[str, Any]]) -> list[ChatMessage]:
    """The messages; what the assistant gave out as several items is one."""
    found: list[ChatMessage] = []
    turn: list[tuple[str, dict[str, Any]]] = []
    for at, item in enumerate(items):
        where, kind = f"input.{at}", item.get("type", "message")
        if kind in _OURS or (kind == "message" and item.get("role") == "assistant"):
            turn.append((where, item))
            continue
        if turn:
            found.append(_assistant(turn))
            turn = []
        found.append(_other(item, kind, where))
    return [*found, _assistant(turn)] if turn else found


def _other(item: dict[str, Any], kind: str, where: str) -> ChatMessage:
    if kind == "function_call_output":
        return ChatMessage("tool", joined(item.get("output"), _TEXT, f"{where}.output"))
    role = item.get("role")
    if kind != "message" or role not in ("user", "system", "developer"):
        raise Refusal("bad", f"{where}: an item of type {kind!r} and role {role!r} cannot be sampled after")
    text = joined(item.get("content"), _TEXT, f"{where}.content")
    return ChatMessage("user" if role == "user" else "system", text)


def _assistant(turn: list[tuple[str, dict[str, Any]]]) -> ChatMessage:
    texts, thoughts, calls, identifiers = [], [], [], []
    for where, item in turn:
        identifiers += [item.get("call_id"), item.get("encrypted_content"), item.get("id")]
        if item.get("type") == "function_call":
            arguments = read_arguments(str(item.get("arguments", "")), f"{where}.arguments")
            calls.append(ToolCall(str(item.get("name", "")), arguments))
        elif item.get("type") == "reasoning":
            parts = item.get("content") or item.get("summary")
            thoughts.append(joined(parts, _TEXT, where))
        else:
            texts.append(joined(item.get("content"), _TEXT, where))
    known = minted(*(each for each in identifiers if isinstance(each, str)))
    return ChatMessage("assistant", "\n".join(texts), tuple(calls), "\n".join(thoughts), known)


def _output(reply: Reply) -> list[dict[str, Any]]:
    spoken = reply.spoken
    items: list[dict[str, Any]] = []
    if spoken.reasoning:
        summary = [{"type": "summary_text", "text": spoken.reasoning}]
        items.append({"id": f"rs_{reply.id}", "type": "reasoning", "summary": summary, "encrypted_content": reply.id})
    if spoken.text or not spoken.calls:
        content = [{"type": "output_text", "text": spoken.text, "annotations": []}]
        status = "incomplete" if reply.finish == "length" else "completed"
        said = {"type": "message", "role": "assistant", "status": status, "content": content}
        items.append({"id": f"msg_{reply.id}", **said})
    for number, call in enumerate(spoken.calls):
        made = {"call_id": reply.call_id(number), "name": call.name, "arguments": write_arguments(call)}
        items.append({"id": reply.call_id(number, "fc"), "type": "function_call", "status": "completed", **made})
    return items


def _item_events(index: int, item: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    at = {"output_index": index, "item_id": item["id"]}
    if item["type"] == "message":
        (part,) = item["content"]
        begun, inner = {**item, "status": "in_progress", "content": []}, _text_events(at, part)
    elif item["type"] == "function_call":
        begun = {**item, "status": "in_progress", "arguments": ""}
        written = item["arguments"]
        inner = [
            ("response.function_call_arguments.delta", {**at, "delta": written}),
            ("response.function_call_arguments.done", {**at, "name": item["name"], "arguments": written}),
        ]
    else:
        begun, inner = {**item, "summary": []}, _summary_events(at, item["summary"][0])
    return [
        ("response.output_item.added", {"output_index": index, "item": begun}),
        *inner,
        ("response.output_item.done", {"output_index": index, "item": item}),
    ]


def _text_events(at: dict[str, Any], part: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    place = {**at, "content_index": 0}
    return [
        ("response.content_part.added", {**place, "part": {**part, "text": ""}}),
        ("response.output_text.delta", {**place, "delta": part["text"], "logprobs": []}),
        ("response.output_text.done", {**place, "text": part["text"], "logprobs": []}),
        ("response.content_part.done", {**place, "part": part}),
    ]


def _summary_events(at: dict[str, Any], part: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    place = {**at, "summary_index": 0}
    return [
        ("response.reasoning_summary_part.added", {**place, "part": {**part, "text": ""}}),
        ("response.reasoning_summary_text.delta", {**place, "delta": part["text"]}),
        ("response.reasoning_summary_text.done", {**place, "text": part["text"]}),
        ("response.reasoning_summary_part.done", {**place, "part": part}),
    ]


def _head(reply: Reply, status: str) -> dict[str, Any]:
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": reply.created,
        "status": status,
        "error": None,
        "instructions": None,
        "metadata": {},
        "model": reply.model,
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
    }


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": reply.sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + reply.sampled_tokens,
    }
