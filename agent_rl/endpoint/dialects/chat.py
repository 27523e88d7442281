"""OpenAI chat completions: ``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal

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
    require_supported,
    tool_schema,
)
from agent_rl.rollout.conversation_tree import ChatMessage
from tools import ParsedTurn, ToolCall

_TEXT = ("text", "refusal")
_ROLES: Mapping[str, Literal["system", "user", "tool"]] = MappingProxyType(
    {"system": "system", "developer": "system", "user": "user", "tool": "tool"}
)


class _Function(RequestModel):
    name: str
    arguments: str = "{}"


class _Call(RequestModel):
    id: str = ""
    function: _Function


class _Message(RequestModel):
    role: str
    content: Any = None
    tool_calls: list[_Call] | None = None
    reasoning_content: str | None = None


class _Described(RequestModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(RequestModel):
    type: str = "function"
    function: _Described | None = None


class _Request(RequestModel):
    messages: list[_Message]
    model: str = ""
    tools: list[_Tool] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    n: int | None = None
    stop: Any = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class Chat:
    """See :class:`agent_rl.endpoint.messages.Dialect`."""

    def read(self, body: bytes) -> ChatRequest:
        request = parse_request(_Request, body)
        tool_choice, forced_tool = read_tool_choice(request.tool_choice)
        require_supported(request.n in (None, 1), "n above 1")
        require_supported(not request.top_logprobs, "top_logprobs")
        return ChatRequest(
            messages=[_message(message, index) for index, message in enumerate(request.messages)],
            tools=[
                tool_schema(tool.function.name, tool.function.description, tool.function.parameters)
                for tool in request.tools or ()
                if tool.function is not None
            ],
            max_tokens=check_max_tokens(
                request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
            ),
            stream=bool(request.stream),
            model=request.model,
            include_usage=bool((request.stream_options or {}).get("include_usage")),
            stops=read_stops(request.stop, "stop"),
            tool_choice=tool_choice,
            forced_tool=forced_tool,
            logprobs=bool(request.logprobs),
            response_schema=read_response_format(request.response_format, "response_format"),
            strict_tools=frozenset(
                tool.function.name for tool in request.tools or () if tool.function is not None and tool.function.strict
            ),
        )

    def response(self, reply: ChatResponse) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": reply.spoken.text or None, **_extras(reply.spoken)}
        if reply.spoken.calls:
            message["tool_calls"] = [_call(reply, number) for number in range(len(reply.spoken.calls))]
        choice = {"index": 0, "message": message, "finish_reason": reply.finish, "logprobs": _logprobs(reply)}
        return {**_head(reply, "chat.completion"), "choices": [choice], "usage": _usage(reply)}

    def events(self, reply: ChatResponse, request: ChatRequest) -> Iterator[bytes]:
        yield _chunk(reply, {"role": "assistant", "content": ""}, logprobs=_logprobs(reply))
        extras = _extras(reply.spoken)
        if extras:
            yield _chunk(reply, extras)
        if reply.spoken.text:
            yield _chunk(reply, {"content": reply.spoken.text})
        for number in range(len(reply.spoken.calls)):
            yield _chunk(reply, {"tool_calls": [{"index": number, **_call(reply, number)}]})
        yield _chunk(reply, {}, reply.finish)
        if request.include_usage:
            yield _event({**_head(reply, "chat.completion.chunk"), "choices": [], "usage": _usage(reply)})
        yield b"data: [DONE]\n\n"

    def error(self, error: RequestRejected) -> dict[str, Any]:
        code = {
            "key": "invalid_api_key",
            "route": "not_found",
            "full": "context_length_exceeded",
            "ended": "episode_ended",
        }
        text = error.text
        if error.kind == "full":
            text = (
                f"This model's maximum context length is {error.limit} tokens. However, your messages resulted in "
                f"{error.tokens} tokens. Please reduce the length of the messages."
            )
        kind = "authentication_error" if error.kind == "key" else "invalid_request_error"
        return {"error": {"message": text, "type": kind, "param": None, "code": code.get(error.kind)}}


def read_arguments(text: str, where: str) -> dict[str, Any]:
    """The arguments of a call that a program returns. Raises RequestRejected if they are not a JSON object."""
    try:
        arguments = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestRejected("bad", f"{where}: expected a JSON object")
    return arguments


def write_arguments(call: ToolCall) -> str:
    """The arguments of a sampled call as JSON."""
    return orjson.dumps(dict(call.arguments)).decode()


def _message(message: _Message, index: int) -> ChatMessage:
    text = (
        message.content if isinstance(message.content, str) else join_text(message.content, _TEXT, f"messages.{index}")
    )
    role = _ROLES.get(message.role)
    if role is not None:
        return ChatMessage(role, text)
    if message.role != "assistant":
        raise RequestRejected(
            "bad", f"messages.{index}.role: {message.role!r}, expected system, developer, user, assistant or tool"
        )
    calls, reasoning = message.tool_calls, message.reasoning_content or ""
    if not calls:
        return ChatMessage("assistant", text, reasoning=reasoning)
    parsed_calls = [
        ToolCall(c.function.name, read_arguments(c.function.arguments, f"messages.{index}.tool_calls")) for c in calls
    ]
    return ChatMessage("assistant", text, tuple(parsed_calls), reasoning, issued_reply_id(*(call.id for call in calls)))


def _extras(spoken: ParsedTurn) -> dict[str, Any]:
    """Values without a field in the API: reasoning, and why no call was parsed."""
    extras: dict[str, Any] = {"reasoning_content": spoken.reasoning} if spoken.reasoning else {}
    return extras | ({"parse_failure": spoken.failure} if spoken.failure else {})


def _call(reply: ChatResponse, number: int) -> dict[str, Any]:
    call = reply.spoken.calls[number]
    function = {"name": call.name, "arguments": write_arguments(call)}
    return {"id": reply.call_id(number), "type": "function", "function": function}


def _head(reply: ChatResponse, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": reply.created, "model": reply.model}


def _usage(reply: ChatResponse) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.sampled_tokens,
        "total_tokens": reply.prompt_tokens + reply.sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reply.thinking_tokens},
    }


def _logprobs(reply: ChatResponse) -> dict[str, Any] | None:
    """The log-probs of all sampled tokens, thoughts and calls included."""
    if reply.logprobs is None:
        return None
    return {
        "content": [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in reply.logprobs
        ],
        "refusal": None,
    }


def _chunk(
    reply: ChatResponse, delta: dict[str, Any], finish: str | None = None, logprobs: dict[str, Any] | None = None
) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
    return _event({**_head(reply, "chat.completion.chunk"), "choices": [choice]})


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"
