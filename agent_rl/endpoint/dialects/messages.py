"""Anthropic Messages: ``POST /v1/messages``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

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
    read_stops,
    read_tool_choice,
    tool_schema,
)
from agent_rl.rollout.conversation_tree import ChatMessage
from tools import ToolCall

_STOPS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
_BILLING = "x-anthropic-billing-header"
_THINKING = ("thinking", "redacted_thinking")


class _Message(RequestModel):
    role: str
    content: Any = ""


class _Tool(RequestModel):
    name: str = ""
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    defer_loading: bool | None = None
    strict: bool | None = None


class _Request(RequestModel):
    messages: list[_Message]
    model: str = ""
    max_tokens: int | None = None
    system: Any = None
    tools: list[_Tool] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: Any = None
    output_config: dict[str, Any] | None = None
    output_format: Any = None
    stream: bool | None = None


class Messages:
    """See :class:`agent_rl.endpoint.messages.Dialect`. Server tools are not offered. Tools with deferred loading are
    described when a tool result refers to them."""

    def read(self, body: bytes) -> ChatRequest:
        request = parse_request(_Request, body)
        tool_choice, forced_tool = read_tool_choice(request.tool_choice)
        usable = [tool for tool in request.tools or () if tool.input_schema is not None]
        tools = {tool.name: tool_schema(tool.name, tool.description, tool.input_schema) for tool in usable}
        deferred = {tool.name: tools.pop(tool.name) for tool in usable if tool.defer_loading}
        system = _system(request.system)
        messages = [ChatMessage("system", system)] if system else []
        for index, message in enumerate(request.messages):
            messages += _messages(message, deferred, f"messages.{index}")
        return ChatRequest(
            messages, list(tools.values()), check_max_tokens(request.max_tokens), bool(request.stream), request.model,
            deferred_tools=list(deferred.values()), stops=read_stops(request.stop_sequences, "stop_sequences"),
            tool_choice=tool_choice, forced_tool=forced_tool, response_schema=_response_schema(request),
            strict_tools=frozenset(tool.name for tool in usable if tool.strict),
        )  # fmt: skip

    def response(self, reply: ChatResponse) -> dict[str, Any]:
        return {
            **_head(reply),
            "content": _content(reply),
            **_stop_reason(reply),
            "usage": _usage(reply, reply.sampled_tokens),
        }

    def events(self, reply: ChatResponse, request: ChatRequest) -> Iterator[bytes]:
        start = {**_head(reply), "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(reply, 0)}
        yield _event("message_start", message=start)
        for index, block in enumerate(_content(reply)):
            empty, deltas = _block_deltas(block)
            yield _event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        yield _event("message_delta", delta=_stop_reason(reply), usage=_usage(reply, reply.sampled_tokens))
        yield _event("message_stop")

    def error(self, error: RequestRejected) -> dict[str, Any]:
        kinds = {"key": "authentication_error", "route": "not_found_error", "large": "request_too_large"}
        text = error.text
        if error.kind == "full":
            text = f"prompt is too long: {error.tokens} tokens > {error.limit} maximum"
        return {"type": "error", "error": {"type": kinds.get(error.kind, "invalid_request_error"), "message": text}}


def _response_schema(request: _Request) -> dict[str, Any] | None:
    """Of ``output_config.format``, or of ``output_format`` as the beta of structured outputs sends it."""
    wanted = (request.output_config or {}).get("format")
    return read_response_format(request.output_format if wanted is None else wanted, "output_config.format")


def _system(system: Any) -> str:
    """The system prompt without the billing block, which changes with every request."""
    if isinstance(system, list):
        system = [b for b in system if not (isinstance(b, dict) and str(b.get("text", "")).startswith(_BILLING))]
    return join_text(system, ("text",), "system")


def _messages(message: _Message, deferred: Mapping[str, Any], where: str) -> list[ChatMessage]:
    if message.role == "system":
        return [ChatMessage("system", join_text(message.content, ("text",), where))]
    if message.role not in ("user", "assistant"):
        raise RequestRejected("bad", f"{where}.role: {message.role!r}, expected user or assistant")
    content = message.content
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise RequestRejected("bad", f"{where}.content: expected text or a list of blocks")
    return [_assistant(blocks, where)] if message.role == "assistant" else _user(blocks, deferred, where)


def _user(blocks: list[dict[str, Any]], deferred: Mapping[str, Any], where: str) -> list[ChatMessage]:
    """One message for each tool result, and one for the text between two results."""
    messages: list[ChatMessage] = []
    texts: list[dict[str, Any]] = []
    for block in [*blocks, {"type": "end"}]:
        if block.get("type") in ("tool_result", "end"):
            if texts:
                messages.append(ChatMessage("user", join_text(texts, ("text",), where)))
                texts = []
            if block["type"] == "tool_result":
                content = _resolve_references(block.get("content"), deferred)
                messages.append(ChatMessage("tool", join_text(content, ("text",), f"{where}.tool_result")))
        else:
            texts.append(block)
    return messages


def _resolve_references(content: Any, deferred: Mapping[str, Any]) -> Any:
    """The content of a tool result, with references to tools replaced by their schemas."""
    if not isinstance(content, list):
        return content
    names = [b.get("tool_name") if isinstance(b, dict) and b.get("type") == "tool_reference" else None for b in content]
    return [
        block if name is None else {"type": "text", "text": orjson.dumps(deferred.get(str(name), name)).decode()}
        for block, name in zip(content, names, strict=True)
    ]


def _assistant(blocks: list[dict[str, Any]], where: str) -> ChatMessage:
    used = [block for block in blocks if block.get("type") == "tool_use"]
    thought = [block for block in blocks if block.get("type") in _THINKING]
    rest = [block for block in blocks if block.get("type") not in ("tool_use", *_THINKING)]
    if not all(isinstance(block.get("input"), dict) and isinstance(block.get("name"), str) for block in used):
        raise RequestRejected("bad", f"{where}.tool_use: expected a name and an object as input")
    identifiers = [block.get("id") for block in used] + [block.get("signature") for block in thought]
    return ChatMessage(
        "assistant",
        join_text(rest, ("text",), where),
        tuple(ToolCall(block["name"], block["input"]) for block in used),
        "".join(str(block.get("thinking", "")) for block in thought),
        issued_reply_id(*(each for each in identifiers if isinstance(each, str))),
    )


def _content(reply: ChatResponse) -> list[dict[str, Any]]:
    spoken = reply.spoken
    blocks: list[dict[str, Any]] = []
    if spoken.reasoning:
        blocks.append({"type": "thinking", "thinking": spoken.reasoning, "signature": reply.id})
    if spoken.text or not spoken.calls:
        blocks.append({"type": "text", "text": spoken.text})
    for number, call in enumerate(spoken.calls):
        use = {"id": reply.call_id(number, "toolu"), "name": call.name, "input": dict(call.arguments)}
        blocks.append({"type": "tool_use", **use})
    return blocks


def _block_deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as its stream starts, and the deltas that fill it."""
    if block["type"] == "thinking":
        thinking = {"type": "thinking_delta", "thinking": block["thinking"]}
        signed = {"type": "signature_delta", "signature": block["signature"]}
        return {**block, "thinking": "", "signature": ""}, [thinking, signed]
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    written = orjson.dumps(block["input"]).decode()
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": written}]


def _head(reply: ChatResponse) -> dict[str, Any]:
    return {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "model": reply.model}


def _stop_reason(reply: ChatResponse) -> dict[str, Any]:
    if reply.stopped and reply.finish == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stopped}
    return {"stop_reason": _STOPS[reply.finish], "stop_sequence": None}


def _usage(reply: ChatResponse, sampled: int) -> dict[str, Any]:
    return {
        "input_tokens": reply.prompt_tokens - reply.cached_tokens,
        "output_tokens": sampled,
        "cache_read_input_tokens": reply.cached_tokens,
        "cache_creation_input_tokens": 0,
    }


def _event(kind: str, **data: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), orjson.dumps({"type": kind, **data}))
