"""OpenAI Responses: ``POST /v1/responses``, stateless: every request carries its whole conversation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from agent_rl.endpoint.dialects.chat import Chat, read_arguments, write_arguments
from agent_rl.endpoint.messages import (
    ChatRequest,
    ChatResponse,
    RequestModel,
    RequestRejected,
    check_max_tokens,
    issued_reply_id,
    join_text,
    parse_request,
    read_response_format,
    read_tool_choice,
    require_supported,
    tool_schema,
)
from agent_rl.rollout.conversation_tree import ChatMessage
from tools import ToolCall

_TEXT = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
_REPLY_ITEMS = ("reasoning", "function_call")


class _Tool(RequestModel):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Request(RequestModel):
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
    """See :class:`agent_rl.endpoint.messages.Dialect`. Only function tools are tool_schema."""

    def read(self, body: bytes) -> ChatRequest:
        request = parse_request(_Request, body)
        tool_choice, forced_tool = read_tool_choice(request.tool_choice)
        require_supported(request.previous_response_id is None, "previous_response_id")
        require_supported(not request.top_logprobs, "top_logprobs")
        items = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
        system = [ChatMessage("system", request.instructions)] if request.instructions else []
        messages = system + _messages(items)
        tools = [tool_schema(t.name, t.description, t.parameters) for t in request.tools or () if t.type == "function"]
        return ChatRequest(
            messages, tools, check_max_tokens(request.max_output_tokens), bool(request.stream), request.model,
            tool_choice=tool_choice, forced_tool=forced_tool,
            response_schema=read_response_format((request.text or {}).get("format"), "text.format"),
            strict_tools=frozenset(t.name for t in request.tools or () if t.type == "function" and t.strict),
        )  # fmt: skip

    def response(self, reply: ChatResponse) -> dict[str, Any]:
        details = {"reason": "max_output_tokens"} if reply.finish == "length" else None
        status = "incomplete" if details else "completed"
        return {**_head(reply, status), "incomplete_details": details, "output": _output(reply), "usage": _usage(reply)}

    def events(self, reply: ChatResponse, request: ChatRequest) -> Iterator[bytes]:
        started = {**_head(reply, "in_progress"), "incomplete_details": None, "output": [], "usage": None}
        body = self.response(reply)
        last = "response.incomplete" if reply.finish == "length" else "response.completed"
        events = [("response.created", {"response": started}), ("response.in_progress", {"response": started})]
        for index, item in enumerate(body["output"]):
            events += _item_events(index, item)
        events.append((last, {"response": body}))
        for number, (kind, data) in enumerate(events):
            written = orjson.dumps({"type": kind, "sequence_number": number, **data})
            yield b"event: %s\ndata: %s\n\n" % (kind.encode(), written)

    def error(self, error: RequestRejected) -> dict[str, Any]:
        return Chat().error(error)


def _messages(items: list[dict[str, Any]]) -> list[ChatMessage]:
    """The messages; consecutive items of one assistant turn form one message."""
    messages: list[ChatMessage] = []
    turn: list[tuple[str, dict[str, Any]]] = []
    for index, item in enumerate(items):
        where, kind = f"input.{index}", item.get("type", "message")
        if kind in _REPLY_ITEMS or (kind == "message" and item.get("role") == "assistant"):
            turn.append((where, item))
            continue
        if turn:
            messages.append(_assistant(turn))
            turn = []
        messages.append(_other_message(item, kind, where))
    return [*messages, _assistant(turn)] if turn else messages


def _other_message(item: dict[str, Any], kind: str, where: str) -> ChatMessage:
    if kind == "function_call_output":
        return ChatMessage("tool", join_text(item.get("output"), _TEXT, f"{where}.output"))
    role = item.get("role")
    if kind != "message" or role not in ("user", "system", "developer"):
        raise RequestRejected("bad", f"{where}: items of type {kind!r} with role {role!r} are not supported")
    text = join_text(item.get("content"), _TEXT, f"{where}.content")
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
            thoughts.append(join_text(parts, _TEXT, where))
        else:
            texts.append(join_text(item.get("content"), _TEXT, where))
    reply_id = issued_reply_id(*(each for each in identifiers if isinstance(each, str)))
    return ChatMessage("assistant", "\n".join(texts), tuple(calls), "\n".join(thoughts), reply_id)


def _output(reply: ChatResponse) -> list[dict[str, Any]]:
    spoken = reply.spoken
    items: list[dict[str, Any]] = []
    if spoken.reasoning:
        summary = [{"type": "summary_text", "text": spoken.reasoning}]
        items.append({"id": f"rs_{reply.id}", "type": "reasoning", "summary": summary, "encrypted_content": reply.id})
    if spoken.text or not spoken.calls:
        content = [{"type": "output_text", "text": spoken.text, "annotations": []}]
        status = "incomplete" if reply.finish == "length" else "completed"
        message = {"type": "message", "role": "assistant", "status": status, "content": content}
        items.append({"id": f"msg_{reply.id}", **message})
    for number, call in enumerate(spoken.calls):
        call_fields = {"call_id": reply.call_id(number), "name": call.name, "arguments": write_arguments(call)}
        items.append({"id": reply.call_id(number, "fc"), "type": "function_call", "status": "completed", **call_fields})
    return items


def _item_events(index: int, item: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    position = {"output_index": index, "item_id": item["id"]}
    if item["type"] == "message":
        (part,) = item["content"]
        started, inner = {**item, "status": "in_progress", "content": []}, _text_events(position, part)
    elif item["type"] == "function_call":
        started = {**item, "status": "in_progress", "arguments": ""}
        written = item["arguments"]
        inner = [
            ("response.function_call_arguments.delta", {**position, "delta": written}),
            ("response.function_call_arguments.done", {**position, "name": item["name"], "arguments": written}),
        ]
    else:
        started, inner = {**item, "summary": []}, _summary_events(position, item["summary"][0])
    return [
        ("response.output_item.added", {"output_index": index, "item": started}),
        *inner,
        ("response.output_item.done", {"output_index": index, "item": item}),
    ]


def _text_events(position: dict[str, Any], part: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    fields = {**position, "content_index": 0}
    return [
        ("response.content_part.added", {**fields, "part": {**part, "text": ""}}),
        ("response.output_text.delta", {**fields, "delta": part["text"], "logprobs": []}),
        ("response.output_text.done", {**fields, "text": part["text"], "logprobs": []}),
        ("response.content_part.done", {**fields, "part": part}),
    ]


def _summary_events(position: dict[str, Any], part: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    fields = {**position, "summary_index": 0}
    return [
        ("response.reasoning_summary_part.added", {**fields, "part": {**part, "text": ""}}),
        ("response.reasoning_summary_text.delta", {**fields, "delta": part["text"]}),
        ("response.reasoning_summary_text.done", {**fields, "text": part["text"]}),
        ("response.reasoning_summary_part.done", {**fields, "part": part}),
    ]


def _head(reply: ChatResponse, status: str) -> dict[str, Any]:
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


def _usage(reply: ChatResponse) -> dict[str, Any]:
    return {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": reply.sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": reply.thinking_tokens},
        "total_tokens": reply.prompt_tokens + reply.sampled_tokens,
    }
